/*
 * RandomNormal, RandomUniform, Bernoulli and Multinomial: the words of a Philox stream that the CPU's kernels take for
 * the same elements (csrc/ops/random/random_fill.c). Products and sums are rounded one by one, as there, so that
 * uniform numbers are the same bits; normal ones and Multinomial differ by the roundings of log, cos and exp.
 */
#include "kernels/launch.cuh"

#include "kernels/bits.cuh"
#include "kernels/kernels.h"
#include "kernels/math.cuh"
#include "kernels/mma.cuh"

/* ---- one number for each element ---- */

/* Elements of float32: a block of four words gives four uniform numbers, or two pairs of normal ones. */
template <bool NORMAL> ONT_DEVICE void four_numbers(const uint32_t *words, float *v)
{
    ONT_UNROLL
    for (int k = 0; k < 4; k++) v[k] = (float)(words[k] >> 8) * 5.9604644775390625e-8f; /* 2^-24 */
    ONT_UNROLL
    for (int k = 0; k < (NORMAL ? 4 : 0); k += 2) {
        const float length = sqrtf(-2 * logf(v[k] + 5.9604644775390625e-8f)), angle = 6.2831853f * v[k + 1];
        v[k] = length * cosf(angle);
        v[k + 1] = length * sinf(angle);
    }
}

template <bool NORMAL>
__global__ void __launch_bounds__(ONT_THREADS)
    fill_float_kernel(const ont_fill s, int64_t n, const uint64_t *random, float *out)
{
    const float low = (float)s.first, width = (float)(NORMAL ? s.second : s.second - s.first);
    const bool aligned = (uint64_t)out % 16 == 0;
    ONT_FOR(i, (n + 3) / 4) {
        uint32_t words[4];
        float v[4];
        ont_philox(random[0], s.stream, (uint64_t)i, words);
        four_numbers<NORMAL>(words, v);
        ONT_UNROLL
        for (int k = 0; k < 4; k++) v[k] = __fadd_rn(low, __fmul_rn(width, v[k]));
        if (aligned && 4 * i + 4 <= n) {
            ont_16bytes four;
            memcpy(&four, v, 16);
            ont_store16(out + 4 * i, four);
            continue;
        }
        for (int k = 0; k < 4 && 4 * i + k < n; k++) out[4 * i + k] = v[k];
    }
}

/* In [0, 1) with 53 bits. */
ONT_DEVICE double fraction(uint32_t high, uint32_t low)
{
    return (double)((uint64_t)high << 21 | low >> 11) * 1.1102230246251565e-16; /* 2^-53 */
}

/* In [0, 1) with as many bits as the dtype has: float64 or 16 bits. */
ONT_DEVICE double uniform(const uint32_t *words, int dtype)
{
    if (dtype == ONT_FLOAT64) return fraction(words[0], words[1]);
    return dtype == ONT_BFLOAT16 ? (double)(words[0] >> 24) * (1.0 / 256) : (double)(words[0] >> 21) * (1.0 / 2048);
}

/* The Box-Muller transform; the uniform number of the radius is in (0, 1]. */
ONT_DEVICE double normal(const uint32_t *words)
{
    const double radius = fraction(words[0], words[1]) + 1.1102230246251565e-16;
    return sqrt(-2 * log(radius)) * cos(6.28318530717958647692 * fraction(words[2], words[3]));
}

/* Elements of any dtype: a block of words for each. */
template <int KIND>
__global__ void __launch_bounds__(ONT_THREADS)
    fill_kernel(const ont_fill s, int64_t n, const uint64_t *random, const void *x, int size, void *out)
{
    ONT_FOR(i, n) {
        uint32_t words[4];
        double v;
        ont_philox(random[0], s.stream, (uint64_t)i, words);
        if (KIND == ONT_FILL_BERNOULLI)
            v = fraction(words[0], words[1]) <
                ont_value<double>(ont_cast((int)s.x, ONT_FLOAT64, ont_read_bits(x, i, size)));
        else if (KIND == ONT_FILL_NORMAL)
            v = __dadd_rn(s.first, __dmul_rn(s.second, normal(words)));
        else
            v = __dadd_rn(s.first, __dmul_rn(s.second - s.first, uniform(words, (int)s.dtype)));
        ont_write_bits(out, i, (int)s.dtype, ont_from_double(v, (int)s.dtype));
    }
}

static int size_of(ont_dtype dtype) { return dtype == ONT_FLOAT64 ? 8 : dtype == ONT_FLOAT32 ? 4 : 2; }

extern "C" int ont_launch_fill(const ont_fill *s, int64_t n, const uint64_t *random, const void *x, void *out,
                               void *stream)
{
    const unsigned blocks = ont_blocks(n, ONT_THREADS), of_four = ont_blocks((n + 3) / 4, ONT_THREADS);
    const bool single = s->dtype == ONT_FLOAT32;
    if (!n) return 0;
#define FOUR(is_normal) \
    ONT_LAUNCH(fill_float_kernel<is_normal>, of_four, ONT_THREADS, 0, stream, *s, n, random, (float *)out)
#define EACH(kind) ONT_LAUNCH(fill_kernel<kind>, blocks, ONT_THREADS, 0, stream, *s, n, random, x, size_of(s->x), out)
    switch (s->kind) {
    case ONT_FILL_BERNOULLI: return EACH(ONT_FILL_BERNOULLI);
    case ONT_FILL_NORMAL: return single ? FOUR(true) : EACH(ONT_FILL_NORMAL);
    default: return single ? FOUR(false) : EACH(ONT_FILL_UNIFORM);
    }
#undef EACH
#undef FOUR
}

/* ---- Multinomial ---- */

/*
 * A block takes a row: its largest logarithm, the sums of the probabilities up to the end of each tile, and then a warp
 * for each sample, which finds the tile in which the sample falls, and the class in that. ends (rows, tiles).
 */
enum { CLASSES = 256 /* of a tile */ };

static inline int64_t tiles_of(const ont_multinomial *s) { return (s->n + CLASSES - 1) / CLASSES; }

struct multinomial_row {
    double most;  /* the largest logarithm */
    int64_t last; /* the last class with a probability above 0, which takes what rounding leaves */
};

/* The sum over the lanes up to this one. */
ONT_DEVICE double running_sum(double v)
{
    const int lane = (int)threadIdx.x & 31;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const double lower = __shfl_up_sync(0xffffffffu, v, (unsigned)lanes);
        if (lane >= lanes) v += lower;
    }
    return v;
}

template <class T>
ONT_DEVICE multinomial_row read_row(const ont_multinomial &s, int64_t tiles, const T *x, double *ends)
{
    __shared__ double largest[32];
    __shared__ int64_t latest[32];
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    multinomial_row row = {-INFINITY, 0};
    for (int64_t i = threadIdx.x; i < s.n; i += blockDim.x) row.most = fmax(row.most, (double)ont_load(x + i));
    row.most = ont_block_max(row.most, largest);
    for (int64_t tile = warp; tile < tiles; tile += warps) {
        double sum = 0;
        for (int64_t i = tile * CLASSES + lane; i < s.n && i < (tile + 1) * CLASSES; i += 32) {
            const double p = exp((double)ont_load(x + i) - row.most);
            if (p > 0) row.last = i;
            sum += p;
        }
        sum = ont_warp_sum(sum);
        if (!lane) ends[tile] = sum;
    }
    row.last = ont_block_max(row.last, latest); /* its barriers order `ends` too */
    double before = 0;
    for (int64_t first = 0; !warp && first < tiles; first += 32) {
        const int64_t tile = first + lane;
        const double sum = before + running_sum(tile < tiles ? ends[tile] : 0);
        if (tile < tiles) ends[tile] = sum;
        before = __shfl_sync(0xffffffffu, sum, 31);
    }
    __syncthreads();
    return row;
}

/* The first class up to which the probabilities add up to more than `left`. All lanes of a warp get it. */
template <class T>
ONT_DEVICE int64_t class_at(const ont_multinomial &s, const multinomial_row &row, const T *x, const double *ends,
                            int64_t tiles, double left)
{
    int64_t first = 0, end = tiles; /* bisects for the first tile whose end is beyond */
    while (first < end) {
        const int64_t middle = (first + end) / 2;
        if (left < ends[middle]) end = middle;
        else first = middle + 1;
    }
    double before = first ? ends[first - 1] : 0;
    for (int64_t at = first * CLASSES; at < s.n; at += 32) {
        const int64_t i = at + ((int)threadIdx.x & 31);
        const double p = i < s.n ? exp((double)ont_load(x + i) - row.most) : 0, sum = before + running_sum(p);
        const unsigned beyond = __ballot_sync(0xffffffffu, p > 0 && left < sum);
        if (beyond) return at + ont_count_bits((beyond & (0 - beyond)) - 1);
        before = __shfl_sync(0xffffffffu, sum, 31);
    }
    return row.last;
}

template <class T>
__global__ void __launch_bounds__(512)
    multinomial_kernel(const ont_multinomial s, int64_t tiles, const uint64_t *random, const T *x, double *ends,
                       void *out)
{
    const int warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    for (int64_t r = blockIdx.x; r < s.rows; r += gridDim.x) {
        const multinomial_row row = read_row(s, tiles, x + r * s.n, ends + r * tiles);
        const double total = ends[r * tiles + tiles - 1];
        for (int64_t k = warp; k < s.samples; k += warps) {
            uint32_t words[4];
            ont_philox(random[0], s.stream, (uint64_t)(r * s.samples + k), words);
            const int64_t chosen = class_at(s, row, x + r * s.n, ends + r * tiles, tiles,
                                            fraction(words[0], words[1]) * total);
            if (threadIdx.x & 31) continue;
            if (s.wide) ((int64_t *)out)[r * s.samples + k] = chosen;
            else ((int32_t *)out)[r * s.samples + k] = (int32_t)chosen;
        }
    }
}

extern "C" size_t ont_multinomial_work(const ont_multinomial *s)
{
    return (size_t)(s->rows * tiles_of(s)) * sizeof(double);
}

extern "C" int ont_launch_multinomial(const ont_multinomial *s, const uint64_t *random, const void *x, void *out,
                                      void *work, void *stream)
{
    const unsigned few = ont_row_threads(s->n), threads = few == 256 && s->n > 2048 ? 512 : few;
    if (!s->rows) return 0;
#define RUN(type) \
    ONT_LAUNCH(multinomial_kernel<type>, ont_blocks(s->rows, 1), threads, 0, stream, *s, tiles_of(s), random, \
               (const type *)x, (double *)work, out)
    switch (s->dtype) {
    case ONT_FLOAT64: return RUN(double);
    case ONT_FLOAT16: return RUN(ont_f16);
    case ONT_BFLOAT16: return RUN(ont_bf16);
    default: return RUN(float);
    }
#undef RUN
}
