/*
 * Serialises a graph to ModelProto bytes. See save.h. All messages are in one arena, with strings and tensors borrowed
 * from the graph if possible; protobuf-c then packs them into one heap block.
 */
#include "onnx/save.h"

#include <string.h>

#include "base/alloc.h"
#include "base/map.h"
#include "onnx-ml.pb-c.h"
#include "ops/op.h"

enum { IR_VERSION = 10, DEFAULT_OPSET = 18 };

typedef struct saver {
    const ont_graph *g;
    ont_arena arena;
    ont_map names; /* names used so far, in subgraphs too */
    char **of;     /* by value id of g, NULL: none yet */
    Onnx__GraphProto *graph;
} saver;

/* An empty message of a generated type, in the arena. */
static void *new_message(saver *s, const ProtobufCMessageDescriptor *type)
{
    void *message = ont_arena_alloc(&s->arena, type->sizeof_message);
    if (message) protobuf_c_message_init(type, message);
    return message;
}

#define NEW(s, type) new_message((s), &onnx__##type##__descriptor)

static char *borrowed(const char *text) /* packing does not modify messages */
{
    return (char *)(uintptr_t)text;
}

/*
 * The name of a value in the file: its own, unless another value has it (an anonymous value's may equal a name of the
 * model).
 */
static ont_status name_of(saver *s, const ont_value *v, char **name)
{
    if (!s->of[v->id]) {
        char *made = borrowed(v->name);
        for (uint32_t i = 0; made && ont_map_get(&s->names, made); i++)
            made = ont_arena_format(&s->arena, "%s_%u_%u", v->name, v->id, i);
        if (!made) return ONT_ENOMEM;
        ONT_TRY(ont_map_put(&s->names, made, made));
        s->of[v->id] = made;
    }
    *name = s->of[v->id];
    return ONT_OK;
}

/* ---- tensors and types ---- */

/* Packs elements below 8 bits, first element in the lowest bits. */
static ont_status pack_narrow(saver *s, const ont_tensor *tensor, ProtobufCBinaryData *raw)
{
    int bits = ont_dtype_bits(tensor->dtype);
    raw->len = (tensor->bytes * (size_t)bits + 7) / 8;
    raw->data = ont_arena_array(&s->arena, raw->len + 1, 1);
    if (!raw->data) return ONT_ENOMEM;
    for (size_t i = 0; i < tensor->bytes; i++) {
        int element = ((const uint8_t *)tensor->data)[i] & ((1 << bits) - 1);
        size_t at = i * (size_t)bits;
        raw->data[at / 8] |= (uint8_t)(element << at % 8);
        if (at % 8 + (size_t)bits > 8) raw->data[at / 8 + 1] |= (uint8_t)(element >> (8 - at % 8));
    }
    return ONT_OK;
}

static ont_status save_tensor(saver *s, const ont_tensor *tensor, char *name, Onnx__TensorProto **out)
{
    Onnx__TensorProto *t = NEW(s, tensor_proto);
    int64_t *dims = ont_arena_array(&s->arena, (size_t)tensor->shape.rank + 1, sizeof *dims);
    if (!t || !dims) return ONT_ENOMEM;
    for (int i = 0; i < tensor->shape.rank; i++) dims[i] = tensor->shape.dims[i];
    t->n_dims = (size_t)tensor->shape.rank;
    t->dims = dims;
    t->has_data_type = true;
    t->data_type = (int32_t)tensor->dtype;
    t->name = name;
    t->has_raw_data = true;
    t->raw_data = (ProtobufCBinaryData){tensor->bytes, tensor->data};
    if (ont_dtype_bits(tensor->dtype) < 8) ONT_TRY(pack_narrow(s, tensor, &t->raw_data));
    *out = t;
    return ONT_OK;
}

static ont_status save_shape(saver *s, const ont_shape *shape, Onnx__TensorShapeProto **out)
{
    Onnx__TensorShapeProto *proto = NEW(s, tensor_shape_proto);
    if (!proto) return ONT_ENOMEM;
    proto->dim = ont_arena_array(&s->arena, (size_t)shape->rank + 1, sizeof *proto->dim);
    if (!proto->dim) return ONT_ENOMEM;
    for (int i = 0; i < shape->rank; i++) {
        int64_t dim = shape->dims[i];
        Onnx__TensorShapeProto__Dimension *d = NEW(s, tensor_shape_proto__dimension);
        if (!d) return ONT_ENOMEM;
        if (dim >= 0) {
            d->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_VALUE;
            d->dim_value = dim;
        } else if (dim != ONT_DIM_UNKNOWN && (uint32_t)ONT_DIM_SYMBOL_INDEX(dim) < s->g->n_symbols) {
            d->value_case = ONNX__TENSOR_SHAPE_PROTO__DIMENSION__VALUE_DIM_PARAM;
            d->dim_param = borrowed(s->g->symbols[ONT_DIM_SYMBOL_INDEX(dim)]);
        }
        proto->dim[proto->n_dim++] = d;
    }
    *out = proto;
    return ONT_OK;
}

static ont_status save_value_info(saver *s, const ont_value *v, Onnx__ValueInfoProto **out)
{
    Onnx__ValueInfoProto *info = NEW(s, value_info_proto);
    Onnx__TypeProto *type = NEW(s, type_proto);
    Onnx__TypeProto__Tensor *tensor = NEW(s, type_proto__tensor);
    if (!info || !type || !tensor) return ONT_ENOMEM;
    ONT_TRY(name_of(s, v, &info->name));
    if (v->dtype != ONT_UNDEFINED) {
        tensor->has_elem_type = true;
        tensor->elem_type = (int32_t)v->dtype;
        if (v->has_shape) ONT_TRY(save_shape(s, &v->shape, &tensor->shape));
        type->value_case = ONNX__TYPE_PROTO__VALUE_TENSOR_TYPE;
        type->tensor_type = tensor;
        info->type = type;
    }
    *out = info;
    return ONT_OK;
}

/* ---- nodes ---- */

#define SET(kind_, field, value) (a->type = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__##kind_, a->field = (value))

static ont_status save_lists(saver *s, const ont_attr *attr, Onnx__AttributeProto *a)
{
    if (attr->kind == ONT_ATTR_INTS) {
        SET(INTS, n_ints, attr->count);
        a->ints = (int64_t *)(uintptr_t)attr->ints;
    } else if (attr->kind == ONT_ATTR_FLOATS) {
        a->floats = ont_arena_array(&s->arena, attr->count + 1, sizeof *a->floats);
        if (!a->floats) return ONT_ENOMEM;
        for (size_t i = 0; i < attr->count; i++) a->floats[i] = (float)attr->floats[i];
        SET(FLOATS, n_floats, attr->count);
    } else {
        a->strings = ont_arena_array(&s->arena, attr->count + 1, sizeof *a->strings);
        if (!a->strings) return ONT_ENOMEM;
        for (size_t i = 0; i < attr->count; i++)
            a->strings[i] = (ProtobufCBinaryData){strlen(attr->strings[i]), (uint8_t *)borrowed(attr->strings[i])};
        SET(STRINGS, n_strings, attr->count);
    }
    return ONT_OK;
}

static ont_status save_body(saver *s, const ont_node *owner, const ont_graph *body, Onnx__GraphProto **out);

static ont_status save_attr(saver *s, const ont_node *node, const ont_attr *attr, Onnx__AttributeProto **out)
{
    Onnx__AttributeProto *a = NEW(s, attribute_proto);
    if (!a) return ONT_ENOMEM;
    a->name = borrowed(attr->name);
    a->has_type = true;
    switch (attr->kind) {
    case ONT_ATTR_INT:
        if (!strcmp(node->op_type, "Optional") && !*node->domain)
            return ont_fail(ONT_EUNSUPPORTED, "%s '%s': attribute '%s' is a type, which is not written", node->op_type,
                            node->name, attr->name);
        SET(INT, i, attr->i), a->has_i = true;
        break;
    case ONT_ATTR_FLOAT: SET(FLOAT, f, (float)attr->f), a->has_f = true; break;
    case ONT_ATTR_STRING:
        SET(STRING, s, ((ProtobufCBinaryData){attr->count, (uint8_t *)borrowed(attr->s)})), a->has_s = true;
        break;
    case ONT_ATTR_TENSOR:
        a->type = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__TENSOR;
        ONT_TRY(save_tensor(s, attr->tensor, NULL, &a->t));
        break;
    case ONT_ATTR_GRAPH:
        a->type = ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__GRAPH;
        ONT_TRY(save_body(s, node, attr->graph, &a->g));
        break;
    case ONT_ATTR_INTS:
    case ONT_ATTR_FLOATS:
    case ONT_ATTR_STRINGS: ONT_TRY(save_lists(s, attr, a)); break;
    }
    *out = a;
    return ONT_OK;
}

/* The loader renumbers random nodes, and standard operators have no attributes of these names. */
static bool is_written(const ont_node *node, const ont_attr *attr)
{
    bool random = node->op && node->op->flags & ONT_OP_RANDOM;
    return !(random && !*node->domain && (!strcmp(attr->name, "rng_stream") || !strcmp(attr->name, "torch_layout")));
}

static ont_status save_attrs(saver *s, const ont_node *node, Onnx__NodeProto *proto)
{
    size_t n = 0;
    for (const ont_attr *attr = node->attrs; attr; attr = attr->next) n++;
    proto->attribute = ont_arena_array(&s->arena, n + 1, sizeof *proto->attribute);
    if (!proto->attribute) return ONT_ENOMEM;
    for (const ont_attr *attr = node->attrs; attr; attr = attr->next) {
        if (!is_written(node, attr)) continue;
        ONT_TRY(save_attr(s, node, attr, &proto->attribute[proto->n_attribute]));
        proto->n_attribute++;
    }
    /* Setters and loader prepend attributes to the list: the file has the original order. */
    for (size_t i = 0, j = proto->n_attribute; i + 1 < j; i++) {
        Onnx__AttributeProto *swapped = proto->attribute[i];
        proto->attribute[i] = proto->attribute[--j];
        proto->attribute[j] = swapped;
    }
    return ONT_OK;
}

/* Captured values are not inputs in the file, where subgraphs read them by name. */
static uint32_t own_inputs(const ont_node *node)
{
    uint32_t n = node->n_inputs;
    for (const ont_attr *attr = node->attrs; attr; attr = attr->next)
        if (attr->kind == ONT_ATTR_GRAPH && attr->graph->n_captures && attr->graph->first_capture < n)
            n = attr->graph->first_capture;
    return n;
}

/* What the loader reads as the node's region. */
static ont_status save_region(saver *s, const ont_node *node, Onnx__NodeProto *proto)
{
    static char key[] = "onnxtrain.region";
    Onnx__StringStringEntryProto *entry = NEW(s, string_string_entry_proto);
    proto->metadata_props = ont_arena_array(&s->arena, 1, sizeof *proto->metadata_props);
    if (!entry || !proto->metadata_props) return ONT_ENOMEM;
    entry->key = key;
    entry->value = borrowed(node->region);
    proto->metadata_props[proto->n_metadata_props++] = entry;
    return ONT_OK;
}

static ont_status save_node(saver *s, const ont_node *node, Onnx__NodeProto **out)
{
    static char absent[] = "";
    Onnx__NodeProto *proto = NEW(s, node_proto);
    if (!proto) return ONT_ENOMEM;
    proto->name = borrowed(node->name);
    proto->domain = borrowed(node->domain);
    proto->op_type = borrowed(node->op_type);
    proto->input = ont_arena_array(&s->arena, node->n_inputs + 1, sizeof *proto->input);
    proto->output = ont_arena_array(&s->arena, node->n_outputs + 1, sizeof *proto->output);
    if (!proto->input || !proto->output) return ONT_ENOMEM;
    uint32_t n_inputs = own_inputs(node);
    for (uint32_t i = 0; i < n_inputs; i++) {
        proto->input[i] = absent;
        if (node->inputs[i].value) ONT_TRY(name_of(s, node->inputs[i].value, &proto->input[i]));
    }
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        proto->output[i] = absent;
        if (node->outputs[i]) ONT_TRY(name_of(s, node->outputs[i], &proto->output[i]));
    }
    proto->n_input = n_inputs;
    proto->n_output = node->n_outputs;
    while (proto->n_output && !*proto->output[proto->n_output - 1]) proto->n_output--;
    ONT_TRY(save_attrs(s, node, proto));
    if (node->region) ONT_TRY(save_region(s, node, proto));
    *out = proto;
    return ONT_OK;
}

/* ---- graph and model ---- */

/* Inputs and outputs first: they keep their names if names collide. */
static ont_status save_interface(saver *s)
{
    const ont_graph *g = s->g;
    Onnx__GraphProto *graph = s->graph;
    uint32_t n_inputs = g->n_inputs - g->n_captures;
    graph->input = ont_arena_array(&s->arena, (size_t)n_inputs + 1, sizeof *graph->input);
    graph->output = ont_arena_array(&s->arena, (size_t)g->n_outputs + 1, sizeof *graph->output);
    if (!graph->input || !graph->output) return ONT_ENOMEM;
    for (uint32_t i = 0; i < n_inputs; i++) ONT_TRY(save_value_info(s, g->inputs[i], &graph->input[i]));
    for (uint32_t i = 0; i < g->n_outputs; i++) ONT_TRY(save_value_info(s, g->outputs[i], &graph->output[i]));
    graph->n_input = n_inputs;
    graph->n_output = g->n_outputs;
    return ONT_OK;
}

static ont_status save_constants(saver *s)
{
    const ont_graph *g = s->g;
    Onnx__GraphProto *graph = s->graph;
    bool *is_output = ont_arena_array(&s->arena, (size_t)g->n_values + 1, sizeof *is_output);
    graph->initializer = ont_arena_array(&s->arena, (size_t)g->n_values + 1, sizeof *graph->initializer);
    if (!is_output || !graph->initializer) return ONT_ENOMEM;
    for (uint32_t i = 0; i < g->n_outputs; i++) is_output[g->outputs[i]->id] = true;
    for (uint32_t i = 0; i < g->n_values; i++) {
        const ont_value *v = g->values[i];
        char *name;
        if (v->kind != ONT_VALUE_CONSTANT || (!v->uses && !is_output[i])) continue;
        ONT_TRY(name_of(s, v, &name));
        ONT_TRY(save_tensor(s, v->data, name, &graph->initializer[graph->n_initializer]));
        graph->n_initializer++;
    }
    return ONT_OK;
}

/* Records that a node needs `version` of `domain`. Linear search: there are few domains. */
static ont_status import_opset(saver *s, Onnx__ModelProto *model, const char *domain, int64_t version)
{
    for (size_t i = 0; i < model->n_opset_import; i++) {
        Onnx__OperatorSetIdProto *set = model->opset_import[i];
        if (strcmp(set->domain, domain)) continue;
        if (version > set->version) set->version = version;
        return ONT_OK;
    }
    Onnx__OperatorSetIdProto **more = ont_arena_array(&s->arena, model->n_opset_import + 1, sizeof *more);
    Onnx__OperatorSetIdProto *set = NEW(s, operator_set_id_proto);
    if (!more || !set) return ONT_ENOMEM;
    if (model->n_opset_import) memcpy(more, model->opset_import, model->n_opset_import * sizeof *more);
    set->domain = borrowed(domain);
    set->has_version = true;
    set->version = version;
    more[model->n_opset_import++] = set;
    model->opset_import = more;
    return ONT_OK;
}

static ont_status import_opsets(saver *s, Onnx__ModelProto *model, const ont_graph *g)
{
    for (const ont_node *node = g->first; node; node = node->next) {
        ONT_TRY(import_opset(s, model, node->domain, node->version));
        for (const ont_attr *attr = node->attrs; attr; attr = attr->next)
            if (attr->kind == ONT_ATTR_GRAPH) ONT_TRY(import_opsets(s, model, attr->graph));
    }
    return ONT_OK;
}

static ont_status save_opsets(saver *s, Onnx__ModelProto *model)
{
    ONT_TRY(import_opset(s, model, "", 0));
    ONT_TRY(import_opsets(s, model, s->g));
    for (size_t i = 0; i < model->n_opset_import; i++) {
        Onnx__OperatorSetIdProto *set = model->opset_import[i];
        if (set->version < 1) set->version = *set->domain ? 1 : DEFAULT_OPSET;
    }
    return ONT_OK;
}

/* Saves all of s->g into a new s->graph; names of captured values are already in s->of. */
static ont_status save_graph(saver *s)
{
    size_t n = 0;
    for (const ont_node *node = s->g->first; node; node = node->next) n++;
    s->graph = NEW(s, graph_proto);
    if (!s->graph) return ONT_ENOMEM;
    s->graph->name = borrowed(*s->g->name ? s->g->name : "graph");
    s->graph->node = ont_arena_array(&s->arena, n + 1, sizeof *s->graph->node);
    if (!s->graph->node) return ONT_ENOMEM;
    ONT_TRY(save_interface(s));
    ONT_TRY(save_constants(s));
    for (const ont_node *node = s->g->first; node; node = node->next) {
        ONT_TRY(save_node(s, node, &s->graph->node[s->graph->n_node]));
        s->graph->n_node++;
    }
    return ONT_OK;
}

static ont_status begin_graph(saver *s, const ont_graph *g)
{
    s->g = g;
    s->of = ont_arena_array(&s->arena, (size_t)g->n_values + 1, sizeof *s->of);
    return s->of ? ONT_OK : ONT_ENOMEM;
}

static ont_status save_body(saver *s, const ont_node *owner, const ont_graph *body, Onnx__GraphProto **out)
{
    saver outer = *s;
    char **captured = ont_arena_array(&s->arena, (size_t)body->n_captures + 1, sizeof *captured);
    if (!captured) return ONT_ENOMEM;
    for (uint32_t i = 0; i < body->n_captures; i++)
        ONT_TRY(name_of(s, ont_node_in(owner, body->first_capture + i), &captured[i]));
    ont_status status = begin_graph(s, body);
    for (uint32_t i = 0; i < body->n_captures && status == ONT_OK; i++)
        s->of[body->inputs[body->n_inputs - body->n_captures + i]->id] = captured[i];
    if (status == ONT_OK) status = save_graph(s);
    *out = s->graph;
    s->g = outer.g;
    s->of = outer.of;
    s->graph = outer.graph;
    return status;
}

static ont_status save_model(saver *s, Onnx__ModelProto *model)
{
    static char producer[] = "onnxtrain";
    ONT_TRY(begin_graph(s, s->g));
    ONT_TRY(save_graph(s));
    model->has_ir_version = true;
    model->ir_version = IR_VERSION;
    model->producer_name = producer;
    model->graph = s->graph;
    return save_opsets(s, model);
}

static ont_status pack(const Onnx__ModelProto *model, uint8_t **bytes, size_t *size)
{
    size_t n = onnx__model_proto__get_packed_size(model);
    if (n > INT32_MAX) return ont_fail(ONT_EUNSUPPORTED, "the model would take %zu bytes, protobuf ends at 2 GiB", n);
    uint8_t *block = ont_malloc(n);
    if (!block) return ONT_ENOMEM;
    *size = onnx__model_proto__pack(model, block);
    *bytes = block;
    return ONT_OK;
}

ont_status ont_onnx_save(const ont_graph *g, uint8_t **bytes, size_t *size)
{
    saver s = {.g = g};
    Onnx__ModelProto model = ONNX__MODEL_PROTO__INIT;
    ont_arena_init(&s.arena);
    ont_status status = save_model(&s, &model);
    if (status == ONT_OK) status = pack(&model, bytes, size);
    ont_map_deinit(&s.names);
    ont_arena_deinit(&s.arena);
    return ont_context(status, "saving '%s'", g->name);
}
