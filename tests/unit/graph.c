/*
 * Use lists follow every edit of a graph, and a clone is equal and apart.
 */
#include "sample.h"

static uint32_t n_uses(const ont_value *value)
{
    uint32_t n = 0;
    for (const ont_use *use = value->uses; use; use = use->next) n++;
    return n;
}

TEST(graph_use_lists)
{
    sample t = made();
    CHECK_INT(n_uses(t.x), 2);
    CHECK_INT(n_uses(t.a), 2);
    CHECK_INT(n_uses(t.s), 0);
    CHECK(reads(t.x, t.add) == 1 && reads(t.x, t.mul) == 1 && !reads(t.x, t.sub));
    ont_node *twice;
    ont_value *out;
    CHECK_OK(node(t.g, "Add", t.x, t.x, NULL, &twice, &out));
    CHECK_INT(reads(t.x, twice), 2);
    CHECK(out->def == twice && out->def_index == 0 && out->kind == ONT_VALUE_NODE && out->anonymous && !t.a->anonymous);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
}

TEST(graph_absent_inputs)
{
    sample t = made();
    const ont_node_spec clip = {.domain = "", .op_type = "Clip", .inputs = (ont_value *[]){t.x, NULL, t.c, NULL, NULL},
                                .n_inputs = 5, .n_outputs = 1};
    const ont_node_spec none = {.domain = "", .op_type = "None", .inputs = (ont_value *[]){NULL}, .n_inputs = 1};
    ont_node *n;
    CHECK_OK(ont_graph_add_node(t.g, NULL, &clip, &n));
    CHECK_INT(n->n_inputs, 3); /* trailing absent ones are trimmed, others stay */
    CHECK(!n->inputs[1].value && n->inputs[2].value == t.c);
    CHECK(ont_node_in(n, 1) == NULL && ont_node_in(n, 99) == NULL && ont_node_out(n, 99) == NULL);
    CHECK_OK(ont_graph_add_node(t.g, NULL, &none, &n));
    CHECK(n->n_inputs == 0 && n->n_outputs == 0);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
}

TEST(graph_nodes_go_where_they_are_told)
{
    sample t = made();
    ont_node *first, *middle;
    CHECK_OK(add_neg(t.g, t.g->first, t.x, &first));
    CHECK_OK(add_neg(t.g, t.sub, t.a, &middle));
    CHECK(t.g->first == first && first->next == t.add && middle->next == t.sub && middle->prev == t.mul);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_move_before(t.g, first, NULL);
    CHECK(t.g->last == first && t.g->first == t.add && !t.add->prev && !first->next);
    ont_graph_move_before(t.g, first, t.mul);
    CHECK(t.add->next == first && first->next == t.mul && t.g->last == t.sub);
    ont_graph_move_before(t.g, first, first);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
}

TEST(graph_set_input)
{
    sample t = made();
    ont_node_set_input(t.sub, 1, t.x);
    CHECK(!reads(t.a, t.sub) && reads(t.x, t.sub) == 1 && t.sub->inputs[1].value == t.x);
    ont_node_set_input(t.sub, 1, t.x); /* again the same */
    CHECK_INT(reads(t.x, t.sub), 1);
    ont_node_set_input(t.sub, 1, NULL);
    CHECK(!reads(t.x, t.sub) && !t.sub->inputs[1].value);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
}

TEST(graph_replace_uses)
{
    sample t = made();
    ont_value_replace_uses(t.g, t.m, t.x); /* an output of the graph as well */
    CHECK(!t.m->uses && t.sub->inputs[0].value == t.x && t.g->outputs[1] == t.x && t.g->outputs[0] == t.s);
    CHECK_INT(n_uses(t.x), 3);
    ont_value_replace_uses(t.g, t.x, t.x); /* nothing to do */
    CHECK_INT(n_uses(t.x), 3);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
}

TEST(graph_removal)
{
    sample t = made();
    CHECK_OK(ont_graph_set_outputs(t.g, (ont_value *[]){t.m}, 1));
    ont_graph_remove_node(t.g, t.sub);
    CHECK(t.g->last == t.mul && !t.m->uses);
    CHECK_INT(n_uses(t.a), 1);
    CHECK_OK(ont_graph_verify(t.g));
    ont_value_replace_uses(t.g, t.a, t.x);
    ont_graph_remove_node(t.g, t.add);
    CHECK(t.g->first == t.mul && t.g->last == t.mul && !t.c->uses);
    CHECK_OK(ont_graph_verify(t.g));
    CHECK_OK(ont_graph_set_outputs(t.g, (ont_value *[]){t.x}, 1));
    ont_graph_remove_node(t.g, t.mul);
    CHECK(!t.g->first && !t.g->last && !t.x->uses);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
}

TEST(graph_want_output)
{
    sample t = made();
    ont_value *first, *third, *again;
    CHECK_OK(ont_node_ensure_output(t.g, t.add, 0, &first));
    CHECK(first == t.a);
    CHECK_OK(ont_node_ensure_output(t.g, t.add, 2, &third));
    CHECK(t.add->n_outputs == 3 && !t.add->outputs[1] && third->def == t.add && third->def_index == 2);
    CHECK_OK(ont_node_ensure_output(t.g, t.add, 2, &again));
    CHECK(again == third && ont_node_out(t.add, 0) == t.a);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
}

TEST(graph_symbols_and_outputs)
{
    sample t = made();
    CHECK_INT(ont_graph_symbol(t.g, "time"), 1);
    CHECK_INT(ont_graph_symbol(t.g, "batch"), 0);
    for (int i = 2; i < 100; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%d", i);
        CHECK_INT(ont_graph_symbol(t.g, name), i);
    }
    CHECK_INT(ont_graph_symbol(t.g, "s57"), 57);
    CHECK(ont_value_is_output(t.g, t.s) && ont_value_is_output(t.g, t.m) && !ont_value_is_output(t.g, t.a));
    CHECK_OK(ont_graph_set_outputs(t.g, NULL, 0));
    CHECK(!ont_value_is_output(t.g, t.s));
    ont_graph_destroy(t.g);
}

/* ---- clone ---- */

TEST(graph_clone_is_equal_and_apart)
{
    sample t = made();
    t.sub->backward = true;
    char *before = printed(t.g);
    ont_graph *copy;
    CHECK_OK(ont_graph_clone(t.g, &copy));
    CHECK_OK(ont_graph_verify(copy));
    check_print(copy, before);
    ont_node *add = copy->first, *mul = add->next;
    CHECK(add != t.add && mul->inputs[0].value == add->outputs[0] && copy->last->backward);
    CHECK(add->inputs[1].value != t.c && add->inputs[1].value->data == t.c->data); /* elements are shared */
    CHECK_OK(ont_attr_set_int(copy, mul, "axis", 9));
    CHECK_OK(ont_attr_set_int(copy, mul, "extra", 9));
    ont_value_replace_uses(copy, copy->inputs[0], copy->inputs[1]);
    copy->inputs[0]->shape.dims[0] = 7;
    ont_graph_remove_node(copy, copy->last);
    CHECK_OK(ont_graph_verify(t.g));
    check_print(t.g, before);
    ont_graph_destroy(copy);
    check_print(t.g, before);
    ont_free(before);
    ont_graph_destroy(t.g);
}

/* Values that the copy makes up later do not take names that it was given. */
TEST(graph_clone_anonymous_names)
{
    sample t = made();
    ont_node *n, *m;
    ont_value *in;
    CHECK_OK(add_neg(t.g, t.g->first, t.x, &n));
    CHECK_OK(ont_graph_add_input(t.g, "late", ONT_FLOAT32, NULL, &in));
    ont_graph *copy;
    CHECK_OK(ont_graph_clone(t.g, &copy));
    for (int i = 0; i < 20; i++)
        CHECK_OK(add_neg(copy, NULL, copy->inputs[0], &m));
    for (uint32_t i = 0; i < copy->n_values; i++)
        for (uint32_t j = 0; j < i; j++) CHECK(strcmp(copy->values[i]->name, copy->values[j]->name));
    CHECK(copy->first->outputs[0]->anonymous && !copy->inputs[0]->anonymous);
    ont_graph_destroy(copy);
    ont_graph_destroy(t.g);
}

/* The k-th allocation fails, for every k: a status, no leak, and the source as it was. */
TEST(graph_allocation_failures)
{
    for (int k = 0;; k++) {
        sample t = {0};
        ont_graph *copy = NULL;
        char *text = NULL;
        ont_alloc_fail_after(k);
        ont_status status = build(&t);
        if (status == ONT_OK) status = ont_graph_clone(t.g, &copy);
        if (status == ONT_OK) status = ont_graph_print(copy, &text);
        if (status == ONT_OK) status = ont_graph_verify(copy);
        bool fired = ont_alloc_fail_fired();
        ont_alloc_fail_after(-1);
        CHECK_INT(status, fired ? ONT_ENOMEM : ONT_OK);
        if (t.s && t.g->n_outputs) CHECK_OK(ont_graph_verify(t.g));
        ont_free(text);
        ont_graph_destroy(copy);
        ont_graph_destroy(t.g);
        CHECK_INT(ont_alloc_live(), 0);
        if (!fired) return;
        CHECK(k < 1000);
    }
}

/* Random edits, verified after each, against a plain list of who reads what. */
TEST(graph_random_edits)
{
    enum { VALUES = 40, NODES = 60 };
    for (int round = 0; round < 50; round++) {
        ont_graph *g;
        ont_value *values[VALUES + NODES];
        ont_node *nodes[NODES];
        int n_values = 0, n_nodes = 0;
        CHECK_OK(ont_graph_create("g", &g));
        for (; n_values < 5; n_values++) CHECK_OK(ont_graph_add_input(g, NULL, ONT_FLOAT32, NULL, &values[n_values]));
        for (int step = 0; step < 150; step++) {
            int kind = (int)check_between(0, 9);
            if (n_nodes < NODES && (kind < 4 || !n_nodes)) {
                ont_value *in[3];
                for (int i = 0; i < 3; i++) in[i] = check_between(0, 4) ? values[check_between(0, n_values - 1)] : NULL;
                const ont_node_spec spec = {.domain = "", .op_type = "F", .inputs = in, .n_inputs = 3, .n_outputs = 1};
                CHECK_OK(ont_graph_add_node(g, NULL, &spec, &nodes[n_nodes]));
                values[n_values++] = nodes[n_nodes++]->outputs[0];
            } else if (kind < 7) { /* an input, replaced by a value that is older than the node */
                ont_node *n = nodes[check_between(0, n_nodes - 1)];
                if (n->n_inputs)
                    ont_node_set_input(n, (uint32_t)check_between(0, n->n_inputs - 1), values[check_between(0, 4)]);
            } else if (kind < 9) {
                ont_value_replace_uses(g, values[check_between(0, n_values - 1)], values[check_between(0, 4)]);
            } else if (!nodes[n_nodes - 1]->outputs[0]->uses) {
                ont_graph_remove_node(g, nodes[--n_nodes]);
                n_values--;
            }
            CHECK_OK(ont_graph_verify(g));
            for (int v = 0; v < n_values; v++) {
                uint32_t count = 0;
                for (int k = 0; k < n_nodes; k++)
                    for (uint32_t i = 0; i < nodes[k]->n_inputs; i++) count += nodes[k]->inputs[i].value == values[v];
                CHECK_INT(n_uses(values[v]), count);
            }
        }
        ont_graph *copy;
        CHECK_OK(ont_graph_clone(g, &copy));
        char *text = printed(g);
        check_print(copy, text);
        ont_free(text);
        ont_graph_destroy(copy);
        ont_graph_destroy(g);
    }
}
