/*
 * ModelProto bytes to a graph. See load.h. protobuf-c allocates through base/alloc, so that injected failures reach it.
 */
#include "onnx/load.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/map.h"
#include "onnx/attribute.h"
#include "onnx/tensor.h"
#include "onnx/wire.h"
#include "ops/op.h"

typedef struct loader {
    const Onnx__ModelProto *model;
    const Onnx__GraphProto *proto;
    ont_graph *g;
    ont_map values;  /* name to ont_value, defined so far */
    int64_t rng_streams;
} loader;

static void *pb_alloc(void *context, size_t size)
{
    (void)context;
    return ont_malloc(size);
}

static void pb_free(void *context, void *block)
{
    (void)context;
    ont_free(block);
}

static ProtobufCAllocator allocator = {pb_alloc, pb_free, NULL};

static const char *text(const char *s)
{
    return s ? s : "";
}

/* ---- inputs and initializers ---- */

static ont_status define(loader *l, const char *name, ont_value *value)
{
    if (ont_map_get(&l->values, name)) return ont_fail(ONT_EINVAL, "value '%s' is defined twice", name);
    return ont_map_put(&l->values, value->name, value);
}

static ont_status load_initializer(loader *l, const Onnx__TensorProto *proto)
{
    ont_tensor tensor;
    ont_value *value;
    if (!*text(proto->name)) return ont_fail(ONT_EINVAL, "an initializer has no name");
    char *what = ont_arena_format(&l->g->arena, "initializer '%s'", proto->name);
    if (!what) return ONT_ENOMEM;
    ONT_TRY(ont_onnx_tensor(proto, what, &l->g->arena, &tensor));
    ont_tensor *data = ont_arena_alloc(&l->g->arena, sizeof *data);
    if (!data) return ONT_ENOMEM;
    *data = tensor;
    ONT_TRY(ont_graph_add_value(l->g, ONT_VALUE_CONSTANT, proto->name, &value));
    value->dtype = tensor.dtype;
    value->has_shape = true;
    value->shape = tensor.shape;
    value->data = data;
    return define(l, proto->name, value);
}

static ont_status load_dim(loader *l, const char *input, const Onnx__TensorShapeProto__Dimension *proto, int64_t *dim)
{
    *dim = ONT_DIM_UNKNOWN;
    if (proto->value_case == ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE) {
        if (proto->dim_value < 0) return ont_fail(ONT_EINVAL, "input '%s': dim %" PRId64 " is negative", input, proto->dim_value);
        *dim = proto->dim_value;
    } else if (proto->value_case == ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM && *text(proto->dim_param)) {
        int symbol = ont_graph_symbol(l->g, proto->dim_param);
        if (symbol < 0) return ONT_ENOMEM;
        *dim = ONT_DIM_SYMBOL(symbol);
    }
    return ONT_OK;
}

static ont_status load_input(loader *l, const Onnx__ValueInfoProto *proto)
{
    const char *name = text(proto->name);
    if (!*name) return ont_fail(ONT_EINVAL, "a graph input has no name");
    /* Before IR version 4 every initializer is also listed as an input. */
    if (ont_map_get(&l->values, name)) {
        const ont_value *v = ont_map_get(&l->values, name);
        return v->kind == ONT_VALUE_CONSTANT ? ONT_OK : ont_fail(ONT_EINVAL, "input '%s' is listed twice", name);
    }
    if (!proto->type || proto->type->value_case != ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE)
        return ont_fail(ONT_EUNSUPPORTED, "input '%s' is not a dense tensor", name);
    const Onnx__TypeProto__Tensor *type = proto->type->tensor_type;
    char *what = ont_arena_format(&l->g->arena, "input '%s'", name);
    if (!what) return ONT_ENOMEM;
    ont_dtype dtype;
    ONT_TRY(ont_onnx_dtype(type->has_elem_type ? type->elem_type : 0, what, &dtype));
    ont_shape shape = {0};
    if (type->shape) {
        if (type->shape->n_dim > ONT_MAX_RANK)
            return ont_fail(ONT_EUNSUPPORTED, "%s: rank %zu, at most %d", what, type->shape->n_dim, ONT_MAX_RANK);
        shape.rank = (int32_t)type->shape->n_dim;
        for (int i = 0; i < shape.rank; i++) ONT_TRY(load_dim(l, name, type->shape->dim[i], &shape.dims[i]));
    }
    ont_value *value;
    ONT_TRY(ont_graph_add_input(l->g, name, dtype, type->shape ? &shape : NULL, &value));
    return define(l, name, value);
}

/* ---- nodes ---- */

static int64_t opset_of(const loader *l, const char *domain)
{
    for (size_t i = 0; i < l->model->n_opset_import; i++) {
        const Onnx__OperatorSetIdProto *set = l->model->opset_import[i];
        const char *name = text(set->domain);
        if (!strcmp(name, "ai.onnx")) name = "";
        if (!strcmp(name, domain)) return set->has_version ? set->version : 1;
    }
    return -1;
}

static ont_status check_not_function(const loader *l, const char *domain, const Onnx__NodeProto *proto)
{
    for (size_t i = 0; i < l->model->n_functions; i++) {
        const Onnx__FunctionProto *f = l->model->functions[i];
        if (!strcmp(text(f->name), text(proto->op_type)) && !strcmp(text(f->domain), domain))
            return ont_fail(ONT_EUNSUPPORTED, "node '%s' calls the model's function %s.%s: inline functions first",
                            text(proto->name), domain, text(f->name));
    }
    return ONT_OK;
}

/* Constant nodes become constants: nothing later knows such an operator. */
static ont_status load_constant(loader *l, const Onnx__NodeProto *proto, const char *what)
{
    if (proto->n_output != 1 || !*text(proto->output[0]) || proto->n_attribute != 1)
        return ont_fail(ONT_EINVAL, "%s: one output and one attribute are expected", what);
    ont_tensor *data = ont_arena_alloc(&l->g->arena, sizeof *data);
    if (!data) return ONT_ENOMEM;
    ONT_TRY(ont_onnx_constant(proto->attribute[0], what, &l->g->arena, data));
    ont_value *value;
    ONT_TRY(ont_graph_add_value(l->g, ONT_VALUE_CONSTANT, proto->output[0], &value));
    value->dtype = data->dtype;
    value->has_shape = true;
    value->shape = data->shape;
    value->data = data;
    return define(l, proto->output[0], value);
}

static ont_status node_inputs(const loader *l, const Onnx__NodeProto *proto, const char *what, ont_value **inputs)
{
    for (size_t i = 0; i < proto->n_input; i++) {
        inputs[i] = NULL;
        if (!*text(proto->input[i])) continue;
        inputs[i] = ont_map_get(&l->values, proto->input[i]);
        if (!inputs[i])
            return ont_fail(ONT_EINVAL, "%s: input '%s' is not defined before it (unknown name, cycle or wrong order)", what,
                            proto->input[i]);
    }
    return ONT_OK;
}

static ont_status node_outputs(loader *l, const Onnx__NodeProto *proto, ont_value **outputs)
{
    for (size_t i = 0; i < proto->n_output; i++) {
        outputs[i] = NULL;
        if (!*text(proto->output[i])) continue;
        if (ont_map_get(&l->values, proto->output[i]))
            return ont_fail(ONT_EINVAL, "value '%s' is defined twice", proto->output[i]);
        ONT_TRY(ont_graph_add_value(l->g, ONT_VALUE_NODE, proto->output[i], &outputs[i]));
        ONT_TRY(define(l, proto->output[i], outputs[i]));
    }
    return ONT_OK;
}

static ont_status load_attributes(loader *l, const Onnx__NodeProto *proto, const char *what, ont_node *node)
{
    for (size_t i = 0; i < proto->n_attribute; i++)
        ONT_TRY(ont_onnx_attribute(proto->attribute[i], what, l->g, node));
    if (node->op && node->op->flags & ONT_OP_RANDOM)
        ONT_TRY(ont_attr_set_int(l->g, node, "rng_stream", l->rng_streams++));
    return ONT_OK;
}

static ont_status load_node(loader *l, const Onnx__NodeProto *proto, size_t index)
{
    const char *domain = text(proto->domain), *op_type = text(proto->op_type);
    if (!strcmp(domain, "ai.onnx")) domain = "";
    char *what = ont_arena_format(&l->g->arena, "node %zu (%s '%s')", index, op_type, text(proto->name));
    if (!what) return ONT_ENOMEM;
    if (!*op_type) return ont_fail(ONT_EINVAL, "%s: no operator type", what);
    int64_t version = opset_of(l, domain);
    if (version < 1) return ont_fail(ONT_EINVAL, "%s: domain '%s' has no valid opset import", what, domain);
    if (!*domain && !strcmp(op_type, "Constant")) return load_constant(l, proto, what);
    ONT_TRY(check_not_function(l, domain, proto));
    if (proto->n_output == 0 || proto->n_output > 4096 || proto->n_input > 65536)
        return ont_fail(ONT_EINVAL, "%s: %zu inputs and %zu outputs", what, proto->n_input, proto->n_output);
    ont_value **inputs = ont_arena_array(&l->g->arena, proto->n_input + 1, sizeof *inputs);
    ont_value **outputs = ont_arena_array(&l->g->arena, proto->n_output + 1, sizeof *outputs);
    if (!inputs || !outputs) return ONT_ENOMEM;
    ONT_TRY(node_inputs(l, proto, what, inputs));
    ONT_TRY(node_outputs(l, proto, outputs));
    ont_node *node;
    ONT_TRY(ont_graph_add_node(l->g, NULL, domain, op_type, inputs, (uint32_t)proto->n_input, outputs,
                               (uint32_t)proto->n_output, &node));
    if (*text(proto->name)) {
        node->name = ont_arena_strdup(&l->g->arena, proto->name);
        if (!node->name) return ONT_ENOMEM;
    }
    node->version = version;
    node->op = ont_op_find(domain, op_type, version);
    return load_attributes(l, proto, what, node);
}

static ont_status load_outputs(loader *l)
{
    size_t n = l->proto->n_output;
    ont_value **outputs = ont_arena_array(&l->g->arena, n + 1, sizeof *outputs);
    if (!outputs) return ONT_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        const char *name = text(l->proto->output[i]->name);
        outputs[i] = ont_map_get(&l->values, name);
        if (!outputs[i]) return ont_fail(ONT_EINVAL, "graph output '%s' is not computed by any node", name);
    }
    return ont_graph_set_outputs(l->g, outputs, (uint32_t)n);
}

static ont_status load_graph(loader *l)
{
    if (!l->proto) return ont_fail(ONT_EINVAL, "the model has no graph");
    if (l->proto->n_sparse_initializer) return ont_fail(ONT_EUNSUPPORTED, "sparse initializers are not read");
    if (!l->proto->n_output) return ont_fail(ONT_EINVAL, "the graph has no outputs");
    for (size_t i = 0; i < l->proto->n_initializer; i++) ONT_TRY(load_initializer(l, l->proto->initializer[i]));
    for (size_t i = 0; i < l->proto->n_input; i++) ONT_TRY(load_input(l, l->proto->input[i]));
    for (size_t i = 0; i < l->proto->n_node; i++) ONT_TRY(load_node(l, l->proto->node[i], i));
    ONT_TRY(load_outputs(l));
    return ont_graph_verify(l->g);
}

ont_status ont_onnx_load(const uint8_t *bytes, size_t size, ont_graph **graph)
{
    loader l = {0};
    Onnx__ModelProto *model = NULL;
    ont_status status;
    ONT_TRY(ont_wire_check(&onnx__model_proto__descriptor, bytes, size));
    model = onnx__model_proto__unpack(&allocator, size, bytes);
    if (!model) return ont_alloc_fail_fired() ? ont_fail(ONT_ENOMEM, "out of memory reading the model")
                                              : ont_fail(ONT_EINVAL, "model: not a valid ModelProto");
    l.model = model;
    l.proto = model->graph;
    ONT_TRYGOTO(status, done, ont_graph_create(model->graph ? text(model->graph->name) : "", &l.g));
    status = ont_context(load_graph(&l), "model");
done:
    ont_map_deinit(&l.values);
    onnx__model_proto__free_unpacked(model, &allocator);
    if (status == ONT_OK)
        *graph = l.g;
    else
        ont_graph_destroy(l.g);
    return status;
}
