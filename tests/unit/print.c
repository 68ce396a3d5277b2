/*
 * A graph is printed as ONNX's text, in which no two names are taken for one.
 */
#include "sample.h"

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
