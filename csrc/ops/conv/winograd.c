/*
 * Winograd convolution F(4x4, 3x3) in float32: forward, gradient of the input (a forward with the weights rotated by
 * 180 degrees) and gradient of the weights. 36 multiplications replace 144; see winograd.h for the source. Sums do
 * not depend on the number of threads. A NaN or infinity affects all results of its tiles, up to 4 x 4 instead of 3 x
 * 3; infinity mostly becomes NaN.
 */
#include "ops/conv/winograd.h"

#include <string.h>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/parallel.h"
#include "simd/winograd/winograd.h"

enum {
    LANES = ONT_WINO_LANES,
    BLOCK = ONT_WINO_TILES * LANES, /* floats of a block of tiles and channels */
    GROUP = 128,                    /* tiles of a group: 128 x 36 x 64 channels are 1.2 MB */
    CHUNK = 4,                      /* blocks of channels whose weights are transformed together: 300 kB */
    MAX_PARTS = 16,
};

typedef struct job {
    const ont_winograd *s;
    const ont_winograd_loops *loops;
    const float *src, *weight, *bias;
    float *dst;
    char *work;
    int64_t first_band, bands, tiles; /* of the group */
} job;

/* ---- geometry ---- */

const char *ont_winograd_refuses(const ont_conv *c)
{
    if (c->dtype != ONT_FLOAT32) return "dtype";
    if (c->spatial < 2) return "one spatial dim";
    if (c->groups != 1) return "groups";
    if (c->stride[0] != 1 || c->dilation[0] != 1) return "not 3 x 3 with stride 1";
    if (c->kernel[0] > 1 && (c->c % LANES || c->o % LANES)) return "blocks of channels in more than one slice";
    if (c->kernel[0] < 1 || c->in[0] < 1 || c->out[0] < 1) return "no elements";
    for (int d = 1; d < 3; d++) {
        if (c->kernel[d] != 3 || c->stride[d] != 1 || c->dilation[d] != 1) return "not 3 x 3 with stride 1";
        if (c->pad[d] < 0 || c->pad[d] > 2 || c->pad_end[d] < 0 || c->pad_end[d] > 2) return "padding";
        if (c->out[d] < 1) return "no elements";
    }
    return c->n && c->c && c->o ? NULL : "no elements";
}

static size_t reserve(size_t *total, int64_t floats)
{
    size_t at = *total;
    *total += ((size_t)floats * sizeof(float) + 63) & ~(size_t)63;
    return at;
}

static int64_t band_floats(const ont_winograd *s)
{
    return ONT_WINO_IN * (4 * s->columns + 2) * LANES;
}

/*
 * Parts of a group's tiles. The matmuls are divided among threads by channels of the result; where these are too few,
 * parts give every thread work.
 */
static int64_t parts_of(int64_t channel_parts, int64_t tiles, int threads)
{
    int64_t parts = 1, limit = ont_min(MAX_PARTS, ont_ceil_div(tiles, 2 * ONT_WINO_TILES));
    while (parts < limit && channel_parts * parts % threads && channel_parts * parts < 8 * threads) parts++;
    return parts;
}

/* The distance between points: an odd number of cache lines, so that the 36 points do not share cache sets. */
static int64_t plane_of(int64_t floats)
{
    return floats + LANES;
}

static void plan_forward(ont_winograd *s, int threads)
{
    int64_t tiles = s->bands * s->columns;
    s->parts = parts_of(ont_ceil_div(s->k, ONT_WINO_WIDTH), tiles, threads);
    s->group_bands = ont_min(s->bands, ont_max(1, GROUP * s->parts / s->columns));
    s->group_tiles = ont_ceil_div(s->group_bands * s->columns, ONT_WINO_TILES) * ONT_WINO_TILES;
    s->part_blocks = ont_ceil_div(s->group_tiles / ONT_WINO_TILES, s->parts);
    s->channel_blocks = ont_ceil_div(s->c, LANES);
    s->v_plane = plane_of(s->group_tiles * s->channel_blocks * LANES);
    s->u_plane = plane_of(CHUNK * LANES * ONT_WINO_WIDTH);
    s->m_plane = plane_of(s->part_blocks * ONT_WINO_TILES * ONT_WINO_WIDTH);
    s->v_at = reserve(&s->work_bytes, ONT_WINO_POINTS * s->v_plane);
    s->slots_at = s->work_bytes;
    reserve(&s->slot_bytes, band_floats(s));
    reserve(&s->slot_bytes, ONT_WINO_POINTS * s->u_plane);
    reserve(&s->slot_bytes, ONT_WINO_POINTS * s->m_plane);
    reserve(&s->slot_bytes, CHUNK * LANES * 9 * LANES);
}

static void plan_grad(ont_winograd *s)
{
    int64_t result_blocks = ont_ceil_div(s->k, LANES);
    s->parts = 1;
    s->group_bands = ont_min(s->bands, ont_max(1, GROUP / s->columns));
    s->group_tiles = ont_ceil_div(s->group_bands * s->columns, ONT_WINO_TILES) * ONT_WINO_TILES;
    s->channel_blocks = ont_ceil_div(s->c, ONT_WINO_WIDTH) * 2;
    s->v_plane = plane_of(s->group_tiles * s->channel_blocks * LANES);
    s->w_plane = plane_of(s->group_tiles * result_blocks * LANES);
    s->m_plane = plane_of(LANES * ONT_WINO_WIDTH);
    s->v_at = reserve(&s->work_bytes, ONT_WINO_POINTS * s->v_plane);
    s->w_at = reserve(&s->work_bytes, ONT_WINO_POINTS * s->w_plane);
    s->sums_at = s->work_bytes;
    if (s->group_bands < s->bands)
        reserve(&s->work_bytes, result_blocks * s->channel_blocks / 2 * ONT_WINO_POINTS * s->m_plane);
    s->slots_at = s->work_bytes;
    reserve(&s->slot_bytes, band_floats(s));
    reserve(&s->slot_bytes, ONT_WINO_POINTS * s->m_plane);
}

void ont_winograd_init(const ont_conv *conv, ont_conv_kind kind, int threads, ont_winograd *s)
{
    bool rotated = kind == ONT_CONV_GRAD_INPUT;
    *s = (ont_winograd){.kind = kind, .each = rotated ? conv->o : conv->c, .k = rotated ? conv->c : conv->o,
                        .taps = conv->kernel[0], .slots = threads};
    s->c = s->taps * s->each;
    s->slices = rotated ? conv->in[0] : conv->out[0];
    s->depth = rotated ? conv->out[0] : conv->in[0];
    s->before = rotated ? s->taps - 1 - conv->pad[0] : conv->pad[0];
    s->n = conv->n * s->slices;
    for (int d = 0; d < 2; d++) {
        s->in[d] = rotated ? conv->out[d + 1] : conv->in[d + 1];
        s->out[d] = rotated ? conv->in[d + 1] : conv->out[d + 1];
        s->pad[d] = rotated ? 2 - conv->pad[d + 1] : conv->pad[d + 1];
    }
    s->rows = ont_ceil_div(s->out[0], ONT_WINO_OUT);
    s->columns = ont_ceil_div(s->out[1], ONT_WINO_OUT);
    s->bands = s->n * s->rows;
    if (kind == ONT_CONV_GRAD_WEIGHT)
        plan_grad(s);
    else
        plan_forward(s, threads);
    s->work_bytes += s->slot_bytes * (size_t)s->slots;
}

/* ---- tiles ---- */

/* A tensor that is divided into tiles: x, or the gradient of the result. */
typedef struct source {
    const float *data; /* (volumes, each, depth, height, width) */
    int64_t channels, each, depth, height, width; /* channels: of all slices that an image of the result reads */
    int64_t before, above, left; /* padding */
    int64_t tile;      /* its size: 6 or 4 */
    void (*transform)(const float *, int64_t, float *, int64_t);
    float *to;         /* block t of tiles and c of channels at t * block_step + c * channel_step */
    int64_t plane, blocks, block_step, channel_step;
} source;

/* out (tile, columns, 16): the rows of sixteen channels that one row of tiles reads; zero in the padding. */
static void fill_band(const job *j, const source *x, int64_t band, int64_t channel, float *out)
{
    const ont_winograd *s = j->s;
    int64_t columns = 4 * s->columns + x->tile - 4, row_floats = columns * LANES,
            lanes = ont_min(LANES, x->channels - channel);
    int64_t top = band % s->rows * 4 - x->above, width = ont_min(x->width, columns - x->left),
            area = x->height * x->width, image_of = band / s->rows;
    int64_t slice = image_of % s->slices + channel / x->each - x->before;
    ONT_ASSERT(x->channels == x->each || x->each % LANES == 0); /* a block of channels is of one slice */
    bool outside = lanes <= 0 || slice < 0 || slice >= x->depth;
    const float *image =
        x->data + ((image_of / s->slices * x->each + channel % x->each) * x->depth + (outside ? 0 : slice)) * area;
    for (int64_t r = 0; r < x->tile; r++, out += row_floats) {
        if (top + r < 0 || top + r >= x->height || outside) {
            memset(out, 0, (size_t)row_floats * sizeof *out);
            continue;
        }
        memset(out, 0, (size_t)(x->left * LANES) * sizeof *out);
        j->loops->gather(image + (top + r) * x->width, x->depth * area, lanes, width, out + x->left * LANES);
        memset(out + (x->left + width) * LANES, 0, (size_t)((columns - x->left - width) * LANES) * sizeof *out);
    }
}

static void transform_band(const job *j, const source *x, int64_t band, int64_t block, float *scratch)
{
    const ont_winograd *s = j->s;
    int64_t row = (4 * s->columns + x->tile - 4) * LANES;
    fill_band(j, x, j->first_band + band, block * LANES, scratch);
    for (int64_t i = 0; i < s->columns; i++) {
        int64_t t = band * s->columns + i;
        float *to = x->to + t / ONT_WINO_TILES * x->block_step + block * x->channel_step + t % ONT_WINO_TILES * LANES;
        x->transform(scratch + i * 4 * LANES, row, to, x->plane);
    }
}

/* Zeroes the unused tiles of the last block. */
static void clear_unused_tiles(const job *j, const source *x)
{
    for (int64_t t = j->bands * j->s->columns; t < j->tiles; t++)
        for (int64_t p = 0; p < ONT_WINO_POINTS; p++)
            for (int64_t b = 0; b < x->blocks; b++)
                memset(x->to + p * x->plane + t / ONT_WINO_TILES * x->block_step + b * x->channel_step +
                           t % ONT_WINO_TILES * LANES,
                       0, LANES * sizeof(float));
}

static char *slot_at(const job *j, int64_t slot)
{
    return j->work + j->s->slots_at + (size_t)slot * j->s->slot_bytes;
}

/* Transforms the bands and blocks of channels of one slot. */
static void transform_share(const job *j, const source *x, int64_t slot)
{
    int64_t items = j->bands * x->blocks, slots = j->s->slots;
    for (int64_t i = items * slot / slots; i < items * (slot + 1) / slots; i++)
        transform_band(j, x, i / x->blocks, i % x->blocks, (float *)slot_at(j, slot));
    if (!slot) clear_unused_tiles(j, x);
}

static source x_of(const job *j, bool grad)
{
    const ont_winograd *s = j->s;
    return (source){.data = j->src, .channels = s->c, .each = s->each, .depth = s->depth, .height = s->in[0],
                    .width = s->in[1], .before = s->before, .above = s->pad[0], .left = s->pad[1],
                    .tile = ONT_WINO_IN, .transform = j->loops->input, .to = (float *)(j->work + s->v_at),
                    .plane = s->v_plane, .blocks = s->channel_blocks,
                    .block_step = grad ? BLOCK : s->channel_blocks * BLOCK,
                    .channel_step = grad ? s->group_tiles * LANES : BLOCK};
}

static source dy_of(const job *j)
{
    const ont_winograd *s = j->s;
    return (source){.data = j->weight, .channels = s->k, .each = s->k, .depth = s->slices, .height = s->out[0],
                    .width = s->out[1], .tile = ONT_WINO_OUT, .transform = j->loops->gradient,
                    .to = (float *)(j->work + s->w_at), .plane = s->w_plane, .blocks = ont_ceil_div(s->k, LANES),
                    .block_step = BLOCK, .channel_step = s->group_tiles * LANES};
}

/* For each group of tiles: transform() on every slot, then multiply() on every slot. */
static void each_group(job *j, void (*transform)(void *, int64_t, int64_t), void (*multiply)(void *, int64_t, int64_t))
{
    const ont_winograd *s = j->s;
    for (j->first_band = 0; j->first_band < s->bands; j->first_band += s->group_bands) {
        j->bands = ont_min(s->group_bands, s->bands - j->first_band);
        j->tiles = ont_ceil_div(j->bands * s->columns, ONT_WINO_TILES) * ONT_WINO_TILES;
        ont_parallel(s->slots, 1, transform, j);
        ont_parallel(s->slots, 1, multiply, j);
    }
}

/* ---- forward ---- */

static void transform_forward(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    source x = x_of(j, false);
    for (int64_t slot = first; slot < last; slot++) transform_share(j, &x, slot);
}

/*
 * Transforms the weights of sixteen result channels from `lane` on and `n` input channels from `c` on. weight is (k,
 * each, taps, 3, 3); for the gradient of the input (each, k, taps, 3, 3), rotated.
 */
static void transform_weights(const job *j, int64_t lane, int64_t c, int64_t n, float *taps, float *u)
{
    const ont_winograd *s = j->s;
    bool rotated = s->kind == ONT_CONV_GRAD_INPUT;
    int64_t lanes = ont_max(0, ont_min(LANES, s->k - lane));
    bool adjacent = !rotated && s->taps == 1;
    if (adjacent) j->loops->gather(j->weight + (lane * s->c + c) * 9, s->c * 9, lanes, n * 9, taps);
    for (int64_t i = 0; i < n; i++) {
        int64_t tap = (c + i) / s->each, channel = (c + i) % s->each;
        int64_t at = rotated ? (channel * s->k + lane) * s->taps + s->taps - 1 - tap
                             : (lane * s->each + channel) * s->taps + tap;
        if (!adjacent)
            j->loops->gather(j->weight + at * 9, (rotated ? s->taps : s->c) * 9, lanes, 9, taps + i * 9 * LANES);
        const float *first = taps + (i * 9 + (rotated ? 8 : 0)) * LANES;
        j->loops->filter(first, rotated ? -LANES : LANES, u + i * ONT_WINO_WIDTH, s->u_plane);
    }
    for (int64_t i = n; i % LANES; i++)
        for (int64_t p = 0; p < ONT_WINO_POINTS; p++)
            memset(u + p * s->u_plane + i * ONT_WINO_WIDTH, 0, LANES * sizeof *u);
}

/* Transforms tiles [tile, tile + count) of one band back and stores sixteen channels from `lane` on. */
static void write_tiles(const job *j, const float *m, int64_t tile, int64_t count, int64_t lane, float *stage)
{
    const ont_winograd *s = j->s;
    int64_t band = j->first_band + tile / s->columns, column = tile % s->columns * 4, row = band % s->rows * 4;
    int64_t lanes = ont_min(LANES, s->k - lane), area = s->out[0] * s->out[1], stage_row = count * 4 * LANES;
    float bias[LANES] = {0};
    if (j->bias) memcpy(bias, j->bias + lane, (size_t)lanes * sizeof *bias);
    for (int64_t i = 0; i < count; i++)
        j->loops->output(m + i * ONT_WINO_WIDTH, s->m_plane, bias, stage + i * 4 * LANES, stage_row);
    int64_t image = band / s->rows, volume = image / s->slices, slice = image % s->slices;
    float *to = j->dst + ((volume * s->k + lane) * s->slices + slice) * area + row * s->out[1] + column;
    for (int64_t r = 0; r < ont_min(4, s->out[0] - row); r++)
        j->loops->scatter(stage + r * stage_row, s->slices * area, lanes, ont_min(count * 4, s->out[1] - column),
                          to + r * s->out[1]);
}

/* Blocks of tiles [block, block + count) of the group, 32 result channels from `lane` on. */
static void multiply_part(const job *j, int64_t lane, int64_t block, int64_t count, char *scratch)
{
    const ont_winograd *s = j->s;
    size_t at = 0;
    float *stage = (float *)(scratch + reserve(&at, band_floats(s))),
          *u = (float *)(scratch + reserve(&at, ONT_WINO_POINTS * s->u_plane));
    float *m = (float *)(scratch + reserve(&at, ONT_WINO_POINTS * s->m_plane)), *taps = (float *)(scratch + at);
    const float *v = (const float *)(j->work + s->v_at) + block * s->channel_blocks * BLOCK;
    for (int64_t c = 0; c < s->channel_blocks; c += CHUNK) {
        int64_t blocks = ont_min(CHUNK, s->channel_blocks - c), n = ont_min(blocks * LANES, s->c - c * LANES);
        for (int half = 0; half < 2; half++)
            transform_weights(j, lane + half * LANES, c * LANES, n, taps, u + half * LANES);
        for (int64_t p = 0; p < ONT_WINO_POINTS; p++)
            j->loops->product(v + p * s->v_plane + c * BLOCK, s->channel_blocks * BLOCK, u + p * s->u_plane,
                              m + p * s->m_plane, count, blocks, c > 0);
    }
    int64_t first = block * ONT_WINO_TILES, end = ont_min(first + count * ONT_WINO_TILES, j->bands * s->columns);
    for (int64_t t = first, run; t < end; t += run) {
        run = ont_min(s->columns - t % s->columns, end - t);
        for (int half = 0; half < 2 && lane + half * LANES < s->k; half++)
            write_tiles(j, m + (t - first) * ONT_WINO_WIDTH + half * LANES, t, run, lane + half * LANES, stage);
    }
}

static void multiply_forward(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_winograd *s = j->s;
    int64_t blocks = j->tiles / ONT_WINO_TILES, parts = ont_ceil_div(blocks, s->part_blocks),
            items = ont_ceil_div(s->k, ONT_WINO_WIDTH) * parts;
    for (int64_t slot = first; slot < last; slot++)
        for (int64_t i = items * slot / s->slots; i < items * (slot + 1) / s->slots; i++) {
            int64_t block = i % parts * s->part_blocks;
            multiply_part(j, i / parts * ONT_WINO_WIDTH, block, ont_min(s->part_blocks, blocks - block),
                          slot_at(j, slot));
        }
}

void ont_winograd_compute(const ont_winograd *s, const float *src, const float *weight, const float *bias, float *dst,
                          char *work)
{
    job j = {.s = s, .loops = ont_simd_winograd(), .src = src, .weight = weight, .bias = bias, .dst = dst,
             .work = work};
    each_group(&j, transform_forward, multiply_forward);
}

/* ---- gradient of the weights ---- */

static void transform_grad(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    source x = x_of(j, true), dy = dy_of(j);
    for (int64_t slot = first; slot < last; slot++) {
        transform_share(j, &x, slot);
        transform_share(j, &dy, slot);
    }
}

/* m (36, 16, 32) to dweight (k, each, taps, 3, 3), from channels `k` and `c` on. */
static void write_weights(const job *j, const float *m, int64_t k, int64_t c)
{
    const ont_winograd *s = j->s;
    for (int64_t r = 0; r < ont_min(LANES, s->k - k); r++)
        for (int64_t half = 0; half < ONT_WINO_WIDTH && c + half < s->c; half += LANES) {
            float taps[9 * LANES];
            int64_t tap = (c + half) / s->each, channel = (c + half) % s->each;
            j->loops->filter_grad(m + r * ONT_WINO_WIDTH + half, s->m_plane, taps);
            j->loops->scatter(taps, s->taps * 9, ont_min(LANES, s->c - c - half), 9,
                              j->dst + (((k + r) * s->each + channel) * s->taps + tap) * 9);
        }
}

static void multiply_grad(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_winograd *s = j->s;
    int64_t step = s->group_tiles * LANES, pairs = s->channel_blocks / 2, items = ont_ceil_div(s->k, LANES) * pairs;
    const float *v = (const float *)(j->work + s->v_at), *w = (const float *)(j->work + s->w_at);
    bool once = s->group_bands == s->bands, end = j->first_band + j->bands == s->bands;
    for (int64_t slot = first; slot < last; slot++)
        for (int64_t i = items * slot / s->slots; i < items * (slot + 1) / s->slots; i++) {
            size_t at = 0;
            reserve(&at, band_floats(s));
            float *m = once ? (float *)(slot_at(j, slot) + at)
                            : (float *)(j->work + s->sums_at) + i * ONT_WINO_POINTS * s->m_plane;
            for (int64_t p = 0; p < ONT_WINO_POINTS; p++)
                j->loops->product_grad(w + p * s->w_plane + i / pairs * step, v + p * s->v_plane + i % pairs * 2 * step,
                                       step, m + p * s->m_plane, j->tiles, j->first_band > 0);
            if (end) write_weights(j, m, i / pairs * LANES, i % pairs * ONT_WINO_WIDTH);
        }
}

void ont_winograd_compute_grad(const ont_winograd *s, const float *dy, const float *x, float *dweight, char *work)
{
    job j = {.s = s, .loops = ont_simd_winograd(), .src = x, .weight = dy, .dst = dweight, .work = work};
    each_group(&j, transform_grad, multiply_grad);
}
