/*
 * Recomputes in backward what is cheap to compute and large to keep: a forward value that only backward still needs is
 * not kept where copies of the nodes that made it, run just before its first reader there, give it again from what is
 * alive at that time anyway. The copies are the same operators with the same attributes and random streams, so every
 * bit is the same, in whatever group they come to stand: sums add up as ops/sums.h says.
 *
 * The rule. A profile says how many bytes are alive at each node. Of the values that lie idle across its highest point,
 * the one with the most bytes a unit of work goes first, as long as
 *   - the profile's highest point does not rise, and what has to be kept instead is at most half of what is not kept;
 *   - all copies together are at most 3% of the step's work. An element of an elementwise node, of a norm or of moved
 * data counts as 128 operations of a product (0.5 ns against 250 GFLOP/s: GELU of 4 x 64 x 3072 takes 0.4 ms on two
 * cores). A parameter's element that is rounded to 16 bits counts as 24: it takes 0.22 ns, but then both products find
 * it in the cache, where they read it from memory before (GPT-2 of 4 x 64: 20 ms of Casts more, 14 of products less).
 * That it is widened again, where no product takes 16 bits, is done in the same pass over it, and counts as 1;
 *   - the step has 8 MiB of activations, and the value 1/1024 of the highest point: a call of a kernel is not free
 * either. Above ONT_RECOMPUTE_CHEAP products and attention may be done again too, for 40% of the step: somewhat more
 * than a forward.
 *
 * Graph inputs that no gradient rule reads are left alone at the lowest level, so that whoever may change a tensor
 * between forward and backward under eager may do so here; a norm's scale and bias are not, which eager keeps as well,
 * and parameters that autocast rounds are not either: eager keeps the rounded copies, 237 MiB for GPT-2, but whoever
 * writes to a parameter before its backward has eager's exception as soon as autocast is off.
 *
 * Source of the idea: Chen, Xu, Zhang and Guestrin, Training Deep Nets with Sublinear Memory Cost, 2016.
 */
#include "passes/recompute.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

enum { NOWHERE = UINT32_MAX, DEEPEST = 64, LEAST_PEAK = 8 << 20, LEAST_SHARE = 1024, WORK_OF_ELEMENT = 128,
       WORK_OF_ROUNDING = 24 };

/* What the plan will know of a piece of memory, by positions of nodes. Index: id of the value that views lead to. */
typedef struct life {
    uint32_t first, last;              /* alive; first NOWHERE: never */
    uint32_t last_forward;             /* reader */
    uint32_t first_backward;           /* reader, NOWHERE: none */
    size_t bytes;                      /* 0 where it takes no room of the slab */
} life;

typedef struct pass_state {
    ont_graph *g;
    uint32_t n_values, n_slots; /* as the pass found them */
    life *lives;
    uint32_t *slot, *order; /* by node id: position in the graph as it was (a copy has its reader's), and as it is */
    uint32_t capacity;          /* of both */
    int64_t *alive;             /* bytes by slot */
    double budget;              /* work that may still be added */
} pass_state;

/* A value that may be made again, and what for. */
typedef struct plan {
    ont_node *node, *before; /* made by, needed by */
    uint32_t from, to;       /* the slots between which it is not kept */
    size_t gain, loss, transient;
    double work;
    const ont_value *kept[DEEPEST]; /* roots that live longer for it */
    int n_kept, depth;
} plan;

static bool everywhere;

void ont_recompute_everywhere(bool on)
{
    __atomic_store_n(&everywhere, on, __ATOMIC_RELAXED);
}

bool ont_recompute_is_everywhere(void)
{
    return __atomic_load_n(&everywhere, __ATOMIC_RELAXED);
}

/* ---- work ---- */

static double count(const ont_value *v)
{
    return v && v->has_shape ? (double)ont_shape_count(&v->shape) : 0;
}

static bool is_named(const ont_node *node, const char *const *names)
{
    for (; *names; names++)
        if (!strcmp(node->op_type, *names)) return true;
    return false;
}

static bool is_product(const ont_node *node)
{
    static const char *const names[] = {"MatMul", "Gemm", "FusedMatMul", "GeluMatMul", "GeluMatMulGrad", NULL};
    return is_named(node, names) && node->n_inputs > 1;
}

static bool is_attention(const ont_node *node)
{
    static const char *const names[] = {"FusedAttention", "FusedAttentionGrad", NULL};
    return is_named(node, names) && node->n_inputs > 1;
}

static bool is_convolution(const ont_node *node)
{
    static const char *const names[] = {"Conv", "ConvGradInput", "ConvGradWeight", NULL};
    return is_named(node, names) && node->n_inputs > 1;
}

static bool is_cheap(const ont_node *node)
{
    return node->op->tile || node->op->flags & ONT_OP_MEMORY_BOUND;
}

/* A parameter that is rounded to 16 bits: autocast's copy of a weight. */
static bool rounds_parameter(const ont_node *node)
{
    const ont_value *from = ont_node_in(node, 0), *to = ont_node_out(node, 0);
    return !strcmp(node->op_type, "Cast") && from && to && ont_value_root(from)->parameter &&
           ont_dtype_size(to->dtype) < ont_dtype_size(from->dtype);
}

/* That a rounded parameter becomes float32 again: one group with the rounding. */
static bool widens_parameter(const ont_node *node)
{
    const ont_value *from = ont_node_in(node, 0);
    const ont_node *rounding = from ? ont_value_root(from)->def : NULL;
    return rounding && !strcmp(node->op_type, "Cast") && rounds_parameter(rounding) &&
           ont_dtype_size(node->outputs[0]->dtype) > ont_dtype_size(from->dtype);
}

/* Cross-entropy with its head's product: once in forward, and in backward once more for each of its gradients. */
static double work_of_streamed(const ont_node *node, bool backward)
{
    const ont_value *h = ont_node_in(node, 0);
    int64_t width = h->shape.dims[h->shape.rank - 1];
    double product = width ? 2 * count(h) * count(ont_node_in(node, 1)) / (double)width : 0;
    return !backward ? product : product * (1 + (ont_node_out(node, 0) != NULL) + (ont_node_out(node, 1) != NULL));
}

/* All that matters: with |A| = mk, |B| = kn and |C| = mn, a product's mnk is the root of their product. */
double ont_recompute_work(const ont_node *node)
{
    static const char *const streamed[] = {"StreamedCrossEntropy", NULL}, *const back[] = {"StreamedCrossEntropyGrad",
                                                                                           NULL};
    if (is_named(node, streamed) || is_named(node, back)) return work_of_streamed(node, is_named(node, back));
    double in0 = count(ont_node_in(node, 0)), out = count(ont_node_out(node, 0));
    if (ont_node_is_view(node)) return 0;
    if (widens_parameter(node)) return out;
    if (is_product(node) || is_convolution(node)) return 2 * sqrt(in0 * count(ont_node_in(node, 1)) * out);
    if (is_attention(node)) { /* scores of every row with every column, and as much again for the values */
        size_t n;
        const int64_t *sizes = ont_attr_ints(node, "sizes", &n);
        return 4 * out * (double)(sizes && n > 1 ? sizes[1] : 1) + out * WORK_OF_ELEMENT;
    }
    return (in0 > out ? in0 : out) * (rounds_parameter(node) ? WORK_OF_ROUNDING : WORK_OF_ELEMENT);
}

double ont_recompute_work_of_graph(const ont_graph *g)
{
    double work = 0;
    for (const ont_node *node = g->first; node; node = node->next) work += ont_recompute_work(node);
    return work;
}

double ont_recompute_share(int level)
{
    return level >= ONT_RECOMPUTE_LAYERS ? 0.4 : 0.03;
}

static bool may_repeat(const pass_state *s, const ont_node *node)
{
    if (node->backward || !node->outputs[0]) return false;
    if (ont_node_is_view(node) || is_cheap(node)) return true;
    if (s->g->recompute.level < ONT_RECOMPUTE_LAYERS && !ont_recompute_is_everywhere()) return false;
    return is_product(node) || is_attention(node) || is_convolution(node);
}

/* ---- lives ---- */

static void read_at(life *l, uint32_t slot, bool backward)
{
    if (slot > l->last || l->first == NOWHERE) l->last = slot;
    if (!backward && slot > l->last_forward) l->last_forward = slot;
    if (backward && slot < l->first_backward) l->first_backward = slot;
}

static ont_status begin(pass_state *s)
{
    ont_graph *g = s->g;
    for (ont_node *node = g->first; node; node = node->next) s->n_slots++;
    s->n_values = g->n_values;
    s->capacity = g->n_nodes * 2 + 64;
    s->lives = ont_calloc((size_t)g->n_values + 1, sizeof *s->lives);
    s->slot = ont_calloc(s->capacity, sizeof *s->slot);
    s->order = ont_calloc(s->capacity, sizeof *s->order);
    s->alive = ont_calloc((size_t)s->n_slots + 1, sizeof *s->alive);
    return s->lives && s->slot && s->order && s->alive ? ONT_OK : ONT_ENOMEM;
}

static void count_order(pass_state *s)
{
    uint32_t at = 0;
    for (const ont_node *node = s->g->first; node; node = node->next) s->order[node->id] = at++;
}

static void find_lives(pass_state *s)
{
    ont_graph *g = s->g;
    for (uint32_t i = 0; i < g->n_values; i++) {
        const ont_value *v = g->values[i];
        s->lives[i] = (life){.first = NOWHERE, .first_backward = NOWHERE};
        if (v->kind == ONT_VALUE_NODE && v->has_shape)
            s->lives[i].bytes = (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype);
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) s->lives[ont_value_root(g->outputs[i])->id].bytes = 0;
    uint32_t at = 0;
    for (const ont_node *node = g->first; node; node = node->next, at++) {
        s->slot[node->id] = at;
        if (ont_node_is_view(node)) continue;
        for (uint32_t i = 0; i < node->n_outputs; i++) {
            if (!node->outputs[i]) continue;
            life *l = &s->lives[node->outputs[i]->id];
            l->first = l->last = l->last_forward = at;
        }
        for (uint32_t i = 0; i < node->n_inputs; i++)
            if (node->inputs[i].value)
                read_at(&s->lives[ont_value_root(node->inputs[i].value)->id], at, node->backward);
    }
    for (uint32_t i = 0; i < g->n_values; i++)
        for (uint32_t t = s->lives[i].first; s->lives[i].bytes && t != NOWHERE && t <= s->lives[i].last; t++)
            s->alive[t] += (int64_t)s->lives[i].bytes;
    count_order(s);
}

static uint32_t highest(const pass_state *s)
{
    uint32_t top = 0;
    for (uint32_t t = 1; t < s->n_slots; t++)
        if (s->alive[t] > s->alive[top]) top = t;
    return top;
}

/* ---- what a value needs to be made again ---- */

/* Whether the memory of v can be read at `slot` of backward without being kept for it. */
static bool is_free(const pass_state *s, const ont_value *root, uint32_t slot)
{
    if (root->kind == ONT_VALUE_CONSTANT || root->id >= s->n_values) return true;
    const life *l = &s->lives[root->id];
    if (root->kind == ONT_VALUE_INPUT) return l->first_backward != NOWHERE;
    return l->first_backward != NOWHERE && l->last >= slot;
}

/* A graph input that backward has not read so far may be kept for it: the caller must leave it as it is until then. */
static bool may_hold(const pass_state *s, const ont_node *node)
{
    static const char *const norms[] = {"LayerNormalization", NULL};
    return s->g->recompute.level > ONT_RECOMPUTE_CHEAP || is_named(node, norms) || rounds_parameter(node);
}

static bool is_graph_output(const pass_state *s, const ont_value *root)
{
    return root->kind == ONT_VALUE_NODE && !s->lives[root->id].bytes && ont_shape_count(&root->shape) > 0;
}

static bool keeps(const plan *p, const ont_value *root)
{
    for (int i = 0; i < p->n_kept; i++)
        if (p->kept[i] == root) return true;
    return false;
}

/* Adds what `node` needs; false where it cannot be had. A value that is not there is made again too, or else kept. */
static bool gather(const pass_state *s, plan *p, const ont_node *node)
{
    if (++p->depth > DEEPEST || !may_repeat(s, node)) return false;
    p->work += ont_recompute_work(node);
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        if (!v || is_free(s, ont_value_root(v), p->to) || keeps(p, ont_value_root(v))) continue;
        const ont_value *root = ont_value_root(v);
        if (root->kind == ONT_VALUE_INPUT) {
            if (!may_hold(s, node)) return false;
            continue;
        }
        plan deeper = *p;
        if (may_repeat(s, root->def) && gather(s, &deeper, root->def)) {
            deeper.transient += s->lives[root->id].bytes;
            *p = deeper;
            continue;
        }
        if (is_graph_output(s, root) || p->n_kept == DEEPEST) return false;
        p->kept[p->n_kept++] = root;
        p->loss += s->lives[root->id].bytes;
    }
    return true;
}

/* The first node of backward that reads the value, through views or not. */
static void first_reader(const pass_state *s, const ont_value *v, ont_node **first)
{
    for (const ont_use *use = v->uses; use; use = use->next) {
        ont_node *user = use->user;
        if (ont_node_is_view(user) && use == &user->inputs[0]) first_reader(s, user->outputs[0], first);
        if (user->backward && (!*first || s->order[user->id] < s->order[(*first)->id])) *first = user;
    }
}

static bool find_plan(const pass_state *s, ont_node *node, plan *p)
{
    const ont_value *v = ont_node_out(node, 0);
    *p = (plan){.node = node};
    if (ont_node_is_view(node) || !v || !may_repeat(s, node) || is_graph_output(s, v)) return false;
    const life *l = &s->lives[v->id];
    if (l->first_backward == NOWHERE || !l->bytes) return false;
    p->gain = l->bytes;
    p->from = l->last_forward;
    p->to = l->first_backward;
    first_reader(s, v, &p->before);
    return p->before && p->from + 1 < p->to && gather(s, p, node) && p->loss * 2 <= p->gain;
}

/* ---- the profile ---- */

/* Bytes over [first, last]. */
static void add_bytes(pass_state *s, uint32_t first, uint32_t last, int64_t bytes)
{
    for (uint32_t t = first; t <= last && t < s->n_slots; t++) s->alive[t] += bytes;
}

/* Puts the plan into the profile, or takes it out again. */
static void apply(pass_state *s, const plan *p, int sign)
{
    add_bytes(s, p->from + 1, p->to - 1, -sign * (int64_t)p->gain);
    add_bytes(s, p->to, p->to, sign * (int64_t)p->transient);
    for (int i = 0; i < p->n_kept; i++) {
        const life *l = &s->lives[p->kept[i]->id];
        add_bytes(s, l->last + 1, p->to, sign * (int64_t)l->bytes);
    }
}

/* ---- rewriting ---- */

static ont_status grow(pass_state *s)
{
    if (s->g->n_nodes < s->capacity) return ONT_OK;
    uint32_t capacity = s->g->n_nodes * 2;
    uint32_t *slot = ont_realloc(s->slot, capacity, sizeof *slot);
    if (!slot) return ONT_ENOMEM;
    s->slot = slot;
    uint32_t *order = ont_realloc(s->order, capacity, sizeof *order);
    if (!order) return ONT_ENOMEM;
    s->order = order;
    s->capacity = capacity;
    return ONT_OK;
}

static ont_status again(pass_state *s, const plan *p, const ont_value *v, ont_value **made);

/*
 * A copy of the node in front of p->before, with the outputs that have a use there; its operands are made again where
 * need be.
 */
static ont_status copy_node(pass_state *s, const plan *p, const ont_node *node, ont_node **copy)
{
    ont_graph *g = s->g;
    ont_value **inputs = ont_arena_array(&g->arena, (size_t)node->n_inputs + 1, sizeof *inputs);
    if (!inputs) return ONT_ENOMEM;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        ont_value *v = node->inputs[i].value;
        const ont_value *root = v ? ont_value_root(v) : NULL;
        inputs[i] = v;
        if (root && !is_free(s, root, p->to) && !keeps(p, root) && root->kind != ONT_VALUE_INPUT)
            ONT_TRY(again(s, p, v, &inputs[i]));
        else if (root && root->id < s->n_values)
            read_at(&s->lives[root->id], p->to, true);
    }
    ont_node *made;
    ONT_TRY(ont_graph_add_node(g, p->before, node->domain, node->op_type, inputs, node->n_inputs, NULL, node->n_outputs,
                               &made));
    ONT_TRY(ont_attr_copy_all(g, made, node));
    made->name = ont_arena_format(&g->arena, "%s_recompute", node->name);
    if (!made->name) return ONT_ENOMEM;
    made->op = node->op;
    made->version = node->version;
    made->backward = true;
    made->origin = node;
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        if (!node->outputs[i]) {
            made->outputs[i] = NULL;
            continue;
        }
        made->outputs[i]->dtype = node->outputs[i]->dtype;
        made->outputs[i]->has_shape = true;
        made->outputs[i]->shape = node->outputs[i]->shape;
    }
    g->recompute.nodes += !ont_node_is_view(node);
    ONT_TRY(grow(s));
    s->slot[made->id] = p->to;
    *copy = made;
    return ONT_OK;
}

static ont_status again(pass_state *s, const plan *p, const ont_value *v, ont_value **made)
{
    ont_node *copy;
    ONT_TRY(copy_node(s, p, v->def, &copy));
    for (uint32_t i = 0; i < copy->n_outputs; i++)
        if (i && i != v->def_index) copy->outputs[i] = NULL;
    *made = copy->outputs[v->def_index];
    return ONT_OK;
}

/* Readers in backward of `old`, and of forward's views of it, read `new` from now on. */
static ont_status redirect(pass_state *s, const plan *p, ont_value *old, ont_value *new)
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
        first_reader(s, user->outputs[0], &first);
        if (!first) continue;
        ont_value *view = user->outputs[0];
        ONT_TRY(copy_node(s, p, user, &copy));
        ont_node_set_input(copy, 0, new);
        ONT_TRY(redirect(s, p, view, copy->outputs[0]));
    }
    return ONT_OK;
}

static ont_status rewrite(pass_state *s, const plan *p)
{
    ont_node *copy;
    ont_value *v = p->node->outputs[0];
    ONT_TRY(copy_node(s, p, p->node, &copy));
    for (uint32_t i = 1; i < copy->n_outputs; i++) copy->outputs[i] = NULL;
    ont_value *made = copy->outputs[0];
    ONT_TRY(redirect(s, p, v, made));
    life *l = &s->lives[v->id];
    l->last = l->last_forward;
    l->first_backward = NOWHERE;
    s->g->recompute.bytes += p->gain - p->loss;
    s->budget -= p->work;
    s->g->recompute.work += p->work;
    count_order(s);
    return ONT_OK;
}

/* ---- the choice ---- */

typedef struct candidate {
    ont_node *node;
    double worth; /* bytes a unit of work */
} candidate;

static int by_worth(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->worth != y->worth) return x->worth > y->worth ? -1 : 1;
    return x->node->id < y->node->id ? -1 : x->node->id > y->node->id;
}

static bool improves(pass_state *s, const plan *p, uint32_t top)
{
    int64_t before = s->alive[top];
    if (p->from >= top || p->to <= top || p->work > s->budget) return false;
    if (!ont_recompute_is_everywhere() && p->gain * LEAST_SHARE < (size_t)before) return false;
    apply(s, p, 1);
    if (s->alive[highest(s)] <= before && s->alive[top] < before) return true;
    apply(s, p, -1);
    return false;
}

/* One walk over the candidates, the worthiest first; *found: whether any was taken. */
static ont_status choose(pass_state *s, candidate *candidates, uint32_t n, bool *found)
{
    *found = false;
    uint32_t top = highest(s);
    for (uint32_t i = 0; i < n; i++) {
        plan p;
        if (!find_plan(s, candidates[i].node, &p) || !improves(s, &p, top)) continue;
        ONT_TRY(rewrite(s, &p));
        top = highest(s);
        *found = true;
    }
    return ONT_OK;
}

static ont_status recompute(pass_state *s)
{
    ONT_TRY(begin(s));
    find_lives(s);
    double share = ont_recompute_share(s->g->recompute.level);
    s->budget = ont_recompute_is_everywhere() ? 1e300
                                              : ont_recompute_work_of_graph(s->g) * share - s->g->recompute.work;
    if (s->alive[highest(s)] < LEAST_PEAK && !ont_recompute_is_everywhere()) return ONT_OK;
    candidate *candidates = ont_calloc((size_t)s->n_slots + 1, sizeof *candidates);
    if (!candidates) return ONT_ENOMEM;
    uint32_t n = 0;
    for (ont_node *node = s->g->first; node; node = node->next) {
        plan p;
        if (find_plan(s, node, &p)) candidates[n++] = (candidate){node, (double)p.gain / p.work};
    }
    qsort(candidates, n, sizeof *candidates, by_worth);
    ont_status status = ONT_OK;
    for (bool found = true; found && status == ONT_OK;) status = choose(s, candidates, n, &found);
    ont_free(candidates);
    return status;
}

ont_status ont_pass_recompute(ont_graph *g)
{
    pass_state s = {.g = g};
    bool backward = g->last && g->last->backward;
    if (!backward || (g->device && g->recompute.level == ONT_RECOMPUTE_CHEAP && !ont_recompute_is_everywhere()))
        return ONT_OK;
    ont_status status = recompute(&s);
    ont_free(s.lives);
    ont_free(s.slot);
    ont_free(s.order);
    ont_free(s.alive);
    return status;
}
