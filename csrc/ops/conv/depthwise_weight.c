/*
 * Gradient of the weight of a depthwise convolution of images, of any stride and dilation. Channel by channel, a few
 * images are copied to a flat array with zeros between their rows. Each tap of the filter is then one distance in it,
 * and its gradient is a dot product of two flat arrays.
 *
 * oneDNN has a kernel for filters of up to 3 x 3; it unrolls the windows of larger ones, a channel at a time.
 *
 * With strides, x is split into one array for each remainder of row and column by the stride ("phase"). Then a tap
 * reads adjacent elements of one phase.
 *
 * The dot products also multiply x by the zeros between rows of dy: an infinity in a channel of x makes more elements
 * of that channel's gradient NaN than it does in PyTorch.
 */
#include <string.h>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/parallel.h"
#include "ops/conv/conv_onednn.h"
#include "ops/conv/depthwise.h"
#include "simd/depthwise/depthwise_weight.h"

enum { MAX_TAPS = 128, MAX_PHASES = 16, CHUNK = 4096 /* floats of a flat array of more than one image */ };

typedef struct weight_state {
    int64_t n, channels, taps;
    int64_t in[2], out[2], stride[2];
    int64_t rows, pitch;   /* of an image in a flat array, zeros included */
    int64_t images;        /* in a flat array, at most */
    int64_t front, length; /* of a flat array: zeros before the first image; floats in all */
    int64_t phases, slots;
    int64_t at[MAX_TAPS]; /* of each tap, the distance from dy to the flat arrays of x */
} weight_state;

const char *ont_depthwise_weight_accept(const ont_node *node)
{
    ont_conv c;
    ont_conv_kind kind;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32) return "dtype";
    if (ont_conv_read(node, &c, &kind) != ONT_OK) return "the window does not fit";
    if (c.groups != c.c || c.groups != c.o) return "not depthwise";
    if (c.in[0] != 1 || c.out[0] != 1 || c.kernel[0] != 1) return "three spatial dims";
    if (c.kernel[1] <= 3 && c.kernel[2] <= 3 && c.dilation[1] == 1 && c.dilation[2] == 1) return "a small filter";
    if (c.stride[1] > MAX_PHASES || c.stride[2] > MAX_PHASES / c.stride[1]) return "large strides";
    for (int d = 0; d < 3; d++)
        if (!c.kernel[d] || !c.in[d] || !c.out[d] || !c.n) return "no elements";
    return (double)c.kernel[1] * (double)c.kernel[2] > MAX_TAPS ? "too many taps" : NULL;
}

static int64_t floor_div(int64_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

/* Along dim d, the distance of the filter's cell k within its phase. */
static int64_t distance(const ont_conv *c, int d, int64_t k)
{
    return floor_div(k * c->dilation[d] - c->pad[d], c->stride[d]);
}

/* Cells of an image along dim d with as many zeros behind them as a tap reads before or behind them. */
static int64_t spaced(const ont_conv *c, int d)
{
    int64_t cells = ont_ceil_div(c->in[d], c->stride[d]);
    int64_t before = -distance(c, d, 0), behind = distance(c, d, c->kernel[d] - 1) + c->out[d] - cells;
    return ont_max(cells + ont_max(0, ont_max(before, behind)), c->out[d]);
}

/* The phase of the filter's cell k along dim d. */
static int64_t remainder_of(const ont_conv *c, int d, int64_t k)
{
    return k * c->dilation[d] - c->pad[d] - distance(c, d, k) * c->stride[d];
}

/* Sets sizes of the flat arrays and where each tap reads. */
static void set_layout(weight_state *s, const ont_conv *c)
{
    int64_t up = -distance(c, 1, 0), down = distance(c, 1, c->kernel[1] - 1);
    int64_t left = -distance(c, 2, 0), right = distance(c, 2, c->kernel[2] - 1);
    s->rows = spaced(c, 1), s->pitch = spaced(c, 2);
    s->images = ont_min(s->n, ont_max(1, CHUNK / (s->rows * s->pitch)));
    s->front = ont_round_up(ont_max(0, ont_max(up * s->pitch + left, down * s->pitch + right)), ONT_DEPTHWISE_LANES);
    s->length = ont_round_up(2 * s->front + s->images * s->rows * s->pitch + ONT_DEPTHWISE_LANES, ONT_DEPTHWISE_LANES);
    for (int64_t a = 0; a < c->kernel[1]; a++)
        for (int64_t b = 0; b < c->kernel[2]; b++) {
            int64_t phase = remainder_of(c, 1, a) * c->stride[2] + remainder_of(c, 2, b);
            int64_t away = distance(c, 1, a) * s->pitch + distance(c, 2, b);
            ONT_ASSERT(phase >= 0 && phase < s->phases && away >= -s->front && away <= s->front);
            s->at[s->taps++] = phase * s->length + away;
        }
}

ont_status ont_depthwise_weight_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ont_conv c;
    ont_conv_kind kind;
    weight_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_conv_read(node, &c, &kind));
    *s = (weight_state){.n = c.n, .channels = c.c, .phases = c.stride[1] * c.stride[2]};
    for (int d = 0; d < 2; d++) s->in[d] = c.in[d + 1], s->out[d] = c.out[d + 1], s->stride[d] = c.stride[d + 1];
    set_layout(s, &c);
    s->slots = ont_min(ont_parallel_threads(), s->channels);
    out->work_bytes = (size_t)(s->slots * (s->phases + 1) * s->length) * sizeof(float);
    out->state = s;
    return ONT_OK;
}

/* Some images of a channel, in the memory of a slot. */
typedef struct chunk {
    const weight_state *s;
    const ont_depthwise_loops *loops;
    float *x, *y; /* flat arrays: of x, one for each phase; then of dy */
    int64_t channel, first, images;
} chunk;

/* Plane of an image in a tensor of `cells` elements a plane. */
static int64_t plane_at(const chunk *c, int64_t image, int64_t cells)
{
    return ((c->first + image) * c->s->channels + c->channel) * cells;
}

/* A flat array's image. */
static float *image_at(const chunk *c, float *flat, int64_t image)
{
    return flat + c->s->front + image * c->s->rows * c->s->pitch;
}

/* The phase whose first cell is (row, column). */
static void pack_phase(const chunk *c, const float *x, int64_t row, int64_t column)
{
    const weight_state *s = c->s;
    int64_t rows = ont_ceil_div(s->in[0] - row, s->stride[0]);
    int64_t columns = ont_ceil_div(s->in[1] - column, s->stride[1]);
    float *flat = c->x + (row * s->stride[1] + column) * s->length;
    for (int64_t i = 0; i < c->images; i++)
        c->loops->pack(image_at(c, flat, i), s->pitch,
                       x + plane_at(c, i, s->in[0] * s->in[1]) + row * s->in[1] + column, s->in[1] * s->stride[0],
                       s->stride[1], rows, columns);
}

static void pack_x(const chunk *c, const float *x)
{
    const weight_state *s = c->s;
    for (int64_t row = 0; row < s->stride[0] && row < s->in[0]; row++)
        for (int64_t column = 0; column < s->stride[1] && column < s->in[1]; column++) pack_phase(c, x, row, column);
}

static void pack_y(const chunk *c, const float *y)
{
    const weight_state *s = c->s;
    for (int64_t i = 0; i < c->images; i++)
        c->loops->pack(image_at(c, c->y, i), s->pitch, y + plane_at(c, i, s->out[0] * s->out[1]), s->out[1], 1,
                       s->out[0], s->out[1]);
}

/* Clears what an earlier chunk, perhaps of another channel, left behind the last image where the taps read. */
static void clear_behind(const chunk *c)
{
    const weight_state *s = c->s;
    if (c->images == s->images) return;
    for (int64_t phase = 0; phase <= s->phases; phase++) /* the last one is dy */
        memset(image_at(c, c->x + phase * s->length, c->images), 0,
               (size_t)(s->front + ONT_DEPTHWISE_LANES) * sizeof(float));
}

static void run_channel(const ont_call *call, chunk *c)
{
    const weight_state *s = c->s;
    float *dw = (float *)call->out[0] + c->channel * s->taps, sums[MAX_TAPS];
    double totals[MAX_TAPS] = {0};
    for (c->first = 0; c->first < s->n; c->first += c->images) {
        c->images = ont_min(s->images, s->n - c->first);
        pack_y(c, call->in[0]);
        pack_x(c, call->in[1]);
        clear_behind(c);
        c->loops->dot_taps(sums, c->y + s->front, c->x + s->front, s->at, s->taps,
                           ont_round_up(c->images * s->rows * s->pitch, ONT_DEPTHWISE_LANES));
        for (int64_t k = 0; k < s->taps; k++) totals[k] += (double)sums[k];
    }
    for (int64_t k = 0; k < s->taps; k++) dw[k] = (float)totals[k];
}

/* Slots [first, last), each of which has its own channels and flat arrays, where the zeros between rows stay. */
static void run_slots(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const weight_state *s = call->state;
    int64_t floats = (s->phases + 1) * s->length;
    for (int64_t slot = first; slot < last; slot++) {
        float *work = (float *)call->work + slot * floats;
        chunk c = {.s = s, .loops = ont_simd_depthwise(), .x = work, .y = work + s->phases * s->length};
        memset(work, 0, (size_t)floats * sizeof *work);
        int64_t end = (slot + 1) * s->channels / s->slots;
        for (c.channel = slot * s->channels / s->slots; c.channel < end; c.channel++) run_channel(call, &c);
    }
}

ont_status ont_depthwise_weight_run(const ont_call *call)
{
    const weight_state *s = call->state;
    ont_parallel(s->slots, 1, run_slots, (void *)call);
    return ONT_OK;
}
