/*
 * Loads the nodes of a graph or of a function's body: order, names, opsets, attributes. See loader.h.
 */
#include <inttypes.h>
#include <string.h>

#include "onnx/attribute.h"
#include "onnx/loader.h"
#include "ops/op.h"

#define TEXT ont_onnx_text

/* ---- opsets ---- */

ont_status ont_onnx_check_opsets(const ont_onnx_scope *scope)
{
    if (scope->n_opsets > ONT_MAX_OPSETS)
        return ont_fail(ONT_EINVAL, "%s%zu opset imports, at most %d", scope->where, scope->n_opsets, ONT_MAX_OPSETS);
    for (size_t i = 0; i < scope->n_opsets; i++) {
        const Onnx__OperatorSetIdProto *set = scope->opsets[i];
        const char *domain = ont_onnx_domain(set->domain);
        for (size_t j = 0; j < i; j++)
            if (!strcmp(domain, ont_onnx_domain(scope->opsets[j]->domain)) && set->version != scope->opsets[j]->version)
                return ont_fail(ONT_EINVAL, "%sdomain '%s' is imported twice", scope->where, domain);
        if (!*domain && set->version > ONT_MAX_OPSET)
            return ont_fail(ONT_EUNSUPPORTED, "%sopset %" PRId64 " of ai.onnx is later than %d", scope->where,
                            set->version, ONT_MAX_OPSET);
    }
    return ONT_OK;
}

static ont_status opset_of(const ont_onnx_scope *scope, const char *what, const char *domain, int64_t *version)
{
    for (size_t i = 0; i < scope->n_opsets; i++) {
        const Onnx__OperatorSetIdProto *set = scope->opsets[i];
        if (strcmp(ont_onnx_domain(set->domain), domain)) continue;
        if (!set->has_version || set->version < 1)
            return ont_fail(ONT_EINVAL, "%s: domain '%s' is imported with version %" PRId64, what, domain,
                            set->version);
        *version = set->version;
        return ONT_OK;
    }
    return ont_fail(ONT_EINVAL, "%s: domain '%s' has no opset import", what, domain);
}

/* ---- attributes ---- */

ont_status ont_onnx_resolve(const ont_onnx_scope *scope, const char *what, const Onnx__AttributeProto *proto,
                            const Onnx__AttributeProto **resolved)
{
    const char *refers = TEXT(proto->ref_attr_name);
    *resolved = proto;
    if (!*refers) return ONT_OK;
    if (!scope->function)
        return ont_fail(ONT_EINVAL, "%s: attribute '%s' refers to '%s', but is in no function", what,
                        TEXT(proto->name), refers);
    for (size_t i = 0; i < scope->n_attributes; i++) {
        const Onnx__AttributeProto *bound = scope->attributes[i].value;
        if (strcmp(scope->attributes[i].name, refers)) continue;
        if (bound && proto->has_type && proto->type && proto->type != bound->type)
            return ont_fail(ONT_EINVAL, "%s: attribute '%s' is of kind %d, '%s' of the function is %d", what,
                            TEXT(proto->name), (int)proto->type, refers, (int)bound->type);
        *resolved = bound;
        return ONT_OK;
    }
    return ont_fail(ONT_EINVAL, "%s: attribute '%s' refers to '%s', which the function does not have", what,
                    TEXT(proto->name), refers);
}

static ont_status load_attributes(ont_loader *l, const ont_onnx_scope *scope, const Onnx__NodeProto *proto,
                                  const char *what,
                                  ont_node *node)
{
    for (size_t i = 0; i < proto->n_attribute; i++) {
        const Onnx__AttributeProto *value;
        const char *name = TEXT(proto->attribute[i]->name);
        if (!*name) return ont_fail(ONT_EINVAL, "%s: an attribute has no name", what);
        for (const ont_attr *attr = node->attrs; attr; attr = attr->next)
            if (!strcmp(attr->name, name)) return ont_fail(ONT_EINVAL, "%s: attribute '%s' is given twice", what, name);
        ONT_TRY(ont_onnx_resolve(scope, what, proto->attribute[i], &value));
        bool graph = value && value->has_type && value->type == ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__GRAPH;
        if (value && !graph) ONT_TRY(ont_onnx_attribute(value, name, what, l->g, node));
    }
    if (node->op && node->op->flags & ONT_OP_RANDOM) return ont_attr_set_int(l->g, node, "rng_stream", l->n_random++);
    return ONT_OK;
}

/* ---- nodes ---- */

/* Constant nodes become constants; no later stage has such an operator. */
static ont_status load_constant(ont_loader *l, ont_onnx_scope *scope, const Onnx__NodeProto *proto, const char *what)
{
    if (proto->n_output != 1 || !*TEXT(proto->output[0]) || proto->n_input)
        return ont_fail(ONT_EINVAL, "%s: no input and one output are expected", what);
    if (proto->n_attribute != 1) return ont_fail(ONT_EINVAL, "%s: one attribute is expected", what);
    const Onnx__AttributeProto *value;
    ont_tensor tensor;
    ONT_TRY(ont_onnx_resolve(scope, what, proto->attribute[0], &value));
    if (!value) return ont_fail(ONT_EINVAL, "%s: its value is an attribute that the call leaves out", what);
    ONT_TRY(ont_onnx_constant(value, TEXT(proto->attribute[0]->name), what, &l->g->arena, &tensor));
    return ont_onnx_constant_value(l, scope, proto->output[0], &tensor);
}

/*
 * Looks up a value in this scope or, for a subgraph, in the enclosing ones: then it becomes an input of the subgraph,
 * or a constant that shares the elements. *value stays NULL if there is none.
 */
static ont_status look_up(ont_loader *l, ont_onnx_scope *scope, const char *name, ont_value **value)
{
    *value = ont_map_get(&scope->values, name);
    if (*value || !scope->outer) return ONT_OK;
    ont_value *outside, *inside;
    ONT_TRY(look_up(l, scope->outer, name, &outside));
    if (!outside) return ONT_OK;
    if (outside == &ont_onnx_absent) {
        inside = outside;
    } else if (outside->kind == ONT_VALUE_CONSTANT) {
        ONT_TRY(ont_graph_add_value(scope->g, ONT_VALUE_CONSTANT, NULL, &inside));
        inside->dtype = outside->dtype;
        inside->has_shape = true;
        inside->shape = outside->shape;
        inside->data = outside->data;
    } else {
        ont_captured *captured = ont_arena_alloc(&scope->g->arena, sizeof *captured);
        if (!captured) return ONT_ENOMEM;
        ONT_TRY(ont_graph_add_input(scope->g, NULL, outside->dtype, NULL, &inside));
        captured->value = outside;
        *(scope->last_captured ? &scope->last_captured->next : &scope->first_captured) = captured;
        scope->last_captured = captured;
    }
    *value = inside;
    return ont_map_put(&scope->values, name, inside);
}

ont_status ont_onnx_input(ont_loader *l, ont_onnx_scope *scope, const char *what, const char *name, ont_value **value)
{
    *value = NULL;
    if (!*TEXT(name)) return ONT_OK;
    ont_value *known;
    ONT_TRY(look_up(l, scope, name, &known));
    if (!known)
        return ont_fail(ONT_EINVAL, "%s: input '%s' is not defined before it (unknown name, cycle or wrong order)",
                        what, name);
    *value = known == &ont_onnx_absent ? NULL : known;
    return ONT_OK;
}

/* Output 0 is created even if the model omits it, so that kernels need not check. */
static ont_status node_outputs(ont_loader *l, ont_onnx_scope *scope, const Onnx__NodeProto *proto, const char *what,
                               ont_value **outputs)
{
    bool any = false;
    for (size_t i = 0; i < proto->n_output; i++) {
        const char *name = TEXT(proto->output[i]);
        outputs[i] = NULL;
        if (!*name) continue;
        any = true;
        if (ont_map_get(&scope->values, name))
            return ont_fail(ONT_EINVAL, "%s: the name of its output '%s' is already defined", what, name);
        ONT_TRY(ont_onnx_value(l, scope, ONT_VALUE_NODE, name, &outputs[i]));
        ONT_TRY(ont_onnx_define(scope, name, outputs[i]));
    }
    if (!any) return ont_fail(ONT_EINVAL, "%s: it has no outputs", what);
    return outputs[0] ? ONT_OK : ont_graph_add_value(l->g, ONT_VALUE_NODE, NULL, &outputs[0]);
}

/* Names a node `wanted` if that is free (it may be NULL), else by its generated name, made unique. */
static ont_status name_node(ont_loader *l, const char *wanted, ont_node *node)
{
    const char *name = wanted && !ont_map_get(&l->node_names, wanted) ? wanted : node->name;
    while (name && ont_map_get(&l->node_names, name))
        name = ont_arena_format(&l->g->arena, "%s_%" PRIu64, node->name, ++l->n_renamed);
    if (!name) return ONT_ENOMEM;
    node->name = name;
    return ont_map_put(&l->node_names, name, node);
}

ont_status ont_onnx_copy(ont_loader *l, const char *name, ont_value *from, ont_value **to)
{
    ont_node *node;
    ont_value *copy;
    ONT_TRY(ont_graph_add_value(l->g, ONT_VALUE_NODE, name, &copy));
    const ont_node_spec spec = {.domain = "", .op_type = "Identity", .inputs = &from, .n_inputs = 1, .outputs = &copy,
                                .n_outputs = 1};
    ONT_TRY(ont_graph_add_node(l->g, NULL, &spec, &node));
    node->version = 13;
    node->op = ont_op_find("", "Identity", node->version);
    *to = copy;
    return name_node(l, NULL, node);
}

/* The regions of torch.utils.checkpoint that the exporter found the node in; NULL: none. See ir/graph.h. */
static ont_status region_of(ont_loader *l, const Onnx__NodeProto *proto, const char **region)
{
    *region = NULL;
    for (size_t i = 0; i < proto->n_metadata_props; i++)
        if (!strcmp(TEXT(proto->metadata_props[i]->key), "onnxtrain.region")) {
            *region = ont_arena_strdup(&l->g->arena, TEXT(proto->metadata_props[i]->value));
            if (!*region) return ONT_ENOMEM;
        }
    return ONT_OK;
}

static ont_status add_node(ont_loader *l, ont_onnx_scope *scope, const Onnx__NodeProto *proto, const char *what,
                           int64_t version, const ont_op *op, ont_subgraphs *subgraphs)
{
    size_t n = proto->n_input + subgraphs->n_captured;
    ont_value **inputs = ont_arena_array(&l->g->arena, n + 1, sizeof *inputs);
    ont_value **outputs = ont_arena_array(&l->g->arena, proto->n_output + 1, sizeof *outputs);
    if (!inputs || !outputs) return ONT_ENOMEM;
    for (size_t i = 0; i < proto->n_input; i++) ONT_TRY(ont_onnx_input(l, scope, what, proto->input[i], &inputs[i]));
    for (size_t i = proto->n_input; i < n; i++) inputs[i] = subgraphs->captured[i - proto->n_input];
    ONT_TRY(node_outputs(l, scope, proto, what, outputs));
    const ont_node_spec spec = {.domain = ont_onnx_domain(proto->domain), .op_type = proto->op_type, .inputs = inputs,
                                .n_inputs = (uint32_t)n, .outputs = outputs, .n_outputs = (uint32_t)proto->n_output};
    ont_node *node;
    ONT_TRY(ont_graph_add_node(l->g, NULL, &spec, &node));
    node->version = version;
    node->op = op;
    ONT_TRY(region_of(l, proto, &node->region));
    const char *name = *TEXT(proto->name) ? ont_arena_format(&l->g->arena, "%s%s", scope->prefix, proto->name) : NULL;
    ONT_TRY(name_node(l, name, node));
    ONT_TRY(load_attributes(l, scope, proto, what, node));
    return ont_onnx_attach_subgraphs(subgraphs, l->g, node);
}

static ont_status load_node(ont_loader *l, ont_onnx_scope *scope, const Onnx__NodeProto *proto, const char *what)
{
    const char *domain = ont_onnx_domain(proto->domain), *op_type = proto->op_type;
    int64_t version;
    ONT_TRY(opset_of(scope, what, domain, &version));
    if (!*domain && !strcmp(op_type, "Constant")) return load_constant(l, scope, proto, what);
    const ont_op *op = ont_op_find(domain, op_type, version);
    const Onnx__FunctionProto *function = NULL;
    /* A function defines what a node means, but for an operator of our own domain it is only a fallback. */
    if (!op || strcmp(domain, ONT_DOMAIN)) ONT_TRY(ont_onnx_function(l, proto, &function));
    if (function) return ont_onnx_inline(l, scope, proto, function, what);
    if (op && !strcmp(domain, ONT_DOMAIN) && !(op->flags & ONT_OP_PUBLIC))
        return ont_fail(ONT_EINVAL, "%s: %s.%s is an internal operator, which a model cannot use", what, domain,
                        op_type);
    ont_subgraphs subgraphs = {0};
    ont_status status = ont_onnx_subgraphs(l, scope, proto, what, &subgraphs);
    if (status == ONT_OK) status = add_node(l, scope, proto, what, version, op, &subgraphs);
    ont_onnx_drop_subgraphs(&subgraphs);
    return status;
}

ont_status ont_onnx_nodes(ont_loader *l, ont_onnx_scope *scope, Onnx__NodeProto *const *nodes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const Onnx__NodeProto *proto = nodes[i];
        char *what = ont_arena_format(&l->g->arena, "%snode %zu (%s '%s')", scope->where, i, TEXT(proto->op_type),
                                      TEXT(proto->name));
        if (!what) return ONT_ENOMEM;
        if (!*TEXT(proto->op_type)) return ont_fail(ONT_EINVAL, "%s: the node has no operator type", what);
        if (proto->n_input > ONT_MAX_INTERFACE || proto->n_output > ONT_MAX_INTERFACE ||
            proto->n_attribute > ONT_MAX_ATTRIBUTES)
            return ont_fail(ONT_EINVAL, "%s: %zu inputs, %zu outputs and %zu attributes, which is too many", what,
                            proto->n_input, proto->n_output, proto->n_attribute);
        if (scope->function) ONT_TRY(ont_onnx_charge(l, what, 1));
        ONT_TRY(load_node(l, scope, proto, what));
    }
    return ONT_OK;
}
