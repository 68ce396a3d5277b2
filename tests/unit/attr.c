/*
 * Attributes keep copies of their values, by name and kind.
 */
#include "sample.h"

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
