/*
 * Building and editing graphs. See graph.h for ownership and invariants.
 */
#include "ir/graph.h"

#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"

ont_status ont_graph_create(const char *name, ont_graph **graph)
{
    ont_graph *g = ont_calloc(1, sizeof *g);
    if (!g) return ONT_ENOMEM;
    ont_arena_init(&g->arena);
    g->name = ont_arena_strdup(&g->arena, name ? name : "graph");
    if (!g->name) {
        ont_graph_destroy(g);
        return ONT_ENOMEM;
    }
    *graph = g;
    return ONT_OK;
}

void ont_graph_destroy(ont_graph *g)
{
    if (!g) return;
    for (ont_node *node = g->first; node; node = node->next)
        for (ont_attr *attr = node->attrs; attr; attr = attr->next)
            if (attr->kind == ONT_ATTR_GRAPH && attr->count) ont_graph_destroy(attr->graph); /* count 1: owned */
    ont_arena_deinit(&g->arena);
    ont_free(g->values);
    ont_free(g->inputs);
    ont_free(g->outputs);
    ont_free(g->symbols);
    ont_free(g);
}

/* Grows a heap array of pointers so that index `n` fits; capacities are powers of two. */
static ont_status grow(void **array, uint32_t n)
{
    if (n & (n - 1) && n) return ONT_OK;
    void *bigger = ont_realloc(*array, n ? (size_t)n * 2 : 1, sizeof(void *));
    if (!bigger) return ONT_ENOMEM;
    *array = bigger;
    return ONT_OK;
}

ont_status ont_graph_add_value(ont_graph *g, ont_value_kind kind, const char *name, ont_value **value)
{
    ONT_TRY(grow((void **)&g->values, g->n_values));
    ont_value *v = ont_arena_alloc(&g->arena, sizeof *v);
    if (!v) return ONT_ENOMEM;
    v->id = g->n_values;
    v->kind = kind;
    v->name = name && *name ? ont_arena_strdup(&g->arena, name) : ont_arena_format(&g->arena, "%%%u", v->id);
    if (!v->name) return ONT_ENOMEM;
    v->anonymous = !(name && *name);
    g->values[g->n_values++] = v;
    *value = v;
    return ONT_OK;
}

ont_status ont_graph_add_input(ont_graph *g, const char *name, ont_dtype dtype, const ont_shape *shape,
                               ont_value **value)
{
    ont_value *v;
    ONT_TRY(grow((void **)&g->inputs, g->n_inputs));
    ONT_TRY(ont_graph_add_value(g, ONT_VALUE_INPUT, name, &v));
    v->dtype = dtype;
    if (shape) {
        v->has_shape = true;
        v->shape = *shape;
    }
    v->input = g->n_inputs;
    g->inputs[g->n_inputs++] = v;
    *value = v;
    return ONT_OK;
}

ont_status ont_graph_add_constant(ont_graph *g, const char *name, const ont_tensor *data, ont_value **value)
{
    ONT_ASSERT(data->data || !data->bytes);
    ont_tensor *copy = ont_arena_alloc(&g->arena, sizeof *copy);
    void *bytes = ont_arena_alloc(&g->arena, data->bytes ? data->bytes : 1);
    if (!copy || !bytes) return ONT_ENOMEM;
    if (data->bytes) memcpy(bytes, data->data, data->bytes);
    *copy = *data;
    copy->data = bytes;
    ont_value *v;
    ONT_TRY(ont_graph_add_value(g, ONT_VALUE_CONSTANT, name, &v));
    v->dtype = data->dtype;
    v->has_shape = true;
    v->shape = data->shape;
    v->data = copy;
    *value = v;
    return ONT_OK;
}

ont_status ont_graph_set_outputs(ont_graph *g, ont_value *const *outputs, uint32_t n)
{
    ont_value **copy = ont_calloc(n ? n : 1, sizeof *copy);
    if (!copy) return ONT_ENOMEM;
    if (n) memcpy(copy, outputs, n * sizeof *copy);
    ont_free(g->outputs);
    g->outputs = copy;
    g->n_outputs = n;
    return ONT_OK;
}

int ont_graph_symbol(ont_graph *g, const char *name)
{
    for (uint32_t i = 0; i < g->n_symbols; i++)
        if (!strcmp(g->symbols[i], name)) return (int)i;
    char *copy = ont_arena_strdup(&g->arena, name);
    if (!copy || grow((void **)&g->symbols, g->n_symbols) != ONT_OK) return -1;
    g->symbols[g->n_symbols] = copy;
    return (int)g->n_symbols++;
}

static void use_link(ont_use *use, ont_value *value)
{
    ONT_ASSERT(use->user);
    use->value = value;
    use->prev = NULL;
    use->next = value ? value->uses : NULL;
    if (use->next) use->next->prev = use;
    if (value) value->uses = use;
}

static void use_unlink(ont_use *use)
{
    ONT_ASSERT(!use->value || use->prev || use->value->uses == use);
    if (!use->value) return;
    if (use->prev)
        use->prev->next = use->next;
    else
        use->value->uses = use->next;
    if (use->next) use->next->prev = use->prev;
    use->value = NULL;
}

static void node_link(ont_graph *g, ont_node *node, ont_node *before)
{
    ONT_ASSERT(!before || before->prev || g->first == before);
    node->next = before;
    node->prev = before ? before->prev : g->last;
    if (node->prev)
        node->prev->next = node;
    else
        g->first = node;
    if (before)
        before->prev = node;
    else
        g->last = node;
}

static void node_unlink(ont_graph *g, ont_node *node)
{
    ONT_ASSERT(node->prev || g->first == node);
    ONT_ASSERT(node->next || g->last == node);
    if (node->prev)
        node->prev->next = node->next;
    else
        g->first = node->next;
    if (node->next)
        node->next->prev = node->prev;
    else
        g->last = node->prev;
    node->prev = node->next = NULL;
}

ont_status ont_graph_add_node(ont_graph *g, ont_node *before, const ont_node_spec *spec, ont_node **node)
{
    uint32_t n_inputs = spec->n_inputs, n_outputs = spec->n_outputs;
    while (n_inputs && !spec->inputs[n_inputs - 1]) n_inputs--;
    ont_node *n = ont_arena_alloc(&g->arena, sizeof *n);
    if (!n) return ONT_ENOMEM;
    n->id = g->n_nodes;
    n->domain = ont_arena_strdup(&g->arena, spec->domain);
    n->op_type = ont_arena_strdup(&g->arena, spec->op_type);
    n->name = ont_arena_format(&g->arena, "%s_%u", spec->op_type, n->id);
    n->region = before ? before->region : NULL;
    n->inputs = ont_arena_array(&g->arena, n_inputs + 1, sizeof *n->inputs);
    n->outputs = ont_arena_array(&g->arena, n_outputs + 1, sizeof *n->outputs);
    if (!n->domain || !n->op_type || !n->name || !n->inputs || !n->outputs) return ONT_ENOMEM;
    for (uint32_t i = 0; i < n_outputs; i++) {
        if (spec->outputs)
            n->outputs[i] = spec->outputs[i];
        else
            ONT_TRY(ont_graph_add_value(g, ONT_VALUE_NODE, NULL, &n->outputs[i]));
        if (!n->outputs[i]) continue;
        n->outputs[i]->kind = ONT_VALUE_NODE;
        n->outputs[i]->def = n;
        n->outputs[i]->def_index = i;
    }
    n->n_inputs = n_inputs;
    n->n_outputs = n_outputs;
    for (uint32_t i = 0; i < n_inputs; i++) {
        n->inputs[i].user = n;
        use_link(&n->inputs[i], spec->inputs[i]);
    }
    g->n_nodes++;
    node_link(g, n, before);
    *node = n;
    return ONT_OK;
}

ont_status ont_node_ensure_output(ont_graph *g, ont_node *node, uint32_t index, ont_value **value)
{
    if (index >= node->n_outputs) {
        ont_value **grown = ont_arena_array(&g->arena, index + 1, sizeof *grown);
        if (!grown) return ONT_ENOMEM;
        memcpy(grown, node->outputs, node->n_outputs * sizeof *grown);
        node->outputs = grown;
        node->n_outputs = index + 1;
    }
    if (!node->outputs[index]) {
        ont_value *v;
        ONT_TRY(ont_graph_add_value(g, ONT_VALUE_NODE, NULL, &v));
        v->def = node;
        v->def_index = index;
        node->outputs[index] = v;
    }
    *value = node->outputs[index];
    return ONT_OK;
}

static bool has_used_output(const ont_node *node)
{
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i] && node->outputs[i]->def == node && node->outputs[i]->uses) return true;
    return false;
}

void ont_graph_remove_node(ont_graph *g, ont_node *node)
{
    ONT_ASSERT(!has_used_output(node));
    for (uint32_t i = 0; i < node->n_inputs; i++) use_unlink(&node->inputs[i]);
    node_unlink(g, node);
}

void ont_graph_move_before(ont_graph *g, ont_node *node, ont_node *before)
{
    if (node == before) return;
    node_unlink(g, node);
    node_link(g, node, before);
}

void ont_node_set_input(ont_node *node, uint32_t index, ont_value *value)
{
    ONT_ASSERT(index < node->n_inputs);
    use_unlink(&node->inputs[index]);
    use_link(&node->inputs[index], value);
}

void ont_value_replace_uses(ont_graph *g, ont_value *from, ont_value *to)
{
    ONT_ASSERT(from && to);
    while (from->uses && from != to) {
        ont_use *use = from->uses;
        use_unlink(use);
        use_link(use, to);
    }
    for (uint32_t i = 0; i < g->n_outputs; i++)
        if (g->outputs[i] == from) g->outputs[i] = to;
}

bool ont_value_is_output(const ont_graph *g, const ont_value *value)
{
    for (uint32_t i = 0; i < g->n_outputs; i++)
        if (g->outputs[i] == value) return true;
    return false;
}

/* ---- clone ---- */

/* Clones every value of `from`; map[id] is the copy. */
static ont_status clone_values(const ont_graph *from, ont_graph *g, ont_value **map)
{
    for (uint32_t i = 0; i < from->n_values; i++) {
        const ont_value *old = from->values[i];
        ont_value *v;
        if (old->kind == ONT_VALUE_INPUT)
            continue; /* added below, in the order of the inputs */
        ONT_TRY(ont_graph_add_value(g, old->kind, old->name, &v));
        v->anonymous = old->anonymous;
        v->dtype = old->dtype;
        v->has_shape = old->has_shape;
        v->shape = old->shape;
        v->container = old->container;
        v->data = old->data;
        map[i] = v;
    }
    for (uint32_t i = 0; i < from->n_inputs; i++) {
        const ont_value *old = from->inputs[i];
        ont_value *v;
        ONT_TRY(ont_graph_add_input(g, old->name, old->dtype, old->has_shape ? &old->shape : NULL, &v));
        v->anonymous = old->anonymous;
        v->parameter = old->parameter;
        v->data = old->data;
        map[old->id] = v;
    }
    return ONT_OK;
}

static ont_status clone_node(const ont_node *old, ont_graph *g, ont_node *before, ont_value **map, ont_node **copy)
{
    ont_value *inline_values[32], **values = inline_values;
    uint32_t n = old->n_inputs + old->n_outputs;
    if (n > 32) values = ont_arena_array(&g->arena, n, sizeof *values);
    if (!values) return ONT_ENOMEM;
    ont_value **outputs = values + old->n_inputs;
    for (uint32_t i = 0; i < old->n_inputs; i++)
        values[i] = old->inputs[i].value ? map[old->inputs[i].value->id] : NULL;
    for (uint32_t i = 0; i < old->n_outputs; i++) outputs[i] = old->outputs[i] ? map[old->outputs[i]->id] : NULL;
    const ont_node_spec spec = {.domain = old->domain, .op_type = old->op_type, .inputs = values,
                                .n_inputs = old->n_inputs, .outputs = outputs, .n_outputs = old->n_outputs};
    ont_node *node;
    ONT_TRY(ont_graph_add_node(g, before, &spec, &node));
    node->name = old->name;
    node->version = old->version;
    node->op = old->op;
    node->backward = old->backward;
    if (old->region) node->region = old->region;
    node->attrs = old->attrs; /* own_attrs() replaces the shared list */
    *copy = node;
    return ONT_OK;
}

/* Gives `node` its own attribute list; clone_node() shares that of the source. */
static ont_status own_attrs(ont_graph *g, ont_node *node)
{
    const ont_attr *shared = node->attrs;
    node->attrs = NULL;
    ont_attr **tail = &node->attrs;
    for (; shared; shared = shared->next) {
        ont_attr *cell = ont_arena_alloc(&g->arena, sizeof *cell);
        if (!cell) return ONT_ENOMEM;
        *cell = *shared;
        cell->next = NULL;
        if (cell->kind == ONT_ATTR_GRAPH) cell->count = 0; /* count 0: the source graph owns the subgraph */
        *tail = cell;
        tail = &cell->next;
    }
    return ONT_OK;
}

ont_status ont_graph_instantiate(ont_graph *g, ont_node *before, const ont_graph *body, const char *scope,
                                 ont_value *const *inputs, ont_value **results)
{
    ont_value **map = ont_arena_array(&g->arena, (size_t)body->n_values + 1, sizeof *map);
    if (!map) return ONT_ENOMEM;
    for (uint32_t i = 0; i < body->n_inputs; i++) map[body->inputs[i]->id] = inputs[i];
    for (uint32_t i = 0; i < body->n_values; i++) {
        const ont_value *old = body->values[i];
        if (old->kind == ONT_VALUE_INPUT) continue;
        ONT_TRY(ont_graph_add_value(g, old->kind, NULL, &map[i]));
        if (old->kind != ONT_VALUE_CONSTANT) continue;
        map[i]->dtype = old->dtype;
        map[i]->has_shape = true;
        map[i]->shape = old->shape;
        map[i]->data = old->data;
    }
    for (const ont_node *old = body->first; old; old = old->next) {
        ont_node *node;
        ONT_TRY(clone_node(old, g, before, map, &node));
        ONT_TRY(own_attrs(g, node));
        node->name = ont_arena_format(&g->arena, "%s/%s", scope, old->name);
        if (!node->name) return ONT_ENOMEM;
    }
    for (uint32_t i = 0; i < body->n_outputs; i++) results[i] = map[body->outputs[i]->id];
    return ONT_OK;
}

ont_status ont_graph_clone(const ont_graph *from, ont_graph **copy)
{
    ont_graph *g = NULL;
    ont_value **map = NULL, **outputs = NULL;
    ont_status status;
    ONT_TRYGOTO(status, fail, ont_graph_create(from->name, &g));
    g->recompute.level = from->recompute.level;
    g->recompute.limit = from->recompute.limit;
    g->packed.wanted = from->packed.wanted;
    g->subgraphs.plans = from->subgraphs.plans;
    g->subgraphs.n_plans = from->subgraphs.n_plans;
    status = ONT_ENOMEM;
    map = ont_calloc(from->n_values ? from->n_values : 1, sizeof *map);
    outputs = ont_calloc(from->n_outputs ? from->n_outputs : 1, sizeof *outputs);
    if (!map || !outputs) goto fail;
    for (uint32_t i = 0; i < from->n_symbols; i++)
        if (ont_graph_symbol(g, from->symbols[i]) < 0) goto fail;
    ONT_TRYGOTO(status, fail, clone_values(from, g, map));
    for (const ont_node *node = from->first; node; node = node->next) {
        ont_node *made;
        ONT_TRYGOTO(status, fail, clone_node(node, g, NULL, map, &made));
        ONT_TRYGOTO(status, fail, own_attrs(g, made));
    }
    for (uint32_t i = 0; i < from->n_outputs; i++) outputs[i] = map[from->outputs[i]->id];
    ONT_TRYGOTO(status, fail, ont_graph_set_outputs(g, outputs, from->n_outputs));
    ont_free(map);
    ont_free(outputs);
    *copy = g;
    return ONT_OK;
fail:
    ont_free(map);
    ont_free(outputs);
    ont_graph_destroy(g);
    return status;
}

ont_node *ont_single_user(const ont_graph *g, const ont_value *value)
{
    return value->uses && !value->uses->next && !ont_value_is_output(g, value) ? value->uses->user : NULL;
}

ont_node *ont_single_user_in_phase(const ont_graph *g, const ont_value *value)
{
    ont_node *user = ont_single_user(g, value);
    return user && user->backward == value->def->backward ? user : NULL;
}
