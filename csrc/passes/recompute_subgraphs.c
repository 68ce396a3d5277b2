/*
 * The subgraphs that could run again in backward, and the choice among them by name (ORTMODULE_MEMORY_OPT_CONFIG).
 *
 * A candidate is a value of forward that backward reads. Its subgraph is its node and, through operands that nothing
 * keeps, those of its operands, until every operand is kept anyway: backward reads it too, or the caller has it. Views
 * cost nothing and are not named. Equal subgraphs form one cluster. Called by recompute_regions.c, which makes the
 * copies.
 */
#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "passes/match.h"
#include "passes/recompute.h"

enum { MAX_NODES = 64 }; /* of a subgraph */

typedef struct selector {
    ont_graph *g;
    uint32_t *levels;
    uint32_t n_clusters, capacity;
    ont_recompute_cluster *clusters;
    bool *held;         /* per value id: the caller has it */
    bool *kept;         /* per value id: backward or the caller has the value anyway */
    uint32_t *position; /* per node id */
} selector;

typedef struct subgraph {
    const ont_node *nodes[MAX_NODES]; /* without views */
    uint32_t n;
    bool compromise;
    size_t bytes; /* saved */
} subgraph;

static size_t bytes_of(const ont_value *v)
{
    return v->has_shape ? (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype) : 0;
}

/* The operator as ONNX has it, whatever was fused into the node. */
static const char *name_of(const ont_node *node)
{
    if (node->op->cost == ONT_COST_MATMUL) return "MatMul";
    if (node->op->cost == ONT_COST_ATTENTION) return "Attention";
    return node->op_type;
}

static void find_kept(selector *s)
{
    const ont_graph *g = s->g;
    for (const ont_node *node = g->first; node; node = node->next)
        for (uint32_t i = 0; node->backward && i < node->n_inputs; i++)
            if (ont_root_in(node, i)) s->kept[ont_root_in(node, i)->id] = true;
    for (uint32_t i = 0; i < g->n_outputs; i++) s->held[ont_value_root(g->outputs[i])->id] = true;
    for (uint32_t i = 0; i < g->n_values; i++)
        if (g->values[i]->kind != ONT_VALUE_NODE || s->levels[i] || s->held[i]) s->kept[i] = true;
}

/* ---- one candidate ---- */

static bool contains(const subgraph *p, const ont_node *node)
{
    for (uint32_t i = 0; i < p->n; i++)
        if (p->nodes[i] == node) return true;
    return false;
}

/* Adds a node, and those of its operands that are not kept; false if that is not possible. */
static bool grow(const selector *s, subgraph *p, const ont_node *first)
{
    p->nodes[p->n++] = first;
    for (uint32_t k = 0; k < p->n; k++) {
        if (!ont_recompute_can_run_again(p->nodes[k])) return false;
        for (uint32_t i = 0; i < p->nodes[k]->n_inputs; i++) {
            const ont_value *root = ont_root_in(p->nodes[k], i);
            if (!root || s->kept[root->id] || contains(p, root->def)) continue;
            if (p->n == MAX_NODES || root->def_index) return false;
            p->nodes[p->n++] = root->def;
        }
    }
    return true;
}

/* Whether the value is a Cast to a wider dtype, so that keeping its operand saves a part. */
static bool widens(const ont_value *v)
{
    const ont_value *from = ont_node_in(v->def, 0);
    return ONT_IS(v->def, Cast) && from && ont_dtype_size(from->dtype) < ont_dtype_size(v->dtype);
}

/* Finds the subgraph of a value; false if there is none. */
static bool find(const selector *s, const ont_value *v, subgraph *p)
{
    *p = (subgraph){.bytes = bytes_of(v)};
    if (grow(s, p, v->def)) return true;
    if (!widens(v)) return false;
    *p = (subgraph){.nodes = {v->def}, .n = 1, .compromise = true};
    p->bytes = bytes_of(v) - bytes_of(ont_value_root(v->def->inputs[0].value));
    return true;
}

/* The names of the operators, in the order of the nodes. */
static char *text_of(const selector *s, subgraph *p)
{
    size_t length = 1;
    for (uint32_t i = 0; i < p->n; i++) {
        const ont_node *node = p->nodes[i];
        uint32_t k = i;
        for (; k && s->position[p->nodes[k - 1]->id] > s->position[node->id]; k--) p->nodes[k] = p->nodes[k - 1];
        p->nodes[k] = node;
        length += strlen(name_of(node)) + 1;
    }
    char *text = ont_arena_array(&s->g->arena, length, 1), *at = text;
    for (uint32_t i = 0; text && i < p->n; i++) {
        size_t n = strlen(name_of(p->nodes[i]));
        memcpy(at, name_of(p->nodes[i]), n);
        at[n] = '+';
        at += n + 1;
    }
    return text;
}

/* ---- clusters ---- */

static ont_status cluster_of(selector *s, const char *text, bool compromise, ont_recompute_cluster **cluster)
{
    for (uint32_t i = 0; i < s->n_clusters; i++) {
        *cluster = &s->clusters[i];
        if ((*cluster)->compromise == compromise && !strcmp((*cluster)->subgraph, text)) return ONT_OK;
    }
    if (s->n_clusters == s->capacity) {
        uint32_t capacity = s->capacity * 2 + 8;
        ont_recompute_cluster *more = ont_arena_array(&s->g->arena, capacity, sizeof *more);
        if (!more) return ONT_ENOMEM;
        if (s->n_clusters) memcpy(more, s->clusters, s->n_clusters * sizeof *more);
        s->clusters = more;
        s->capacity = capacity;
    }
    *cluster = &s->clusters[s->n_clusters++];
    **cluster = (ont_recompute_cluster){.subgraph = text, .compromise = compromise};
    return ONT_OK;
}

static bool is_wanted(const ont_graph *g, const ont_recompute_cluster *cluster)
{
    for (uint32_t i = 0; i < g->subgraphs.n_plans; i++) {
        const ont_recompute_plan *plan = &g->subgraphs.plans[i];
        if (plan->compromise == cluster->compromise && !strcmp(plan->subgraph, cluster->subgraph))
            return plan->count < 0 || cluster->applied < plan->count;
    }
    return false;
}

static ont_status look_at(selector *s, const ont_node *node)
{
    subgraph p;
    const ont_value *v = node->outputs[0];
    if (!v || !s->kept[v->id] || s->held[v->id] || s->levels[v->id]) return ONT_OK;
    if (ont_node_is_view(node) || node->op->early_gradients || !find(s, v, &p)) return ONT_OK;
    const char *text = text_of(s, &p);
    ont_recompute_cluster *cluster;
    if (!text) return ONT_ENOMEM;
    ONT_TRY(cluster_of(s, text, p.compromise, &cluster));
    ONT_ASSERT(p.n && p.nodes[p.n - 1] == v->def);
    cluster->frequency++;
    cluster->bytes += p.bytes;
    if (!is_wanted(s->g, cluster)) return ONT_OK;
    cluster->applied++;
    for (uint32_t i = 0; i < p.n; i++) s->levels[p.nodes[i]->outputs[0]->id] = 1;
    return ONT_OK;
}

static ont_status select_subgraphs(selector *s)
{
    ont_graph *g = s->g;
    s->held = ont_calloc((size_t)g->n_values + 1, sizeof *s->held);
    s->kept = ont_calloc((size_t)g->n_values + 1, sizeof *s->kept);
    if (!s->held || !s->kept) return ONT_ENOMEM;
    ONT_TRY(ont_node_positions(g, g->n_nodes, &s->position));
    find_kept(s);
    for (const ont_node *node = g->first; node && !node->backward; node = node->next) ONT_TRY(look_at(s, node));
    return ONT_OK;
}

ont_status ont_recompute_select(ont_graph *g, uint32_t *levels)
{
    selector s = {.g = g, .levels = levels};
    ont_status status = select_subgraphs(&s);
    g->subgraphs.clusters = s.clusters;
    g->subgraphs.n_clusters = s.n_clusters;
    ont_free(s.held);
    ont_free(s.kept);
    ont_free(s.position);
    return status;
}
