/*
 * Loads bodies of control flow: a graph attribute becomes a graph of its own. Values that it reads from the enclosing
 * graph become inputs, so that no later stage looks up names: the node that owns the body has those values as its last
 * inputs. See loader.h.
 */
#include <string.h>

#include "base/alloc.h"
#include "onnx/loader.h"

#define TEXT ont_onnx_text

static ont_status load_outputs(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto)
{
    ont_value **outputs = ont_arena_array(&l->g->arena, proto->n_output + 1, sizeof *outputs);
    if (!outputs) return ONT_ENOMEM;
    for (size_t i = 0; i < proto->n_output; i++) {
        ONT_TRY(ont_onnx_input(l, scope, "output of the subgraph", TEXT(proto->output[i]->name), &outputs[i]));
        if (!outputs[i]) return ont_fail(ONT_EINVAL, "%soutput %zu is absent", scope->where, i);
    }
    return ont_graph_set_outputs(l->g, outputs, (uint32_t)proto->n_output);
}

static ont_status load_body(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto)
{
    if (!proto) return ont_fail(ONT_EINVAL, "%sthe attribute has no graph", scope->where);
    if (proto->n_sparse_initializer)
        return ont_fail(ONT_EUNSUPPORTED, "%ssparse initializers are not read", scope->where);
    if (!proto->n_output) return ont_fail(ONT_EINVAL, "%sthe graph has no outputs", scope->where);
    if (proto->n_output > ONT_MAX_INTERFACE || proto->n_input > ONT_MAX_INTERFACE)
        return ont_fail(ONT_EINVAL, "%sthe graph has %zu inputs and %zu outputs, at most %d", scope->where,
                        proto->n_input, proto->n_output, ONT_MAX_INTERFACE);
    if (scope->depth > ONT_MAX_CALL_DEPTH)
        return ont_fail(ONT_EINVAL, "%ssubgraphs are nested deeper than %d", scope->where, ONT_MAX_CALL_DEPTH);
    ONT_TRY(ont_context(ont_onnx_initializers(l, scope, proto), "%s", scope->where));
    ONT_TRY(ont_context(ont_onnx_inputs(l, scope, proto), "%s", scope->where));
    ONT_TRY(ont_onnx_nodes(l, scope, proto->node, proto->n_node));
    ONT_TRY(load_outputs(l, scope, proto));
    return ont_graph_verify(l->g);
}

/*
 * Records the values captured by a body. Once the bodies are attached, the node's inputs from first_capture on are the
 * captured values, body by body.
 */
static ont_status note_captured(const ont_onnx_scope *scope, ont_graph *body, ont_graph *g, ont_subgraphs *all)
{
    uint32_t n = 0;
    for (const ont_captured *c = scope->first_captured; c; c = c->next) n++;
    ont_value **more = ont_arena_array(&g->arena, (size_t)all->n_captured + n + 1, sizeof *more);
    if (!more) return ONT_ENOMEM;
    if (all->n_captured) memcpy(more, all->captured, all->n_captured * sizeof *more);
    body->n_captures = n;
    body->first_capture = all->n_captured; /* the number of the node's own inputs is added when it is attached */
    for (const ont_captured *c = scope->first_captured; c; c = c->next) more[all->n_captured++] = c->value;
    all->captured = more;
    return ONT_OK;
}

static ont_status load_one(ont_loader *l, ont_onnx_scope *outer, const Onnx__AttributeProto *attribute,
                           const char *name,
                           const char *what, ont_subgraphs *all)
{
    ont_graph *g = l->g, *body;
    ont_onnx_scope scope = {.caller = outer, .function = outer->function, .depth = outer->depth + 1,
                            .opsets = outer->opsets,
                            .n_opsets = outer->n_opsets, .attributes = outer->attributes,
                            .n_attributes = outer->n_attributes, .outer = outer, .prefix = outer->prefix};
    scope.where = ont_arena_format(&g->arena, "%s, %s: ", what, name);
    if (!scope.where) return ONT_ENOMEM;
    ONT_TRY(ont_graph_create(name, &body));
    scope.g = l->g = body;
    all->items[all->n++] = (struct ont_subgraph){name, body};
    ont_status status = load_body(l, &scope, attribute->g);
    l->g = g;
    ont_map_deinit(&scope.values);
    ont_map_deinit(&scope.results);
    return status == ONT_OK ? note_captured(&scope, body, g, all) : status;
}

ont_status ont_onnx_subgraphs(ont_loader *l, ont_onnx_scope *scope, const Onnx__NodeProto *call, const char *what,
                              ont_subgraphs *subgraphs)
{
    subgraphs->items = ont_arena_array(&l->g->arena, call->n_attribute + 1, sizeof *subgraphs->items);
    if (!subgraphs->items) return ONT_ENOMEM;
    for (size_t i = 0; i < call->n_attribute; i++) {
        const Onnx__AttributeProto *value;
        ONT_TRY(ont_onnx_resolve(scope, what, call->attribute[i], &value));
        if (!value || !value->has_type || value->type != ONNX__ATTRIBUTE_PROTO__ATTRIBUTE_TYPE__GRAPH) continue;
        const char *name = ont_arena_strdup(&l->g->arena, TEXT(call->attribute[i]->name));
        if (!name) return ONT_ENOMEM;
        for (uint32_t j = 0; j < subgraphs->n; j++)
            if (!strcmp(name, subgraphs->items[j].name))
                return ont_fail(ONT_EINVAL, "%s: attribute '%s' is given twice", what, name);
        ONT_TRY(load_one(l, scope, value, name, what, subgraphs));
    }
    return ONT_OK;
}

ont_status ont_onnx_attach_subgraphs(ont_subgraphs *subgraphs, ont_graph *g, ont_node *node)
{
    for (uint32_t i = 0; i < subgraphs->n; i++) {
        ont_attr *attr = ont_arena_alloc(&g->arena, sizeof *attr);
        if (!attr) return ONT_ENOMEM;
        ont_graph *body = subgraphs->items[i].g;
        body->first_capture += node->n_inputs - subgraphs->n_captured;
        *attr = (ont_attr){.next = node->attrs, .name = subgraphs->items[i].name, .kind = ONT_ATTR_GRAPH, .count = 1,
                           .graph = body};
        node->attrs = attr;
        subgraphs->items[i].g = NULL;
    }
    return ONT_OK;
}

void ont_onnx_drop_subgraphs(ont_subgraphs *subgraphs)
{
    for (uint32_t i = 0; subgraphs->items && i < subgraphs->n; i++) ont_graph_destroy(subgraphs->items[i].g);
}
