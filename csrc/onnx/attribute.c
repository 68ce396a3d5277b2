/*
 * Attributes of nodes. See attribute.h.
 */
#include "onnx/attribute.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onnx/tensor.h"

#define KIND(name) ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__##name

/*
 * ONNX stores float attributes as float32, but exporters mostly write short decimals (1e-5, 0.9, 0.2) or inverses of
 * small numbers (1 / 6). If a decimal of at most six digits, or the inverse of a number up to 100, rounds to the stored
 * float, it is taken instead: float64 arithmetic then agrees with eager PyTorch, and in float32 both are the same
 * number.
 */
static double shortest_decimal(float value)
{
    char text[32];
    snprintf(text, sizeof text, "%.6g", (double)value);
    double decimal = strtod(text, NULL), inverse = rint(1 / (double)value);
    if ((float)decimal == value) return decimal;
    return fabs(inverse) <= 100 && (float)(1 / inverse) == value ? 1 / inverse : (double)value;
}

static ont_status set_floats(const Onnx__AttributeProto *proto, const char *name, ont_graph *g, ont_node *node)
{
    double *values = ont_arena_array(&g->arena, proto->n_floats + 1, sizeof *values);
    if (!values) return ONT_ENOMEM;
    for (size_t i = 0; i < proto->n_floats; i++) values[i] = shortest_decimal(proto->floats[i]);
    return ont_attr_set_floats(g, node, name, values, proto->n_floats);
}

/* Strings with a NUL inside would be truncated: they are refused, by position. */
static ont_status set_strings(const Onnx__AttributeProto *proto, const char *name, const char *what, ont_graph *g,
                              ont_node *node)
{
    const char **strings = ont_arena_array(&g->arena, proto->n_strings + 1, sizeof *strings);
    ont_attr *attr = ont_arena_alloc(&g->arena, sizeof *attr);
    if (!strings || !attr) return ONT_ENOMEM;
    for (size_t i = 0; i < proto->n_strings; i++) {
        const ProtobufCBinaryData *s = &proto->strings[i];
        if (s->len && memchr(s->data, 0, s->len))
            return ont_fail(ONT_EINVAL, "%s: string %zu of attribute '%s' has a zero byte", what, i, name);
        strings[i] = ont_arena_strndup(&g->arena, s->data ? (const char *)s->data : "", s->len);
        if (!strings[i]) return ONT_ENOMEM;
    }
    *attr = (ont_attr){.next = node->attrs, .name = ont_arena_strdup(&g->arena, name), .kind = ONT_ATTR_STRINGS,
                       .count = proto->n_strings, .strings = strings};
    if (!attr->name) return ONT_ENOMEM;
    node->attrs = attr;
    return ONT_OK;
}

static const char *kind_text(int kind)
{
    switch (kind) {
    case KIND(GRAPH): return "a subgraph (control flow)";
    case KIND(GRAPHS): return "a list of subgraphs (control flow)";
    case KIND(TENSORS): return "a list of tensors";
    case KIND(SPARSE_TENSOR): return "a sparse tensor";
    case KIND(SPARSE_TENSORS): return "a list of sparse tensors";
    case KIND(TYPE_PROTOS): return "a list of types";
    default: return NULL;
    }
}

/* Of a type attribute (Optional has one), only the element dtype matters. */
static int64_t element_type(const Onnx__TypeProto *type)
{
    for (int depth = 0; type && depth < 8; depth++) {
        if (type->value_case == ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE)
            return type->tensor_type ? type->tensor_type->elem_type : 0;
        if (type->value_case == ONNX__TYPE_PROTO__VALUE_SEQUENCE_TYPE)
            type = type->sequence_type ? type->sequence_type->elem_type : NULL;
        else if (type->value_case == ONNX__TYPE_PROTO__VALUE_OPTIONAL_TYPE)
            type = type->optional_type ? type->optional_type->elem_type : NULL;
        else
            break;
    }
    return 0;
}

ont_status ont_onnx_attribute(const Onnx__AttributeProto *proto, const char *name, const char *what, ont_graph *g,
                              ont_node *node)
{
    ont_tensor tensor;
    int kind = proto->has_type ? (int)proto->type : KIND(UNDEFINED);
    switch (kind) {
    case KIND(INT): return ont_attr_set_int(g, node, name, proto->i);
    case KIND(FLOAT): return ont_attr_set_float(g, node, name, shortest_decimal(proto->f));
    case KIND(STRING):
        if (proto->s.len && memchr(proto->s.data, 0, proto->s.len))
            return ont_fail(ONT_EINVAL, "%s: string attribute '%s' has a zero byte", what, name);
        return ont_attr_set_string(g, node, name, proto->s.data ? (const char *)proto->s.data : "", proto->s.len);
    case KIND(INTS): return ont_attr_set_ints(g, node, name, proto->ints, proto->n_ints);
    case KIND(FLOATS): return set_floats(proto, name, g, node);
    case KIND(STRINGS): return set_strings(proto, name, what, g, node);
    case KIND(TENSOR):
        if (!proto->t) return ont_fail(ONT_EINVAL, "%s: attribute '%s' has no tensor", what, name);
        ONT_TRY(ont_onnx_tensor(proto->t, what, &g->arena, &tensor));
        return ont_attr_set_tensor(g, node, name, &tensor);
    case KIND(TYPE_PROTO): return ont_attr_set_int(g, node, name, element_type(proto->tp));
    case KIND(UNDEFINED): return ont_fail(ONT_EINVAL, "%s: attribute '%s' has no type", what, name);
    default:
        if (kind_text(kind))
            return ont_fail(ONT_EUNSUPPORTED, "%s: attribute '%s' is %s, which is not supported", what, name,
                            kind_text(kind));
        return ont_fail(ONT_EINVAL, "%s: attribute '%s' is of kind %d, which does not exist", what, name, kind);
    }
}

static ont_status filled(ont_arena *arena, ont_dtype dtype, int rank, size_t count, const void *from,
                         ont_tensor *tensor)
{
    ont_tensor t = {.dtype = dtype, .shape = {.rank = rank}, .bytes = count * ont_dtype_size(dtype)};
    t.shape.dims[0] = rank ? (int64_t)count : 0;
    t.data = ont_arena_alloc(arena, t.bytes ? t.bytes : 1);
    if (!t.data) return ONT_ENOMEM;
    if (t.bytes) memcpy(t.data, from, t.bytes);
    *tensor = t;
    return ONT_OK;
}

ont_status ont_onnx_constant(const Onnx__AttributeProto *proto, const char *name, const char *what, ont_arena *arena,
                             ont_tensor *tensor)
{
    static const struct {
        const char *name;
        int kind;
    } forms[] = {{"value", KIND(TENSOR)},         {"value_float", KIND(FLOAT)},   {"value_int", KIND(INT)},
                 {"value_floats", KIND(FLOATS)},  {"value_ints", KIND(INTS)},     {"value_string", KIND(STRING)},
                 {"value_strings", KIND(STRINGS)}, {"sparse_value", KIND(SPARSE_TENSOR)}};
    int kind = proto->has_type ? (int)proto->type : KIND(UNDEFINED), expected = -1;
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++)
        if (!strcmp(name, forms[i].name)) expected = forms[i].kind;
    if (expected < 0) return ont_fail(ONT_EINVAL, "%s: a constant has no attribute '%s'", what, name);
    if (kind != expected)
        return ont_fail(ONT_EINVAL, "%s: attribute '%s' is of kind %d, expected %d", what, name, kind, expected);
    switch (kind) {
    case KIND(TENSOR):
        if (!proto->t) return ont_fail(ONT_EINVAL, "%s: attribute '%s' has no tensor", what, name);
        return ont_onnx_tensor(proto->t, what, arena, tensor);
    case KIND(FLOAT): return filled(arena, ONT_FLOAT32, 0, 1, &proto->f, tensor);
    case KIND(INT): return filled(arena, ONT_INT64, 0, 1, &proto->i, tensor);
    case KIND(FLOATS): return filled(arena, ONT_FLOAT32, 1, proto->n_floats, proto->floats, tensor);
    case KIND(INTS): return filled(arena, ONT_INT64, 1, proto->n_ints, proto->ints, tensor);
    default: return ont_fail(ONT_EUNSUPPORTED, "%s: a constant of kind '%s' is not supported", what, name);
    }
}
