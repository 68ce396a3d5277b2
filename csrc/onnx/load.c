/*
 * Loads ModelProto bytes into a graph: the model, its inputs, initializers and outputs. See load.h, and loader.h for
 * the other parts. protobuf-c allocates through base/alloc, so that injected failures reach it.
 */
#include "onnx/load.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "onnx/loader.h"
#include "onnx/tensor.h"
#include "onnx/wire.h"

ont_value ont_onnx_absent;

/* ---- memory of protobuf-c ---- */

static void *pb_alloc(void *failed, size_t size)
{
    void *block = ont_malloc(size);
    if (!block) *(bool *)failed = true;
    return block;
}

static void pb_free(void *failed, void *block)
{
    (void)failed;
    ont_free(block);
}

/* ---- names and values ---- */

ont_status ont_onnx_define(ont_onnx_scope *scope, const char *name, ont_value *value)
{
    if (ont_map_get(&scope->values, name))
        return ont_fail(ONT_EINVAL, "%svalue '%s' is defined twice", scope->where, name);
    return ont_map_put(&scope->values, name, value);
}

ont_status ont_onnx_name(ont_loader *l, ont_onnx_scope *scope, const char *name, const char **result)
{
    const char *known = ont_map_get(&scope->results, name);
    if (known) {
        *result = known;
        return ONT_OK;
    }
    char *made = ont_arena_format(&l->g->arena, "%s%s", scope->prefix, name);
    while (made && ont_map_get(&l->names, made))
        made = ont_arena_format(&l->g->arena, "%s%s_%" PRIu64, scope->prefix, name, ++l->n_renamed);
    if (!made) return ONT_ENOMEM;
    ONT_TRY(ont_map_put(&l->names, made, made));
    *result = made;
    return ONT_OK;
}

ont_status ont_onnx_value(ont_loader *l, ont_onnx_scope *scope, ont_value_kind kind, const char *name,
                          ont_value **value)
{
    const char *unique;
    ont_value *v;
    ONT_TRY(ont_onnx_name(l, scope, name, &unique));
    ONT_TRY(ont_graph_add_value(l->g, kind, unique, &v));
    /* compared by address: inline.c checks whether the body created this value under the requested name */
    v->name = unique;
    *value = v;
    return ONT_OK;
}

ont_status ont_onnx_constant_value(ont_loader *l, ont_onnx_scope *scope, const char *name, const ont_tensor *tensor)
{
    if (ont_map_get(&scope->values, name))
        return ont_fail(ONT_EINVAL, "%svalue '%s' is defined twice", scope->where, name);
    ont_tensor *data = ont_arena_alloc(&l->g->arena, sizeof *data);
    if (!data) return ONT_ENOMEM;
    *data = *tensor;
    ont_value *value;
    ONT_TRY(ont_onnx_value(l, scope, ONT_VALUE_CONSTANT, name, &value));
    value->dtype = tensor->dtype;
    value->has_shape = true;
    value->shape = tensor->shape;
    value->data = data;
    return ont_onnx_define(scope, name, value);
}

/* ---- initializers, inputs, outputs ---- */

static ont_status load_initializer(ont_loader *l, ont_onnx_scope *scope, const Onnx__TensorProto *proto)
{
    ont_tensor tensor;
    if (!*ont_onnx_text(proto->name)) return ont_fail(ONT_EINVAL, "an initializer has no name");
    char *what = ont_arena_format(&l->g->arena, "initializer '%s'", proto->name);
    if (!what) return ONT_ENOMEM;
    ONT_TRY(ont_onnx_tensor(proto, what, &l->g->arena, &tensor));
    return ont_onnx_constant_value(l, scope, proto->name, &tensor);
}

static ont_status load_dim(ont_loader *l, const char *what, const Onnx__TensorShapeProto__Dimension *proto,
                           int64_t *dim)
{
    *dim = ONT_DIM_UNKNOWN;
    if (proto->value_case == ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE) {
        if (proto->dim_value < 0)
            return ont_fail(ONT_EINVAL, "%s: dim %" PRId64 " is negative", what, proto->dim_value);
        *dim = proto->dim_value;
    } else if (proto->value_case == ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM &&
               *ont_onnx_text(proto->dim_param)) {
        int symbol = ont_graph_symbol(l->g, proto->dim_param);
        if (symbol < 0) return ONT_ENOMEM;
        if (symbol >= ONT_MAX_SYMBOLS)
            return ont_fail(ONT_EINVAL, "%s: more than %d symbolic dims", what, ONT_MAX_SYMBOLS);
        *dim = ONT_DIM_SYMBOL(symbol);
    }
    return ONT_OK;
}

/* Reads the declared type of an input or output; *has_shape is false if it declares no rank. */
static ont_status load_type(ont_loader *l, const Onnx__ValueInfoProto *proto, const char *what, ont_dtype *dtype,
                            bool *has_shape, ont_shape *shape)
{
    if (!proto->type || proto->type->value_case != ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE || !proto->type->tensor_type)
        return ont_fail(ONT_EUNSUPPORTED, "%s is not a dense tensor", what);
    const Onnx__TypeProto__Tensor *type = proto->type->tensor_type;
    ONT_TRY(ont_onnx_dtype(type->has_elem_type ? type->elem_type : 0, what, dtype));
    *has_shape = type->shape != NULL;
    *shape = (ont_shape){0};
    if (!type->shape) return ONT_OK;
    if (type->shape->n_dim > ONT_MAX_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "%s: rank %zu, at most %d", what, type->shape->n_dim, ONT_MAX_RANK);
    shape->rank = (int32_t)type->shape->n_dim;
    for (int i = 0; i < shape->rank; i++) ONT_TRY(load_dim(l, what, type->shape->dim[i], &shape->dims[i]));
    if (ont_shape_is_static(shape)) {
        size_t bytes;
        ONT_TRY(ont_context(ont_shape_bytes(shape, *dtype, &bytes), "%s", what));
    }
    return ONT_OK;
}

static ont_status load_input(ont_loader *l, ont_onnx_scope *scope, const Onnx__ValueInfoProto *proto)
{
    const char *name = ont_onnx_text(proto->name), *unique;
    if (!*name) return ont_fail(ONT_EINVAL, "a graph input has no name");
    /* Before IR version 4 every initializer is also listed as an input. */
    const ont_value *known = ont_map_get(&scope->values, name);
    if (known)
        return known->kind == ONT_VALUE_CONSTANT ? ONT_OK : ont_fail(ONT_EINVAL, "input '%s' is listed twice", name);
    char *what = ont_arena_format(&l->g->arena, "input '%s'", name);
    if (!what) return ONT_ENOMEM;
    ont_dtype dtype;
    ont_shape shape;
    bool has_shape;
    if (scope->outer) { /* inputs of a subgraph take the types of the values passed in */
        dtype = ONT_UNDEFINED;
        has_shape = false;
    } else {
        ONT_TRY(load_type(l, proto, what, &dtype, &has_shape, &shape));
    }
    ont_value *value;
    ONT_TRY(ont_onnx_name(l, scope, name, &unique));
    ONT_TRY(ont_graph_add_input(l->g, unique, dtype, has_shape ? &shape : NULL, &value));
    return ont_onnx_define(scope, name, value);
}

ont_status ont_onnx_initializers(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto)
{
    for (size_t i = 0; i < proto->n_initializer; i++) ONT_TRY(load_initializer(l, scope, proto->initializer[i]));
    return ONT_OK;
}

ont_status ont_onnx_inputs(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto)
{
    for (size_t i = 0; i < proto->n_input; i++) ONT_TRY(load_input(l, scope, proto->input[i]));
    return ONT_OK;
}

/* The declared type of an output is shown to the user and replaced by shape inference. */
static ont_status declare_output(ont_loader *l, const Onnx__ValueInfoProto *proto, ont_value *value)
{
    ont_dtype dtype;
    ont_shape shape;
    bool has_shape;
    if (!proto->type || value->kind != ONT_VALUE_NODE) return ONT_OK;
    if (proto->type->value_case != ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE)
        return ONT_OK; /* a sequence or optional: its type is inferred */
    char *what = ont_arena_format(&l->g->arena, "output '%s'", proto->name);
    if (!what) return ONT_ENOMEM;
    ONT_TRY(load_type(l, proto, what, &dtype, &has_shape, &shape));
    value->dtype = dtype;
    value->has_shape = has_shape;
    value->shape = shape;
    return ONT_OK;
}

static ont_status load_outputs(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto)
{
    ont_value **outputs = ont_arena_array(&l->g->arena, proto->n_output, sizeof *outputs);
    bool *listed = ont_arena_array(&l->g->arena, l->g->n_values + 1, sizeof *listed);
    if (!outputs || !listed) return ONT_ENOMEM;
    for (size_t i = 0; i < proto->n_output; i++) {
        const char *name = ont_onnx_text(proto->output[i]->name);
        outputs[i] = ont_map_get(&scope->values, name);
        if (!outputs[i]) return ont_fail(ONT_EINVAL, "graph output '%s' is not computed by any node", name);
        if (listed[outputs[i]->id]) { /* TorchScript's exporter writes `return y, y` like this */
            const char *unique;
            ONT_TRY(ont_onnx_name(l, scope, name, &unique));
            ONT_TRY(ont_onnx_copy(l, unique, outputs[i], &outputs[i]));
        } else {
            listed[outputs[i]->id] = true;
        }
        ONT_TRY(declare_output(l, proto->output[i], outputs[i]));
    }
    return ont_graph_set_outputs(l->g, outputs, (uint32_t)proto->n_output);
}

/* ---- the model ---- */

static ont_status load_graph(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto)
{
    if (!proto) return ont_fail(ONT_EINVAL, "the model has no graph");
    const Onnx__TensorProto *sparse = proto->n_sparse_initializer ? proto->sparse_initializer[0]->values : NULL;
    if (proto->n_sparse_initializer)
        return ont_fail(ONT_EUNSUPPORTED, "sparse initializer '%s': sparse tensors are not read",
                        sparse ? ont_onnx_text(sparse->name) : "");
    if (!proto->n_output) return ont_fail(ONT_EINVAL, "the graph has no outputs");
    if (proto->n_output > ONT_MAX_INTERFACE || proto->n_input > ONT_MAX_INTERFACE)
        return ont_fail(ONT_EINVAL, "the graph has %zu inputs and %zu outputs, at most %d", proto->n_input,
                        proto->n_output, ONT_MAX_INTERFACE);
    ONT_TRY(ont_onnx_initializers(l, scope, proto));
    ONT_TRY(ont_onnx_inputs(l, scope, proto));
    l->max_bytes = l->g->arena.bytes * 64 + ((size_t)256 << 20);
    ONT_TRY(ont_onnx_nodes(l, scope, proto->node, proto->n_node));
    ONT_TRY(load_outputs(l, scope, proto));
    return ont_graph_verify(l->g);
}

static ont_status load_model(ont_loader *l, const Onnx__ModelProto *model)
{
    ont_onnx_scope scope = {.where = "", .prefix = "", .opsets = model->opset_import,
                            .n_opsets = model->n_opset_import};
    ont_status status = ont_onnx_check_opsets(&scope);
    if (status == ONT_OK) status = ont_onnx_list_functions(l, model);
    if (status == ONT_OK) status = load_graph(l, &scope, model->graph);
    ont_map_deinit(&scope.values);
    return ont_context(status, "model");
}

ont_status ont_onnx_load(const uint8_t *bytes, size_t size, ont_graph **graph)
{
    bool out_of_memory = false;
    ProtobufCAllocator allocator = {pb_alloc, pb_free, &out_of_memory};
    ont_loader l = {0};
    ont_status status;
    ONT_TRY(ont_wire_check(&onnx__model_proto__descriptor, bytes, size));
    Onnx__ModelProto *model = onnx__model_proto__unpack(&allocator, size, bytes);
    if (!model)
        return out_of_memory ? ont_fail(ONT_ENOMEM, "out of memory reading a model of %zu bytes", size)
                             : ont_fail(ONT_EINVAL, "model: not a valid ModelProto");
    status = ont_graph_create(model->graph ? ont_onnx_text(model->graph->name) : "", &l.g);
    if (status == ONT_OK) status = load_model(&l, model);
    ont_map_deinit(&l.names);
    ont_map_deinit(&l.node_names);
    ont_map_deinit(&l.functions);
    onnx__model_proto__free_unpacked(model, &allocator);
    if (status == ONT_OK)
        *graph = l.g;
    else
        ont_graph_destroy(l.g);
    return status;
}
