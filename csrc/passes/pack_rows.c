/*
 * Rows that nobody reads are not computed. Rows are the entries of a value's leading dims, flattened: the tokens of a
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
 *    packed where a packed node reads a whole value, and unpacked in front of attention, which runs on all of them:
 *    probabilities of keys without a row are 0, and the results of queries without a row have no reader.
 *
 * Everything behind is exact: left-out rows have gradient 0, since nobody reads them. Dropout draws for each element
 * the word of its place before packing, so that the noise does not change.
 */
#include "passes/pack_rows.h"

#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "ops/attention/fused_attention.h"
#include "ops/index/rows.h"
#include "ops/random/random.h"
#include "passes/pipeline.h"
#include "passes/recompute.h"

enum { MAX_SOURCES = 64, MAX_SETS = 96, MAX_ANCESTORS = 400, NO_SET = -1, ALL_ROWS = -2 };
/* Counting rows takes a probe at each call: it is not worth it for less of the forward's cost, in its share and in
 * operations. */
#define MIN_SHARE 0.02
#define MIN_COST 3e8

/* Where a demand for some rows begins. */
typedef struct source {
    ont_row_rule rule;   /* ONT_ROWS_LOSS, ONT_ROWS_ATTENTION, or one of a selection */
    const ont_node *node;
    int64_t n;           /* rows that there are */
    int within;          /* a selection of which only this set is read; NO_SET */
    int64_t inner;       /* elements of a row of attention's K */
    ont_value *marks;    /* bool (n), built on demand */
    ont_value *numbers;  /* of a selection: the row that each of its rows is */
} source;

typedef struct row_set {
    int64_t n;
    uint64_t sources;    /* bits */
    int64_t count;       /* rows to compute; n: all of them */
    bool counted;        /* the count depends on data */
    double cost, products; /* of the nodes that it would shrink; that of matmuls alone */
    int packed_as;       /* the set whose rows are computed: itself or a superset of about its size; NO_SET: all rows */
    ont_value *marks, *rows, *inverse;
} row_set;

typedef struct packed {
    ont_value *value;
    int set;
} packed;

typedef struct state {
    ont_graph *g;
    uint32_t n_values, n_nodes;
    int *demands;        /* per value: a set, NO_SET (nothing) or ALL_ROWS */
    int *accepted;       /* per node: the set that it can be computed for, or NO_SET */
    packed *packed;      /* per value */
    ont_value **whole;   /* per value: its packed form, unpacked */
    source sources[MAX_SOURCES];
    int n_sources;
    row_set sets[MAX_SETS];
    int n_sets;
    ont_node *front;     /* first node of the graph as it was */
    bool forced;
} state;

/* ---- rows of a shape ---- */

/* The number of leading dims that make n rows; -1: there are none. */
static int leading(const ont_shape *shape, int64_t n)
{
    int64_t product = 1;
    for (int d = 0; d < shape->rank; d++)
        if ((product *= shape->dims[d]) == n) return d + 1;
    return -1;
}

static ont_shape packed_shape(const ont_shape *shape, int64_t n, int64_t rows)
{
    ont_shape result = *shape;
    int p = leading(shape, n);
    for (int d = 0; d < p; d++) result.dims[d] = d ? 1 : rows;
    return result;
}

/* ---- rules: what a node reads for n rows of its result ---- */

typedef enum reads { READS_WHOLE, READS_ROWS, READS_BROADCAST } reads;

/* How an operand that broadcasts to `out`, whose leading p dims are rows, is read. */
static reads broadcast_reads(const ont_shape *in, const ont_shape *out, int p)
{
    bool ones = true, same = true;
    for (int d = 0; d < p; d++) {
        int at = d - (out->rank - in->rank);
        int64_t dim = at < 0 ? 1 : in->dims[at];
        ones &= dim == 1;
        same &= dim == out->dims[d];
    }
    return same ? READS_ROWS : ones ? READS_WHOLE : READS_BROADCAST;
}

/* Whether `axes` of the node, from input 1 or the attribute, are known and behind the first p of `rank` dims. */
static bool axes_behind(const ont_node *node, int rank, int p)
{
    int64_t axes[ONT_MAX_RANK];
    int n, axis;
    if (ont_const_ints(node, 1, "axes", axes, ONT_MAX_RANK, &n) != ONT_OK || n <= 0) return false;
    for (int i = 0; i < n; i++)
        if (ont_shape_axis(axes[i], rank, &axis) != ONT_OK || axis < p) return false;
    return true;
}

static bool axis_of(const ont_node *node, int64_t otherwise, int rank, int *axis)
{
    return ont_shape_axis(ont_attr_int(node, "axis", otherwise), rank, axis) == ONT_OK;
}

/* Whether a Slice keeps the first p dims as they are: all of it does, or its axes lie behind them. */
static bool slices_behind(const ont_node *node, const ont_shape *x, const ont_shape *y, int p)
{
    int64_t steps[ONT_MAX_RANK], axes[ONT_MAX_RANK];
    int n, axis;
    if (ont_const_ints(node, 4, "steps", steps, ONT_MAX_RANK, &n) != ONT_OK) return false;
    for (int i = 0; i < n; i++)
        if (steps[i] < 0) return false;
    if (ont_shape_equal(x, y)) return true;
    if (ont_const_ints(node, 3, "axes", axes, ONT_MAX_RANK, &n) != ONT_OK || n < 0) return false;
    for (int i = 0; i < n; i++)
        if (ont_shape_axis(axes[i], x->rank, &axis) != ONT_OK || axis < p) return false;
    return true;
}

static bool is_product_of_rows(const ont_node *node, int p)
{
    const ont_value *a = ont_node_in(node, 0), *b = ont_node_in(node, 1), *c = ont_node_in(node, 2);
    if (a->shape.rank < 2 || b->shape.rank != 2 || ont_attr_int(node, "transA", 0) || p >= a->shape.rank) return false;
    return !c || c->shape.rank < 2 || ont_shape_count_range(&c->shape, 0, c->shape.rank - 1) == 1;
}

static bool rows_of_transpose(const ont_node *node, int p)
{
    size_t n;
    const int64_t *perm = ont_attr_ints(node, "perm", &n);
    for (int d = 0; d < p; d++)
        if (!perm || d >= (int)n || perm[d] != d) return false;
    return true;
}

/* Fills `read` for n rows of `out`, an output of the node; false if they cannot be computed alone. */
static bool apply_rule(const ont_node *node, const ont_value *out, int64_t n, reads *read)
{
    const ont_value *x = ont_node_in(node, 0);
    int p = leading(&out->shape, n), axis;
    for (uint32_t i = 0; i < node->n_inputs; i++) read[i] = READS_WHOLE;
    if (p < 0 || !x) return false;
    const ont_value *index = ont_node_in(node, 1);
    switch (node->op->rows) {
    case ONT_ROWS_ELEMENTWISE:
        for (uint32_t i = 0; i < node->n_inputs; i++)
            if (node->inputs[i].value) read[i] = broadcast_reads(&node->inputs[i].value->shape, &out->shape, p);
        return true;
    case ONT_ROWS_EXPAND:
        read[0] = broadcast_reads(&x->shape, &out->shape, p);
        return x->shape.rank <= out->shape.rank;
    case ONT_ROWS_DROPOUT:
        read[0] = READS_ROWS;
        return !ont_node_out(node, 1) || (!node->outputs[1]->uses);
    case ONT_ROWS_VIEW:
        read[0] = READS_ROWS;
        return leading(&x->shape, n) > 0;
    case ONT_ROWS_NORM:
        read[0] = READS_ROWS;
        for (uint32_t i = 1; i < node->n_outputs; i++)
            if (node->outputs[i]) return false;
        return axis_of(node, -1, x->shape.rank, &axis) && axis >= p && ont_attr_find(node, "axis", ONT_ATTR_INT);
    case ONT_ROWS_MATMUL:
        read[0] = READS_ROWS;
        return is_product_of_rows(node, p);
    case ONT_ROWS_REDUCE:
        read[0] = READS_ROWS;
        return leading(&x->shape, n) == p && axes_behind(node, x->shape.rank, p);
    case ONT_ROWS_GATHER:
        if (!axis_of(node, 0, x->shape.rank, &axis)) return false;
        read[axis ? 0 : 1] = READS_ROWS;
        return axis ? p <= axis : p <= index->shape.rank;
    case ONT_ROWS_SLICE:
        read[0] = READS_ROWS;
        return slices_behind(node, &x->shape, &out->shape, p);
    case ONT_ROWS_CONCAT:
        for (uint32_t i = 0; i < node->n_inputs; i++) read[i] = READS_ROWS;
        return axis_of(node, 0, x->shape.rank, &axis) && axis >= p;
    case ONT_ROWS_SPLIT:
        read[0] = READS_ROWS;
        return axis_of(node, 0, x->shape.rank, &axis) && axis >= p;
    case ONT_ROWS_TRANSPOSE:
        read[0] = READS_ROWS;
        return rows_of_transpose(node, p);
    default: return false;
    }
}

/* ---- selections ---- */

/*
 * Whether the node selects rows of input 0: *n of them there are, of which its result has *m. Integers are not worth
 * it: they are indices.
 */
static bool is_selection(const ont_node *node, int64_t *n, int64_t *m)
{
    const ont_value *x = ont_node_in(node, 0), *y = ont_node_out(node, 0), *index = ont_node_in(node, 1);
    if (!x || !y || !ont_dtype_is_float(x->dtype)) return false;
    int axis = -1, rank = x->shape.rank;
    if (node->op->rows == ONT_ROWS_GATHER && axis_of(node, 0, rank, &axis)) {
        *n = ont_shape_count_range(&x->shape, 0, axis + 1);
        *m = ont_shape_count_range(&x->shape, 0, axis) * ont_shape_count(&index->shape);
        return true;
    }
    if (node->op->rows == ONT_ROWS_GATHER_ND && index->shape.rank) {
        int64_t k = index->shape.dims[index->shape.rank - 1], dims = ont_attr_int(node, "batch_dims", 0) + k;
        if (dims < 1 || dims > rank || !k) return false;
        *n = ont_shape_count_range(&x->shape, 0, (int)dims);
        *m = ont_shape_count(&index->shape) / k;
        return true;
    }
    if (node->op->rows != ONT_ROWS_SLICE) return false;
    for (int d = 0; d < rank; d++)
        if (x->shape.dims[d] != y->shape.dims[d]) axis = d;
    if (axis < 0) return false;
    *n = ont_shape_count_range(&x->shape, 0, axis + 1);
    *m = ont_shape_count_range(&y->shape, 0, axis + 1);
    return true;
}

/* The dims of the node's input 0 that are rows of the selection. */
static ont_shape rows_dims(const ont_node *node, int64_t n)
{
    ont_shape shape = ont_node_in(node, 0)->shape;
    int64_t product = 1;
    int d = 0;
    while (d < shape.rank && (product *= shape.dims[d]) != n) d++;
    for (d++; d < shape.rank; d++) shape.dims[d] = 1;
    return shape;
}

/* ---- sources and sets ---- */

/* Whether a value follows cheaply from inputs of the graph, without random numbers. */
static bool is_cheap(const ont_node *node, int *budget, double *cost)
{
    if (--*budget < 0 || node->op->flags & ONT_OP_RANDOM || node->op->rows == ONT_ROWS_MATMUL ||
        node->op->rows == ONT_ROWS_ATTENTION || node->op->rows == ONT_ROWS_NORM)
        return false;
    *cost += ont_recompute_node_cost(node);
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        if (v && v->kind == ONT_VALUE_NODE && !is_cheap(v->def, budget, cost)) return false;
    }
    return true;
}

static bool follows_cheaply(const state *s, const ont_value *v)
{
    int budget = MAX_ANCESTORS;
    double cost = 0;
    if (!v || v->kind != ONT_VALUE_NODE) return true;
    return is_cheap(v->def, &budget, &cost) && (s->forced || cost <= 0.05 * ont_recompute_graph_cost(s->g));
}

static int intern_set(state *s, int64_t n, uint64_t sources)
{
    for (int i = 0; i < s->n_sets; i++)
        if (s->sets[i].n == n && s->sets[i].sources == sources) return i;
    if (s->n_sets == MAX_SETS) return ALL_ROWS;
    s->sets[s->n_sets] = (row_set){.n = n, .sources = sources, .packed_as = NO_SET};
    return s->n_sets++;
}

static int join(state *s, int a, int b)
{
    if (a == NO_SET || a == b) return b;
    if (b == NO_SET) return a;
    if (a == ALL_ROWS || b == ALL_ROWS || s->sets[a].n != s->sets[b].n) return ALL_ROWS;
    return intern_set(s, s->sets[a].n, s->sets[a].sources | s->sets[b].sources);
}

static void demand(state *s, const ont_value *v, int set)
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

static bool same_source(const source *a, const source *b)
{
    if (a->rule != b->rule || a->n != b->n || a->within != b->within || a->inner != b->inner) return false;
    if (a->rule == ONT_ROWS_ATTENTION) return same_attention_rows(a->node, b->node);
    if (a->rule == ONT_ROWS_LOSS)
        return ont_node_in(a->node, 1) == ont_node_in(b->node, 1) &&
               ont_attr_int(a->node, "ignore_index", 0) == ont_attr_int(b->node, "ignore_index", 0);
    return a->node == b->node;
}

/* The set of the rows of one source; ALL_ROWS if there are too many sources. */
static int source_set(state *s, const source *given)
{
    int i = 0;
    while (i < s->n_sources && !same_source(&s->sources[i], given)) i++;
    if (i == MAX_SOURCES) return ALL_ROWS;
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

static int demand_of_loss(state *s, const ont_node *node)
{
    const ont_value *scores = ont_node_in(node, 0), *labels = ont_node_in(node, 1);
    const char *reduction = ont_attr_string(node, "reduction", "mean");
    if (!(s->g->packed.wanted & ONT_PACK_LABELS) || scores->shape.rank != 2 || node->outputs[1]) return ALL_ROWS;
    if (!ont_attr_find(node, "ignore_index", ONT_ATTR_INT) || !strcmp(reduction, "none")) return ALL_ROWS;
    if (!are_of_tokens(labels) || !follows_cheaply(s, labels)) return ALL_ROWS;
    return source_set(s, &(source){.rule = ONT_ROWS_LOSS, .node = node, .n = scores->shape.dims[0], .within = NO_SET});
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
    if (leading(&v->shape, n) < 0 || n < 1) return false;
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
static int demand_of_keys(state *s, const ont_node *node, const ont_attention *a, int operand, int64_t width)
{
    const ont_value *v = ont_node_in(node, (uint32_t)operand), *k = ont_node_in(node, ONT_ATTENTION_K),
                    *bias = ont_node_in(node, ONT_ATTENTION_BIAS);
    int64_t inner, inner_k, n = a->n_batch_dims ? a->batch_dims[0] * a->seqlen_k : 0;
    if (!(s->g->packed.wanted & ONT_PACK_KEYS) || !operand_rows(a, operand, v, width, n, &inner) ||
        !operand_rows(a, ONT_ATTENTION_K, k, a->head_dim, n, &inner_k) ||
        !rows_match(a, ONT_ATTENTION_K, inner_k, operand, inner) || !masks_by_batch(node, a, inner_k))
        return ALL_ROWS;
    if (bias && bias->dtype != ONT_FLOAT32 && bias->dtype != ONT_FLOAT64) return ALL_ROWS;
    for (uint32_t i = ONT_ATTENTION_BIAS; i <= ONT_ATTENTION_MASKED_ROWS; i++)
        if (!follows_cheaply(s, ont_node_in(node, i))) return ALL_ROWS;
    return source_set(s, &(source){.rule = ONT_ROWS_ATTENTION, .node = node, .n = n, .within = NO_SET,
                                   .inner = inner_k});
}

static void demand_of_attention(state *s, const ont_node *node, int set)
{
    ont_attention a;
    int64_t inner_q, inner_y;
    const ont_value *q = ont_node_in(node, ONT_ATTENTION_Q), *y = ont_node_out(node, 0);
    for (uint32_t i = ONT_ATTENTION_BIAS; i < node->n_inputs; i++) demand(s, node->inputs[i].value, ALL_ROWS);
    bool known = ont_attention_read(node, &a) == ONT_OK && y && !ont_node_out(node, 1);
    bool match = known && set >= 0 && operand_rows(&a, ONT_ATTENTION_Q, q, a.head_dim, s->sets[set].n, &inner_q) &&
                 operand_rows(&a, ONT_ATTENTION_Y, y, a.head_dim_v, s->sets[set].n, &inner_y) &&
                 rows_match(&a, ONT_ATTENTION_Q, inner_q, ONT_ATTENTION_Y, inner_y);
    demand(s, q, match ? set : ALL_ROWS);
    for (int i = ONT_ATTENTION_K; i <= ONT_ATTENTION_V; i++)
        demand(s, ont_node_in(node, (uint32_t)i),
               known ? demand_of_keys(s, node, &a, i, i == ONT_ATTENTION_K ? a.head_dim : a.head_dim_v) : ALL_ROWS);
}

static int demand_of_selection(state *s, const ont_node *node, int set)
{
    int64_t n, m;
    if (!(s->g->packed.wanted & ONT_PACK_SELECTED) || !is_selection(node, &n, &m) || n < 2) return ALL_ROWS;
    const ont_value *y = ont_node_out(node, 0);
    int within = set >= 0 && s->sets[set].n == m && leading(&y->shape, m) > 0 ? set : NO_SET;
    if (within < 0 && 10 * m >= 9 * n) return ALL_ROWS;
    if (!follows_cheaply(s, ont_node_in(node, 1))) return ALL_ROWS;
    return source_set(s, &(source){.rule = node->op->rows, .node = node, .n = n, .within = within});
}

static void demand_of_inputs(state *s, const ont_node *node)
{
    int set = NO_SET;
    reads read[64];
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) set = join(s, set, s->demands[node->outputs[i]->id]);
    if (set == NO_SET) return;
    if (node->op->rows == ONT_ROWS_ATTENTION) {
        demand_of_attention(s, node, set);
        return;
    }
    bool rule = set >= 0 && node->n_inputs <= 64 && ont_node_out(node, 0);
    if (rule) rule = apply_rule(node, node->outputs[0], s->sets[set].n, read);
    if (rule) s->accepted[node->id] = set;
    int first = rule ? NO_SET : node->op->rows == ONT_ROWS_LOSS ? demand_of_loss(s, node)
                                                                : demand_of_selection(s, node, set);
    for (uint32_t i = 0; i < node->n_inputs; i++)
        demand(s, node->inputs[i].value, rule ? (read[i] == READS_ROWS ? set : ALL_ROWS) : i ? ALL_ROWS : first);
}

/* ---- counts ---- */

/* An upper bound of the number of rows that follows from shapes; -1: it depends on data. */
static int64_t static_bound(const state *s, const row_set *set)
{
    int64_t total = 0;
    for (int i = 0; i < s->n_sources; i++) {
        const source *x = &s->sources[i];
        int64_t n, m;
        if (!(set->sources >> i & 1)) continue;
        if (x->rule == ONT_ROWS_LOSS || x->rule == ONT_ROWS_ATTENTION || !is_selection(x->node, &n, &m)) return -1;
        int64_t bound = x->within >= 0 ? static_bound(s, &s->sets[x->within]) : m;
        if (bound < 0) return -1;
        total += bound;
    }
    return total < set->n ? total : set->n;
}

static void add_costs(state *s)
{
    for (const ont_node *node = s->g->first; node; node = node->next) {
        int set = s->accepted[node->id];
        if (set < 0) continue;
        double cost = ont_recompute_node_cost(node);
        s->sets[set].cost += cost;
        if (node->op->rows == ONT_ROWS_MATMUL) s->sets[set].products += cost;
    }
}

/* The nodes that v is computed by, moved to the front of the graph in their order. */
static void move_to_front(state *s, ont_value *v)
{
    if (!v || v->kind != ONT_VALUE_NODE || v->def->id >= s->n_nodes || s->accepted[v->def->id] == ALL_ROWS) return;
    ont_node *node = v->def;
    for (uint32_t i = 0; i < node->n_inputs; i++) move_to_front(s, node->inputs[i].value);
    s->accepted[node->id] = ALL_ROWS; /* moved: its result is read whole */
    if (node == s->front)
        s->front = node->next;
    else
        ont_graph_move_before(s->g, node, s->front);
}

static ont_value *constant(ont_builder *b, ont_dtype dtype, const ont_shape *shape, const void *data)
{
    ont_value *v = NULL;
    size_t bytes;
    if (b->status == ONT_OK) b->status = ont_shape_bytes(shape, dtype, &bytes);
    if (b->status == ONT_OK)
        b->status = ont_graph_add_constant(b->graph, NULL, &(ont_tensor){dtype, *shape, bytes, (void *)data}, &v);
    return b->status == ONT_OK ? v : NULL;
}

static ont_value *vector(ont_builder *b, ont_value *v)
{
    return v ? ont_build_reshape(b, v, &(ont_shape){1, {ont_shape_count(&v->shape)}}) : NULL;
}

/* The node again with other inputs; *clone (may be NULL) receives it. */
static ont_value *clone_node(ont_builder *b, const ont_node *node, ont_value *const *inputs, ont_node **clone)
{
    for (uint32_t i = 0; i < node->n_inputs && b->status == ONT_OK; i++)
        if (node->inputs[i].value && !inputs[i]) return NULL;
    ont_node *copy = ont_build_node(b, node->domain, node->op_type, inputs, node->n_inputs, node->n_outputs);
    if (!copy) return NULL;
    copy->op = node->op;
    copy->version = node->version;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (!node->outputs[i]) copy->outputs[i] = NULL;
    b->status = ont_attr_copy_all(b->graph, copy, node);
    if (clone) *clone = copy;
    return ont_build_done(b, copy);
}

/* For each row of a selection's result, the number of the row of its input 0. */
static ont_value *build_numbers(ont_builder *b, source *x)
{
    if (x->numbers) return x->numbers;
    const ont_node *node = x->node;
    ont_shape shape = rows_dims(node, x->n);
    int64_t *numbers = ont_arena_array(&b->graph->arena, (size_t)x->n + 1, sizeof *numbers);
    ont_value **inputs = ont_arena_array(&b->graph->arena, node->n_inputs + 1, sizeof *inputs);
    if (!numbers || !inputs) {
        b->status = ONT_ENOMEM;
        return NULL;
    }
    for (int64_t i = 0; i < x->n; i++) numbers[i] = i;
    for (uint32_t i = 0; i < node->n_inputs; i++) inputs[i] = node->inputs[i].value;
    inputs[0] = constant(b, ONT_INT64, &shape, numbers);
    return x->numbers = vector(b, clone_node(b, node, inputs, NULL));
}

static ont_value *build_set_marks(state *s, ont_builder *b, int set);

static ont_value *build_visible(ont_builder *b, const source *x)
{
    ont_value *inputs[ONT_ATTENTION_INPUTS] = {NULL};
    for (uint32_t i = ONT_ATTENTION_BIAS; i < ONT_ATTENTION_INPUTS; i++) inputs[i] = ont_node_in(x->node, i);
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "VisibleKeys", inputs, ONT_ATTENTION_INPUTS, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "inner", x->inner);
    if (b->status == ONT_OK && node) b->status = ont_attr_set_int(b->graph, node, "n", x->n);
    if (b->status == ONT_OK && node) b->status = ont_attr_copy_all(b->graph, node, x->node);
    return ont_build_done(b, node);
}

static ont_value *build_marks(state *s, ont_builder *b, source *x)
{
    if (x->marks) return x->marks;
    if (x->rule == ONT_ROWS_ATTENTION) {
        for (uint32_t i = ONT_ATTENTION_BIAS; i < x->node->n_inputs; i++) move_to_front(s, x->node->inputs[i].value);
        b->before = s->front;
        return x->marks = build_visible(b, x);
    }
    if (x->rule == ONT_ROWS_LOSS) {
        ont_value *labels = ont_node_in(x->node, 1);
        move_to_front(s, labels);
        b->before = s->front;
        ont_value *ignored = ont_build_scalar(b, labels->dtype, (double)ont_attr_int(x->node, "ignore_index", 0));
        return x->marks = ont_build1(b, "Not", ont_build2(b, "Equal", vector(b, labels), ignored));
    }
    for (uint32_t i = 1; i < x->node->n_inputs; i++) move_to_front(s, x->node->inputs[i].value);
    b->before = s->front;
    ont_value *inputs[] = {build_numbers(b, x), x->within < 0 ? NULL : build_set_marks(s, b, x->within)};
    if (b->status != ONT_OK) return NULL;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "MarkRows", inputs, x->within < 0 ? 1 : 2, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "n", x->n);
    return x->marks = ont_build_done(b, node);
}

static ont_value *build_set_marks(state *s, ont_builder *b, int set)
{
    row_set *x = &s->sets[set];
    for (int i = 0; i < s->n_sources && !x->marks; i++)
        if (x->sources == UINT64_C(1) << i) x->marks = build_marks(s, b, &s->sources[i]);
    if (x->marks) return x->marks;
    ont_value *marks = NULL;
    for (int i = 0; i < s->n_sources && b->status == ONT_OK; i++) {
        if (!(x->sources >> i & 1)) continue;
        ont_value *more = build_marks(s, b, &s->sources[i]);
        b->before = s->front;
        marks = marks ? ont_build2(b, "Or", marks, more) : more;
    }
    return x->marks = marks;
}

/*
 * Sets the counts of all sets. Those that depend on data are taken from `known`; if it lacks them, they are required
 * of a probe.
 */
static ont_status count_rows(state *s, ont_known_values *known)
{
    ont_graph *g = s->g;
    double total = ont_recompute_graph_cost(g);
    ont_builder b = {.graph = g, .before = s->front, .status = ONT_OK};
    uint32_t n = 0;
    double counted = 0;
    for (int i = 0; i < s->n_sets; i++) {
        row_set *x = &s->sets[i];
        int64_t bound = static_bound(s, x);
        x->count = bound < 0 ? x->n : ont_rows_bucket(bound, x->n);
        if (bound >= 0 && bound * 10 < 9 * x->n) x->count = bound ? bound : 1;
        if (!x->products) x->count = x->n;
        x->counted = bound < 0 && x->products > 0;
        if (x->counted) counted += x->cost;
    }
    bool worth = s->forced || (counted >= MIN_SHARE * total && counted >= MIN_COST);
    ont_value **counts = ont_arena_array(&g->arena, (size_t)s->n_sets + 1, sizeof *counts);
    if (!counts) return ONT_ENOMEM;
    for (int i = 0; i < s->n_sets; i++) n += s->sets[i].counted && worth;
    bool ask = n && known->used == known->n;
    if (n && !ask && known->used + n > known->n) return ont_fail(ONT_EINTERNAL, "a probe of counts is incomplete");
    for (int i = 0, at = 0; i < s->n_sets && n; i++) {
        row_set *x = &s->sets[i];
        if (!x->counted) continue;
        if (ask) {
            ont_value *marks = build_set_marks(s, &b, i);
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
static void choose_packing(state *s)
{
    for (int i = 0; i < s->n_sets; i++) {
        row_set *x = &s->sets[i];
        if (x->count * 10 >= x->n * 9) continue;
        x->packed_as = i;
        for (int k = 0; k < s->n_sets; k++) {
            const row_set *y = &s->sets[k], *chosen = &s->sets[x->packed_as];
            bool contains = y->n == x->n && (y->sources & x->sources) == x->sources && y->products > 0;
            if (contains && y->count * 10 < y->n * 9 && y->count * 100 <= x->count * 115 &&
                __builtin_popcountll(y->sources) > __builtin_popcountll(chosen->sources))
                x->packed_as = k;
        }
    }
}

/* ---- rewriting ---- */

static const row_set *build_set(state *s, ont_builder *b, int set)
{
    row_set *x = &s->sets[set];
    if (x->rows || b->status != ONT_OK) return x;
    ont_node *before = b->before;
    ont_value *marks = build_set_marks(s, b, set);
    b->before = s->front;
    const char *scope = b->scope;
    b->scope = NULL;
    ont_node *node = marks ? ont_build_node(b, ONT_DOMAIN, "SelectRows", &marks, 1, 2) : NULL;
    if (node) b->status = ont_attr_set_int(b->graph, node, "count", x->count);
    x->rows = ont_build_done(b, node);
    if (x->rows) x->inverse = node->outputs[1];
    b->before = before;
    b->scope = scope;
    return x;
}

static ont_value *build_pack(ont_builder *b, const char *op_type, ont_value *v, ont_value *rows, ont_value *inverse,
                             const ont_shape *shape)
{
    ont_value *inputs[] = {v, rows, inverse};
    if (b->status != ONT_OK || !v || !rows || !inverse) return NULL;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, op_type, inputs, 3, 1);
    if (node) b->status = ont_attr_set_ints(b->graph, node, "shape", shape->dims, (size_t)shape->rank);
    return ont_build_done(b, node);
}

/* Rows of `v` in the set, as (count, 1, ..., rest). */
static ont_value *packed_value(state *s, ont_builder *b, ont_value *v, int set)
{
    const row_set *x = build_set(s, b, set);
    packed *have = v->id < s->n_values ? &s->packed[v->id] : NULL;
    if (b->status != ONT_OK) return NULL;
    if (have && have->value && have->set == set) return have->value;
    ont_shape shape = packed_shape(&v->shape, x->n, x->count);
    if (!have || !have->value) return build_pack(b, "PackRows", v, x->rows, x->inverse, &shape);
    const row_set *y = build_set(s, b, have->set);
    ont_value *inputs[] = {y->rows, y->inverse, x->rows, x->inverse};
    if (b->status != ONT_OK) return NULL;
    ont_node *within = ont_build_node(b, ONT_DOMAIN, "RowsWithin", inputs, 4, 2);
    ont_value *rows = ont_build_done(b, within);
    return rows ? build_pack(b, "PackRows", have->value, rows, within->outputs[1], &shape) : NULL;
}

/* A packed value with all rows, those that are not there copies of another. */
static ont_value *whole_value(state *s, ont_builder *b, ont_value *v)
{
    const packed *have = v->id < s->n_values ? &s->packed[v->id] : NULL;
    if (!have || !have->value) return v;
    const row_set *x = build_set(s, b, have->set);
    if (!s->whole[v->id])
        s->whole[v->id] = build_pack(b, "UnpackRows", have->value, x->rows, x->inverse, &v->shape);
    return s->whole[v->id];
}

/* For each packed row, the entry of an operand that broadcasts to the rows of `out`. */
static ont_value *broadcast_rows(ont_builder *b, ont_value *v, const ont_shape *out, int p, const row_set *x)
{
    int offset = out->rank - v->shape.rank, q = p - offset; /* v's dims in front of `q` are rows */
    int64_t *table = ont_arena_array(&b->graph->arena, (size_t)x->n + 1, sizeof *table);
    if (!table) {
        b->status = ONT_ENOMEM;
        return NULL;
    }
    for (int64_t i = 0; i < x->n; i++) {
        int64_t rest = i, step = 1, entry = 0;
        for (int d = p - 1; d >= 0; d--) {
            int64_t at = rest % out->dims[d], dim = d < offset ? 1 : v->shape.dims[d - offset];
            rest /= out->dims[d];
            if (dim > 1) entry += at * step;
            step *= dim;
        }
        table[i] = entry;
    }
    ont_shape flat = {.rank = 1 + v->shape.rank - q}, shape = {.rank = out->rank};
    flat.dims[0] = ont_shape_count_range(&v->shape, 0, q);
    for (int d = 0; d < p; d++) shape.dims[d] = d ? 1 : x->count;
    for (int d = q; d < v->shape.rank; d++) flat.dims[1 + d - q] = shape.dims[p + d - q] = v->shape.dims[d];
    ont_value *entries = ont_build2(b, "Gather", constant(b, ONT_INT64, &(ont_shape){1, {x->n}}, table), x->rows);
    return ont_build_reshape(b, ont_build2(b, "Gather", ont_build_reshape(b, v, &flat), entries), &shape);
}

/* A row operand of a node that broadcasts: with the rank of the result. */
static ont_value *align(ont_builder *b, ont_value *v, const ont_shape *in, const ont_shape *out, int p, int64_t count)
{
    ont_shape shape = {.rank = out->rank};
    int offset = out->rank - in->rank;
    for (int d = 0; d < out->rank; d++) shape.dims[d] = d < p ? (d ? 1 : count) : in->dims[d - offset];
    return v ? ont_build_reshape(b, v, &shape) : NULL;
}

static bool drops(const ont_node *node, double *ratio)
{
    double mode = ont_attr_int(node, "training_mode", 0);
    *ratio = ont_attr_float(node, "ratio", 0.5);
    if (ont_node_in(node, 1) && ont_const_scalar(node, 1, ratio) != ONT_OK) return false;
    if (ont_node_in(node, 2) && ont_const_scalar(node, 2, &mode) != ONT_OK) return false;
    return mode != 0 && *ratio > 0;
}

static ont_value *pack_dropout(ont_builder *b, const ont_node *node, ont_value *const *inputs, const row_set *x)
{
    double ratio;
    if (!drops(node, &ratio)) return inputs[0];
    ont_value *operands[] = {inputs[0], x->rows};
    if (b->status != ONT_OK || !operands[0]) return NULL;
    ont_node *drop = ont_build_node(b, ONT_DOMAIN, "RowDropout", operands, 2, 1);
    if (drop) b->status = ont_attr_set_float(b->graph, drop, "ratio", ratio);
    if (drop && b->status == ONT_OK)
        b->status = ont_attr_set_int(b->graph, drop, "rng_stream", (int64_t)ont_random_stream(node));
    return ont_build_done(b, drop);
}

/* Lets a node that is not packed read all rows. */
static ont_status unpack_inputs(state *s, ont_node *node)
{
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    for (uint32_t i = 0; i < node->n_inputs && b.status == ONT_OK; i++) {
        ont_value *v = node->inputs[i].value, *whole = v ? whole_value(s, &b, v) : NULL;
        if (whole && whole != v) ont_node_set_input(node, i, whole);
    }
    return b.status;
}

/* Builds the node over the packed rows of a set. */
static ont_status pack_node(state *s, ont_node *node, int set)
{
    reads read[64];
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    const row_set *x = build_set(s, &b, set);
    const ont_shape *out = &node->outputs[0]->shape;
    int p = leading(out, x->n);
    bool broadcasts = node->op->rows == ONT_ROWS_ELEMENTWISE || node->op->rows == ONT_ROWS_EXPAND;
    ont_value **inputs = ont_arena_array(&s->g->arena, node->n_inputs + 1, sizeof *inputs);
    if (!inputs) return ONT_ENOMEM;
    if (!apply_rule(node, node->outputs[0], x->n, read)) return ont_fail(ONT_EINTERNAL, "rows of '%s'", node->name);
    for (uint32_t i = 0; i < node->n_inputs && b.status == ONT_OK; i++) {
        ont_value *v = inputs[i] = node->inputs[i].value;
        if (!v || read[i] == READS_WHOLE) continue;
        inputs[i] = read[i] == READS_ROWS ? packed_value(s, &b, v, set) : broadcast_rows(&b, v, out, p, x);
        if (broadcasts && read[i] == READS_ROWS) inputs[i] = align(&b, inputs[i], &v->shape, out, p, x->count);
    }
    ONT_TRY(b.status);
    ont_shape shape = packed_shape(out, x->n, x->count);
    ont_node *clone = NULL;
    ont_value *y;
    if (node->op->rows == ONT_ROWS_VIEW)
        y = ont_build_reshape(&b, inputs[0], &shape);
    else if (node->op->rows == ONT_ROWS_EXPAND)
        y = ont_build2(&b, "Expand", inputs[0], ont_build_const_ints(&b, shape.dims, (size_t)shape.rank));
    else if (node->op->rows == ONT_ROWS_SLICE && ont_shape_equal(&ont_node_in(node, 0)->shape, out))
        y = inputs[0];
    else if (node->op->rows == ONT_ROWS_DROPOUT)
        y = pack_dropout(&b, node, inputs, x);
    else
        y = clone_node(&b, node, inputs, &clone);
    if (b.status == ONT_ENOMEM) return b.status;
    if (!y || !ont_shape_equal(&y->shape, &shape)) { /* it stays as it is */
        ont_log(ONT_LOG_INFO, "%s '%s' is not computed for some rows alone", node->op_type, node->name);
        return unpack_inputs(s, node);
    }
    s->packed[node->outputs[0]->id] = (packed){y, set};
    for (uint32_t i = 1; clone && i < node->n_outputs; i++)
        if (node->outputs[i]) s->packed[node->outputs[i]->id] = (packed){clone->outputs[i], set};
    s->g->packed.nodes++;
    return ONT_OK;
}

/* Lets a loss read packed scores. */
static ont_status pack_loss(state *s, ont_node *node)
{
    const packed *scores = &s->packed[ont_node_in(node, 0)->id];
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    const row_set *x = build_set(s, &b, scores->set);
    ont_value *labels = ont_node_in(node, 1), *inputs[] = {labels, x->rows, x->inverse};
    ONT_TRY(b.status);
    ont_node *pack = ont_build_node(&b, ONT_DOMAIN, "PackRows", inputs, 3, 1);
    if (pack) b.status = ont_attr_set_ints(s->g, pack, "shape", &x->count, 1);
    if (pack && b.status == ONT_OK)
        b.status = ont_attr_set_int(s->g, pack, "fill", ont_attr_int(node, "ignore_index", 0));
    ont_value *kept = ont_build_done(&b, pack);
    ONT_TRY(b.status);
    ont_node_set_input(node, 0, scores->value);
    ont_node_set_input(node, 1, kept);
    return ONT_OK;
}

/* Lets a selection read packed rows: it becomes a Gather of their places among the packed ones. */
static ont_status pack_selection(state *s, ont_node *node)
{
    const packed *from = &s->packed[ont_node_in(node, 0)->id];
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    const row_set *x = build_set(s, &b, from->set);
    ont_value *y = node->outputs[0];
    int set = s->demands[y->id] >= 0 ? s->sets[s->demands[y->id]].packed_as : NO_SET;
    source whole = {.rule = node->op->rows, .node = node, .n = x->n};
    source *numbers = &whole;
    for (int i = 0; i < s->n_sources; i++)
        if (s->sources[i].node == node) numbers = &s->sources[i];
    ont_value *places = build_numbers(&b, numbers);
    const row_set *to = set >= 0 ? build_set(s, &b, set) : NULL;
    if (to) places = ont_build2(&b, "Gather", places, to->rows);
    places = ont_build2(&b, "Gather", x->inverse, places);
    ont_shape rows = {.rank = 2, .dims = {x->count, ont_shape_count(&from->value->shape) / x->count}};
    ont_value *picked = ont_build2(&b, "Gather", ont_build_reshape(&b, from->value, &rows), places);
    ont_shape shape = to ? packed_shape(&y->shape, to->n, to->count) : y->shape;
    picked = picked ? ont_build_reshape(&b, picked, &shape) : NULL;
    ONT_TRY(b.status);
    if (to)
        s->packed[y->id] = (packed){picked, set};
    else
        ont_value_replace_uses(s->g, y, picked);
    return ONT_OK;
}

static ont_status rewrite(state *s)
{
    for (ont_node *node = s->g->first, *next; node; node = next) {
        next = node->next;
        if (node->id >= s->n_nodes) continue; /* built here */
        int set = s->accepted[node->id] >= 0 ? s->sets[s->accepted[node->id]].packed_as : NO_SET;
        const ont_value *x = ont_node_in(node, 0);
        bool packed_input = x && x->id < s->n_values && s->packed[x->id].value;
        int64_t n, m;
        if (set >= 0)
            ONT_TRY(pack_node(s, node, set));
        else if (packed_input && node->op->rows == ONT_ROWS_LOSS)
            ONT_TRY(pack_loss(s, node));
        else if (packed_input && s->accepted[node->id] < 0 && is_selection(node, &n, &m) &&
                 n == s->sets[s->packed[x->id].set].n)
            ONT_TRY(pack_selection(s, node));
        else
            ONT_TRY(unpack_inputs(s, node));
    }
    return ONT_OK;
}

static void add_statistics(state *s)
{
    for (int i = 0; i < s->n_sets; i++) {
        const row_set *x = &s->sets[i];
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
    state s = {.g = g, .n_values = g->n_values, .n_nodes = g->n_nodes, .front = g->first,
               .forced = ont_pass_is_forced("pack_rows")};
    known->n_required = 0;
    if (g->device || !g->packed.wanted || !g->first) return ONT_OK;
    s.demands = ont_arena_array(&g->arena, s.n_values + 1, sizeof *s.demands);
    s.accepted = ont_arena_array(&g->arena, s.n_nodes + 1, sizeof *s.accepted);
    s.packed = ont_arena_array(&g->arena, s.n_values + 1, sizeof *s.packed);
    s.whole = ont_arena_array(&g->arena, s.n_values + 1, sizeof *s.whole);
    if (!s.demands || !s.accepted || !s.packed || !s.whole) return ONT_ENOMEM;
    for (uint32_t i = 0; i < s.n_values; i++) s.demands[i] = NO_SET;
    for (uint32_t i = 0; i < s.n_nodes; i++) s.accepted[i] = NO_SET;
    for (uint32_t i = 0; i < g->n_outputs; i++) s.demands[g->outputs[i]->id] = ALL_ROWS;
    for (const ont_node *node = g->last; node; node = node->prev) demand_of_inputs(&s, node);
    if (!s.n_sets) return ONT_OK;
    add_costs(&s);
    ONT_TRY(count_rows(&s, known));
    if (known->n_required) return ONT_OK;
    choose_packing(&s);
    ONT_TRY(rewrite(&s));
    add_statistics(&s);
    return ont_pass_dce(g);
}
