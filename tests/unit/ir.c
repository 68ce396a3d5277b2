/*
 * Verification of csrc/ir/verify.c finds every kind of damage of a graph.
 */
#include "sample.h"

/* Damages a sound graph, sees the message, and puts it right again, so that nothing else was damaged. */
#define DAMAGE(message, damage, repair) \
    do { \
        damage; \
        CHECK_FAILS(ont_graph_verify(t.g), ONT_EINTERNAL, message); \
        repair; \
        CHECK_OK(ont_graph_verify(t.g)); \
    } while (0)

TEST(verify_finds_damaged_nodes)
{
    sample t = made(), other = made();
    ont_use *use = &t.mul->inputs[0];
    DAMAGE("'Mul_1': input 0 does not know its node", use->user = t.sub, use->user = t.mul);
    DAMAGE("'Mul_1': input 0 is a value of another graph", use->value = other.a, use->value = t.a);
    DAMAGE("'Sub_2': input 'a' is not in its use list", t.a->uses = use, t.a->uses = &t.sub->inputs[1]);
    DAMAGE("'Mul_1': input 'a' is not in its use list", t.sub->inputs[1].next = NULL, t.sub->inputs[1].next = use);
    DAMAGE("'Add_0': output 'a' is not its own", t.a->def_index = 1, t.a->def_index = 0);
    DAMAGE("'Add_0': output 'a' is not its own", t.a->def = t.mul, t.a->def = t.add);
    DAMAGE("'Mul_1': output 'a' is not its own", t.mul->outputs[0] = t.a, t.mul->outputs[0] = t.m);
    DAMAGE("'Mul_1': output 0 is a value of another graph", t.mul->outputs[0] = other.m, t.mul->outputs[0] = t.m);
    DAMAGE("'Mul_1': input 'a' is used before it is computed", ont_graph_move_before(t.g, t.add, NULL),
           ont_graph_move_before(t.g, t.add, t.mul));
    ont_graph_destroy(t.g);
    ont_graph_destroy(other.g);
}

TEST(verify_finds_a_value_computed_twice)
{
    sample t = made();
    const ont_node_spec split = {.domain = "", .op_type = "Split", .inputs = &t.x, .n_inputs = 1,
                                 .outputs = (ont_value *[]){t.s, t.s}, .n_outputs = 2};
    ont_node *n;
    ont_graph_remove_node(t.g, t.sub);
    CHECK_OK(ont_graph_add_node(t.g, NULL, &split, &n));
    CHECK_FAILS(ont_graph_verify(t.g), ONT_EINTERNAL, "output 's' is not its own");
    n->outputs[1] = NULL;
    t.s->def_index = 0;
    CHECK_OK(ont_graph_verify(t.g));
    CHECK_OK(ont_graph_set_outputs(t.g, (ont_value *[]){t.x}, 1));
    t.x->kind = ONT_VALUE_NODE; /* an input that a node claims */
    t.x->def = n;
    CHECK_FAILS(ont_graph_verify(t.g), ONT_EINTERNAL, "used before it is computed");
    t.x->kind = ONT_VALUE_INPUT;
    ont_graph_destroy(t.g);
}

TEST(verify_finds_damaged_lists)
{
    sample t = made(), other = made();
    DAMAGE("'Mul_1': wrong predecessor", t.mul->prev = NULL, t.mul->prev = t.add);
    DAMAGE("wrong predecessor", t.sub->next = t.add, t.sub->next = NULL); /* a ring */
    DAMAGE("last node is not the end", t.g->last = t.mul, t.g->last = t.sub);
    DAMAGE("last node is not the end", t.mul->next = NULL, t.mul->next = t.sub);
    DAMAGE("longer than nodes were made", t.g->n_nodes = 2, t.g->n_nodes = 3);
    ont_use stray = {.value = t.y, .user = t.add};
    DAMAGE("value 'y': an entry of its use list is no input", t.y->uses = &stray, t.y->uses = NULL);
    DAMAGE("value 'y': an entry of its use list is no input", t.y->uses = other.c->uses, t.y->uses = NULL);
    DAMAGE("value 'y': an entry of its use list is no input", t.y->uses = t.c->uses, t.y->uses = NULL);
    DAMAGE("value 'c': an entry of its use list is no input", t.c->uses->next = t.c->uses, t.c->uses->next = NULL);
    DAMAGE("value 'x': wrong id", t.x->id = 2, t.x->id = 0);
    ont_graph_destroy(t.g);
    ont_graph_destroy(other.g);
}

TEST(verify_finds_damaged_interfaces)
{
    sample t = made(), other = made();
    DAMAGE("graph input 1 ('y') is not input 1", t.y->input = 0, t.y->input = 1);
    DAMAGE("graph input 0 ('x') is not input 0", t.x->kind = ONT_VALUE_CONSTANT, t.x->kind = ONT_VALUE_INPUT);
    DAMAGE("graph input 1 ('y') is not input 1", t.g->inputs[1] = other.y, t.g->inputs[1] = t.y);
    DAMAGE("graph output 0 is a value of another graph", t.g->outputs[0] = other.s, t.g->outputs[0] = t.s);
    DAMAGE("two inputs or outputs are named 'x'", t.y->name = "x", t.y->name = "y");
    DAMAGE("two inputs or outputs are named 's'", t.m->name = "s", t.m->name = "m");
    DAMAGE("two inputs or outputs are named 'x'", t.m->name = "x", t.m->name = "m");
    DAMAGE("value 0 has no name", t.x->name = "", t.x->name = "x");
    ont_value *loose;
    CHECK_OK(ont_graph_add_value(t.g, ONT_VALUE_NODE, "loose", &loose));
    DAMAGE("output 'loose' is not computed", t.g->outputs[0] = loose, t.g->outputs[0] = t.s);
    /* Valid: one value as two outputs, an input as an output, an anonymous name that equals a given one. */
    t.g->outputs[0] = t.g->outputs[1] = t.x;
    CHECK_OK(ont_graph_verify(t.g));
    t.g->outputs[0] = t.s;
    t.s->name = "x";
    t.s->anonymous = true;
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
    ont_graph_destroy(other.g);
}
