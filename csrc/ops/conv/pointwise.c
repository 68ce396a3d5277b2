/*
 * Convolution with a filter of one cell, and its two gradients, in bfloat16: products of the native GEMM, with x (N, C,
 * cells) and y (N, O, cells) as they are stored. oneDNN's kernel would copy both to its own layout and back. A stride
 * leaves out cells of x; the others are copied next to each other first.
 *
 *   y[n] = w x[n]       dx[n] = w' dy[n]       dw = sum over n of dy[n] x[n]'
 *
 * Sums are float32 and are rounded once, the sum over images too.
 */
#include <string.h>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/parallel.h"
#include "device/gemm_native.h"
#include "ops/conv/conv_onednn.h"
#include "ops/conv/pointwise.h"
#include "simd/simd.h"

enum { SIZE = 2, LINE = 64, LEAST = 16 }; /* LEAST: channels and cells; padded panels are wasted on fewer */

typedef struct pointwise_state {
    ont_conv conv;
    ont_conv_kind kind;
    int64_t in_cells, cells; /* of a plane of x; of y */
    bool strided;
    bool joined;   /* gradient of the weight: one product of copies that have all images side by side */
    int64_t slots; /* threads that take images of their own, or 1: all threads compute one image */
    ont_gemm_native native;
    size_t x_bytes, y_bytes, sums_bytes, slot_bytes; /* of the copies of x and of dy; of a sum over images */
} pointwise_state;

/* ---- choice ---- */

const char *ont_pointwise_accept(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    if (ont_node_in(node, 0)->dtype != ONT_BFLOAT16) return "dtype";
    if (!ont_gemm_native_kernel(ONT_BFLOAT16)) return "no native GEMM";
    if (ont_simd_gemm_bf16x3()) return "oneDNN has AMX tiles, which are faster";
    if (ont_node_in(node, 2)) return "a bias: the native GEMM adds one for each column, not for each row";
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    if (c.groups > 1) return "groups";
    for (int d = 0; d < 3; d++)
        if (c.kernel[d] != 1 || c.pad[d] || c.pad_end[d]) return "the filter has several cells, or there is padding";
    if (!c.n || !c.in[0] || !c.in[1] || !c.in[2]) return "no elements";
    if (c.c < LEAST || c.o < LEAST || c.out[0] * c.out[1] * c.out[2] < LEAST) return "too small";
    return NULL;
}

/* Images side by side cost a copy of x and dy; a sum over images reads and writes float32 sums for each image. */
static bool joins(const pointwise_state *s)
{
    const ont_conv *c = &s->conv;
    return s->kind == ONT_CONV_GRAD_WEIGHT && c->n > 1 && 2 * c->o * c->c > (c->o + c->c) * s->cells;
}

static ont_gemm product_of(const pointwise_state *s)
{
    const ont_conv *c = &s->conv;
    int64_t cells = s->joined ? c->n * s->cells : s->cells;
    ont_gemm g = {.dtype = ONT_BFLOAT16, .alpha = 1};
    switch (s->kind) {
    case ONT_CONV_FORWARD: /* (o, c) (c, cells) */
        g.m = c->o, g.n = cells, g.k = c->c, g.lda = c->c, g.ldb = g.ldc = cells;
        break;
    case ONT_CONV_GRAD_INPUT: /* (o, c)' (o, cells) */
        g.trans_a = true;
        g.m = c->c, g.n = cells, g.k = c->o, g.lda = c->c, g.ldb = g.ldc = cells;
        break;
    case ONT_CONV_GRAD_WEIGHT: /* (o, cells) (c, cells)' */
        g.trans_b = true;
        g.m = c->o, g.n = c->c, g.k = cells, g.lda = g.ldb = cells, g.ldc = c->c;
        break;
    }
    return g;
}

static size_t lines(int64_t bytes)
{
    return (size_t)ont_round_up(bytes, LINE);
}

ont_status ont_pointwise_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    pointwise_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (pointwise_state){0};
    ONT_TRY(ont_conv_read(node, &s->conv, &s->kind));
    const ont_conv *c = &s->conv;
    ONT_ASSERT(c->dtype == ONT_BFLOAT16 && c->groups == 1);
    int threads = ont_parallel_threads();
    bool sums = s->kind == ONT_CONV_GRAD_WEIGHT;
    s->in_cells = c->in[0] * c->in[1] * c->in[2];
    s->cells = c->out[0] * c->out[1] * c->out[2];
    s->strided = c->stride[0] > 1 || c->stride[1] > 1 || c->stride[2] > 1;
    s->joined = joins(s);
    s->slots = !sums && (c->n % threads == 0 || c->n >= 4 * threads) ? threads : 1;
    ont_gemm g = product_of(s);
    bool adds = sums && !s->joined && c->n > 1;
    ont_gemm_native_init(&s->native, ont_gemm_native_kernel(ONT_BFLOAT16), &g,
                         adds ? ONT_FLOAT32 : ONT_BFLOAT16, s->slots > 1 ? 1 : threads);
    int64_t copied = s->joined ? c->n * s->cells : s->cells;
    s->x_bytes = s->strided || s->joined ? lines(c->c * copied * SIZE) : 0;
    s->y_bytes = s->joined ? lines(c->o * copied * SIZE) : 0;
    s->sums_bytes = adds ? lines(c->o * c->c * (int64_t)sizeof(float)) : 0;
    s->slot_bytes = s->x_bytes + s->y_bytes + s->sums_bytes +
                    lines((int64_t)ont_gemm_native_work_bytes(&s->native));
    out->state = s;
    out->work_bytes = s->slot_bytes * (size_t)s->slots;
    return ONT_OK;
}

/* ---- copies ---- */

/* Between images (n, channels, plane) and rows of cells (channels, ld), in which the images are side by side. */
typedef struct copy_job {
    const ont_conv *conv; /* whose stride applies, or NULL: all cells of a plane */
    uint16_t *images, *rows;
    int64_t channels, plane, cells, ld;
    bool back; /* from the rows; other cells of a plane become 0 */
} copy_job;

/* One line of cells along the last dim. */
static void copy_line(uint16_t *line, uint16_t *row, int64_t cells, int64_t step, bool back)
{
    if (back)
        for (int64_t k = 0; k < cells; k++) line[k * step] = row[k];
    else
        for (int64_t k = 0; k < cells; k++) row[k] = line[k * step];
}

static void copy_plane(const copy_job *j, uint16_t *plane, uint16_t *row)
{
    const ont_conv *c = j->conv;
    if (!c) {
        copy_line(plane, row, j->cells, 1, j->back);
        return;
    }
    if (j->back) memset(plane, 0, (size_t)j->plane * SIZE);
    for (int64_t z = 0; z < c->out[0]; z++)
        for (int64_t y = 0; y < c->out[1]; y++, row += c->out[2])
            copy_line(plane + (z * c->stride[0] * c->in[1] + y * c->stride[1]) * c->in[2], row, c->out[2], c->stride[2],
                      j->back);
}

static void copy_planes(void *context, int64_t first, int64_t last)
{
    const copy_job *j = context;
    for (int64_t i = first; i < last; i++)
        copy_plane(j, j->images + i * j->plane, j->rows + i % j->channels * j->ld + i / j->channels * j->cells);
}

static void copy(const copy_job *j, int64_t images)
{
    ont_parallel(images * j->channels, 16384 / j->plane + 1, copy_planes, (void *)j);
}

static copy_job copy_of_x(const pointwise_state *s, uint16_t *images, void *rows, int64_t ld, bool back)
{
    return (copy_job){s->strided ? &s->conv : NULL, images, rows, s->conv.c, s->in_cells, s->cells, ld, back};
}

/* ---- kernels ---- */

/* Images [first, last), in the scratch of one thread or, where there is one slot, by all of them. */
static void run_images(const ont_call *call, int64_t first, int64_t last, char *work)
{
    const pointwise_state *s = call->state;
    const ont_conv *c = &s->conv;
    bool forward = s->kind == ONT_CONV_FORWARD;
    ONT_ASSERT(s->kind != ONT_CONV_GRAD_WEIGHT && !s->y_bytes && !s->sums_bytes);
    uint16_t *x = (uint16_t *)(forward ? (uintptr_t)call->in[0] : (uintptr_t)call->out[0]);
    uint16_t *y = (uint16_t *)(forward ? (uintptr_t)call->out[0] : (uintptr_t)call->in[0]);
    for (int64_t n = first; n < last; n++) {
        uint16_t *image = x + n * c->c * s->in_cells, *result = y + n * c->o * s->cells;
        copy_job cells = copy_of_x(s, image, work, s->cells, !forward);
        if (s->strided && forward) copy(&cells, 1);
        if (s->strided) image = cells.rows;
        ont_gemm_native_run(&s->native, call->in[1], forward ? image : result, NULL, forward ? result : image, NULL,
                            work + s->x_bytes);
        if (s->strided && !forward) copy(&cells, 1);
    }
}

static void run_slots(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const pointwise_state *s = call->state;
    for (int64_t slot = first; slot < last; slot++)
        run_images(call, slot * s->conv.n / s->slots, (slot + 1) * s->conv.n / s->slots,
                   (char *)call->work + (size_t)slot * s->slot_bytes);
}

static void round_sums(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const pointwise_state *s = call->state;
    const float *sums = (const float *)(const void *)((const char *)call->work + s->x_bytes);
    ont_simd()->float_to_bfloat(sums + first, (uint16_t *)call->out[0] + first, last - first);
}

/* dw as one product of copies of all images */
static void run_joined(const ont_call *call, uint16_t *dy, uint16_t *x)
{
    const pointwise_state *s = call->state;
    const ont_conv *c = &s->conv;
    char *work = call->work;
    int64_t ld = c->n * s->cells;
    copy_job of_x = copy_of_x(s, x, work, ld, false);
    copy_job of_y = {NULL, dy, (uint16_t *)(void *)(work + s->x_bytes), c->o, s->cells, s->cells, ld, false};
    copy(&of_x, c->n);
    copy(&of_y, c->n);
    ont_gemm_native_run(&s->native, of_y.rows, of_x.rows, NULL, call->out[0], NULL, work + s->x_bytes + s->y_bytes);
}

/* (dy, x) -> dw */
static void run_weight(const ont_call *call)
{
    const pointwise_state *s = call->state;
    const ont_conv *c = &s->conv;
    uint16_t *dy = (uint16_t *)(uintptr_t)call->in[0], *x = (uint16_t *)(uintptr_t)call->in[1];
    char *work = call->work, *sums = work + s->x_bytes, *scratch = sums + s->sums_bytes;
    if (s->joined) {
        run_joined(call, dy, x);
        return;
    }
    ont_gemm_native native = s->native;
    for (int64_t n = 0; n < c->n; n++) {
        uint16_t *image = x + n * c->c * s->in_cells;
        copy_job cells = copy_of_x(s, image, work, s->cells, false);
        if (s->strided) copy(&cells, 1);
        native.gemm.beta = n > 0;
        ont_gemm_native_run(&native, dy + n * c->o * s->cells, s->strided ? cells.rows : image, NULL,
                            s->sums_bytes ? (void *)sums : call->out[0], NULL, scratch);
    }
    if (s->sums_bytes) ont_parallel(c->o * c->c, 16384, round_sums, (void *)call);
}

ont_status ont_pointwise_run(const ont_call *call)
{
    const pointwise_state *s = call->state;
    if (s->kind == ONT_CONV_GRAD_WEIGHT)
        run_weight(call);
    else if (s->slots > 1)
        ont_parallel(s->slots, 1, run_slots, (void *)call);
    else
        run_images(call, 0, s->conv.n, call->work);
    return ONT_OK;
}
