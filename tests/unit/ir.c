/*
 * Unit tests of csrc/ir: use lists, edits, attributes, clone, verification of every kind of damage, printing.
 */
#include "check.h"
#include "ir/graph.h"

/* x, y, c -> a = Add(x, c); m = Mul(a, x) <axis = 1>; s = Sub(m, a) ; outputs s, m. */
typedef struct sample {
    ont_graph *g;
    ont_value *x, *y, *c, *a, *m, *s;
    ont_node *add, *mul, *sub;
} sample;

static ont_status node(ont_graph *g, const char *type, ont_value *p, ont_value *q, const char *name, ont_node **made,
                       ont_value **out)
{
    const ont_node_spec spec = {.domain = "", .op_type = type, .inputs = (ont_value *[]){p, q}, .n_inputs = 2,
                                .outputs = out, .n_outputs = 1};
    ONT_TRY(ont_graph_add_value(g, ONT_VALUE_NODE, name, out));
    ONT_TRY(ont_graph_add_node(g, NULL, &spec, made));
    (*out)->dtype = ONT_FLOAT32;
    (*out)->has_shape = true;
    (*out)->shape = p->shape;
    return ONT_OK;
}

/* A node of one input and one new output. */
static ont_status add_neg(ont_graph *g, ont_node *before, ont_value *x, ont_node **made)
{
    const ont_node_spec spec = {.domain = "", .op_type = "Neg", .inputs = &x, .n_inputs = 1, .n_outputs = 1};
    return ont_graph_add_node(g, before, &spec, made);
}

static ont_status build(sample *t)
{
    float two[2] = {0.5f, 2};
    ont_tensor data = {ONT_FLOAT32, {1, {2}}, sizeof two, two};
    ONT_TRY(ont_graph_create("sample", &t->g));
    int batch = ont_graph_symbol(t->g, "batch");
    if (batch < 0) return ONT_ENOMEM;
    ont_shape shape = {2, {ONT_DIM_SYMBOL(batch), 2}};
    ONT_TRY(ont_graph_add_input(t->g, "x", ONT_FLOAT32, &shape, &t->x));
    ONT_TRY(ont_graph_add_input(t->g, "y", ONT_INT64, NULL, &t->y));
    ONT_TRY(ont_graph_add_constant(t->g, "c", &data, &t->c));
    ONT_TRY(node(t->g, "Add", t->x, t->c, "a", &t->add, &t->a));
    ONT_TRY(node(t->g, "Mul", t->a, t->x, "m", &t->mul, &t->m));
    ONT_TRY(node(t->g, "Sub", t->m, t->a, "s", &t->sub, &t->s));
    ONT_TRY(ont_attr_set_int(t->g, t->mul, "axis", 1));
    return ont_graph_set_outputs(t->g, (ont_value *[]){t->s, t->m}, 2);
}

static sample made(void)
{
    sample t = {0};
    CHECK_OK(build(&t));
    CHECK_OK(ont_graph_verify(t.g));
    return t;
}

static char *printed(const ont_graph *g)
{
    char *text;
    CHECK_OK(ont_graph_print(g, &text));
    return text;
}

static void check_print(const ont_graph *g, const char *expected)
{
    char *text = printed(g);
    CHECK_TEXT(text, expected);
    ont_free(text);
}

/* How often `user` reads `v`, by v's use list. */
static int reads(const ont_value *v, const ont_node *user)
{
    int n = 0;
    for (const ont_use *use = v->uses; use; use = use->next) n += use->user == user;
    return n;
}

/* ---- building ---- */

TEST(graph_use_lists)
{
    sample t = made();
    CHECK_INT(ont_value_n_uses(t.x), 2);
    CHECK_INT(ont_value_n_uses(t.a), 2);
    CHECK_INT(ont_value_n_uses(t.s), 0);
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
    CHECK_INT(ont_value_n_uses(t.x), 3);
    ont_value_replace_uses(t.g, t.x, t.x); /* nothing to do */
    CHECK_INT(ont_value_n_uses(t.x), 3);
    CHECK_OK(ont_graph_verify(t.g));
    ont_graph_destroy(t.g);
}

TEST(graph_removal)
{
    sample t = made();
    CHECK_OK(ont_graph_set_outputs(t.g, (ont_value *[]){t.m}, 1));
    ont_graph_remove_node(t.g, t.sub);
    CHECK(t.g->last == t.mul && !t.m->uses);
    CHECK_INT(ont_value_n_uses(t.a), 1);
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

/* ---- attributes ---- */

TEST(attr_kinds_and_replacement)
{
    sample t = made();
    const int64_t ints[] = {3, -1};
    const double floats[] = {0.5};
    size_t n = 9;
    CHECK_INT(ont_attr_int(t.mul, "axis", -7), 1);
    CHECK_INT(ont_attr_int(t.add, "axis", -7), -7);
    CHECK(ont_attr_float(t.mul, "axis", 2.5) == 2.5); /* of another kind: absent */
    CHECK_OK(ont_attr_set_ints(t.g, t.mul, "axis", ints, 2));
    CHECK_INT(ont_attr_int(t.mul, "axis", -7), -7);
    CHECK(ont_attr_ints(t.mul, "axis", &n)[1] == -1 && n == 2);
    CHECK_OK(ont_attr_set_ints(t.g, t.mul, "none", ints, 0));
    CHECK(ont_attr_ints(t.mul, "none", &n) != NULL && n == 0);
    CHECK(ont_attr_ints(t.mul, "absent", &n) == NULL && n == 0);
    CHECK_OK(ont_attr_set_floats(t.g, t.mul, "scales", floats, 1));
    CHECK(ont_attr_floats(t.mul, "scales", &n)[0] == 0.5 && n == 1);
    CHECK_OK(ont_attr_set_string(t.g, t.mul, "mode", "linear!", 6));
    CHECK_TEXT(ont_attr_string(t.mul, "mode", "?"), "linear");
    CHECK_OK(ont_attr_set_float(t.g, t.mul, "mode", 4));
    CHECK_TEXT(ont_attr_string(t.mul, "mode", "?"), "?");
    CHECK(ont_attr_float(t.mul, "mode", 0) == 4);
    float data[2] = {1, 2};
    ont_tensor tensor = {ONT_FLOAT32, {1, {2}}, sizeof data, data};
    CHECK_OK(ont_attr_set_tensor(t.g, t.mul, "value", &tensor));
    data[1] = 9; /* the attribute has a copy */
    const ont_attr *value = ont_attr_find(t.mul, "value", ONT_ATTR_TENSOR);
    CHECK(value && ((const float *)value->tensor->data)[1] == 2);
    ont_graph_destroy(t.g);
}

TEST(attr_copy_all_keeps_what_is_there)
{
    sample t = made();
    CHECK_OK(ont_attr_set_int(t.g, t.add, "axis", 5));
    CHECK_OK(ont_attr_set_string(t.g, t.mul, "mode", "a", 1));
    CHECK_OK(ont_attr_copy_all(t.g, t.add, t.mul));
    CHECK_INT(ont_attr_int(t.add, "axis", 0), 5);
    CHECK_TEXT(ont_attr_string(t.add, "mode", ""), "a");
    CHECK_OK(ont_attr_set_string(t.g, t.add, "mode", "b", 1));
    CHECK_TEXT(ont_attr_string(t.mul, "mode", ""), "a");
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

/* ---- verify ---- */

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

/* ---- print ---- */

TEST(print_reads_like_onnx_text)
{
    sample t = made();
    CHECK_OK(ont_attr_set_float(t.g, t.sub, "alpha", 0.5));
    CHECK_OK(ont_attr_set_ints(t.g, t.sub, "perm", (int64_t[]){1, 0}, 2));
    CHECK_OK(ont_attr_set_string(t.g, t.sub, "mode", "a\"b", 3));
    t.sub->domain = "ai.own";
    t.sub->backward = true;
    check_print(t.g, "sample (float[batch,2] x, int64 y) => (float[batch,2] s, float[batch,2] m)\n"
                     "  float[2] c = {0.5, 2}\n"
                     "{\n"
                     "  float[batch,2] a = Add (x, c)\n"
                     "  float[batch,2] m = Mul <axis = 1> (a, x)\n"
                     "  # backward\n"
                     "  float[batch,2] s = ai.own.Sub <mode = \"a\\\"b\", perm = [1, 0], alpha = 0.5> (m, a)\n"
                     "}\n");
    ont_graph_destroy(t.g);
}

/* A model's own "%7" and an anonymous value's, and names that would break the line, are told apart. */
TEST(print_is_unambiguous)
{
    ont_graph *g;
    ont_value *in, *x;
    ont_node *n;
    CHECK_OK(ont_graph_create("two words", &g));
    CHECK_OK(ont_graph_add_input(g, "%1", ONT_FLOAT32, NULL, &in));
    CHECK_OK(add_neg(g, NULL, in, &n));
    x = n->outputs[0];
    CHECK_TEXT(x->name, in->name);
    CHECK_OK(ont_graph_set_outputs(g, &x, 1));
    CHECK_OK(ont_graph_verify(g));
    check_print(g, "\"two words\" (float \"%1\") => (undefined %1)\n{\n  undefined %1 = Neg (\"%1\")\n}\n");
    static const char *const odd[][2] = {
        {"a, b", "\"a, b\""},   {"a\nb", "\"a\\x0ab\""},    {"\"a\"", "\"\\\"a\\\"\""}, {"a\\", "\"a\\\\\""},
        {"f(x)", "\"f(x)\""},   {"a=b", "\"a=b\""},         {"x\x7f", "\"x\\x7f\""},     {"\xc3\xa9", "\xc3\xa9"},
        {"layers.0/w:1_-", "layers.0/w:1_-"}, {"onnx::Add_3", "onnx::Add_3"}, {"50%", "50%"}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        char expected[200];
        in->name = odd[i][0];
        snprintf(expected, sizeof expected,
                 "\"two words\" (float %s) => (undefined %%1)\n{\n  undefined %%1 = Neg (%s)\n}\n", odd[i][1],
                 odd[i][1]);
        check_print(g, expected);
    }
    ont_graph_destroy(g);
}

/* Constants without users are omitted, but an output is a use. Large constants are not printed. */
TEST(print_constants)
{
    ont_graph *g;
    ont_value *small, *unread, *large;
    int64_t three[3] = {1, -2, 3};
    static float many[100];
    CHECK_OK(ont_graph_create("g", &g));
    CHECK_OK(ont_graph_add_constant(g, "small", &(ont_tensor){ONT_INT64, {1, {3}}, sizeof three, three}, &small));
    CHECK_OK(ont_graph_add_constant(g, "unread", &(ont_tensor){ONT_INT64, {1, {3}}, sizeof three, three}, &unread));
    CHECK_OK(ont_graph_add_constant(g, "large", &(ont_tensor){ONT_FLOAT32, {1, {100}}, sizeof many, many}, &large));
    CHECK_OK(ont_graph_set_outputs(g, (ont_value *[]){small, large}, 2));
    check_print(g, "g () => (int64[3] small, float[100] large)\n  int64[3] small = {1, -2, 3}\n  float[100] "
                   "large\n{\n}\n");
    ont_graph_destroy(g);
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
                CHECK_INT(ont_value_n_uses(values[v]), count);
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
