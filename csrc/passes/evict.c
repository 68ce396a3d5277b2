/*
 * Rematerialization by eviction: what backward computes again at each level, and under a budget of bytes.
 *
 * The step is simulated node by node with a limit of live bytes. Where the next result would exceed it, a value that
 * only backward still reads is evicted: the one with the least cost per byte, and of equals the one that is read last.
 * Where a node of backward reads an evicted value, copies of the nodes that produce it run in front of that node; what
 * they compute stays, for later readers, until it is evicted again. So copies are shared as long as there is room, a
 * value near its reader (the last layer's) is the last one to go, and a product whose result is small and stays (a
 * layer's second one in its MLP) is not repeated unless everything cheaper is gone.
 *
 * The cost of a value is that of its node and of those operands that nothing else brings back: an operand that is
 * evicted, but read by backward itself, is computed again anyway.
 *
 * A level is the lowest limit whose copies cost at most a fraction of a step. Under a budget run/session.c asks for one
 * limit after the other and lets the memory plan judge.
 *
 * The lowest level is for every step, so it asks more of a value:
 *   - nodes that run again are memory-bound ones and attention, no other products;
 *   - copies read only values that backward reads then or later anyway;
 *   - the step has at least 8 MiB of activations, and the value at least 1/1024 of them, since a kernel call has a
 *     fixed cost;
 *   - graph inputs that no gradient rule reads are not kept for backward, so that code which modifies such a tensor
 *     between forward and backward under eager PyTorch works here too. Exceptions are scale and bias of a norm, which
 *     eager keeps as well, and parameters that autocast rounds: eager keeps the rounded copies (237 MiB for GPT-2), but
 *     raises an exception for a parameter modified before backward as soon as autocast is off.
 *
 * A device waits for memory, not for arithmetic, and fuses elementwise nodes. So at the lowest level it evicts all
 * elementwise values whose readers in backward are elementwise too, where copies read no more bytes than the value has:
 * the float32 values in which an activation function of 16-bit values is computed are neither written nor read. For
 * that it keeps values that backward does not read otherwise.
 *
 * Source: Kirisame et al., Dynamic Tensor Rematerialization, 2021, with the future known: Belady, A Study of
 * Replacement Algorithms for a Virtual-Storage Computer, 1966.
 */
#include "passes/recompute.h"

#include <math.h>

#include "base/alloc.h"
#include "passes/match.h"
#include "passes/options.h"

enum { NONE = UINT32_MAX, MIN_PEAK_BYTES = 8 << 20, MIN_SAVED_DIVISOR = 1024, MAX_COPIES = 64, MAX_ROUNDS = 12,
       MAX_EVENTS_PER_NODE = 8, MOST_SHARE = 2 };

/* A storage: the value that all views of it alias. Index: id of that value. */
typedef struct storage {
    ont_node *def;
    size_t bytes;        /* 0: not in the slab, always there */
    double cost;         /* of `def` */
    uint32_t first_use, n_uses; /* of the array of uses: positions in increasing order */
    uint32_t next;       /* index among its uses of the next one */
    uint32_t locks;      /* operands of nodes that are about to run */
    uint32_t keep_until; /* position of a node whose copied operands read it; 0: no copies do */
    bool evictable, live;
    bool repeatable; /* its node may run again */
} storage;

/* A node that runs again in front of the node at position `at`. */
typedef struct event {
    uint32_t at;
    ont_node *node;
    uint32_t outputs; /* bit i: output i is read */
} event;

typedef struct evictor {
    ont_graph *g;
    uint32_t n_values, n_nodes, split;
    ont_node **nodes; /* by position; views included */
    storage *s;
    uint32_t *uses;
    bool lowest;     /* level: ONT_RECOMPUTE_MEMORY_BOUND, without a budget */
    bool from_kept;  /* copies read only values that backward reads then or later anyway */
    bool fused_only; /* the same of a device: only what costs no time */
    uint32_t *stack, *visited, n_visited; /* visited: per value, the query that counted it */
    uint32_t *reads, n_reads;             /* the result of find_reads() */
    /* the simulation */
    uint32_t now;
    int64_t live_bytes, peak, limit;
    double cost, max_cost;
    bool failed;
    event *events;
    uint32_t n_events, max_events;
    uint32_t *live; /* ids of live evictable values */
    uint32_t n_live;
    uint32_t *at; /* per value: its index in `live` */
} evictor;

/* ---- the step as it is ---- */

/* Scratch memory of the node, where that is large: the scores of a tile. */
static int64_t work_of(const ont_node *node)
{
    if (!ONT_IS(node, StreamedCrossEntropy)) return 0;
    const ont_value *w = ont_node_in(node, 1);
    int64_t classes = w->shape.dims[!ont_attr_int(node, "transB", 0)];
    ont_dtype scores = (ont_dtype)ont_attr_int(node, "to", w->dtype);
    return ont_attr_int(node, "rows", 0) * classes * (int64_t)ont_dtype_size(scores);
}

static ont_status allocate(evictor *e)
{
    const ont_graph *g = e->g;
    uint32_t n_uses = 0;
    for (const ont_node *node = g->first; node; node = node->next) e->n_nodes++, n_uses += node->n_inputs;
    e->n_values = g->n_values;
    e->max_events = MAX_EVENTS_PER_NODE * e->n_nodes;
    e->nodes = ont_calloc((size_t)e->n_nodes + 1, sizeof *e->nodes);
    e->s = ont_calloc((size_t)e->n_values + 1, sizeof *e->s);
    e->uses = ont_calloc((size_t)n_uses + 1, sizeof *e->uses);
    e->events = ont_calloc((size_t)e->max_events + 1, sizeof *e->events);
    e->live = ont_calloc((size_t)e->n_values + 1, sizeof *e->live);
    e->at = ont_calloc((size_t)e->n_values + 1, sizeof *e->at);
    e->visited = ont_calloc((size_t)e->n_values + 1, sizeof *e->visited);
    e->stack = ont_calloc((size_t)e->n_values + 1, sizeof *e->stack);
    e->reads = ont_calloc((size_t)e->n_values + 1, sizeof *e->reads);
    bool all = e->nodes && e->s && e->uses && e->events && e->live && e->at && e->visited && e->stack && e->reads;
    return all ? ONT_OK : ONT_ENOMEM;
}

static void release(evictor *e)
{
    ont_free(e->nodes);
    ont_free(e->s);
    ont_free(e->uses);
    ont_free(e->events);
    ont_free(e->live);
    ont_free(e->at);
    ont_free(e->visited);
    ont_free(e->stack);
    ont_free(e->reads);
}

/* What a node that is no view writes. A value whose node has left the graph keeps no storage. */
static void read_outputs(evictor *e, const ont_node *node)
{
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        const ont_value *v = ont_node_out(node, i);
        if (!v || !v->has_shape) continue;
        storage *s = &e->s[v->id];
        bool in_output = !e->g->device && ont_is_early_gradient(v); /* no part of the slab */
        s->def = v->def;
        s->bytes = in_output ? 0 : (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype);
        s->cost = ont_node_cost(node);
    }
}

/* Finds the storages and the positions at which they are read. */
static void read_graph(evictor *e)
{
    const ont_graph *g = e->g;
    uint32_t at = 0, total = 0;
    for (ont_node *node = g->first; node; node = node->next) {
        e->nodes[at++] = node;
        if (!node->backward) e->split = at;
        if (!ont_node_is_view(node)) read_outputs(e, node);
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) e->s[ont_value_root(g->outputs[i])->id].bytes = 0;
    for (uint32_t i = 0; i < e->n_values; i++) {
        storage *s = &e->s[i];
        s->repeatable = s->def && ont_recompute_is_recomputable(g, s->def);
        s->evictable = s->bytes && s->repeatable && !s->def->backward;
    }
    for (int fill = 0; fill < 2; fill++) { /* counts, then positions */
        for (uint32_t t = 0; t < e->n_nodes; t++) {
            const ont_node *node = e->nodes[t];
            for (uint32_t i = 0; i < node->n_inputs && !ont_node_is_view(node); i++) {
                const ont_value *root = ont_root_in(node, i);
                if (!root) continue;
                storage *s = &e->s[root->id];
                if (fill) e->uses[s->first_use + s->n_uses] = t;
                s->n_uses++;
            }
        }
        for (uint32_t i = 0; i < e->n_values && !fill; i++) {
            e->s[i].first_use = total;
            total += e->s[i].n_uses;
            e->s[i].n_uses = 0;
        }
    }
}

/* ---- the lowest level ---- */

static uint32_t last_use(const evictor *e, uint32_t id)
{
    const storage *s = &e->s[id];
    return s->n_uses ? e->uses[s->first_use + s->n_uses - 1] : 0;
}

/* Whether the value can be read by a node at `at`, or a copy in front of it, without anything being kept for that. */
static bool is_read_until(const evictor *e, const ont_value *root, uint32_t at)
{
    return root->kind != ONT_VALUE_NODE || !e->s[root->id].bytes || last_use(e, root->id) >= at;
}

/* Whether the node may run again, by its kind and by what the copy would read of the caller's memory. */
static bool is_repeatable(const evictor *e, const ont_node *node)
{
    if (!ont_recompute_is_recomputable(e->g, node)) return false;
    if (e->fused_only && (!ont_recompute_is_fusable(node) || ont_node_rounds_parameter(node) ||
                          ont_node_promotes_parameter(node)))
        return false;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *root = ont_root_in(node, i);
        if (!root || root->kind == ONT_VALUE_CONSTANT || last_use(e, root->id) >= e->split) continue;
        if (root->kind == ONT_VALUE_NODE && !e->s[root->id].bytes) return false; /* an output of the graph */
        if (root->kind == ONT_VALUE_INPUT && !ONT_IS(node, LayerNormalization) && !ont_node_rounds_parameter(node))
            return false;
    }
    return true;
}

/*
 * Finds what is read in order to compute the value again at `at`: operands that are read until then anyway, or that no
 * copy can compute. False if its node cannot run again, or takes too many others.
 */
static bool find_reads(evictor *e, uint32_t id, uint32_t at)
{
    uint32_t n = 0, n_copies = 1;
    if (!e->s[id].repeatable) return false;
    e->n_reads = 0;
    e->n_visited++;
    e->stack[n++] = id;
    while (n) {
        const ont_node *node = e->s[e->stack[--n]].def;
        for (uint32_t i = 0; i < node->n_inputs; i++) {
            const ont_value *root = ont_root_in(node, i);
            if (!root || e->visited[root->id] == e->n_visited) continue;
            e->visited[root->id] = e->n_visited;
            const storage *operand = &e->s[root->id];
            bool is_gone = e->fused_only && operand->evictable;
            if (!operand->repeatable || (is_read_until(e, root, at) && !is_gone)) e->reads[e->n_reads++] = root->id;
            else if (n_copies++ == MAX_COPIES) return false;
            else e->stack[n++] = root->id;
        }
    }
    return true;
}

/* Whether the value can be computed again at `at` from what is read there or later anyway. */
static bool can_return(evictor *e, uint32_t id, uint32_t at)
{
    if (!find_reads(e, id, at)) return false;
    for (uint32_t i = 0; i < e->n_reads; i++)
        if (!is_read_until(e, e->g->values[e->reads[i]], at)) return false;
    return true;
}

/*
 * Whether copies of the value cost a device nothing, which fuses them with their readers: all of these are elementwise,
 * and the copies read no more bytes than the value has. What they read is kept until then.
 */
static bool take_fused(evictor *e, uint32_t id)
{
    const storage *s = &e->s[id];
    size_t bytes = 0;
    uint32_t at = NONE;
    for (uint32_t i = 0; i < s->n_uses; i++) {
        uint32_t use = e->uses[s->first_use + i];
        if (use < e->split) continue;
        if (!ont_recompute_is_fusable(e->nodes[use])) return false;
        if (at == NONE) at = use;
    }
    if (at == NONE || !find_reads(e, id, at)) return false;
    for (uint32_t i = 0; i < e->n_reads; i++) {
        const ont_value *v = e->g->values[e->reads[i]];
        bytes += (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype);
    }
    for (uint32_t i = 0; i < e->n_reads && bytes <= s->bytes; i++) {
        storage *read = &e->s[e->reads[i]];
        if (!is_read_until(e, e->g->values[e->reads[i]], at) && read->keep_until < at) read->keep_until = at;
    }
    return bytes <= s->bytes;
}

/* Which values may be evicted at the lowest level, in a step whose peak is `peak`. */
static void apply_rule(evictor *e, int64_t peak)
{
    int64_t divisor = ont_recompute_is_everywhere() ? INT64_MAX : MIN_SAVED_DIVISOR;
    for (uint32_t i = 0; i < e->n_values; i++) {
        storage *s = &e->s[i];
        s->repeatable = s->def && is_repeatable(e, s->def);
        s->evictable &= s->repeatable && !e->fused_only && (int64_t)s->bytes >= peak / divisor;
    }
    /* Where an operand is evicted, its readers may follow in the next round. */
    for (bool found = e->fused_only; found;) {
        found = false;
        for (uint32_t i = 0; i < e->n_values; i++) {
            storage *s = &e->s[i];
            if (s->evictable || !s->repeatable || !s->bytes || !take_fused(e, i)) continue;
            s->evictable = found = true;
        }
    }
}

/* ---- the simulation ---- */

/* Position of the next use at or behind `now`; NONE: there is none. */
static uint32_t next_use(const evictor *e, storage *s)
{
    while (s->next < s->n_uses && e->uses[s->first_use + s->next] < e->now) s->next++;
    if (s->next < s->n_uses) return e->uses[s->first_use + s->next];
    return s->keep_until && s->keep_until >= e->now ? s->keep_until : NONE;
}

static void make_live(evictor *e, uint32_t id)
{
    storage *s = &e->s[id];
    if (s->live) return;
    s->live = true;
    e->live_bytes += (int64_t)s->bytes;
    if (e->live_bytes > e->peak) e->peak = e->live_bytes;
    e->at[id] = e->n_live;
    e->live[e->n_live++] = id;
}

static void make_dead(evictor *e, uint32_t id)
{
    storage *s = &e->s[id];
    if (!s->live) return;
    s->live = false;
    e->live_bytes -= (int64_t)s->bytes;
    uint32_t last = e->live[--e->n_live];
    e->live[e->at[id]] = last;
    e->at[last] = e->at[id];
}

static void drop_if_unread(evictor *e, uint32_t id, uint32_t from)
{
    storage *s = &e->s[id];
    if (!s->bytes || s->locks || !s->live) return;
    uint32_t now = e->now;
    e->now = from;
    if (next_use(e, s) == NONE) make_dead(e, id);
    e->now = now;
}

/* Whether the value can be read without computing anything. */
static bool is_there(const evictor *e, const ont_value *root)
{
    const storage *s = &e->s[root->id];
    return root->kind != ONT_VALUE_NODE || !s->bytes || s->live;
}

/* Cost of bringing the value back: of its node, and of those operands that are gone and read by nothing else. */
static double cost_of(evictor *e, uint32_t id)
{
    uint32_t n = 0;
    double cost = 0;
    e->n_visited++;
    e->stack[n++] = id;
    e->visited[id] = e->n_visited;
    while (n) {
        const storage *s = &e->s[e->stack[--n]];
        cost += s->cost;
        for (uint32_t i = 0; i < s->def->n_inputs; i++) {
            const ont_value *root = ont_root_in(s->def, i);
            if (!root || is_there(e, root) || e->visited[root->id] == e->n_visited) continue;
            e->visited[root->id] = e->n_visited;
            if (next_use(e, &e->s[root->id]) == NONE) e->stack[n++] = root->id;
        }
    }
    return cost;
}

/* Evicts values until `bytes` more fit, as far as there are any to evict. */
static void make_room(evictor *e, int64_t bytes)
{
    if (e->fused_only && e->now >= e->split) return; /* a copy has all readers */
    while (e->live_bytes + bytes > e->limit) {
        uint32_t best = NONE, best_next = 0;
        double best_score = INFINITY;
        for (uint32_t k = 0; k < e->n_live; k++) {
            uint32_t id = e->live[k];
            storage *s = &e->s[id];
            if (!s->evictable || s->locks) continue;
            uint32_t next = next_use(e, s);
            if (next == NONE || next < e->split || next <= e->now) continue;
            if (e->from_kept && !can_return(e, id, next)) continue;
            double score = cost_of(e, id) / (double)s->bytes;
            if (score > best_score || (score == best_score && next < best_next)) continue;
            best = id, best_score = score, best_next = next;
        }
        if (best == NONE) return;
        make_dead(e, best);
    }
}

/* Runs `node`, whose operands are there: makes room for its results, at once or for `outputs`. */
static void run_node(evictor *e, const ont_node *node)
{
    int64_t bytes = work_of(node);
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        const ont_value *v = node->outputs[i];
        if (v && !e->s[v->id].live) bytes += (int64_t)e->s[v->id].bytes;
    }
    make_room(e, bytes);
    if (e->live_bytes + bytes > e->peak) e->peak = e->live_bytes + bytes;
}

static void lock_operands(evictor *e, const ont_node *node, int sign)
{
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *root = ont_root_in(node, i);
        if (root && e->s[root->id].bytes) e->s[root->id].locks += (uint32_t)sign;
    }
}

static void bring_operands(evictor *e, ont_node *node);

/* Computes an evicted value again in front of the current node. */
static void bring_back(evictor *e, const ont_value *root)
{
    ont_node *node = root->def;
    e->failed |= e->cost > e->max_cost;
    if (e->failed) return;
    bring_operands(e, node);
    e->failed |= e->n_events == e->max_events; /* the copies of operands come first in the table */
    if (e->failed) return;
    run_node(e, node);
    uint32_t outputs = 1;
    for (uint32_t i = 0; i < node->n_outputs && i < 32; i++) {
        const ont_value *v = node->outputs[i];
        if (!v || !e->s[v->id].bytes || e->s[v->id].live) continue;
        if (v != root && next_use(e, &e->s[v->id]) == NONE) continue;
        make_live(e, v->id);
        outputs |= 1u << i;
    }
    e->events[e->n_events++] = (event){e->now, node, outputs};
    e->cost += ont_node_cost(node);
    lock_operands(e, node, -1);
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (ont_root_in(node, i)) drop_if_unread(e, ont_root_in(node, i)->id, e->now);
}

/* Brings the operands back that are evicted, and locks all of them. */
static void bring_operands(evictor *e, ont_node *node)
{
    lock_operands(e, node, 1);
    for (uint32_t i = 0; i < node->n_inputs && !e->failed; i++) {
        const ont_value *root = ont_root_in(node, i);
        if (root && !is_there(e, root)) bring_back(e, root);
    }
}

/* Whether an elementwise node may write over one of its operands, which no later node reads. */
static int64_t bytes_in_place(evictor *e, const ont_node *node)
{
    const ont_value *out = ont_node_out(node, 0);
    if (!out || !node->op->tile) return 0;
    e->now++;
    int64_t bytes = 0;
    for (uint32_t i = 0; i < node->n_inputs && !bytes; i++) {
        const ont_value *root = ont_root_in(node, i);
        storage *s = root ? &e->s[root->id] : NULL;
        if (s && s->live && s->bytes == e->s[out->id].bytes && next_use(e, s) == NONE) bytes = (int64_t)s->bytes;
    }
    e->now--;
    return bytes;
}

/* Simulates the step within `limit` bytes; false if that takes more than `max_cost` or cannot be. */
static bool simulate(evictor *e, int64_t limit, double max_cost)
{
    e->limit = limit;
    e->max_cost = max_cost;
    e->live_bytes = e->peak = 0;
    e->cost = 0;
    e->failed = false;
    e->n_events = e->n_live = 0;
    for (uint32_t i = 0; i < e->n_values; i++) e->s[i].live = false, e->s[i].next = 0, e->s[i].locks = 0;
    for (e->now = 0; e->now < e->n_nodes && !e->failed; e->now++) {
        ont_node *node = e->nodes[e->now];
        if (ont_node_is_view(node)) continue;
        bring_operands(e, node);
        if (e->failed) break;
        int64_t reused = bytes_in_place(e, node);
        e->live_bytes -= reused;
        run_node(e, node);
        for (uint32_t i = 0; i < node->n_outputs; i++)
            if (node->outputs[i] && e->s[node->outputs[i]->id].bytes) make_live(e, node->outputs[i]->id);
        e->live_bytes += reused;
        lock_operands(e, node, -1);
        for (uint32_t i = 0; i < node->n_inputs; i++)
            if (ont_root_in(node, i)) drop_if_unread(e, ont_root_in(node, i)->id, e->now + 1);
        for (uint32_t i = 0; i < node->n_outputs; i++)
            if (node->outputs[i]) drop_if_unread(e, node->outputs[i]->id, e->now + 1);
    }
    return !e->failed && e->cost <= max_cost;
}

/* ---- rewriting ---- */

typedef struct rewriter {
    ont_graph *g;
    uint32_t n_values;
    ont_value **current; /* per value of the original graph: its latest copy, or NULL */
} rewriter;

/* The value to read in front of `before` instead of `v`: the latest copy, or a view of it. */
static ont_status latest(const rewriter *r, ont_value *v, ont_node *before, ont_value **result)
{
    const ont_value *root = ont_value_root(v);
    *result = v;
    if (root->id >= r->n_values || !r->current[root->id]) return ONT_OK;
    if (v == root) {
        *result = r->current[root->id];
        return ONT_OK;
    }
    ont_node *view = v->def, *copy;
    ont_value **inputs = ont_arena_array(&r->g->arena, (size_t)view->n_inputs + 1, sizeof *inputs);
    if (!inputs) return ONT_ENOMEM;
    for (uint32_t i = 1; i < view->n_inputs; i++) inputs[i] = view->inputs[i].value;
    ONT_TRY(latest(r, view->inputs[0].value, before, &inputs[0]));
    ONT_TRY(ont_recompute_copy(r->g, view, before, inputs, 1, &copy));
    *result = copy->outputs[0];
    return ONT_OK;
}

static ont_status replay(const rewriter *r, const event *event, ont_node *before)
{
    const ont_node *node = event->node;
    ont_node *copy;
    ont_value **inputs = ont_arena_array(&r->g->arena, (size_t)node->n_inputs + 1, sizeof *inputs);
    if (!inputs) return ONT_ENOMEM;
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (node->inputs[i].value) ONT_TRY(latest(r, node->inputs[i].value, before, &inputs[i]));
    ONT_TRY(ont_recompute_copy(r->g, node, before, inputs, event->outputs, &copy));
    for (uint32_t i = 0; i < copy->n_outputs; i++)
        if (copy->outputs[i]) r->current[node->outputs[i]->id] = copy->outputs[i];
    r->g->recompute.nodes++;
    return ONT_OK;
}

/* Puts the copies of the latest simulation into the graph. */
static ont_status rewrite(evictor *e)
{
    rewriter r = {e->g, e->n_values, ont_calloc((size_t)e->n_values + 1, sizeof *r.current)};
    if (!r.current) return ONT_ENOMEM;
    ont_status status = ONT_OK;
    uint32_t k = 0;
    for (uint32_t t = e->split; t < e->n_nodes && status == ONT_OK; t++) {
        ont_node *node = e->nodes[t];
        for (; k < e->n_events && e->events[k].at == t && status == ONT_OK; k++)
            status = replay(&r, &e->events[k], node);
        for (uint32_t i = 0; i < node->n_inputs && status == ONT_OK && !ont_node_is_view(node); i++) {
            ont_value *v = node->inputs[i].value, *now = v;
            if (v) status = latest(&r, v, node, &now);
            if (now != v) ont_node_set_input(node, i, now);
        }
    }
    ont_free(r.current);
    return status == ONT_OK ? ont_pass_dce(e->g) : status;
}

/* ---- the limit ---- */

/*
 * The lowest limit whose copies cost at most `max_cost`, by bisection; leaves its simulation. At the lowest level also
 * below the least peak that can be, if some can: the memory plan may have room where the simulation has none.
 */
static bool find_limit(evictor *e, int64_t peak, double max_cost)
{
    int64_t low = 0, high = peak, found = -1, least = -1;
    for (int i = 0; i < MAX_ROUNDS; i++) {
        int64_t middle = low + (high - low) / 2;
        bool fits = simulate(e, middle, max_cost) && (e->peak <= middle || (e->lowest && e->peak <= least));
        if (fits) high = found = middle, least = e->peak;
        else low = middle;
    }
    return found >= 0 && simulate(e, found, max_cost);
}

/* Simulates the step within what the level or the budget asks, or else at the lowest limit, if there is one. */
static bool search(evictor *e, int64_t peak)
{
    const ont_graph *g = e->g;
    double step = g->recompute.step, most = MOST_SHARE * step;
    int64_t limit = (int64_t)g->recompute.limit;
    if (limit) return (simulate(e, limit, most) && e->peak <= limit) || find_limit(e, peak, most);
    if (e->fused_only) return simulate(e, 0, INFINITY);
    return find_limit(e, peak, step * ont_recompute_budget_fraction(g->recompute.level) - g->recompute.cost);
}

/* Whether a simulation beats another one: within the limit the cost counts, beyond it the peak. */
static bool is_better(const evictor *e, int64_t peak, double cost)
{
    int64_t limit = (int64_t)e->g->recompute.limit, mine = e->peak > limit ? e->peak : limit;
    if (peak < limit) peak = limit;
    return mine < peak || (mine == peak && e->cost < cost);
}

/*
 * Evicts first whatever costs least a byte, then only what copies bring back from values that backward reads anyway,
 * and takes the better of both. The first is free to repeat a chain of layers, as small budgets of GPT-2 need. Where
 * small values tie the layers together, as a frozen Llama's residuals do, it computes all layers again at the start of
 * backward, and holds them: level 1 of four layers with adapters took 396 MiB, and level 0 290; the second takes 179.
 */
static bool search_both_ways(evictor *e, int64_t peak)
{
    bool found = search(e, peak);
    int64_t limit = e->limit, least = e->peak;
    double cost = e->cost;
    e->from_kept = true;
    if (search(e, peak) && (!found || is_better(e, least, cost))) return true;
    e->from_kept = false;
    return found && simulate(e, limit, INFINITY);
}

/* Simulates the step as it is to be; false if it stays as it is. */
static bool choose(evictor *e, int64_t peak)
{
    ont_graph *g = e->g;
    if (ont_recompute_is_everywhere()) return simulate(e, 0, INFINITY) || find_limit(e, peak, INFINITY);
    if (!g->recompute.limit && peak < MIN_PEAK_BYTES && !ont_pass_is_forced("recompute")) return false;
    bool found = e->lowest ? search(e, peak) : search_both_ways(e, peak);
    if (g->recompute.limit && e->limit > (int64_t)g->recompute.limit) g->recompute.limit = (size_t)e->limit;
    return found;
}

static ont_status recompute(evictor *e)
{
    ont_graph *g = e->g;
    ONT_TRY(allocate(e));
    read_graph(e);
    simulate(e, INT64_MAX, INFINITY);
    int64_t peak = e->peak;
    if (e->lowest) apply_rule(e, peak);
    if (!choose(e, peak) || !e->n_events) return ONT_OK;
    g->recompute.bytes += peak > e->peak ? (size_t)(peak - e->peak) : 0;
    g->recompute.cost += e->cost;
    return rewrite(e);
}

ont_status ont_pass_recompute(ont_graph *g)
{
    if (!g->last || !g->last->backward) return ONT_OK;
    if (!g->recompute.step) g->recompute.step = ont_graph_cost(g);
    evictor e = {.g = g, .lowest = g->recompute.level == ONT_RECOMPUTE_MEMORY_BOUND && !g->recompute.limit};
    e.fused_only = e.lowest && g->device && !ont_recompute_is_everywhere();
    e.from_kept = e.lowest && !e.fused_only;
    ont_status status = recompute(&e);
    release(&e);
    return status;
}
