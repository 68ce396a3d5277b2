/*
 * LayerNormalization and RMSNormalization, with an addition before and Casts around them, and their gradients.
 * Statistics are in C, float32 or float64; other operands are in C or in H, 16 bits. Rows of up to 8192 elements are
 * read once, in chunks of 16 bytes and more, and stay in registers; any other row is read several times. Gradients of
 * scale and bias are partial sums over sets of rows, added in order, so that the result does not depend on the device.
 */
#include "kernels/launch.cuh"

#include "kernels/chunks.cuh"
#include "kernels/kernels.h"
#include "kernels/math.cuh"

enum {
    N = 8,          /* elements of a chunk */
    SUM_LANES = 32, /* columns of a block that adds partial sums */
#ifdef ONT_EMULATE  /* for the duration of tests */
    THREADS_1 = 96,
    THREADS_2 = 64,
    ALL_THREADS = 768,
#else
    THREADS_1 = 384,         /* of a block with one chunk for each thread, which may have several rows */
    THREADS_2 = 512,         /* of a block with two, which has one row */
    ALL_THREADS = 132 * 768, /* of a gradient: as many as run at once on an H100 with 80 registers each */
#endif
};

/* An operand, which is 16-bit or not, or absent. */
struct operand {
    const void *data;
    bool half;
};
struct result {
    void *data;
    bool half;
};

struct forward_operands {
    int64_t rows, n;
    double eps;
    int width, rms; /* width: threads of a row */
    operand x, addend;
    const void *scale, *bias;
    result y, sum, copy;
    void *mean, *inv;
};

/* partial (parts, 2, n): sums of dy * hat and of dy over a set of rows */
struct gradient_operands {
    int64_t rows, n, parts;
    int width, rms;
    operand x, dy, dy2, addend;
    const void *scale, *mean, *inv;
    result dx, copy;
    void *dscale, *dbias, *partial;
};

/* ---- elements ---- */

template <class H, class C> ONT_DEVICE C element(const operand &from, int64_t i)
{
    return from.half ? (C)ont_load((const H *)from.data + i) : ((const C *)from.data)[i];
}

template <class H, class C> ONT_DEVICE void put(const result &to, int64_t i, C v)
{
    if (to.half)
        ont_store((H *)to.data + i, v);
    else
        ((C *)to.data)[i] = v;
}

/* A chunk as it lies in memory: all loads of a row are issued before the first is converted. */
template <class C> struct raw_chunk {
    ont_16bytes part[N * sizeof(C) / 16];
};

template <class H, class C> ONT_DEVICE void fetch(const operand &from, int64_t i, raw_chunk<C> &raw)
{
    const int size = from.half ? sizeof(H) : sizeof(C);
    /* A shift: with a product by the size, nvcc needs more registers than the gradient's kernel has. */
    const char *at = (const char *)from.data + (i << (from.half ? 1 : sizeof(C) == 4 ? 2 : 3));
    ONT_UNROLL
    for (int k = 0; k < (int)(N * sizeof(C) / 16); k++)
        if (k * 16 < (int)(N * size)) raw.part[k] = ont_load16(at + k * 16);
}

template <class H, class C> ONT_DEVICE void expand(const operand &from, const raw_chunk<C> &raw, C (&v)[N])
{
    if (from.half) {
        H part[N];
        memcpy(part, &raw, sizeof part);
        ONT_UNROLL
        for (int k = 0; k < N; k++) v[k] = (C)ont_load(&part[k]);
    } else
        memcpy(v, &raw, sizeof v);
}

template <class H, class C> ONT_DEVICE void put_chunk(const result &to, int64_t i, const C (&v)[N])
{
    if (to.half)
        store_chunk((H *)to.data + i, v);
    else
        store_chunk((C *)to.data + i, v);
}

template <class H, class C> ONT_DEVICE void add_chunk(const operand &from, int64_t i, C (&v)[N])
{
    raw_chunk<C> raw;
    C more[N];
    fetch<H>(from, i, raw);
    expand<H>(from, raw, more);
    for (int k = 0; k < N; k++) v[k] += more[k];
}

/* Sums over the `width` threads of a row, in one order; every thread of the block calls it. The two halves of `scratch`
 * are used in turn, so that one barrier suffices. */
template <class C> struct row_sums {
    C *scratch; /* (2, 2, 32) */
    int width, turn;

    __device__ void add(C &a, C &b)
    {
        a = ont_warp_sum(a);
        b = ont_warp_sum(b);
        if (width == 32) return;
        const int warp = (int)threadIdx.x >> 5, first = (int)threadIdx.x / width * (width >> 5);
        C *of_a = scratch + turn * 64, *of_b = of_a + 32;
        turn ^= 1;
        if (!(threadIdx.x & 31)) {
            of_a[warp] = a;
            of_b[warp] = b;
        }
        __syncthreads();
        a = b = 0;
        for (int w = first; w < first + (width >> 5); w++) {
            a += of_a[w];
            b += of_b[w];
        }
    }
};

/* ---- forward, rows in registers: `width` threads for each of several rows, K chunks for each thread ---- */

template <class H, class C, int K>
ONT_DEVICE void load_row(const forward_operands &f, int64_t at, int first, C (&v)[K][N])
{
    const int n = (int)f.n;
    raw_chunk<C> x[K], addend[K];
    ONT_UNROLL
    for (int k = 0; k < K; k++) {
        const int c = (first + k * f.width) * N;
        if (c >= n) continue;
        fetch<H>(f.x, at + c, x[k]);
        if (f.addend.data) fetch<H>(f.addend, at + c, addend[k]);
    }
    ONT_UNROLL
    for (int k = 0; k < K; k++) {
        const int c = (first + k * f.width) * N;
        if (c >= n) continue;
        expand<H>(f.x, x[k], v[k]);
        if (!f.addend.data) continue;
        C more[N];
        expand<H>(f.addend, addend[k], more);
        for (int j = 0; j < N; j++) v[k][j] += more[j];
        if (f.sum.data) put_chunk<H>(f.sum, at + c, v[k]);
    }
}

template <class H, class C, int K>
__global__ void __launch_bounds__(K == 1 ? THREADS_1 : THREADS_2, K == 1 && sizeof(C) == 4 ? 3 : 1)
    norm_kernel(const forward_operands f)
{
    __shared__ C scratch[128];
    row_sums<C> sums = {scratch, f.width, 0};
    const int n = (int)f.n, rows = (int)blockDim.x / f.width;
    const int group = (int)threadIdx.x / f.width, first = (int)threadIdx.x % f.width;
    for (int64_t base = (int64_t)blockIdx.x * rows; base < f.rows; base += (int64_t)gridDim.x * rows) {
        const int64_t row = base + group, at = row * n;
        const bool live = row < f.rows;
        C v[K][N] = {}, mean = 0, var = 0, unused = 0;
        if (live) load_row<H, C, K>(f, at, first, v);
        if (!f.rms) {
            for (int k = 0; k < K; k++)
                for (int j = 0; j < N; j++) mean += v[k][j];
            sums.add(mean, unused);
            mean /= (C)f.n;
        }
        for (int k = 0; k < K; k++)
            if ((first + k * f.width) * N < n)
                for (int j = 0; j < N; j++) var += (v[k][j] - mean) * (v[k][j] - mean);
        sums.add(var, unused);
        const C inv = 1 / vsqrt(var / (C)f.n + (C)f.eps);
        if (!live) continue;
        ONT_UNROLL
        for (int k = 0; k < K; k++) {
            const int c = (first + k * f.width) * N;
            if (c >= n) continue;
            C scale[N], bias[N] = {};
            load_chunk((const C *)f.scale + c, scale);
            if (f.bias) load_chunk((const C *)f.bias + c, bias);
            for (int j = 0; j < N; j++) v[k][j] = (v[k][j] - mean) * inv * scale[j] + bias[j];
            put_chunk<H>(f.y, at + c, v[k]);
            if (f.copy.data) put_chunk<H>(f.copy, at + c, v[k]);
        }
        if (first) continue;
        if (f.mean) ((C *)f.mean)[row] = mean;
        if (f.inv) ((C *)f.inv)[row] = inv;
    }
}

/* ---- gradient, rows in registers ---- */

/* hat = (x - mean) * inv, and the gradient of y */
template <class H, class C, int K>
ONT_DEVICE void load_gradient(const gradient_operands &f, int64_t row, int first, C (&hat)[K][N], C (&d)[K][N])
{
    const int n = (int)f.n;
    const C mean = f.mean ? ((const C *)f.mean)[row] : (C)0, inv = ((const C *)f.inv)[row];
    ONT_UNROLL
    for (int k = 0; k < K; k++) {
        const int c = (first + k * f.width) * N;
        if (c >= n) continue;
        raw_chunk<C> x, dy;
        C v[N];
        fetch<H>(f.x, row * n + c, x);
        fetch<H>(f.dy, row * n + c, dy);
        expand<H>(f.x, x, v);
        expand<H>(f.dy, dy, d[k]);
        for (int j = 0; j < N; j++) hat[k][j] = (v[j] - mean) * inv;
        if (f.dy2.data) add_chunk<H>(f.dy2, row * n + c, d[k]);
    }
}

/* The sums of a block over its rows, from those of each thread. */
template <class C, int K>
ONT_DEVICE void put_partial(const gradient_operands &f, const C (&sum)[K][N], int which, C *shared)
{
    const int n = (int)f.n, rows = (int)blockDim.x / f.width, first = (int)threadIdx.x % f.width;
    C *to = (C *)f.partial + (2 * (int64_t)blockIdx.x + which) * f.n;
    if (rows == 1) {
        for (int k = 0; k < K; k++)
            if ((first + k * f.width) * N < n) store_chunk(to + (first + k * f.width) * N, sum[k]);
        return;
    }
    __syncthreads();
    for (int j = 0; j < N; j++) shared[j * THREADS_1 + (int)threadIdx.x] = sum[0][j]; /* K is 1 */
    __syncthreads();
    for (int c = (int)threadIdx.x; c < n; c += (int)blockDim.x) {
        C total = 0;
        for (int g = 0; g < rows; g++) total += shared[c % N * THREADS_1 + g * f.width + c / N];
        to[c] = total;
    }
}

/* dx = inv * (g - mean(g) - hat * mean(g * hat)) + addend, with g = dy * scale, and without mean(g) for RMS */
template <class H, class C, int K>
__global__ void __launch_bounds__(K == 1 ? THREADS_1 : THREADS_2, K == 1 && sizeof(C) == 4 ? 2 : 1)
    norm_grad_kernel(const gradient_operands f)
{
    __shared__ C scratch[128], shared[K == 1 ? N * THREADS_1 : 1];
    row_sums<C> sums = {scratch, f.width, 0};
    const int n = (int)f.n, rows = (int)blockDim.x / f.width;
    const int group = (int)threadIdx.x / f.width, first = (int)threadIdx.x % f.width;
    C dscale[K][N] = {}, dbias[K][N] = {};
    for (int64_t base = (int64_t)blockIdx.x * rows; base < f.rows; base += (int64_t)gridDim.x * rows) {
        const int64_t row = base + group, at = row * n;
        const bool live = row < f.rows;
        C hat[K][N] = {}, d[K][N] = {}, g_sum = 0, gx_sum = 0;
        if (live) load_gradient<H, C, K>(f, row, first, hat, d);
        ONT_UNROLL
        for (int k = 0; k < K; k++) {
            const int c = (first + k * f.width) * N;
            if (c >= n) continue;
            C scale[N];
            load_chunk((const C *)f.scale + c, scale);
            for (int j = 0; j < N; j++) {
                dscale[k][j] += d[k][j] * hat[k][j];
                dbias[k][j] += d[k][j];
                d[k][j] *= scale[j];
                g_sum += d[k][j];
                gx_sum += d[k][j] * hat[k][j];
            }
        }
        sums.add(g_sum, gx_sum);
        if (!live || !f.dx.data) continue;
        const C inv = ((const C *)f.inv)[row], g_mean = f.rms ? (C)0 : g_sum / (C)f.n, gx_mean = gx_sum / (C)f.n;
        ONT_UNROLL
        for (int k = 0; k < K; k++) {
            const int c = (first + k * f.width) * N;
            if (c >= n) continue;
            for (int j = 0; j < N; j++) d[k][j] = inv * (d[k][j] - g_mean - hat[k][j] * gx_mean);
            if (f.addend.data) add_chunk<H>(f.addend, at + c, d[k]);
            put_chunk<H>(f.dx, at + c, d[k]);
            if (f.copy.data) put_chunk<H>(f.copy, at + c, d[k]);
        }
    }
    if (!f.partial) return;
    put_partial(f, dscale, 0, shared);
    put_partial(f, dbias, 1, shared);
}

/* ---- any row: a block for each ---- */

template <class H, class C> ONT_DEVICE C summand(const forward_operands &f, int64_t i)
{
    const C x = element<H, C>(f.x, i);
    return f.addend.data ? x + element<H, C>(f.addend, i) : x;
}

template <class H, class C> __global__ void __launch_bounds__(ONT_THREADS) norm_any_kernel(const forward_operands f)
{
    __shared__ C scratch[32];
    const int64_t n = f.n;
    const C *scales = (const C *)f.scale, *biases = (const C *)f.bias;
    for (int64_t row = blockIdx.x; row < f.rows; row += gridDim.x) {
        C mean = 0, var = 0;
        if (!f.rms) {
            for (int64_t i = threadIdx.x; i < n; i += blockDim.x) mean += summand<H, C>(f, row * n + i);
            mean = ont_block_sum(mean, scratch) / (C)n;
        }
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            const C v = summand<H, C>(f, row * n + i) - mean;
            var += v * v;
        }
        var = ont_block_sum(var, scratch) / (C)n;
        const C inv = 1 / vsqrt(var + (C)f.eps);
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            const C x = summand<H, C>(f, row * n + i), y = (x - mean) * inv * scales[i] + (biases ? biases[i] : (C)0);
            if (f.sum.data) put<H>(f.sum, row * n + i, x);
            put<H>(f.y, row * n + i, y);
            if (f.copy.data) put<H>(f.copy, row * n + i, y);
        }
        if (!threadIdx.x && f.mean) ((C *)f.mean)[row] = mean;
        if (!threadIdx.x && f.inv) ((C *)f.inv)[row] = inv;
    }
}

template <class H, class C> ONT_DEVICE C gradient_of_y(const gradient_operands &f, int64_t i)
{
    const C d = element<H, C>(f.dy, i);
    return f.dy2.data ? d + element<H, C>(f.dy2, i) : d;
}

template <class H, class C> ONT_DEVICE C normalized(const gradient_operands &f, int64_t row, int64_t i)
{
    return (element<H, C>(f.x, row * f.n + i) - (f.mean ? ((const C *)f.mean)[row] : (C)0)) * ((const C *)f.inv)[row];
}

template <class H, class C> __global__ void __launch_bounds__(ONT_THREADS) norm_dx_any_kernel(const gradient_operands f)
{
    __shared__ C scratch[32];
    const int64_t n = f.n;
    const C *scales = (const C *)f.scale;
    for (int64_t row = blockIdx.x; row < f.rows; row += gridDim.x) {
        C g_sum = 0, gx_sum = 0;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            const C g = gradient_of_y<H, C>(f, row * n + i) * scales[i];
            g_sum += g;
            gx_sum += g * normalized<H, C>(f, row, i);
        }
        gx_sum = ont_block_sum(gx_sum, scratch) / (C)n;
        g_sum = f.rms ? (C)0 : ont_block_sum(g_sum, scratch) / (C)n;
        for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
            const int64_t at = row * n + i;
            const C g = gradient_of_y<H, C>(f, at) * scales[i];
            C v = ((const C *)f.inv)[row] * (g - g_sum - normalized<H, C>(f, row, i) * gx_sum);
            if (f.addend.data) v += element<H, C>(f.addend, at);
            put<H>(f.dx, at, v);
            if (f.copy.data) put<H>(f.copy, at, v);
        }
        __syncthreads();
    }
}

/* A thread for each column. */
template <class H, class C>
__global__ void __launch_bounds__(ONT_THREADS) norm_parts_any_kernel(const gradient_operands f)
{
    const int64_t n = f.n, part = blockIdx.y, last = f.rows * (part + 1) / f.parts;
    C *partial = (C *)f.partial + part * 2 * n;
    ONT_FOR(i, n) {
        C dscale = 0, dbias = 0;
        for (int64_t row = f.rows * part / f.parts; row < last; row++) {
            const C d = gradient_of_y<H, C>(f, row * n + i);
            dscale += d * normalized<H, C>(f, row, i);
            dbias += d;
        }
        partial[i] = dscale;
        partial[n + i] = dbias;
    }
}

/* ---- dscale and dbias from partial sums ---- */

template <class C> __global__ void __launch_bounds__(ONT_THREADS) norm_sums_kernel(const gradient_operands f)
{
    enum { SLOTS = ONT_THREADS / SUM_LANES };
    __shared__ C sums[ONT_THREADS];
    const int lane = (int)threadIdx.x % SUM_LANES, slot = (int)threadIdx.x / SUM_LANES;
    const C *partial = (const C *)f.partial;
    for (int64_t base = (int64_t)blockIdx.x * SUM_LANES; base < 2 * f.n; base += (int64_t)gridDim.x * SUM_LANES) {
        const int64_t i = base + lane;
        C sum = 0;
        if (i < 2 * f.n)
            for (int64_t part = slot; part < f.parts; part += SLOTS) sum += partial[part * 2 * f.n + i];
        __syncthreads();
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (slot || i >= 2 * f.n) continue;
        for (int s = 1; s < SLOTS; s++) sum += sums[s * SUM_LANES + lane];
        if (i < f.n && f.dscale) ((C *)f.dscale)[i] = sum;
        if (i >= f.n && f.dbias) ((C *)f.dbias)[i - f.n] = sum;
    }
}

/* ---- launchers ---- */

/* Chunks of a thread, threads of a row, rows of a block; no chunks: the row is not kept in registers. */
struct row_shape {
    int chunks, width, rows;
};

static row_shape shape_of(const ont_norm *o)
{
    const int64_t n = o->n, most = o->dtype == ONT_FLOAT64 ? N * THREADS_1 : 2 * N * THREADS_2;
    row_shape s = {0, 0, 0};
    if (!n || n % N || n > most) return s;
    s.chunks = n > N * THREADS_1 ? 2 : 1;
    s.width = (int)((n / N + s.chunks * 32 - 1) / (s.chunks * 32) * 32);
    s.rows = s.chunks == 1 ? THREADS_1 / s.width : 1;
    return s;
}

/* Blocks of the gradient's kernel, or sets of rows where rows are not kept in registers. */
static int64_t parts_of(const ont_norm *s)
{
    const row_shape shape = shape_of(s);
    const int64_t at_once = shape.chunks ? shape.rows : 32, steps = (s->rows + at_once - 1) / at_once;
    const int64_t most = shape.chunks ? ALL_THREADS / (shape.width * shape.rows) : 256;
    const int64_t each = (steps + most - 1) / most;
    return steps ? (steps + each - 1) / each : 1;
}

extern "C" size_t ont_norm_grad_work(const ont_norm *s)
{
    return (size_t)(parts_of(s) * 2 * s->n) * sizeof(double);
}

static inline operand input(const ont_norm *s, const void *const *in, int i)
{
    return {in[i], (s->half_in >> i & 1) != 0};
}
static inline result output(const ont_norm *s, void *const *out, int i)
{
    return {out[i], (s->half_out >> i & 1) != 0};
}

template <class H, class C> static int forward(const ont_norm *s, const void *const *in, void *const *out, void *stream)
{
    const row_shape shape = shape_of(s);
    const forward_operands f = {s->rows, s->n, s->eps, shape.width, s->rms, input(s, in, 0), input(s, in, 3), in[1],
                                in[2], output(s, out, 0), output(s, out, 3), output(s, out, 4), out[1], out[2]};
    const void *const chunked[] = {in[0], in[1], in[2], in[3], out[0], out[3], out[4]};
    if (!shape.chunks || !are_aligned(chunked, 7))
        return ONT_LAUNCH((norm_any_kernel<H, C>), ont_blocks(s->rows, 1), ont_row_threads(s->n), 0, stream, f);
    const unsigned blocks = ont_blocks(s->rows, shape.rows), threads = (unsigned)(shape.width * shape.rows);
    if constexpr (sizeof(C) == 4) /* other rows have one chunk for each thread */
        if (shape.chunks == 2) return ONT_LAUNCH((norm_kernel<H, C, 2>), blocks, threads, 0, stream, f);
    return ONT_LAUNCH((norm_kernel<H, C, 1>), blocks, threads, 0, stream, f);
}

template <class H, class C> static int gradient_any(const gradient_operands &f, void *stream)
{
    const unsigned threads = ont_row_threads(f.n);
    int error = 0;
    if (f.partial)
        error = ONT_LAUNCH((norm_parts_any_kernel<H, C>), dim3(ont_blocks(f.n, threads), (unsigned)f.parts), threads, 0,
                           stream, f);
    if (!error && f.dx.data && f.rows)
        error = ONT_LAUNCH((norm_dx_any_kernel<H, C>), ont_blocks(f.rows, 1), threads, 0, stream, f);
    return error;
}

template <class H, class C> static int gradient(const gradient_operands &f, const row_shape &shape, void *stream)
{
    const unsigned threads = (unsigned)(shape.width * shape.rows);
    if constexpr (sizeof(C) == 4)
        if (shape.chunks == 2)
            return ONT_LAUNCH((norm_grad_kernel<H, C, 2>), (unsigned)f.parts, threads, 0, stream, f);
    return ONT_LAUNCH((norm_grad_kernel<H, C, 1>), (unsigned)f.parts, threads, 0, stream, f);
}

template <class H, class C>
static int backward(const ont_norm *s, const void *const *in, void *const *out, void *work, void *stream)
{
    const row_shape shape = shape_of(s);
    const gradient_operands f = {s->rows, s->n, parts_of(s), shape.width, s->rms, input(s, in, 0),
                                 input(s, in, 4), input(s, in, 5), input(s, in, 6), in[1], in[2], in[3],
                                 output(s, out, 0), output(s, out, 3), out[1], out[2], out[1] || out[2] ? work : NULL};
    const void *const chunked[] = {in[0], in[1], in[4], in[5], in[6], out[0], out[3], f.partial};
    const bool in_chunks = shape.chunks && are_aligned(chunked, 8);
    int error = in_chunks ? gradient<H, C>(f, shape, stream) : gradient_any<H, C>(f, stream);
    if (!error && f.partial)
        error = ONT_LAUNCH(norm_sums_kernel<C>, ont_blocks(2 * f.n, SUM_LANES), ONT_THREADS, 0, stream, f);
    return error;
}

extern "C" int ont_launch_norm(const ont_norm *s, const void *const *in, void *const *out, void *stream)
{
    if (!s->rows) return 0;
    if (s->dtype == ONT_FLOAT64) return forward<double, double>(s, in, out, stream);
    return (s->half == ONT_FLOAT16 ? forward<ont_f16, float> : forward<ont_bf16, float>)(s, in, out, stream);
}

extern "C" int ont_launch_norm_grad(const ont_norm *s, const void *const *in, void *const *out, void *work,
                                    void *stream)
{
    if (!s->n) return 0;
    if (s->dtype == ONT_FLOAT64) return backward<double, double>(s, in, out, work, stream);
    return (s->half == ONT_FLOAT16 ? backward<ont_f16, float> : backward<ont_bf16, float>)(s, in, out, work, stream);
}
