/*
 * Dropout, counter-based: word e of a Philox stream decides about element e. The run has the key, the node the stream
 * (random.h), so no mask is stored and the gradient generates the words again.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/parallel.h"
#include "device/device.h"
#include "ops/random/random.h"
#include "ops/elementwise/tile_program.h"

/* Ratio and mode are attributes, or from opset 12 on constant inputs 1 and 2. */
static ont_status dropout_config(const ont_node *node, double *ratio, bool *training)
{
    *ratio = ont_attr_float(node, "ratio", 0.5);
    *training = ont_attr_int(node, "training_mode", 0);
    if (ont_node_in(node, 1)) ONT_TRY(ont_const_scalar(node, 1, ratio));
    double mode = *training;
    if (ont_node_in(node, 2)) ONT_TRY(ont_const_scalar(node, 2, &mode));
    *training = mode != 0;
    if (!(*ratio >= 0 && *ratio <= 1)) return ont_fail(ONT_EINVAL, "ratio %g is not in [0, 1]", *ratio);
    return ONT_OK;
}

static ont_status dropout_infer(ont_graph *g, ont_node *node)
{
    double ratio;
    bool training;
    ONT_TRY(dropout_config(node, &ratio, &training));
    if (ont_node_out(node, 1)) ONT_TRY(ont_infer_out(node, 1, ONT_BOOL, &ont_node_in(node, 0)->shape));
    return ont_infer_same(g, node);
}

int32_t ont_random_blocks(const ont_graph *g)
{
    return g->device ? g->device->random_blocks : 0;
}

/* Undoes a rounding of the ratio to float32: the shortest decimal that rounds to it. */
static double before_rounding(double ratio)
{
    char text[32];
    if ((double)(float)ratio != ratio) return ratio;
    for (int digits = 1; digits < 10; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, ratio);
        double candidate = strtod(text, NULL);
        if ((float)candidate == (float)ratio && candidate >= 0 && candidate <= 1) return candidate;
    }
    return ratio;
}

/*
 * PyTorch keeps an element where u < 1 - ratio, with u = (word + 0.5) / 2^32 in float32. u grows with the word, so
 * there is a first word from which on nothing is kept. CUDA kernels invert the word; then, as with our own streams,
 * words below the threshold drop.
 */
static ont_dropout_rule torch_rule(const ont_node *node, double ratio)
{
    bool wide = node->outputs[0]->dtype == ONT_FLOAT64;
    ratio = before_rounding(ratio);
    double keep = wide ? 1 - ratio : (double)(float)(1 - ratio);
    uint64_t low = 0, high = UINT64_C(1) << 32;
    while (low < high) { /* bisects for the first word that is not kept */
        uint64_t middle = (low + high) / 2;
        bool kept = (double)((float)(uint32_t)middle * 0x1p-32f + 0x1p-33f) < keep;
        *(kept ? &low : &high) = kept ? middle + 1 : middle;
    }
    /* PyTorch's backward computes the scale from the ratio before rounding. */
    bool backward = ONT_IS(node, DropoutGrad) || ont_attr_int(node, "gradient", 0);
    double scale = backward ? 1 / (1 - ratio) : 1 / keep;
    return (ont_dropout_rule){(uint32_t)((UINT64_C(1) << 32) - low), wide ? scale : (double)(float)scale};
}

ont_dropout_rule ont_dropout_rule_of(const ont_node *node, double ratio)
{
    if (ratio == 1) return (ont_dropout_rule){UINT32_MAX, 0};
    if (ont_dropout_stream(node) & ONT_LAYOUT_TORCH) return torch_rule(node, ratio);
    return (ont_dropout_rule){(uint32_t)(ratio * 0x1p32), (double)(float)(1 / (1 - ratio))};
}

typedef struct dropout_state {
    uint32_t threshold; /* words below it drop; with ratio 1 all words drop */
    float scale;
    bool active, all;
    uint64_t stream;
    const ont_simd_table *simd;
} dropout_state;

static ont_status make_state(const ont_simd_table *simd, const ont_node *node, double ratio, bool active,
                             ont_arena *arena, ont_prepared *out)
{
    dropout_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ont_dropout_rule rule = active ? ont_dropout_rule_of(node, ratio) : (ont_dropout_rule){0, 1};
    *s = (dropout_state){rule.threshold, (float)rule.scale, active, ratio == 1, ont_dropout_stream(node), simd};
    out->state = s;
    return ONT_OK;
}

static ont_status dropout_prepare_with(const ont_simd_table *simd, const ont_node *node, ont_arena *arena,
                                       ont_prepared *out)
{
    double ratio;
    bool training;
    ONT_TRY(dropout_config(node, &ratio, &training));
    return make_state(simd, node, ratio, training && ratio > 0, arena, out);
}

static ont_status dropout_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return dropout_prepare_with(ont_simd(), node, arena, out);
}

static ont_status dropout_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return dropout_prepare_with(ont_simd_plain(), node, arena, out);
}

/*
 * n elements from `first` on; element `first` takes word `word` of the stream. float64: the float32 loop writes the
 * mask in pieces.
 */
static void drop(const dropout_state *s, const ont_call *call, uint8_t *mask, int64_t first, int64_t n, int64_t word)
{
    enum { PIECE = 256 };
    uint8_t keep[PIECE];
    const ont_dropout_params dropout = {.key = call->seed, .stream = s->stream, .threshold = s->threshold,
                                        .scale = s->scale};
    if (call->node->outputs[0]->dtype != ONT_FLOAT64) {
        s->simd->dropout(&dropout, (const float *)call->in[0] + first, (float *)call->out[0] + first,
                         mask ? mask + first : NULL, word, n);
        return;
    }
    const double *x = (const double *)call->in[0] + first;
    double *y = (double *)call->out[0] + first;
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t m = n - at < PIECE ? n - at : PIECE;
        s->simd->dropout(&dropout, NULL, NULL, keep, word + at, m);
        for (int64_t i = 0; i < m; i++) y[at + i] = keep[i] && !s->all ? x[at + i] * (double)s->scale : 0;
        if (mask) memcpy(mask + first + at, keep, (size_t)m);
    }
}

static void dropout_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    drop(call->state, call, call->node->n_outputs > 1 ? call->out[1] : NULL, first, last - first, first);
}

static ont_status dropout_run(const ont_call *call)
{
    const dropout_state *s = call->state;
    const ont_value *out = call->node->outputs[0];
    int64_t n = ont_shape_count(&out->shape);
    if (s->active) {
        ont_parallel(n, 8192, dropout_range, (void *)call);
        return ONT_OK;
    }
    if (n && call->out[0] != call->in[0]) memcpy(call->out[0], call->in[0], (size_t)n * ont_dtype_size(out->dtype));
    if (call->node->n_outputs > 1 && call->out[1]) memset(call->out[1], 1, (size_t)n);
    return ONT_OK;
}

static bool dropout_tile(const ont_node *node, ont_tile_step *step)
{
    double ratio;
    bool training;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32 || dropout_config(node, &ratio, &training) != ONT_OK) return false;
    if (!training || ratio == 0 || ratio == 1) return false;
    ont_dropout_rule rule = ont_dropout_rule_of(node, ratio);
    *step = (ont_tile_step){.kind = ONT_TILE_DROPOUT, .in = ONT_FLOAT32, .out = ONT_FLOAT32, .n_operands = 1,
                            .p = {(double)rule.threshold, rule.scale}, .stream = (int64_t)ont_dropout_stream(node)};
    return true;
}

static void dropout_grad(ont_grad *g)
{
    double ratio;
    bool training;
    if (dropout_config(g->node, &ratio, &training) != ONT_OK || !training || ratio == 0) {
        GI(0, GO(0));
        return;
    }
    ont_node *node = ont_build_node(&g->b, ONT_DOMAIN, "DropoutGrad", (ont_value *[]){GO(0)}, 1, 1);
    ont_builder *b = &g->b;
    if (b->status == ONT_OK) b->status = ont_attr_set_float(b->graph, node, "ratio", ratio);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "training_mode", 1);
    int64_t stream = (int64_t)ont_random_stream(g->node);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "rng_stream", stream);
    int64_t layout = ont_attr_int(g->node, "torch_layout", -1);
    if (b->status == ONT_OK && layout >= 0) b->status = ont_attr_set_int(b->graph, node, "torch_layout", layout);
    GI(0, ont_build_done(b, node));
}

static const ont_kernel kernels[] = {
    {.name = "dropout_simd", .accept = ont_accept_float, .prepare = dropout_prepare, .run = dropout_run, .inplace = 1},
    {.name = "dropout_ref", .accept = ont_accept_float, .prepare = dropout_prepare_ref, .run = dropout_run,
     .inplace = 1},
};

const ont_op ont_op_Dropout = {.domain = "", .name = "Dropout", .since = 7, .min_inputs = 1, .max_inputs = 3,
                               .flags = ONT_OP_RANDOM, .nondiff_inputs = 6,
                               .attributes = "ratio:f rng_stream:i seed:i torch_layout:i", .infer = dropout_infer,
                               .grad = dropout_grad, .tile = dropout_tile, .rows = ONT_ROWS_DROPOUT,
                               ONT_KERNELS(kernels)};
const ont_op ont_op_DropoutGrad = {.domain = ONT_DOMAIN, .name = "DropoutGrad", .since = 1, .min_inputs = 1,
                                   .max_inputs = 1, .flags = ONT_OP_RANDOM,
                                   .attributes = "ratio:f training_mode:i rng_stream:i torch_layout:i",
                                   .infer = dropout_infer, .tile = dropout_tile, ONT_KERNELS(kernels)};

/*
 * ---- RowDropout(x (r, ...), rows (r); ratio, rng_stream, torch_layout, gradient) ----
 *
 * Dropout of packed rows (ops/index/rows.h): each element takes the random word of its place in the tensor before rows
 * were packed, so that the same elements are dropped. Its gradient is the same map, with `gradient` 1.
 */

static ont_status row_dropout_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return make_state(ont_simd(), node, ont_attr_float(node, "ratio", 0.5), true, arena, out);
}

static ont_status row_dropout_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return make_state(ont_simd_plain(), node, ont_attr_float(node, "ratio", 0.5), true, arena, out);
}

static void row_dropout_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const int64_t *rows = call->in[1], width = ont_shape_count(&call->node->outputs[0]->shape) /
                                               ont_node_in(call->node, 1)->shape.dims[0];
    for (int64_t i = first; i < last; i++) drop(call->state, call, NULL, i * width, width, rows[i] * width);
}

static ont_status row_dropout_run(const ont_call *call)
{
    int64_t rows = ont_node_in(call->node, 1)->shape.dims[0], n = ont_shape_count(&call->node->outputs[0]->shape);
    ont_parallel(rows, 1 + 8192 * rows / (n + 1), row_dropout_range, (void *)call);
    return ONT_OK;
}

static void row_dropout_grad(ont_grad *g)
{
    ont_value *inputs[] = {GO(0), ont_node_in(g->node, 1)};
    ont_node *node = ont_build_node(&g->b, ONT_DOMAIN, "RowDropout", inputs, 2, 1);
    if (node) g->b.status = ont_attr_copy_all(g->b.graph, node, g->node);
    if (node && g->b.status == ONT_OK) g->b.status = ont_attr_set_int(g->b.graph, node, "gradient", 1);
    GI(0, ont_build_done(&g->b, node));
}

static const ont_kernel row_dropout_kernels[] = {
    {.name = "row_dropout_simd", .accept = ont_accept_float, .prepare = row_dropout_prepare, .run = row_dropout_run,
     .inplace = 1},
    {.name = "row_dropout_ref", .accept = ont_accept_float, .prepare = row_dropout_prepare_ref, .run = row_dropout_run,
     .inplace = 1},
};
const ont_op ont_op_RowDropout = {.domain = ONT_DOMAIN, .name = "RowDropout", .since = 1, .min_inputs = 2,
                                  .max_inputs = 2, .flags = ONT_OP_RANDOM | ONT_OP_MEMORY_BOUND, .nondiff_inputs = 2,
                                  .attributes = "ratio:f rng_stream:i torch_layout:i gradient:i",
                                  .infer = ont_infer_same,
                                  .grad = row_dropout_grad, ONT_KERNELS(row_dropout_kernels)};
