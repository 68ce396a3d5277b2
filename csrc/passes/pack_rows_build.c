/*
 * Builds what pack_rows.c has decided: which rows are read, as values in front of the graph, and every node over packed
 * rows.
 */
#include <string.h>

#include "base/log.h"
#include "ops/attention/fused_attention.h"
#include "ops/index/rows.h"
#include "ops/random/random.h"
#include "passes/pack_rows_state.h"

/* ---- sets of rows ---- */

/* The nodes that v is computed by, moved to the front of the graph in their order. */
static void move_to_front(ont_pack_state *s, ont_value *v)
{
    if (!v || v->kind != ONT_VALUE_NODE || v->def->id >= s->n_nodes || s->accepted[v->def->id] == ONT_ALL_ROWS) return;
    ont_node *node = v->def;
    for (uint32_t i = 0; i < node->n_inputs; i++) move_to_front(s, node->inputs[i].value);
    s->accepted[node->id] = ONT_ALL_ROWS; /* moved: its result is read whole */
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
static ont_value *build_numbers(ont_builder *b, ont_row_source *x)
{
    if (x->numbers) return x->numbers;
    const ont_node *node = x->node;
    ont_shape shape = ont_rows_of_selection(node, x->n);
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

static ont_value *build_visible(ont_builder *b, const ont_row_source *x)
{
    ont_value *inputs[ONT_ATTENTION_INPUTS] = {NULL};
    for (uint32_t i = ONT_ATTENTION_BIAS; i < ONT_ATTENTION_INPUTS; i++) inputs[i] = ont_node_in(x->node, i);
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "VisibleKeys", inputs, ONT_ATTENTION_INPUTS, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "inner", x->inner);
    if (b->status == ONT_OK && node) b->status = ont_attr_set_int(b->graph, node, "n", x->n);
    if (b->status == ONT_OK && node) b->status = ont_attr_copy_all(b->graph, node, x->node);
    return ont_build_done(b, node);
}

static ont_value *build_marks(ont_pack_state *s, ont_builder *b, ont_row_source *x)
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
    ont_value *inputs[] = {build_numbers(b, x), x->within < 0 ? NULL : ont_pack_build_marks(s, b, x->within)};
    if (b->status != ONT_OK) return NULL;
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "MarkRows", inputs, x->within < 0 ? 1 : 2, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "n", x->n);
    return x->marks = ont_build_done(b, node);
}

ont_value *ont_pack_build_marks(ont_pack_state *s, ont_builder *b, int set)
{
    ont_row_set *x = &s->sets[set];
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

/* ---- rewriting ---- */

static const ont_row_set *build_set(ont_pack_state *s, ont_builder *b, int set)
{
    ont_row_set *x = &s->sets[set];
    if (x->rows || b->status != ONT_OK) return x;
    ont_node *before = b->before;
    ont_value *marks = ont_pack_build_marks(s, b, set);
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
static ont_value *packed_value(ont_pack_state *s, ont_builder *b, ont_value *v, int set)
{
    const ont_row_set *x = build_set(s, b, set);
    ont_packed_value *have = v->id < s->n_values ? &s->packed[v->id] : NULL;
    if (b->status != ONT_OK) return NULL;
    if (have && have->value && have->set == set) return have->value;
    ont_shape shape = ont_rows_packed_shape(&v->shape, x->n, x->count);
    if (!have || !have->value) return build_pack(b, "PackRows", v, x->rows, x->inverse, &shape);
    const ont_row_set *y = build_set(s, b, have->set);
    ont_value *inputs[] = {y->rows, y->inverse, x->rows, x->inverse};
    if (b->status != ONT_OK) return NULL;
    ont_node *within = ont_build_node(b, ONT_DOMAIN, "RowsWithin", inputs, 4, 2);
    ont_value *rows = ont_build_done(b, within);
    return rows ? build_pack(b, "PackRows", have->value, rows, within->outputs[1], &shape) : NULL;
}

/* Unpacks a value: the rows that were left out become copies of another one. */
static ont_value *whole_value(ont_pack_state *s, ont_builder *b, ont_value *v)
{
    const ont_packed_value *have = v->id < s->n_values ? &s->packed[v->id] : NULL;
    if (!have || !have->value) return v;
    const ont_row_set *x = build_set(s, b, have->set);
    if (!s->whole[v->id])
        s->whole[v->id] = build_pack(b, "UnpackRows", have->value, x->rows, x->inverse, &v->shape);
    return s->whole[v->id];
}

/* For each packed row, the entry of an operand that broadcasts to the rows of `out`. */
static ont_value *broadcast_rows(ont_builder *b, ont_value *v, const ont_shape *out, int p, const ont_row_set *x)
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

static ont_value *pack_dropout(ont_builder *b, const ont_node *node, ont_value *const *inputs, const ont_row_set *x)
{
    double ratio;
    if (!drops(node, &ratio)) return inputs[0];
    ont_value *operands[] = {inputs[0], x->rows};
    if (b->status != ONT_OK || !operands[0]) return NULL;
    ont_node *drop = ont_build_node(b, ONT_DOMAIN, "RowDropout", operands, 2, 1);
    if (drop) b->status = ont_attr_set_float(b->graph, drop, "ratio", ratio);
    if (drop && b->status == ONT_OK)
        b->status = ont_attr_set_int(b->graph, drop, "rng_stream", (int64_t)ont_random_stream(node));
    int64_t layout = ont_attr_int(node, "torch_layout", -1);
    if (drop && b->status == ONT_OK && layout >= 0)
        b->status = ont_attr_set_int(b->graph, drop, "torch_layout", layout);
    return ont_build_done(b, drop);
}

/* Lets a node that is not packed read all rows. */
static ont_status unpack_inputs(ont_pack_state *s, ont_node *node)
{
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    for (uint32_t i = 0; i < node->n_inputs && b.status == ONT_OK; i++) {
        ont_value *v = node->inputs[i].value, *whole = v ? whole_value(s, &b, v) : NULL;
        if (whole && whole != v) ont_node_set_input(node, i, whole);
    }
    return b.status;
}

/* Builds the node over the packed rows of a set. */
static ont_status pack_node(ont_pack_state *s, ont_node *node, int set)
{
    ont_row_reads read[64];
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    const ont_row_set *x = build_set(s, &b, set);
    const ont_shape *out = &node->outputs[0]->shape;
    int p = ont_rows_leading(out, x->n);
    bool broadcasts = node->op->rows == ONT_ROWS_ELEMENTWISE || node->op->rows == ONT_ROWS_EXPAND;
    ont_value **inputs = ont_arena_array(&s->g->arena, node->n_inputs + 1, sizeof *inputs);
    if (!inputs) return ONT_ENOMEM;
    if (!ont_rows_apply_rule(node, node->outputs[0], x->n, read))
        return ont_fail(ONT_EINTERNAL, "rows of '%s'", node->name);
    for (uint32_t i = 0; i < node->n_inputs && b.status == ONT_OK; i++) {
        ont_value *v = inputs[i] = node->inputs[i].value;
        if (!v || read[i] == ONT_READS_WHOLE) continue;
        inputs[i] = read[i] == ONT_READS_ROWS ? packed_value(s, &b, v, set) : broadcast_rows(&b, v, out, p, x);
        if (broadcasts && read[i] == ONT_READS_ROWS) inputs[i] = align(&b, inputs[i], &v->shape, out, p, x->count);
    }
    ONT_TRY(b.status);
    ont_shape shape = ont_rows_packed_shape(out, x->n, x->count);
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
        ont_log(ONT_LOG_INFO, "%s '%s' is computed for all rows, since it cannot be computed for some", node->op_type,
                node->name);
        return unpack_inputs(s, node);
    }
    s->packed[node->outputs[0]->id] = (ont_packed_value){y, set};
    for (uint32_t i = 1; clone && i < node->n_outputs; i++)
        if (node->outputs[i]) s->packed[node->outputs[i]->id] = (ont_packed_value){clone->outputs[i], set};
    s->g->packed.nodes++;
    return ONT_OK;
}

/* Lets a loss read packed scores. */
static ont_status pack_loss(ont_pack_state *s, ont_node *node)
{
    const ont_packed_value *scores = &s->packed[ont_node_in(node, 0)->id];
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    const ont_row_set *x = build_set(s, &b, scores->set);
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
static ont_status pack_selection(ont_pack_state *s, ont_node *node)
{
    const ont_packed_value *from = &s->packed[ont_node_in(node, 0)->id];
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    const ont_row_set *x = build_set(s, &b, from->set);
    ont_value *y = node->outputs[0];
    int set = s->demands[y->id] >= 0 ? s->sets[s->demands[y->id]].packed_as : ONT_NO_ROWS;
    ont_row_source whole = {.rule = node->op->rows, .node = node, .n = x->n};
    ont_row_source *numbers = &whole;
    for (int i = 0; i < s->n_sources; i++)
        if (s->sources[i].node == node) numbers = &s->sources[i];
    ont_value *places = build_numbers(&b, numbers);
    const ont_row_set *to = set >= 0 ? build_set(s, &b, set) : NULL;
    if (to) places = ont_build2(&b, "Gather", places, to->rows);
    places = ont_build2(&b, "Gather", x->inverse, places);
    ont_shape rows = {.rank = 2, .dims = {x->count, ont_shape_count(&from->value->shape) / x->count}};
    ont_value *picked = ont_build2(&b, "Gather", ont_build_reshape(&b, from->value, &rows), places);
    ont_shape shape = to ? ont_rows_packed_shape(&y->shape, to->n, to->count) : y->shape;
    picked = picked ? ont_build_reshape(&b, picked, &shape) : NULL;
    ONT_TRY(b.status);
    if (to)
        s->packed[y->id] = (ont_packed_value){picked, set};
    else
        ont_value_replace_uses(s->g, y, picked);
    return ONT_OK;
}

/* Whether row i of sequence b of an operand is row b * length + i of v: kernels find packed rows by their order. */
static bool rows_are_in_order(const ont_attention *a, int operand, const ont_value *v, int64_t width, int64_t length)
{
    const ont_matrix_layout *layout = &a->layout[operand];
    int64_t inner = ont_shape_count(&v->shape) / (a->batch_dims[0] * length), last = layout->offset + width;
    for (int d = 1; d < a->n_batch_dims; d++) last += (a->batch_dims[d] - 1) * layout->batch_stride[d];
    return layout->row_stride == inner && layout->batch_stride[0] == length * inner && last <= inner;
}

/* The set of an operand's packed rows, or ONT_NO_ROWS where the kernels would not find them. */
static int packed_set(const ont_pack_state *s, const ont_node *node, const ont_attention *a, int operand)
{
    const ont_value *v = ont_node_in(node, (uint32_t)operand);
    const ont_packed_value *have = v->id < s->n_values ? &s->packed[v->id] : NULL;
    int64_t length = operand == ONT_ATTENTION_Q ? a->seqlen_q : a->seqlen_k;
    bool found = have && have->value && s->sets[have->set].n == a->batch_dims[0] * length &&
                 rows_are_in_order(a, operand, v, operand == ONT_ATTENTION_V ? a->head_dim_v : a->head_dim, length);
    return found ? have->set : ONT_NO_ROWS;
}

/* Which sets of packed rows attention reads, ONT_NO_ROWS: all rows, as always on a device. */
static void sets_of_attention(const ont_pack_state *s, const ont_node *node, const ont_attention *a, int *q, int *k)
{
    *q = *k = ONT_NO_ROWS;
    if (s->g->device) return;
    *q = packed_set(s, node, a, ONT_ATTENTION_Q);
    *k = packed_set(s, node, a, ONT_ATTENTION_K);
    if (*k >= 0 && packed_set(s, node, a, ONT_ATTENTION_V) != *k) *k = ONT_NO_ROWS;
    if (!rows_are_in_order(a, ONT_ATTENTION_Y, node->outputs[0], a->head_dim_v, a->seqlen_q)) *q = ONT_NO_ROWS;
    bool aligned = *q == *k && a->seqlen_q == a->seqlen_k && !a->causal_offset; /* the causal mask's diagonal */
    if (a->causal && !aligned) *q = *k = ONT_NO_ROWS;
    bool shared = ont_node_in(node, ONT_ATTENTION_Q) == ont_node_in(node, ONT_ATTENTION_K) ||
                  ont_node_in(node, ONT_ATTENTION_Q) == ont_node_in(node, ONT_ATTENTION_V);
    if (shared && *q != *k) *q = *k = ONT_NO_ROWS;
}

/* Lets attention read packed rows where they lie. */
static ont_status pack_attention(ont_pack_state *s, ont_node *node)
{
    ont_attention a;
    int q, k;
    ont_value *inputs[ONT_ATTENTION_ALL_INPUTS] = {NULL}, *y = ont_node_out(node, 0);
    ont_builder b = {.graph = s->g, .before = node, .scope = node->name, .status = ONT_OK};
    if (!y || ont_node_out(node, 1) || ont_attention_read(node, &a) != ONT_OK) return unpack_inputs(s, node);
    sets_of_attention(s, node, &a, &q, &k);
    if (q < 0 && k < 0) return unpack_inputs(s, node);
    for (uint32_t i = 0; i < node->n_inputs && b.status == ONT_OK; i++) {
        ont_value *v = ont_node_in(node, i);
        int set = i == ONT_ATTENTION_Q ? q : i == ONT_ATTENTION_K || i == ONT_ATTENTION_V ? k : ONT_NO_ROWS;
        inputs[i] = v && set >= 0 ? s->packed[v->id].value : v ? whole_value(s, &b, v) : NULL;
    }
    if (q >= 0) inputs[ONT_ATTENTION_Q_ROWS] = build_set(s, &b, q)->rows;
    if (k >= 0) inputs[ONT_ATTENTION_K_ROWS] = build_set(s, &b, k)->rows;
    ONT_TRY(b.status);
    ont_node *packed = ont_build_node(&b, ONT_DOMAIN, node->op_type, inputs, ONT_ATTENTION_ALL_INPUTS, node->n_outputs);
    if (!packed) return b.status;
    for (uint32_t i = 1; i < node->n_outputs; i++) packed->outputs[i] = NULL;
    b.status = ont_attr_copy_all(b.graph, packed, node);
    ont_shape shape = q < 0 ? y->shape : ont_rows_packed_shape(&y->shape, s->sets[q].n, s->sets[q].count);
    if (b.status == ONT_OK)
        b.status = ont_attr_set_ints(b.graph, packed, "shape", shape.dims, (size_t)shape.rank);
    ont_value *result = ont_build_done(&b, packed);
    ONT_TRY(b.status);
    if (q >= 0) s->packed[y->id] = (ont_packed_value){result, q};
    else ont_value_replace_uses(s->g, y, result);
    s->g->packed.nodes++;
    return ONT_OK;
}

ont_status ont_pack_rewrite(ont_pack_state *s)
{
    for (ont_node *node = s->g->first, *next; node; node = next) {
        next = node->next;
        if (node->id >= s->n_nodes) continue; /* built here */
        int set = s->accepted[node->id] >= 0 ? s->sets[s->accepted[node->id]].packed_as : ONT_NO_ROWS;
        const ont_value *x = ont_node_in(node, 0);
        bool packed_input = x && x->id < s->n_values && s->packed[x->id].value;
        int64_t n, m;
        if (set >= 0)
            ONT_TRY(pack_node(s, node, set));
        else if (packed_input && node->op->rows == ONT_ROWS_LOSS)
            ONT_TRY(pack_loss(s, node));
        else if (packed_input && s->accepted[node->id] < 0 && ont_rows_is_selection(node, &n, &m) &&
                 n == s->sets[s->packed[x->id].set].n)
            ONT_TRY(pack_selection(s, node));
        else if (node->op->rows == ONT_ROWS_ATTENTION)
            ONT_TRY(pack_attention(s, node));
        else
            ONT_TRY(unpack_inputs(s, node));
    }
    return ONT_OK;
}
