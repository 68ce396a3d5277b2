/*
 * Rematerialization: a forward value that only backward still uses is not kept if copies of the nodes that produce it
 * can recompute it. The copies run just before the first user in backward and read only values that are live there
 * anyway. They are the same operators with the same attributes and random streams, so results are bitwise equal, also
 * if fusion puts them into another group: reductions add up in the fixed order of ops/support/sums.h.
 *
 * The choice. A profile holds the live bytes at each node. Of the values whose live range spans the peak of the profile
 * without use, the one that saves the most bytes per unit of cost is taken first, while
 *   - the peak does not rise, and the values whose live range grows add at most half of the bytes saved;
 *   - all copies together add at most 3% of the step's cost, in operations of a matmul. An element of an elementwise
 *     node, a norm or a layout operator costs 128 (0.5 ns against 250 GFLOP/s: GELU of 4 x 64 x 3072 takes 0.4 ms on
 *     two cores). An element of a parameter that is rounded to 16 bits costs 24: it takes 0.22 ns, but then both
 *     matmuls read it from the cache instead of from memory (GPT-2 of 4 x 64: 20 ms more for Casts, 14 ms less for
 *     matmuls). Casting it back to float32, where no matmul takes 16 bits, is fused with the rounding and costs 1;
 *   - the step has at least 8 MiB of activations, and the value at least 1/1024 of the peak, since a kernel call has a
 *     fixed cost. Above ONT_RECOMPUTE_MEMORY_BOUND matmuls and attention may be recomputed too, for 40% of the step's
 *     cost: somewhat more than a forward.
 *
 * At the lowest level graph inputs that no gradient rule reads are not kept for backward, so that code which modifies
 * such a tensor between forward and backward under eager PyTorch works here too. Exceptions are scale and bias of a
 * norm, which eager keeps as well, and parameters that autocast rounds: eager keeps the rounded copies (237 MiB for
 * GPT-2), but raises an exception for a parameter modified before backward as soon as autocast is off.
 *
 * A device waits for memory, not for arithmetic, and fuses elementwise nodes. So at the lowest level it recomputes
 * elementwise values whose users in backward are elementwise too, where that reads no more bytes than the value has:
 * the float32 values in which an activation function of 16-bit values is computed are neither written nor read.
 *
 * Source: Chen, Xu, Zhang and Guestrin, Training Deep Nets with Sublinear Memory Cost, 2016.
 */
#include "passes/recompute.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "passes/options.h"

enum { NONE = UINT32_MAX, MAX_DEPTH = 64, MIN_PEAK_BYTES = 8 << 20, MIN_SAVED_DIVISOR = 1024 };

/* Live range of one storage, in positions of nodes. Index: id of the value that all views of it alias. */
typedef struct live_range {
    uint32_t first, last;    /* inclusive; first NONE: never live */
    uint32_t last_forward;   /* position of the last forward use */
    uint32_t first_backward; /* position of the first backward use; NONE: no backward use */
    size_t bytes;            /* 0 if it is not in the slab */
} live_range;

typedef struct pass_state {
    ont_graph *g;
    uint32_t n_values, n_positions; /* before the pass */
    live_range *ranges;
    /* By node id: position in the original graph (a copy has the position of its user), and current position. */
    uint32_t *position, *number;
    uint32_t capacity;   /* of both arrays */
    int64_t *live_bytes; /* live bytes by position */
    double budget;       /* cost that may still be added */
    bool fused_only;     /* the lowest level of a device */
} pass_state;

/* A rematerialization of output 0 of `node` in front of `before`. */
typedef struct remat {
    ont_node *node, *before; /* producer; first backward user */
    uint32_t last_forward_use, first_backward_use; /* positions between which the value is no longer live */
    size_t bytes_saved, bytes_added, bytes_transient;
    double cost;
    const ont_value *extended[MAX_DEPTH]; /* values whose live range is extended */
    const ont_value *read[MAX_DEPTH];     /* values that the copies read, none of them a copy's; bytes_read: of all */
    size_t bytes_read;
    int n_extended, n_read, depth;
} remat;

/* ---- what may run again ---- */

static bool is_memory_bound(const ont_node *node)
{
    return node->op->tile || node->op->flags & ONT_OP_MEMORY_BOUND;
}

bool ont_recompute_can_run_again(const ont_node *node)
{
    if (node->backward || !node->outputs[0]) return false;
    return ont_node_is_view(node) || is_memory_bound(node) || ont_node_is_product(node) || ont_node_is_attention(node);
}

bool ont_recompute_is_recomputable(const ont_graph *g, const ont_node *node)
{
    bool light = g->recompute.level < ONT_RECOMPUTE_LAYERS && !g->recompute.limit && !ont_recompute_is_everywhere();
    return ont_recompute_can_run_again(node) &&
           !(light && ont_node_is_product(node) && !ont_node_is_view(node) && !is_memory_bound(node));
}

ont_status ont_recompute_copy(ont_graph *g, const ont_node *node, ont_node *before, ont_value *const *inputs,
                              uint32_t outputs, ont_node **copy)
{
    const ont_node_spec spec = {.domain = node->domain, .op_type = node->op_type, .inputs = inputs,
                                .n_inputs = node->n_inputs, .n_outputs = node->n_outputs};
    ont_node *copied;
    ONT_TRY(ont_graph_add_node(g, before, &spec, &copied));
    ONT_TRY(ont_attr_copy_all(g, copied, node));
    copied->name = ont_arena_format(&g->arena, "%s_recompute", node->name);
    if (!copied->name) return ONT_ENOMEM;
    copied->op = node->op;
    copied->version = node->version;
    copied->backward = true;
    copied->origin = node;
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        if (!node->outputs[i] || (i < 32 && !(outputs >> i & 1))) {
            copied->outputs[i] = NULL;
            continue;
        }
        copied->outputs[i]->dtype = node->outputs[i]->dtype;
        copied->outputs[i]->has_shape = true;
        copied->outputs[i]->shape = node->outputs[i]->shape;
    }
    *copy = copied;
    return ONT_OK;
}

/* Whether fuse_elementwise.c may join copies of the node with their users. */
static bool is_fusable(const ont_node *node)
{
    return node->op->tile && !(node->op->flags & ONT_OP_RANDOM);
}

static bool is_recomputable(const pass_state *s, const ont_node *node)
{
    if (s->fused_only && !ont_node_is_view(node) &&
        (!is_fusable(node) || ont_node_rounds_parameter(node) || ont_node_promotes_parameter(node)))
        return false;
    return ont_recompute_is_recomputable(s->g, node);
}

/* ---- live ranges ---- */

static void extend_range(live_range *range, uint32_t position, bool backward)
{
    if (position > range->last || range->first == NONE) range->last = position;
    if (!backward && position > range->last_forward) range->last_forward = position;
    if (backward && position < range->first_backward) range->first_backward = position;
}

static ont_status init(pass_state *s)
{
    ont_graph *g = s->g;
    for (ont_node *node = g->first; node; node = node->next) s->n_positions++;
    s->n_values = g->n_values;
    s->capacity = g->n_nodes * 2 + 64;
    s->ranges = ont_calloc((size_t)g->n_values + 1, sizeof *s->ranges);
    s->position = ont_calloc(s->capacity, sizeof *s->position);
    s->number = ont_calloc(s->capacity, sizeof *s->number);
    s->live_bytes = ont_calloc((size_t)s->n_positions + 1, sizeof *s->live_bytes);
    return s->ranges && s->position && s->number && s->live_bytes ? ONT_OK : ONT_ENOMEM;
}

static void number_nodes(pass_state *s)
{
    uint32_t at = 0;
    for (const ont_node *node = s->g->first; node; node = node->next) s->number[node->id] = at++;
}

static void find_live_ranges(pass_state *s)
{
    ont_graph *g = s->g;
    for (uint32_t i = 0; i < g->n_values; i++) {
        const ont_value *v = g->values[i];
        s->ranges[i] = (live_range){.first = NONE, .first_backward = NONE};
        if (v->kind == ONT_VALUE_NODE && v->has_shape)
            s->ranges[i].bytes = (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype);
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) s->ranges[ont_value_root(g->outputs[i])->id].bytes = 0;
    uint32_t at = 0;
    for (const ont_node *node = g->first; node; node = node->next, at++) {
        s->position[node->id] = at;
        if (ont_node_is_view(node)) continue;
        for (uint32_t i = 0; i < node->n_outputs; i++) {
            if (!node->outputs[i]) continue;
            live_range *range = &s->ranges[node->outputs[i]->id];
            range->first = range->last = range->last_forward = at;
        }
        for (uint32_t i = 0; i < node->n_inputs; i++)
            if (node->inputs[i].value)
                extend_range(&s->ranges[ont_value_root(node->inputs[i].value)->id], at, node->backward);
    }
    for (uint32_t i = 0; i < g->n_values; i++)
        for (uint32_t t = s->ranges[i].first; s->ranges[i].bytes && t != NONE && t <= s->ranges[i].last; t++)
            s->live_bytes[t] += (int64_t)s->ranges[i].bytes;
    number_nodes(s);
}

static uint32_t peak_position(const pass_state *s)
{
    uint32_t peak = 0;
    for (uint32_t t = 1; t < s->n_positions; t++)
        if (s->live_bytes[t] > s->live_bytes[peak]) peak = t;
    return peak;
}

/* ---- operands of a rematerialization ---- */

/* Whether the value is live at `position` of backward without an extension of its live range. */
static bool is_live_at(const pass_state *s, const ont_value *root, uint32_t position)
{
    if (root->kind == ONT_VALUE_CONSTANT || root->id >= s->n_values) return true;
    const live_range *range = &s->ranges[root->id];
    if (root->kind == ONT_VALUE_INPUT) return range->first_backward != NONE;
    return range->first_backward != NONE && range->last >= position;
}

/*
 * Whether a graph input that backward does not read so far may be read by the copy of `node`: the caller must then
 * leave it unchanged until backward.
 */
static bool may_extend_input(const pass_state *s, const ont_node *node)
{
    return s->g->recompute.level > ONT_RECOMPUTE_MEMORY_BOUND || ONT_IS(node, LayerNormalization) ||
           ont_node_rounds_parameter(node);
}

static bool is_graph_output(const pass_state *s, const ont_value *root)
{
    return root->kind == ONT_VALUE_NODE && !s->ranges[root->id].bytes && ont_shape_count(&root->shape) > 0;
}

static bool is_extended(const remat *p, const ont_value *root)
{
    for (int i = 0; i < p->n_extended; i++)
        if (p->extended[i] == root) return true;
    return false;
}

/* False if there are too many. */
static bool add_read(remat *p, const ont_value *root)
{
    size_t bytes;
    for (int i = 0; i < p->n_read; i++)
        if (p->read[i] == root) return true;
    if (p->n_read == MAX_DEPTH || ont_shape_bytes(&root->shape, root->dtype, &bytes) != ONT_OK) return false;
    p->read[p->n_read++] = root;
    p->bytes_read += bytes;
    return true;
}

/*
 * Adds the operands of `node` to the rematerialization: operands that are not live are recomputed too, or else their
 * live range is extended. False if neither is possible.
 */
static bool add_operands(const pass_state *s, remat *p, const ont_node *node)
{
    if (++p->depth > MAX_DEPTH || !is_recomputable(s, node)) return false;
    p->cost += ont_node_cost(node);
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        if (!v) continue;
        const ont_value *root = ont_value_root(v);
        if (is_live_at(s, root, p->first_backward_use) || is_extended(p, root)) {
            if (!add_read(p, root)) return false;
            continue;
        }
        if (root->kind == ONT_VALUE_INPUT) {
            if (!may_extend_input(s, node) || !add_read(p, root)) return false;
            continue;
        }
        remat extended_remat = *p;
        if (is_recomputable(s, root->def) && add_operands(s, &extended_remat, root->def)) {
            extended_remat.bytes_transient += s->ranges[root->id].bytes;
            *p = extended_remat;
            continue;
        }
        if (is_graph_output(s, root) || p->n_extended == MAX_DEPTH || !add_read(p, root)) return false;
        p->extended[p->n_extended++] = root;
        p->bytes_added += s->ranges[root->id].bytes;
    }
    return true;
}

/* Finds the first backward node that uses the value, directly or through views. */
static void find_first_backward_user(const pass_state *s, const ont_value *v, ont_node **first)
{
    for (const ont_use *use = v->uses; use; use = use->next) {
        ont_node *user = use->user;
        if (ont_node_is_view(user) && use == &user->inputs[0]) find_first_backward_user(s, user->outputs[0], first);
        if (user->backward && (!*first || s->number[user->id] < s->number[(*first)->id])) *first = user;
    }
}

/* Whether all backward users, directly or through views, may be fused with a copy. */
static bool has_fusable_users(const ont_value *v)
{
    for (const ont_use *use = v->uses; use; use = use->next) {
        const ont_node *user = use->user;
        if (ont_node_is_view(user) && use == &user->inputs[0]) {
            if (!has_fusable_users(user->outputs[0])) return false;
        } else if (user->backward && !is_fusable(user))
            return false;
    }
    return true;
}

static bool find_remat(const pass_state *s, ont_node *node, remat *p)
{
    const ont_value *v = ont_node_out(node, 0);
    *p = (remat){.node = node};
    if (ont_node_is_view(node) || !v || !is_recomputable(s, node) || is_graph_output(s, v)) return false;
    const live_range *range = &s->ranges[v->id];
    if (range->first_backward == NONE || !range->bytes) return false;
    p->bytes_saved = range->bytes;
    p->last_forward_use = range->last_forward;
    p->first_backward_use = range->first_backward;
    find_first_backward_user(s, v, &p->before);
    if (!p->before || p->last_forward_use + 1 >= p->first_backward_use || !add_operands(s, p, node)) return false;
    if (s->fused_only) return p->bytes_read <= p->bytes_saved && has_fusable_users(v);
    return p->bytes_added * 2 <= p->bytes_saved;
}

/* ---- the profile ---- */

/* Adds bytes to positions [first, last]. */
static void add_bytes(pass_state *s, uint32_t first, uint32_t last, int64_t bytes)
{
    for (uint32_t t = first; t <= last && t < s->n_positions; t++) s->live_bytes[t] += bytes;
}

/* Applies the rematerialization to the profile (sign 1), or undoes that (sign -1). */
static void update_profile(pass_state *s, const remat *p, int sign)
{
    add_bytes(s, p->last_forward_use + 1, p->first_backward_use - 1, -sign * (int64_t)p->bytes_saved);
    add_bytes(s, p->first_backward_use, p->first_backward_use, sign * (int64_t)p->bytes_transient);
    for (int i = 0; i < p->n_extended; i++) {
        const live_range *range = &s->ranges[p->extended[i]->id];
        add_bytes(s, range->last + 1, p->first_backward_use, sign * (int64_t)range->bytes);
    }
}

/* ---- rewriting ---- */

static ont_status reserve(pass_state *s)
{
    if (s->g->n_nodes < s->capacity) return ONT_OK;
    uint32_t capacity = s->g->n_nodes * 2;
    uint32_t *position = ont_realloc(s->position, capacity, sizeof *position);
    if (!position) return ONT_ENOMEM;
    s->position = position;
    uint32_t *number = ont_realloc(s->number, capacity, sizeof *number);
    if (!number) return ONT_ENOMEM;
    s->number = number;
    s->capacity = capacity;
    return ONT_OK;
}

static ont_status rematerialize(pass_state *s, const remat *p, const ont_value *v, ont_value **recomputed);

/*
 * Clones the node in front of p->before, with the outputs that are used there; operands that are not live are
 * rematerialized.
 */
static ont_status clone_for_backward(pass_state *s, const remat *p, const ont_node *node, ont_node **copy)
{
    ont_graph *g = s->g;
    ont_value **inputs = ont_arena_array(&g->arena, (size_t)node->n_inputs + 1, sizeof *inputs);
    if (!inputs) return ONT_ENOMEM;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        ont_value *v = node->inputs[i].value;
        const ont_value *root = v ? ont_value_root(v) : NULL;
        inputs[i] = v;
        if (root && !is_live_at(s, root, p->first_backward_use) && !is_extended(p, root) &&
            root->kind != ONT_VALUE_INPUT)
            ONT_TRY(rematerialize(s, p, v, &inputs[i]));
        else if (root && root->id < s->n_values)
            extend_range(&s->ranges[root->id], p->first_backward_use, true);
    }
    ont_node *copied;
    ONT_TRY(ont_recompute_copy(g, node, p->before, inputs, UINT32_MAX, &copied));
    g->recompute.nodes += !ont_node_is_view(node);
    ONT_TRY(reserve(s));
    s->position[copied->id] = p->first_backward_use;
    *copy = copied;
    return ONT_OK;
}

static ont_status rematerialize(pass_state *s, const remat *p, const ont_value *v, ont_value **recomputed)
{
    ont_node *copy;
    ONT_TRY(clone_for_backward(s, p, v->def, &copy));
    for (uint32_t i = 0; i < copy->n_outputs; i++)
        if (i && i != v->def_index) copy->outputs[i] = NULL;
    *recomputed = copy->outputs[v->def_index];
    return ONT_OK;
}

/* Replaces the backward uses of `old`, and of forward views of it, by `new`. */
static ont_status replace_backward_uses(pass_state *s, const remat *p, ont_value *old, ont_value *new)
{
    for (ont_use *use = old->uses, *next; use; use = next) {
        next = use->next;
        ont_node *user = use->user;
        if (user->backward) {
            ont_node_set_input(user, (uint32_t)(use - user->inputs), new);
            continue;
        }
        ont_node *first = NULL, *copy;
        if (!ont_node_is_view(user) || use != &user->inputs[0]) continue;
        find_first_backward_user(s, user->outputs[0], &first);
        if (!first) continue;
        ont_value *view = user->outputs[0];
        ONT_TRY(clone_for_backward(s, p, user, &copy));
        ont_node_set_input(copy, 0, new);
        ONT_TRY(replace_backward_uses(s, p, view, copy->outputs[0]));
    }
    return ONT_OK;
}

static ont_status apply_remat(pass_state *s, const remat *p)
{
    ont_node *copy;
    ont_value *v = p->node->outputs[0];
    ONT_TRY(clone_for_backward(s, p, p->node, &copy));
    for (uint32_t i = 1; i < copy->n_outputs; i++) copy->outputs[i] = NULL;
    ont_value *recomputed = copy->outputs[0];
    ONT_TRY(replace_backward_uses(s, p, v, recomputed));
    live_range *range = &s->ranges[v->id];
    range->last = range->last_forward;
    range->first_backward = NONE;
    s->g->recompute.bytes += p->bytes_saved - p->bytes_added;
    s->budget -= p->cost;
    s->g->recompute.cost += p->cost;
    number_nodes(s);
    return ONT_OK;
}

/* ---- the choice ---- */

typedef struct candidate {
    ont_node *node;
    double benefit; /* bytes saved per unit of cost */
} candidate;

static int by_benefit(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->benefit != y->benefit) return x->benefit > y->benefit ? -1 : 1;
    return x->node->id < y->node->id ? -1 : x->node->id > y->node->id;
}

static bool lowers_peak(pass_state *s, const remat *p, uint32_t peak)
{
    int64_t before = s->live_bytes[peak];
    if (p->last_forward_use >= peak || p->first_backward_use <= peak || p->cost > s->budget) return false;
    if (!ont_recompute_is_everywhere() && p->bytes_saved * MIN_SAVED_DIVISOR < (size_t)before) return false;
    update_profile(s, p, 1);
    if (s->live_bytes[peak_position(s)] <= before && s->live_bytes[peak] < before) return true;
    update_profile(s, p, -1);
    return false;
}

/* One pass over the candidates in order of decreasing benefit; *found: whether any was taken. */
static ont_status choose_candidates(pass_state *s, candidate *candidates, uint32_t n, bool *found)
{
    *found = false;
    uint32_t peak = peak_position(s);
    for (uint32_t i = 0; i < n; i++) {
        remat p;
        if (!find_remat(s, candidates[i].node, &p) || !lowers_peak(s, &p, peak)) continue;
        ONT_TRY(apply_remat(s, &p));
        peak = peak_position(s);
        *found = true;
    }
    return ONT_OK;
}

/* All that find_remat() finds; where an operand is recomputed, its users may follow in the next round. */
static ont_status recompute_fused(pass_state *s)
{
    for (bool found = true; found;) {
        found = false;
        for (ont_node *node = s->g->first; node && !node->backward; node = node->next) {
            remat p;
            if (!find_remat(s, node, &p)) continue;
            ONT_TRY(apply_remat(s, &p));
            found = true;
        }
    }
    return ONT_OK;
}

static ont_status recompute(pass_state *s)
{
    ONT_TRY(init(s));
    find_live_ranges(s);
    double fraction = ont_recompute_budget_fraction(s->g->recompute.level);
    s->budget = ont_recompute_is_everywhere() ? 1e300
                                              : s->g->recompute.step * fraction - s->g->recompute.cost;
    if (s->live_bytes[peak_position(s)] < MIN_PEAK_BYTES && !ont_recompute_is_everywhere()) return ONT_OK;
    if (s->fused_only) return recompute_fused(s);
    candidate *candidates = ont_calloc((size_t)s->n_positions + 1, sizeof *candidates);
    if (!candidates) return ONT_ENOMEM;
    uint32_t n = 0;
    for (ont_node *node = s->g->first; node; node = node->next) {
        remat p;
        if (find_remat(s, node, &p)) candidates[n++] = (candidate){node, (double)p.bytes_saved / p.cost};
    }
    qsort(candidates, n, sizeof *candidates, by_benefit);
    ont_status status = ONT_OK;
    for (bool found = true; found && status == ONT_OK;) status = choose_candidates(s, candidates, n, &found);
    ont_free(candidates);
    return status;
}

ont_status ont_pass_recompute(ont_graph *g)
{
    pass_state s = {.g = g};
    s.fused_only = g->device && !ont_recompute_is_everywhere();
    ont_status status = recompute(&s);
    ont_free(s.ranges);
    ont_free(s.position);
    ont_free(s.number);
    ont_free(s.live_bytes);
    return status;
}
