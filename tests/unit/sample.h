/*
 * The small graph that tests of csrc/ir build, and what they ask of a graph.
 */
#ifndef ONT_TESTS_SAMPLE_H
#define ONT_TESTS_SAMPLE_H

#include "check.h"
#include "ir/graph.h"

/* x, y, c -> a = Add(x, c); m = Mul(a, x) <axis = 1>; s = Sub(m, a) ; outputs s, m. */
typedef struct sample {
    ont_graph *g;
    ont_value *x, *y, *c, *a, *m, *s;
    ont_node *add, *mul, *sub;
} sample;

static inline ont_status node(ont_graph *g, const char *type, ont_value *p, ont_value *q, const char *name,
                              ont_node **made, ont_value **out)
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
static inline ont_status add_neg(ont_graph *g, ont_node *before, ont_value *x, ont_node **made)
{
    const ont_node_spec spec = {.domain = "", .op_type = "Neg", .inputs = &x, .n_inputs = 1, .n_outputs = 1};
    return ont_graph_add_node(g, before, &spec, made);
}

static inline ont_status build(sample *t)
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

static inline sample made(void)
{
    sample t = {0};
    CHECK_OK(build(&t));
    CHECK_OK(ont_graph_verify(t.g));
    return t;
}

static inline char *printed(const ont_graph *g)
{
    char *text;
    CHECK_OK(ont_graph_print(g, &text));
    return text;
}

static inline void check_print(const ont_graph *g, const char *expected)
{
    char *text = printed(g);
    CHECK_TEXT(text, expected);
    ont_free(text);
}

/* How often `user` reads `v`, by v's use list. */
static inline int reads(const ont_value *v, const ont_node *user)
{
    int n = 0;
    for (const ont_use *use = v->uses; use; use = use->next) n += use->user == user;
    return n;
}

#endif
