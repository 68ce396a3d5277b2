/*
 * Rematerialization of what the user marks: regions of torch.utils.checkpoint, and subgraphs by name
 * (recompute_subgraphs.c). Backward keeps what leaves a region, and runs the rest of it again, whatever that costs;
 * level and budget (recompute.c) choose among what is left.
 *
 * The level of a value is the number of regions that its node and all its readers in forward lie in. At level 0 it
 * leaves every region, or is in none, and backward reads the value itself. At any other level backward reads a copy.
 * Copies run in front of the first node of backward that needs them, and later readers share them. With nested regions
 * the outer one is recomputed first, as a whole (copies at level 1), and keeps only the outputs of the inner ones; each
 * inner region is recomputed when its backward needs it (copies at level 2). So a node has at most one copy for each
 * level. The values of a chosen subgraph have level 1, whatever reads them.
 */
#include <stdlib.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "passes/recompute.h"

enum { MAX_LEVEL = 8 }; /* regions nested deeper count as part of the one around them */

typedef struct regions {
    ont_graph *g;
    uint32_t n_nodes, n_values, n_levels; /* before the pass; n_levels: the highest level of a value */
    ont_node **nodes;                     /* by position in forward; NULL behind it */
    uint32_t *position;                   /* per node id */
    uint32_t *levels;                     /* per value id, of values that no view makes */
    /* A copy's index is (level - 1) * n_nodes + position. */
    ont_node **copies;
    bool *wanted;
    uint32_t *order; /* copies to make before the current node of backward */
    uint32_t n_order;
    bool *counted; /* per value id: its bytes are in the statistics */
} regions;

/* ---- levels ---- */

static uint32_t depth_of(const char *region)
{
    uint32_t n = 0;
    for (; region && *region; region++) n += *region == '/';
    return n < MAX_LEVEL ? n : MAX_LEVEL;
}

/* How many regions two nodes share. */
static uint32_t shared_depth(const char *a, const char *b)
{
    uint32_t n = 0;
    for (; a && b && *a && *a == *b; a++, b++) n += *a == '/';
    return n < MAX_LEVEL ? n : MAX_LEVEL;
}

/* A gradient that forward computes stays where it is: backward has only to scale it. */
static bool is_copied(const ont_node *node)
{
    return !node->backward && !node->op->early_gradients;
}

static void find_levels(regions *r)
{
    const ont_graph *g = r->g;
    for (uint32_t i = 0; i < r->n_values; i++) {
        const ont_value *v = g->values[i];
        if (v->kind == ONT_VALUE_NODE && !ont_node_is_view(v->def) && is_copied(v->def))
            r->levels[i] = depth_of(v->def->region);
    }
    for (const ont_node *node = g->first; node && !node->backward; node = node->next)
        for (uint32_t i = ont_node_is_view(node); i < node->n_inputs; i++) {
            const ont_value *root = node->inputs[i].value ? ont_value_root(node->inputs[i].value) : NULL;
            if (!root || !root->def) continue;
            uint32_t shared = shared_depth(root->def->region, node->region);
            if (shared < r->levels[root->id]) r->levels[root->id] = shared;
        }
    for (uint32_t i = 0; i < g->n_outputs; i++) r->levels[ont_value_root(g->outputs[i])->id] = 0;
}

/* ---- copies ---- */

/* The level of the copy that a reader at `level` reads instead of `v`; 0: it reads `v`. */
static uint32_t level_for(const regions *r, const ont_value *v, uint32_t level)
{
    const ont_value *root = ont_value_root(v);
    uint32_t own = root->id < r->n_values ? r->levels[root->id] : 0;
    return own < level ? own : level;
}

static uint32_t copy_index(const regions *r, const ont_node *node, uint32_t level)
{
    return (level - 1) * r->n_nodes + r->position[node->id];
}

static void want(regions *r, const ont_value *v, uint32_t level)
{
    if (!v || !(level = level_for(r, v, level))) return;
    uint32_t index = copy_index(r, v->def, level);
    ONT_ASSERT(level <= r->n_levels && !v->def->backward);
    if (r->wanted[index]) return;
    r->wanted[index] = true;
    r->order[r->n_order++] = index;
}

static int by_index(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static ont_value *copy_of(const regions *r, ont_value *v, uint32_t level)
{
    if (!v || !(level = level_for(r, v, level))) return v;
    const ont_node *made = r->copies[copy_index(r, v->def, level)];
    ONT_ASSERT(made && "operands are copied before their readers");
    return made->outputs[v->def_index];
}

static ont_status copy(regions *r, uint32_t index, ont_node *before)
{
    ont_graph *g = r->g;
    const ont_node *node = r->nodes[index % r->n_nodes];
    ont_value **inputs = ont_arena_array(&g->arena, (size_t)node->n_inputs + 1, sizeof *inputs);
    if (!inputs) return ONT_ENOMEM;
    for (uint32_t i = 0; i < node->n_inputs; i++)
        inputs[i] = copy_of(r, node->inputs[i].value, index / r->n_nodes + 1);
    ONT_TRY(ont_recompute_copy(g, node, before, inputs, UINT32_MAX, &r->copies[index]));
    g->recompute.nodes += !ont_node_is_view(node);
    g->recompute.marked += ont_node_cost(node);
    return ONT_OK;
}

/* Lets a node of backward read copies, which are made in front of it unless an earlier node has read them. */
static ont_status redirect(regions *r, ont_node *reader)
{
    r->n_order = 0;
    for (uint32_t i = 0; i < reader->n_inputs; i++) want(r, reader->inputs[i].value, MAX_LEVEL);
    for (uint32_t k = 0; k < r->n_order; k++) {
        const ont_node *node = r->nodes[r->order[k] % r->n_nodes];
        for (uint32_t i = 0; i < node->n_inputs; i++)
            want(r, node->inputs[i].value, r->order[k] / r->n_nodes + 1);
    }
    qsort(r->order, r->n_order, sizeof *r->order, by_index); /* an operand has a lower index than its reader */
    for (uint32_t k = 0; k < r->n_order; k++) ONT_TRY(copy(r, r->order[k], reader));
    for (uint32_t i = 0; i < reader->n_inputs; i++) {
        ont_value *v = reader->inputs[i].value, *copied = copy_of(r, v, MAX_LEVEL);
        if (copied == v) continue;
        ont_node_set_input(reader, i, copied);
        const ont_value *root = ont_value_root(v);
        if (!r->counted[root->id])
            r->g->recompute.bytes += (size_t)ont_shape_count(&root->shape) * ont_dtype_size(root->dtype);
        r->counted[root->id] = true;
    }
    return ONT_OK;
}

static ont_status rewrite(regions *r)
{
    size_t n = (size_t)r->n_nodes * r->n_levels;
    r->copies = ont_calloc(n, sizeof *r->copies);
    r->wanted = ont_calloc(n, sizeof *r->wanted);
    r->order = ont_calloc(n, sizeof *r->order);
    r->counted = ont_calloc((size_t)r->n_values, sizeof *r->counted);
    if (!r->copies || !r->wanted || !r->order || !r->counted) return ONT_ENOMEM;
    r->g->recompute.step = ont_graph_cost(r->g);
    for (ont_node *node = r->g->first, *next; node; node = next) {
        next = node->next;
        if (node->backward) ONT_TRY(redirect(r, node));
    }
    return ont_pass_dce(r->g);
}

static ont_status recompute_regions(regions *r)
{
    ont_graph *g = r->g;
    r->n_values = g->n_values;
    r->nodes = ont_calloc((size_t)g->n_nodes + 1, sizeof *r->nodes);
    r->position = ont_calloc((size_t)g->n_nodes + 1, sizeof *r->position);
    r->levels = ont_calloc((size_t)g->n_values + 1, sizeof *r->levels);
    if (!r->nodes || !r->position || !r->levels) return ONT_ENOMEM;
    for (ont_node *node = g->first; node && !node->backward; node = node->next) {
        r->position[node->id] = r->n_nodes;
        r->nodes[r->n_nodes++] = node;
    }
    find_levels(r);
    ONT_TRY(ont_recompute_select(g, r->levels));
    for (uint32_t i = 0; i < r->n_values; i++)
        if (r->levels[i] > r->n_levels) r->n_levels = r->levels[i];
    return r->n_levels ? rewrite(r) : ONT_OK;
}

ont_status ont_pass_recompute_regions(ont_graph *g)
{
    if (!g->last || !g->last->backward) return ONT_OK;
    regions r = {.g = g};
    ont_status status = recompute_regions(&r);
    ont_free(r.nodes);
    ont_free(r.position);
    ont_free(r.levels);
    ont_free(r.copies);
    ont_free(r.wanted);
    ont_free(r.order);
    ont_free(r.counted);
    return status;
}
