/*
 * Attributes of nodes. See attribute.h.
 */
#include "onnx/attribute.h"

#include <string.h>

#include "onnx/tensor.h"

#define KIND(name) ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__##name

static ont_status set_floats(const Onnx__AttributeProto *proto, ont_graph *g, ont_node *node)
{
    double *values = ont_arena_array(&g->arena, proto->n_floats + 1, sizeof *values);
    if (!values) return ONT_ENOMEM;
    for (size_t i = 0; i < proto->n_floats; i++) values[i] = (double)proto->floats[i];
    return ont_attr_set_floats(g, node, proto->name, values, proto->n_floats);
}

ont_status ont_onnx_attribute(const Onnx__AttributeProto *proto, const char *what, ont_graph *g, ont_node *node)
{
    if (!proto->name || !*proto->name) return ont_fail(ONT_EINVAL, "%s: an attribute has no name", what);
    if (proto->ref_attr_name && *proto->ref_attr_name)
        return ont_fail(ONT_EINVAL, "%s: attribute '%s' refers to an attribute of a function", what, proto->name);
    ont_tensor tensor;
    switch (proto->has_type ? proto->type : KIND(UNDEFINED)) {
    case KIND(INT): return ont_attr_set_int(g, node, proto->name, proto->i);
    case KIND(FLOAT): return ont_attr_set_float(g, node, proto->name, (double)proto->f);
    case KIND(STRING):
        return ont_attr_set_string(g, node, proto->name, proto->s.data ? (const char *)proto->s.data : "", proto->s.len);
    case KIND(INTS): return ont_attr_set_ints(g, node, proto->name, proto->ints, proto->n_ints);
    case KIND(FLOATS): return set_floats(proto, g, node);
    case KIND(TENSOR):
        if (!proto->t) return ont_fail(ONT_EINVAL, "%s: attribute '%s' has no tensor", what, proto->name);
        ONT_TRY(ont_onnx_tensor(proto->t, what, &g->arena, &tensor));
        return ont_attr_set_tensor(g, node, proto->name, &tensor);
    case KIND(UNDEFINED): return ont_fail(ONT_EINVAL, "%s: attribute '%s' has no type", what, proto->name);
    default:
        return ont_fail(ONT_EUNSUPPORTED, "%s: attribute '%s' is of a kind (%d) that is not supported", what, proto->name,
                        (int)proto->type);
    }
}

static ont_status filled(ont_arena *arena, ont_dtype dtype, int rank, size_t count, const void *from, ont_tensor *tensor)
{
    ont_tensor t = {.dtype = dtype, .shape = {.rank = rank}, .bytes = count * ont_dtype_size(dtype)};
    t.shape.dims[0] = (int64_t)count;
    t.data = ont_arena_alloc(arena, t.bytes ? t.bytes : 1);
    if (!t.data) return ONT_ENOMEM;
    if (t.bytes) memcpy(t.data, from, t.bytes);
    *tensor = t;
    return ONT_OK;
}

ont_status ont_onnx_constant(const Onnx__AttributeProto *proto, const char *what, ont_arena *arena, ont_tensor *tensor)
{
    const char *name = proto->name ? proto->name : "";
    if (!strcmp(name, "value") && proto->t) return ont_onnx_tensor(proto->t, what, arena, tensor);
    if (!strcmp(name, "value_float") && proto->has_f) return filled(arena, ONT_FLOAT32, 0, 1, &proto->f, tensor);
    if (!strcmp(name, "value_int") && proto->has_i) return filled(arena, ONT_INT64, 0, 1, &proto->i, tensor);
    if (!strcmp(name, "value_floats")) return filled(arena, ONT_FLOAT32, 1, proto->n_floats, proto->floats, tensor);
    if (!strcmp(name, "value_ints")) return filled(arena, ONT_INT64, 1, proto->n_ints, proto->ints, tensor);
    return ont_fail(ONT_EUNSUPPORTED, "%s: constant of kind '%s'", what, name);
}
