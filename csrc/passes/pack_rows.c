/*
 * Unused rows are not computed. Rows are the entries of a value's leading dims, flattened: the tokens of a
 * batch.
 *
 * 1. Demands, backwards over the forward graph: for each value, which rows anything behind it reads. A loss reads the
 *    rows whose label counts, a Gather, GatherND or Slice the rows that it selects, attention the keys that its mask
 *    lets through and the queries whose result is read; graph outputs and operators without a rule (ont_row_rule of
 *    their descriptors) read all. Where a value has several readers, the demand is the union.
 * 2. Counts. A set of rows is a union of sources; whether each row belongs to it is computed from inputs of the graph.
 *    Its size, where it depends on data, is asked for as a value that shapes depend on (pass.h), rounded up to one of
 *    64 sizes (ops/index/rows.h), so that batches share programs.
 * 3. Rewriting, forwards: every node with a rule whose result is read in some rows is built again over packed rows:
 *    (r, 1, ..., 1, rest) for (leading dims ..., rest), so that attributes and broadcasting stay as they are. Rows are
 *    packed where a packed node reads a whole value. Attention reads packed rows where they lie (fused_attention.h).
 *    Where it cannot, as on a device, rows are unpacked in front of it: probabilities of keys without a row are 0, and
 *    the results of queries without a row have no reader.
 *
 * Everything behind is exact: left-out rows have gradient 0, since no node reads them. Dropout draws for each element
 * the word of its place before packing, so that the noise does not change.
 */
#include "passes/pack_rows.h"

#include <string.h>

#include "ops/attention/fused_attention.h"
#include "ops/index/rows.h"
#include "passes/cost.h"
#include "passes/options.h"
#include "passes/pack_rows_state.h"

enum { MAX_ANCESTORS = 400 };
/* Counting rows takes a probe at each call: it is not worth it for less of the forward's cost, in its share and in
 * operations. */
#define MIN_SHARE 0.02
#define MIN_COST 3e8
/* On a device the host waits for the probe, and so for all that was enqueued before: it is not worth it for less than
 * some two milliseconds of a GPU's products. */
#define MIN_DEVICE_COST 1e12
/* Marking, selecting and packing rows takes launches, some 50 microseconds of a GPU's products. */
#define MIN_DEVICE_SAVING 2e10

/* ---- sources and sets ---- */

/* Whether a value follows cheaply from inputs of the graph, without random numbers. */
static bool is_cheap(const ont_node *node, int *budget, double *cost)
{
    if (--*budget < 0 || node->op->flags & ONT_OP_RANDOM || node->op->rows == ONT_ROWS_MATMUL ||
        node->op->rows == ONT_ROWS_ATTENTION || node->op->rows == ONT_ROWS_NORM)
        return false;
    *cost += ont_node_cost(node);
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        if (v && v->kind == ONT_VALUE_NODE && !is_cheap(v->def, budget, cost)) return false;
    }
    return true;
}

static bool follows_cheaply(const ont_pack_state *s, const ont_value *v)
{
    int budget = MAX_ANCESTORS;
    double cost = 0;
    if (!v || v->kind != ONT_VALUE_NODE) return true;
    return is_cheap(v->def, &budget, &cost) && (s->forced || cost <= 0.05 * ont_graph_cost(s->g));
}

static int intern_set(ont_pack_state *s, int64_t n, uint64_t sources)
{
    for (int i = 0; i < s->n_sets; i++)
        if (s->sets[i].n == n && s->sets[i].sources == sources) return i;
    if (s->n_sets == ONT_MAX_ROW_SETS) return ONT_ALL_ROWS;
    s->sets[s->n_sets] = (ont_row_set){.n = n, .sources = sources, .packed_as = ONT_NO_ROWS};
    return s->n_sets++;
}

static int join(ont_pack_state *s, int a, int b)
{
    if (a == ONT_NO_ROWS || a == b) return b;
    if (b == ONT_NO_ROWS) return a;
    if (a == ONT_ALL_ROWS || b == ONT_ALL_ROWS || s->sets[a].n != s->sets[b].n) return ONT_ALL_ROWS;
    return intern_set(s, s->sets[a].n, s->sets[a].sources | s->sets[b].sources);
}

static void demand(ont_pack_state *s, const ont_value *v, int set)
{
    if (v) s->demands[v->id] = join(s, s->demands[v->id], set);
}

static bool same_attention_rows(const ont_node *a, const ont_node *b)
{
    static const char *const names[] = {"sizes", "batch_dims", "k", "bias", "mask", "masked_rows"};
    for (uint32_t i = ONT_ATTENTION_BIAS; i <= ONT_ATTENTION_MASKED_ROWS; i++)
        if (ont_node_in(a, i) != ont_node_in(b, i)) return false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t n, m;
        const int64_t *x = ont_attr_ints(a, names[i], &n), *y = ont_attr_ints(b, names[i], &m);
        if (n != m || (n && memcmp(x, y, n * sizeof *x))) return false;
    }
    return ont_attr_int(a, "causal", 0) == ont_attr_int(b, "causal", 0) &&
           ont_attr_int(a, "causal_offset", 0) == ont_attr_int(b, "causal_offset", 0) &&
           ont_attr_int(a, "mask_polarity", 1) == ont_attr_int(b, "mask_polarity", 1) &&
           ont_attr_int(a, "zero_nan", 0) == ont_attr_int(b, "zero_nan", 0) &&
           ont_attr_float(a, "mask_value", 0) == ont_attr_float(b, "mask_value", 0);
}

static bool same_source(const ont_row_source *a, const ont_row_source *b)
{
    if (a->rule != b->rule || a->n != b->n || a->within != b->within || a->inner != b->inner) return false;
    if (a->rule == ONT_ROWS_ATTENTION) return same_attention_rows(a->node, b->node);
    if (a->rule == ONT_ROWS_LOSS)
        return ont_node_in(a->node, 1) == ont_node_in(b->node, 1) &&
               ont_attr_int(a->node, "ignore_index", 0) == ont_attr_int(b->node, "ignore_index", 0);
    return a->node == b->node;
}

/* The set of the rows of one source; ONT_ALL_ROWS if there are too many sources. */
static int source_set(ont_pack_state *s, const ont_row_source *given)
{
    int i = 0;
    while (i < s->n_sources && !same_source(&s->sources[i], given)) i++;
    if (i == ONT_MAX_ROW_SOURCES) return ONT_ALL_ROWS;
    if (i == s->n_sources) s->sources[s->n_sources++] = *given;
    return intern_set(s, given->n, UINT64_C(1) << i);
}

/* ---- demands ---- */

/* Whether labels are those of a batch of sequences: a vector of classes has none that are ignored. */
static bool are_of_tokens(const ont_value *labels)
{
    for (; labels; labels = labels->def && labels->def->n_inputs ? labels->def->inputs[0].value : NULL)
        if (labels->shape.rank > 1) return true;
    return false;
}

static int demand_of_loss(ont_pack_state *s, const ont_node *node)
{
    const ont_value *scores = ont_node_in(node, 0), *labels = ont_node_in(node, 1);
    const char *reduction = ont_attr_string(node, "reduction", "mean");
    if (!(s->g->packed.wanted & ONT_PACK_LABELS) || scores->shape.rank != 2 || node->outputs[1]) return ONT_ALL_ROWS;
    if (!ont_attr_find(node, "ignore_index", ONT_ATTR_INT) || !strcmp(reduction, "none")) return ONT_ALL_ROWS;
    if (!are_of_tokens(labels) || !follows_cheaply(s, labels)) return ONT_ALL_ROWS;
    return source_set(s, &(ont_row_source){.rule = ONT_ROWS_LOSS, .node = node, .n = scores->shape.dims[0],
                                           .within = ONT_NO_ROWS});
}

/*
 * Whether an operand of attention is n rows, each of which holds whole rows of the operand's matrices, at a place that
 * follows from the batch dims and the row. *inner: elements of a row.
 */
static bool operand_rows(const ont_attention *a, int operand, const ont_value *v, int64_t width, int64_t n,
                         int64_t *inner)
{
    const ont_matrix_layout *layout = &a->layout[operand];
    int64_t last = layout->offset + width;
    if (ont_rows_leading(&v->shape, n) < 0 || n < 1) return false;
    *inner = ont_shape_count(&v->shape) / n;
    if (*inner < 1 || layout->row_stride % *inner) return false;
    for (int d = 0; d < a->n_batch_dims; d++) {
        if (a->batch_dims[d] == 1 || layout->batch_stride[d] % *inner == 0) continue;
        last += (a->batch_dims[d] - 1) * layout->batch_stride[d];
    }
    return last <= *inner;
}

/* Whether row i of one operand goes with row i of another. */
static bool rows_match(const ont_attention *a, int one, int64_t inner_one, int other, int64_t inner_other)
{
    const ont_matrix_layout *x = &a->layout[one], *y = &a->layout[other];
    if (x->row_stride / inner_one != y->row_stride / inner_other) return false;
    for (int d = 0; d < a->n_batch_dims; d++)
        if (a->batch_dims[d] > 1 && x->batch_stride[d] / inner_one != y->batch_stride[d] / inner_other) return false;
    return true;
}

/* Whether the mask or the bias differs between rows of the batch, so that some keys may be padding. */
static bool masks_by_batch(const ont_node *node, const ont_attention *a, int64_t inner)
{
    for (uint32_t i = ONT_ATTENTION_BIAS; i <= ONT_ATTENTION_MASK; i++) {
        const ont_value *v = ont_node_in(node, i);
        if (!v || v->data) continue;
        for (int d = 0; d < a->n_batch_dims; d++)
            if (a->layout[ONT_ATTENTION_K].batch_stride[d] >= inner && a->layout[i].batch_stride[d]) return true;
    }
    return false;
}

/* Keys are numbered as rows of K: a token each, of every sequence of the batch. */
static int demand_of_keys(ont_pack_state *s, const ont_node *node, const ont_attention *a, int operand, int64_t width)
{
    const ont_value *v = ont_node_in(node, (uint32_t)operand), *k = ont_node_in(node, ONT_ATTENTION_K);
    int64_t inner, inner_k, n = a->n_batch_dims ? a->batch_dims[0] * a->seqlen_k : 0;
    if (!(s->g->packed.wanted & ONT_PACK_KEYS) || !operand_rows(a, operand, v, width, n, &inner) ||
        !operand_rows(a, ONT_ATTENTION_K, k, a->head_dim, n, &inner_k) ||
        !rows_match(a, ONT_ATTENTION_K, inner_k, operand, inner) || !masks_by_batch(node, a, inner_k))
        return ONT_ALL_ROWS;
    for (uint32_t i = ONT_ATTENTION_BIAS; i <= ONT_ATTENTION_MASKED_ROWS; i++)
        if (!follows_cheaply(s, ont_node_in(node, i))) return ONT_ALL_ROWS;
    return source_set(s, &(ont_row_source){.rule = ONT_ROWS_ATTENTION, .node = node, .n = n, .within = ONT_NO_ROWS,
                                   .inner = inner_k});
}

static void demand_of_attention(ont_pack_state *s, const ont_node *node, int set)
{
    ont_attention a;
    int64_t inner_q, inner_y;
    const ont_value *q = ont_node_in(node, ONT_ATTENTION_Q), *y = ont_node_out(node, 0);
    for (uint32_t i = ONT_ATTENTION_BIAS; i < node->n_inputs; i++) demand(s, node->inputs[i].value, ONT_ALL_ROWS);
    bool known = ont_attention_read(node, &a) == ONT_OK && y && !ont_node_out(node, 1);
    bool match = known && set >= 0 && operand_rows(&a, ONT_ATTENTION_Q, q, a.head_dim, s->sets[set].n, &inner_q) &&
                 operand_rows(&a, ONT_ATTENTION_Y, y, a.head_dim_v, s->sets[set].n, &inner_y) &&
                 rows_match(&a, ONT_ATTENTION_Q, inner_q, ONT_ATTENTION_Y, inner_y);
    demand(s, q, match ? set : ONT_ALL_ROWS);
    for (int i = ONT_ATTENTION_K; i <= ONT_ATTENTION_V; i++)
        demand(s, ont_node_in(node, (uint32_t)i),
               known ? demand_of_keys(s, node, &a, i, i == ONT_ATTENTION_K ? a.head_dim : a.head_dim_v) : ONT_ALL_ROWS);
}

static int demand_of_selection(ont_pack_state *s, const ont_node *node, int set)
{
    int64_t n, m;
    if (!(s->g->packed.wanted & ONT_PACK_SELECTED) || !ont_rows_is_selection(node, &n, &m) || n < 2)
        return ONT_ALL_ROWS;
    const ont_value *y = ont_node_out(node, 0);
    int within = set >= 0 && s->sets[set].n == m && ont_rows_leading(&y->shape, m) > 0 ? set : ONT_NO_ROWS;
    if (within < 0 && 10 * m >= 9 * n) return ONT_ALL_ROWS;
    if (!follows_cheaply(s, ont_node_in(node, 1))) return ONT_ALL_ROWS;
    return source_set(s, &(ont_row_source){.rule = node->op->rows, .node = node, .n = n, .within = within});
}

static void demand_of_inputs(ont_pack_state *s, const ont_node *node)
{
    int set = ONT_NO_ROWS;
    ont_row_reads read[64];
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) set = join(s, set, s->demands[node->outputs[i]->id]);
    if (set == ONT_NO_ROWS) return;
    if (node->op->rows == ONT_ROWS_ATTENTION) {
        demand_of_attention(s, node, set);
        return;
    }
    bool rule = set >= 0 && node->n_inputs <= 64 && ont_node_out(node, 0);
    if (rule) rule = ont_rows_apply_rule(node, node->outputs[0], s->sets[set].n, read);
    if (rule) s->accepted[node->id] = set;
    int first = rule ? ONT_NO_ROWS : node->op->rows == ONT_ROWS_LOSS ? demand_of_loss(s, node)
                                                                : demand_of_selection(s, node, set);
    for (uint32_t i = 0; i < node->n_inputs; i++)
        demand(s, node->inputs[i].value,
               rule ? (read[i] == ONT_READS_ROWS ? set : ONT_ALL_ROWS) : i ? ONT_ALL_ROWS : first);
}

/* ---- counts ---- */

/* An upper bound of the number of rows that follows from shapes; -1: it depends on data. */
static int64_t static_bound(const ont_pack_state *s, const ont_row_set *set)
{
    int64_t total = 0;
    for (int i = 0; i < s->n_sources; i++) {
        const ont_row_source *x = &s->sources[i];
        int64_t n, m;
        if (!(set->sources >> i & 1)) continue;
        if (x->rule == ONT_ROWS_LOSS || x->rule == ONT_ROWS_ATTENTION || !ont_rows_is_selection(x->node, &n, &m))
            return -1;
        int64_t bound = x->within >= 0 ? static_bound(s, &s->sets[x->within]) : m;
        if (bound < 0) return -1;
        total += bound;
    }
    return total < set->n ? total : set->n;
}

/* The number of rows of a set that does not depend on data; all, where it would not pay to leave the others out. */
static int64_t static_count(const ont_pack_state *s, const ont_row_set *set, int64_t bound)
{
    int64_t count = bound * 10 >= 9 * set->n ? ont_rows_bucket(bound, set->n) : bound ? bound : 1;
    double saving = set->cost * (double)(set->n - count) / (double)set->n;
    return s->g->device && !s->forced && saving < MIN_DEVICE_SAVING ? set->n : count;
}

static void add_costs(ont_pack_state *s)
{
    for (const ont_node *node = s->g->first; node; node = node->next) {
        int set = s->accepted[node->id];
        if (set < 0) continue;
        double cost = ont_node_cost(node);
        s->sets[set].cost += cost;
        if (node->op->rows == ONT_ROWS_MATMUL) s->sets[set].products += cost;
    }
}

/*
 * Sets the counts of all sets. Those that depend on data are taken from `known`; if it lacks them, they are required
 * of a probe.
 */
static ont_status count_rows(ont_pack_state *s, ont_known_values *known)
{
    ont_graph *g = s->g;
    double total = ont_graph_cost(g);
    ont_builder b = {.graph = g, .before = s->front, .status = ONT_OK};
    uint32_t n = 0;
    double counted = 0;
    for (int i = 0; i < s->n_sets; i++) {
        ont_row_set *x = &s->sets[i];
        int64_t bound = static_bound(s, x);
        x->count = bound < 0 || !x->products ? x->n : static_count(s, x, bound);
        x->counted = bound < 0 && x->products > 0;
        if (x->counted) counted += x->cost;
    }
    bool worth = s->forced || (counted >= MIN_SHARE * total && counted >= (g->device ? MIN_DEVICE_COST : MIN_COST));
    ont_value **counts = ont_arena_array(&g->arena, (size_t)s->n_sets + 1, sizeof *counts);
    if (!counts) return ONT_ENOMEM;
    for (int i = 0; i < s->n_sets; i++) n += s->sets[i].counted && worth;
    bool ask = n && known->used == known->n;
    if (n && !ask && known->used + n > known->n) return ont_fail(ONT_EINTERNAL, "a probe of counts is incomplete");
    for (int i = 0, at = 0; i < s->n_sets && n; i++) {
        ont_row_set *x = &s->sets[i];
        if (!x->counted) continue;
        if (ask) {
            ont_value *marks = ont_pack_build_marks(s, &b, i);
            b.before = s->front;
            counts[at++] = marks ? ont_build1(&b, "ours:CountRows", marks) : NULL;
        } else {
            const ont_tensor *value = &known->tensors[known->used++];
            if (value->dtype != ONT_INT64 || value->bytes != sizeof(int64_t))
                return ont_fail(ONT_EINTERNAL, "a probe of a count has another type");
            x->count = *(const int64_t *)value->data;
        }
    }
    ONT_TRY(b.status);
    known->required = counts;
    known->n_required = ask ? n : 0;
    return ONT_OK;
}

/* A set that is contained in another one of about its size is computed as that one, which saves packing it again. */
static void choose_packing(ont_pack_state *s)
{
    for (int i = 0; i < s->n_sets; i++) {
        ont_row_set *x = &s->sets[i];
        if (x->count * 10 >= x->n * 9) continue;
        x->packed_as = i;
        for (int k = 0; k < s->n_sets; k++) {
            const ont_row_set *y = &s->sets[k], *chosen = &s->sets[x->packed_as];
            bool contains = y->n == x->n && (y->sources & x->sources) == x->sources && y->products > 0;
            if (contains && y->count * 10 < y->n * 9 && y->count * 100 <= x->count * 115 &&
                __builtin_popcountll(y->sources) > __builtin_popcountll(chosen->sources))
                x->packed_as = k;
        }
    }
}

static void add_statistics(ont_pack_state *s)
{
    for (int i = 0; i < s->n_sets; i++) {
        const ont_row_set *x = &s->sets[i];
        if (!x->rows) continue;
        int kind = 0; /* as the bits of ONT_PACK_ */
        for (int k = 0; k < s->n_sources; k++) {
            if (!(x->sources >> k & 1)) continue;
            if (s->sources[k].rule == ONT_ROWS_LOSS && kind < 1) kind = 1;
            if (s->sources[k].rule == ONT_ROWS_ATTENTION) kind = 2;
        }
        if (x->n < s->g->packed.rows[kind][1]) continue;
        s->g->packed.rows[kind][0] = x->count;
        s->g->packed.rows[kind][1] = x->n;
    }
}

ont_status ont_pass_pack_rows(ont_graph *g, ont_known_values *known)
{
    ont_pack_state s = {.g = g, .n_values = g->n_values, .n_nodes = g->n_nodes, .front = g->first,
               .forced = ont_pass_is_forced("pack_rows")};
    known->n_required = 0;
    if (!g->packed.wanted || !g->first) return ONT_OK;
    s.demands = ont_arena_array(&g->arena, s.n_values + 1, sizeof *s.demands);
    s.accepted = ont_arena_array(&g->arena, s.n_nodes + 1, sizeof *s.accepted);
    s.packed = ont_arena_array(&g->arena, s.n_values + 1, sizeof *s.packed);
    s.whole = ont_arena_array(&g->arena, s.n_values + 1, sizeof *s.whole);
    if (!s.demands || !s.accepted || !s.packed || !s.whole) return ONT_ENOMEM;
    for (uint32_t i = 0; i < s.n_values; i++) s.demands[i] = ONT_NO_ROWS;
    for (uint32_t i = 0; i < s.n_nodes; i++) s.accepted[i] = ONT_NO_ROWS;
    for (uint32_t i = 0; i < g->n_outputs; i++) s.demands[g->outputs[i]->id] = ONT_ALL_ROWS;
    for (const ont_node *node = g->last; node; node = node->prev) demand_of_inputs(&s, node);
    if (!s.n_sets) return ONT_OK;
    add_costs(&s);
    ONT_TRY(count_rows(&s, known));
    if (known->n_required) return ONT_OK;
    choose_packing(&s);
    ONT_TRY(ont_pack_rewrite(&s));
    add_statistics(&s);
    return ont_pass_dce(g);
}
