/*
 * BatchNormalization over (N, C, D): statistics of ranges of a channel's elements, the ranges joined in order, then one
 * pass over the planes. Where D is 1, as in channels last, a block takes some columns of the matrix (N, C) instead of a
 * plane. 16-bit x and y have float32 scale, bias and statistics. A residual and a Relu behind the norm, and the Relu's
 * gradient in front of the norm's, are computed in the same passes. Source of the joining: Chan, Golub and
 * LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
 */
#include "kernels/chunks.cuh"

#include "kernels/kernels.h"

static const int64_t RANGE = 4096, MAX_RANGES = 512; /* least elements of a range; most ranges of a channel */

struct layout {
    int64_t n, c, d, each; /* each: elements of a range */
    int ranges;
};

static layout layout_of(const ont_batchnorm *s)
{
    layout l = {s->n, s->c, s->d, 0, 1};
    int64_t count = s->n * s->d, ranges = (count + RANGE - 1) / RANGE;
    l.ranges = (int)(ranges < 1 ? 1 : ranges > MAX_RANGES ? MAX_RANGES : ranges);
    l.each = (count + l.ranges - 1) / l.ranges;
    return l;
}

/* Calls use(offset) for this thread's elements of range r of a channel, with one division at the start. */
template <class F> ONT_DEVICE void each_element(const layout &l, int64_t channel, int64_t r, F use)
{
    int64_t count = l.n * l.d, first = r * l.each, last = first + l.each < count ? first + l.each : count;
    int64_t i = first + threadIdx.x;
    if (i >= last) return;
    int64_t n = i / l.d, d = i % l.d, images = blockDim.x / l.d, rest = blockDim.x % l.d;
    for (; i < last; i += blockDim.x) {
        use((n * l.c + channel) * l.d + d);
        n += images;
        d += rest;
        if (d >= l.d) {
            d -= l.d;
            n++;
        }
    }
}

ONT_DEVICE int64_t count_of(const layout &l, int64_t r)
{
    int64_t count = l.n * l.d, first = r * l.each, last = first + l.each < count ? first + l.each : count;
    return last > first ? last - first : 0;
}

/* parts (C, ranges, 2): mean, and sum of squared differences from it */
template <class T, class A>
__global__ void __launch_bounds__(ONT_THREADS) batchnorm_parts_kernel(layout l, const T *x, A *parts)
{
    __shared__ A scratch[32];
    for (int64_t b = blockIdx.x; b < l.c * l.ranges; b += gridDim.x) {
        int64_t channel = b / l.ranges, r = b % l.ranges;
        A sum = 0, square = 0;
        each_element(l, channel, r, [&](int64_t at) { sum += ont_load(x + at); });
        sum = ont_block_sum(sum, scratch);
        A count = (A)count_of(l, r), mean = count > 0 ? sum / count : 0;
        each_element(l, channel, r, [&](int64_t at) {
            A v = ont_load(x + at) - mean;
            square += v * v;
        });
        square = ont_block_sum(square, scratch);
        if (!threadIdx.x) {
            parts[b * 2] = mean;
            parts[b * 2 + 1] = square;
        }
        __syncthreads();
    }
}

/* ---- what is fused ---- */

/* y = relu(norm + residual) */
template <class T> struct addition {
    const T *residual; /* NULL: none */
    bool relu;
};

template <class A> ONT_DEVICE A relu_of(A v, bool relu) { return relu && v < 0 ? 0 : v; }

/* The Relu of which dy is the gradient: by its result y, or by the line of the norm in front of it. Neither: none. */
template <class T, class A> struct gate {
    const T *y;
    const A *bias, *scale, *mean, *inv;
};

template <class A> struct line {
    A slope, offset;
};

/* The line of forward, up to the rounding of the statistics. */
template <class T, class A> ONT_DEVICE line<A> line_of(const gate<T, A> &g, int64_t channel)
{
    double slope = (double)g.inv[channel] * (double)g.scale[channel];
    return {(A)slope, (A)((double)g.bias[channel] - (double)g.mean[channel] * slope)};
}

/* As in PyTorch, dy passes where the result is NaN. */
template <class A> ONT_DEVICE A gated(A dy, A result) { return result <= 0 ? 0 : dy; }

enum { DX_LINE = 5 }; /* entries of a channel: three of dx, then the line of the gate */

/* ---- rows of channels: (N, C), of which a thread reads CHUNK channels at once ---- */

enum { LANES = 32 }; /* most threads beside each other in a row; the others have rows below */

/* A thread's part of a range of rows. */
struct column {
    int64_t channel, first, last; /* rows */
    int lane, row, rows;          /* of the threads of the block */
    bool is_inside;
};

template <int CHUNK> ONT_DEVICE column column_of(const layout &l, int64_t b, int lanes)
{
    int64_t groups = (l.c + lanes * CHUNK - 1) / (lanes * CHUNK), r = b / groups;
    int lane = (int)threadIdx.x % lanes, row = (int)threadIdx.x / lanes;
    int64_t channel = (b % groups * lanes + lane) * CHUNK, first = r * l.each, last = first + l.each;
    return {channel, first + row, last < l.n ? last : l.n, lane, row, ONT_THREADS / lanes, channel < l.c};
}

/* The sums over the threads of a channel, in their order. */
template <class A, int CHUNK> ONT_DEVICE void add_rows(A (&v)[CHUNK], const column &c, int lanes, A *scratch)
{
    for (int k = 0; k < CHUNK; k++) scratch[(c.row * CHUNK + k) * lanes + c.lane] = v[k];
    __syncthreads();
    for (int k = 0; k < CHUNK; k++) {
        v[k] = 0;
        for (int row = 0; row < c.rows; row++) v[k] += scratch[(row * CHUNK + k) * lanes + c.lane];
    }
    __syncthreads();
}

template <class A, int CHUNK>
ONT_DEVICE void store_parts(const layout &l, const column &c, int64_t range, const A (&left)[CHUNK],
                            const A (&right)[CHUNK], A *parts)
{
    if (!c.is_inside || c.row) return;
    for (int k = 0; k < CHUNK; k++) {
        A *to = parts + ((c.channel + k) * l.ranges + range) * 2;
        to[0] = left[k];
        to[1] = right[k];
    }
}

/* As batchnorm_parts_kernel. */
template <class T, class A, int CHUNK>
__global__ void __launch_bounds__(ONT_THREADS) batchnorm_row_parts_kernel(layout l, int lanes, const T *x, A *parts)
{
    __shared__ A scratch[ONT_THREADS * CHUNK];
    int64_t groups = (l.c + lanes * CHUNK - 1) / (lanes * CHUNK);
    for (int64_t b = blockIdx.x; b < groups * l.ranges; b += gridDim.x) {
        column c = column_of<CHUNK>(l, b, lanes);
        A mean[CHUNK] = {0}, square[CHUNK] = {0}, v[CHUNK], count = (A)count_of(l, b / groups);
        for (int64_t row = c.first; c.is_inside && row < c.last; row += c.rows) {
            load_chunk(x + row * l.c + c.channel, v);
            for (int k = 0; k < CHUNK; k++) mean[k] += v[k];
        }
        add_rows(mean, c, lanes, scratch);
        for (int k = 0; k < CHUNK; k++) mean[k] = count > 0 ? mean[k] / count : 0;
        for (int64_t row = c.first; c.is_inside && row < c.last; row += c.rows) {
            load_chunk(x + row * l.c + c.channel, v);
            for (int k = 0; k < CHUNK; k++) square[k] += (v[k] - mean[k]) * (v[k] - mean[k]);
        }
        add_rows(square, c, lanes, scratch);
        store_parts(l, c, b / groups, mean, square, parts);
    }
}

/* As batchnorm_grad_parts_kernel. */
template <class T, class A, int CHUNK>
__global__ void __launch_bounds__(ONT_THREADS)
    batchnorm_grad_row_parts_kernel(layout l, int lanes, const T *x, gate<T, A> relu, const T *dy, A *parts)
{
    __shared__ A scratch[ONT_THREADS * CHUNK];
    int64_t groups = (l.c + lanes * CHUNK - 1) / (lanes * CHUNK);
    for (int64_t b = blockIdx.x; b < groups * l.ranges; b += gridDim.x) {
        column c = column_of<CHUNK>(l, b, lanes);
        A sum[CHUNK] = {0}, dot[CHUNK] = {0}, middle[CHUNK] = {0}, v[CHUNK], g[CHUNK], y[CHUNK];
        line<A> lines[CHUNK] = {};
        for (int k = 0; c.is_inside && k < CHUNK; k++) {
            middle[k] = relu.mean[c.channel + k];
            if (relu.bias) lines[k] = line_of(relu, c.channel + k);
        }
        for (int64_t row = c.first; c.is_inside && row < c.last; row += c.rows) {
            load_chunk(x + row * l.c + c.channel, v);
            load_chunk(dy + row * l.c + c.channel, g);
            if (relu.y) load_chunk(relu.y + row * l.c + c.channel, y);
            for (int k = 0; k < CHUNK; k++) {
                if (relu.y) g[k] = gated(g[k], y[k]);
                else if (relu.bias) g[k] = gated(g[k], v[k] * lines[k].slope + lines[k].offset);
                sum[k] += g[k];
                dot[k] += g[k] * (v[k] - middle[k]);
            }
        }
        add_rows(sum, c, lanes, scratch);
        add_rows(dot, c, lanes, scratch);
        store_parts(l, c, b / groups, sum, dot, parts);
    }
}

/* Elements of a matrix with c columns by a grid-stride loop, with one division at the start. */
#define ONT_EACH_OF_ROWS(n, c, i, channel) \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, stride_ = (int64_t)gridDim.x * blockDim.x, \
                 step_ = stride_ % (c), channel = i % (c); \
         i < (n); i += stride_, channel += step_, channel -= channel < (c) ? 0 : (c))

template <class T, class A, int CHUNK>
__global__ void __launch_bounds__(ONT_THREADS)
    batchnorm_apply_rows_kernel(int64_t n, int64_t c, const T *x, const A *lines, addition<T> more, T *y)
{
    ONT_EACH_OF_ROWS(n / CHUNK, c / CHUNK, i, chunk)
    {
        const A *line = lines + chunk * CHUNK * 2;
        A v[CHUNK], added[CHUNK] = {0};
        load_chunk(x + i * CHUNK, v);
        if (more.residual) load_chunk(more.residual + i * CHUNK, added);
        for (int k = 0; k < CHUNK; k++) v[k] = relu_of(v[k] * line[2 * k] + line[2 * k + 1] + added[k], more.relu);
        store_chunk(y + i * CHUNK, v);
    }
}

template <class T, class A, int CHUNK>
__global__ void __launch_bounds__(ONT_THREADS)
    batchnorm_dx_rows_kernel(layout l, const T *x, gate<T, A> relu, const A *lines, const T *dy, T *dx)
{
    ONT_EACH_OF_ROWS(l.n * l.c / CHUNK, l.c / CHUNK, i, chunk)
    {
        const A *line = lines + chunk * CHUNK * DX_LINE, *middle = relu.mean + chunk * CHUNK;
        A v[CHUNK], g[CHUNK], y[CHUNK];
        load_chunk(x + i * CHUNK, v);
        load_chunk(dy + i * CHUNK, g);
        if (relu.y) load_chunk(relu.y + i * CHUNK, y);
        for (int k = 0; k < CHUNK; k++, line += DX_LINE) {
            if (relu.y) g[k] = gated(g[k], y[k]);
            else if (relu.bias) g[k] = gated(g[k], v[k] * line[3] + line[4]);
            g[k] = line[0] * (g[k] - line[1] - (v[k] - middle[k]) * line[2]);
        }
        store_chunk(dx + i * CHUNK, g);
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) row_bias_kernel(int64_t n, int64_t c, const T *bias, T *y)
{
    ONT_EACH_OF_ROWS(n, c, i, channel) ont_store(y + i, ont_load(y + i) + ont_load(bias + channel));
}

/* ---- by channel ---- */

template <class A> struct channel_operands {
    bool training;
    double eps, momentum;
    const A *parts, *scale, *bias, *old_mean, *old_var;
    A *new_mean, *new_var, *saved_mean, *saved_inv, *lines;
};

/* By channel: the statistics, joined from the ranges or running ones, and the line of y = x * line[0] + line[1]. */
template <class A> __global__ void __launch_bounds__(32) batchnorm_channel_kernel(layout l, const channel_operands<A> f)
{
    ONT_FOR(c, l.c)
    {
        double mean = (double)f.old_mean[c], var = (double)f.old_var[c];
        if (f.training) {
            double seen = 0, square = 0, middle = 0;
            for (int r = 0; r < l.ranges; r++) {
                double n = (double)count_of(l, r);
                if (n == 0) continue;
                double off = (double)f.parts[(c * l.ranges + r) * 2] - middle;
                middle += off * n / (seen + n);
                square += (double)f.parts[(c * l.ranges + r) * 2 + 1] + off * off * seen * n / (seen + n);
                seen += n;
            }
            mean = seen > 0 ? middle : (double)NAN;
            var = square / seen;
            if (f.new_mean) f.new_mean[c] = (A)(f.momentum * (double)f.old_mean[c] + (1 - f.momentum) * mean);
            if (f.new_var) f.new_var[c] = (A)(f.momentum * (double)f.old_var[c] + (1 - f.momentum) * var);
        }
        double inv = 1 / sqrt(var + f.eps);
        if (f.saved_mean) f.saved_mean[c] = (A)mean;
        if (f.saved_inv) f.saved_inv[c] = (A)inv;
        f.lines[c * 2] = (A)(inv * (double)f.scale[c]);
        f.lines[c * 2 + 1] = (A)((double)f.bias[c] - mean * inv * (double)f.scale[c]);
    }
}

/* Planes are cut into pieces, one for each block: blockIdx.x -> (plane, piece). */
enum { PIECE = 4096 };
#define ONT_EACH_PIECE(planes, d, plane, i) \
    for (int64_t pieces_ = ((d) + PIECE - 1) / PIECE, b_ = blockIdx.x; b_ < (planes) * pieces_; b_ += gridDim.x) \
        for (int64_t plane = b_ / pieces_, end_ = (b_ % pieces_ + 1) * PIECE < (d) ? (b_ % pieces_ + 1) * PIECE : (d), \
                     i = b_ % pieces_ * PIECE + threadIdx.x; \
             i < end_; i += blockDim.x)

template <class T, class A>
__global__ void __launch_bounds__(ONT_THREADS)
    batchnorm_apply_kernel(layout l, const T *x, const A *lines, addition<T> more, T *y)
{
    ONT_EACH_PIECE(l.n * l.c, l.d, plane, i)
    {
        int64_t c = plane % l.c, at = plane * l.d + i;
        A added = more.residual ? ont_load(more.residual + at) : 0;
        ont_store(y + at, relu_of(ont_load(x + at) * lines[c * 2] + lines[c * 2 + 1] + added, more.relu));
    }
}

/* ---- gradient ---- */

/* parts (C, ranges, 2): sum of dy, and of dy times the difference from the mean */
template <class T, class A>
__global__ void __launch_bounds__(ONT_THREADS)
    batchnorm_grad_parts_kernel(layout l, const T *x, gate<T, A> relu, const T *dy, A *parts)
{
    __shared__ A scratch[32];
    for (int64_t b = blockIdx.x; b < l.c * l.ranges; b += gridDim.x) {
        int64_t channel = b / l.ranges, r = b % l.ranges;
        A sum = 0, dot = 0, middle = relu.mean[channel];
        line<A> norm = relu.bias ? line_of(relu, channel) : line<A>{};
        each_element(l, channel, r, [&](int64_t at) {
            A g = ont_load(dy + at), v = ont_load(x + at);
            if (relu.y) g = gated(g, ont_load(relu.y + at));
            else if (relu.bias) g = gated(g, v * norm.slope + norm.offset);
            sum += g;
            dot += g * (v - middle);
        });
        sum = ont_block_sum(sum, scratch);
        dot = ont_block_sum(dot, scratch);
        if (!threadIdx.x) {
            parts[b * 2] = sum;
            parts[b * 2 + 1] = dot;
        }
        __syncthreads();
    }
}

template <class T, class A> struct channel_gradient_operands {
    bool training;
    const A *parts;
    gate<T, A> relu;
    A *dscale, *dbias, *lines;
};

/* By channel: dscale, dbias, and the line of dx = line[0] * (dy - line[1] - (x - mean) * line[2]). */
template <class T, class A>
__global__ void __launch_bounds__(32) batchnorm_grad_channel_kernel(layout l, const channel_gradient_operands<T, A> f)
{
    ONT_FOR(c, l.c)
    {
        double sum = 0, dot = 0, count = (double)(l.n * l.d), deviation = (double)f.relu.inv[c];
        for (int r = 0; r < l.ranges; r++) {
            sum += (double)f.parts[(c * l.ranges + r) * 2];
            dot += (double)f.parts[(c * l.ranges + r) * 2 + 1];
        }
        if (f.dscale) f.dscale[c] = count > 0 ? (A)(dot * deviation) : (A)0; /* 0 * NaN is NaN */
        if (f.dbias) f.dbias[c] = (A)sum;
        A *to = f.lines + c * DX_LINE;
        to[0] = f.relu.scale[c] * f.relu.inv[c];
        to[1] = f.training ? (A)(sum / count) : (A)0;
        to[2] = f.training ? (A)(dot * deviation * deviation / count) : (A)0;
        if (!f.relu.bias) continue;
        line<A> norm = line_of(f.relu, c);
        to[3] = norm.slope;
        to[4] = norm.offset;
    }
}

template <class T, class A>
__global__ void __launch_bounds__(ONT_THREADS)
    batchnorm_dx_kernel(layout l, const T *x, gate<T, A> relu, const A *lines, const T *dy, T *dx)
{
    ONT_EACH_PIECE(l.n * l.c, l.d, plane, i)
    {
        int64_t c = plane % l.c, at = plane * l.d + i;
        const A *line = lines + c * DX_LINE;
        A v = ont_load(x + at), g = ont_load(dy + at);
        if (relu.y) g = gated(g, ont_load(relu.y + at));
        else if (relu.bias) g = gated(g, v * line[3] + line[4]);
        ont_store(dx + at, line[0] * (g - line[1] - (v - relu.mean[c]) * line[2]));
    }
}

/* ---- y += bias of a channel ---- */

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    channel_bias_kernel(int64_t planes, int64_t c, int64_t d, const T *bias, T *y)
{
    ONT_EACH_PIECE(planes, d, plane, i)
    {
        T *to = y + plane * d + i;
        ont_store(to, ont_load(to) + ont_load(bias + plane % c));
    }
}

/* ---- launchers ---- */

static unsigned piece_blocks(int64_t planes, int64_t d)
{
    return ont_blocks(planes * ((d + PIECE - 1) / PIECE), 1);
}

static bool has_rows(const layout &l)
{
    return l.d == 1 && l.c > 1;
}

/* Threads beside each other in a row. */
static int lanes_of(const layout &l, int chunk)
{
    int lanes = 1;
    while (lanes < LANES && lanes * chunk < l.c) lanes *= 2;
    return lanes;
}

static unsigned row_part_blocks(const layout &l, int lanes, int chunk)
{
    return ont_blocks((l.c + lanes * chunk - 1) / (lanes * chunk) * l.ranges, 1);
}

/* Elements of T in 16 bytes. */
template <class T> struct full {
    enum { CHUNK = 16 / sizeof(T) };
};

template <class T> static bool has_full_chunks(const layout &l, const void *const (&pointers)[4])
{
    return l.c % full<T>::CHUNK == 0 && are_aligned(pointers, 4);
}

template <class T, class A, int CHUNK>
static int forward_of_rows(const layout &l, const channel_operands<A> &f, const T *x, addition<T> more, T *y,
                           void *stream)
{
    int lanes = lanes_of(l, CHUNK), error = 0;
    if (f.training)
        error = ONT_LAUNCH((batchnorm_row_parts_kernel<T, A, CHUNK>), row_part_blocks(l, lanes, CHUNK), ONT_THREADS, 0,
                           stream, l, lanes, x, (A *)(uintptr_t)f.parts);
    if (!error) error = ONT_LAUNCH(batchnorm_channel_kernel<A>, ont_blocks(l.c, 32), 32, 0, stream, l, f);
    if (error || !l.n) return error;
    return ONT_LAUNCH((batchnorm_apply_rows_kernel<T, A, CHUNK>), ont_blocks(l.n * l.c / CHUNK, ONT_THREADS),
                      ONT_THREADS, 0, stream, l.n * l.c, l.c, x, (const A *)f.lines, more, y);
}

/* dx: NULL where it is not wanted. */
template <class T, class A, int CHUNK>
static int backward_of_rows(const layout &l, const channel_gradient_operands<T, A> &f, const T *x, const T *dy, T *dx,
                            void *stream)
{
    int lanes = lanes_of(l, CHUNK);
    int error = ONT_LAUNCH((batchnorm_grad_row_parts_kernel<T, A, CHUNK>), row_part_blocks(l, lanes, CHUNK),
                           ONT_THREADS, 0, stream, l, lanes, x, f.relu, dy, (A *)(uintptr_t)f.parts);
    if (!error) error = ONT_LAUNCH((batchnorm_grad_channel_kernel<T, A>), ont_blocks(l.c, 32), 32, 0, stream, l, f);
    if (error || !dx || !l.n) return error;
    return ONT_LAUNCH((batchnorm_dx_rows_kernel<T, A, CHUNK>), ont_blocks(l.n * l.c / CHUNK, ONT_THREADS), ONT_THREADS,
                      0, stream, l, x, f.relu, (const A *)f.lines, dy, dx);
}

static unsigned channel_threads(int64_t n)
{
    return ont_row_threads(n);
}

extern "C" size_t ont_batchnorm_work(const ont_batchnorm *s)
{
    layout l = layout_of(s);
    return (size_t)(l.c * l.ranges * 2 + l.c * DX_LINE) * sizeof(double);
}

template <class T>
static int forward(const ont_batchnorm *s, const void *const *in, void *const *out, void *work, void *stream)
{
    typedef typename ont_compute<T>::type A;
    layout l = layout_of(s);
    A *parts = (A *)work, *lines = parts + l.c * l.ranges * 2;
    channel_operands<A> f = {s->training != 0, s->eps, s->momentum, parts, (const A *)in[1], (const A *)in[2],
                             (const A *)in[3], (const A *)in[4], (A *)out[1], (A *)out[2], (A *)out[3], (A *)out[4],
                             lines};
    const T *x = (const T *)in[0];
    T *y = (T *)out[0];
    addition<T> more = {(const T *)in[5], s->relu != 0};
    int error = 0;
    if (!l.c) return 0;
    if (has_rows(l) && has_full_chunks<T>(l, {x, y, more.residual, nullptr}))
        return forward_of_rows<T, A, full<T>::CHUNK>(l, f, x, more, y, stream);
    if (has_rows(l)) return forward_of_rows<T, A, 1>(l, f, x, more, y, stream);
    if (s->training)
        error = ONT_LAUNCH((batchnorm_parts_kernel<T, A>), ont_blocks(l.c * l.ranges, 1), channel_threads(l.each), 0,
                           stream, l, x, parts);
    if (!error)
        error = ONT_LAUNCH(batchnorm_channel_kernel<A>, ont_blocks(l.c, 32), 32, 0, stream, l, f);
    if (!error && l.n * l.d > 0)
        error = ONT_LAUNCH((batchnorm_apply_kernel<T, A>), piece_blocks(l.n * l.c, l.d), channel_threads(l.d), 0,
                           stream, l, x, (const A *)lines, more, y);
    return error;
}

template <class T>
static int backward(const ont_batchnorm *s, const void *const *in, void *dx, void *dscale, void *dbias, void *work,
                    void *stream)
{
    typedef typename ont_compute<T>::type A;
    layout l = layout_of(s);
    A *parts = (A *)work, *lines = parts + l.c * l.ranges * 2;
    const T *x = (const T *)in[0], *dy = (const T *)in[4];
    gate<T, A> relu = {(const T *)in[5], (const A *)in[6], (const A *)in[1], (const A *)in[2], (const A *)in[3]};
    channel_gradient_operands<T, A> f = {s->training != 0, parts, relu, (A *)dscale, (A *)dbias, lines};
    if (!l.c) return 0;
    if (has_rows(l) && has_full_chunks<T>(l, {x, dy, dx, relu.y}))
        return backward_of_rows<T, A, full<T>::CHUNK>(l, f, x, dy, (T *)dx, stream);
    if (has_rows(l)) return backward_of_rows<T, A, 1>(l, f, x, dy, (T *)dx, stream);
    int error = ONT_LAUNCH((batchnorm_grad_parts_kernel<T, A>), ont_blocks(l.c * l.ranges, 1), channel_threads(l.each),
                           0, stream, l, x, relu, dy, parts);
    if (!error)
        error = ONT_LAUNCH((batchnorm_grad_channel_kernel<T, A>), ont_blocks(l.c, 32), 32, 0, stream, l, f);
    if (!error && dx && l.n * l.d > 0)
        error = ONT_LAUNCH((batchnorm_dx_kernel<T, A>), piece_blocks(l.n * l.c, l.d), channel_threads(l.d), 0, stream,
                           l, x, relu, (const A *)lines, dy, (T *)dx);
    return error;
}

extern "C" int ont_launch_batchnorm(const ont_batchnorm *s, const void *const *in, void *const *out, void *work,
                                    void *stream)
{
    switch (s->dtype) {
    case ONT_FLOAT32: return forward<float>(s, in, out, work, stream);
    case ONT_FLOAT64: return forward<double>(s, in, out, work, stream);
    case ONT_FLOAT16: return forward<ont_f16>(s, in, out, work, stream);
    default: return forward<ont_bf16>(s, in, out, work, stream);
    }
}

extern "C" int ont_launch_batchnorm_grad(const ont_batchnorm *s, const void *const *in, void *dx, void *dscale,
                                         void *dbias, void *work, void *stream)
{
    switch (s->dtype) {
    case ONT_FLOAT32: return backward<float>(s, in, dx, dscale, dbias, work, stream);
    case ONT_FLOAT64: return backward<double>(s, in, dx, dscale, dbias, work, stream);
    case ONT_FLOAT16: return backward<ont_f16>(s, in, dx, dscale, dbias, work, stream);
    default: return backward<ont_bf16>(s, in, dx, dscale, dbias, work, stream);
    }
}

template <class T> static int add_bias(int64_t images, int64_t c, int64_t d, const void *bias, void *y, void *stream)
{
    if (d == 1)
        return ONT_LAUNCH(row_bias_kernel<T>, ont_blocks(images * c, ONT_THREADS), ONT_THREADS, 0, stream, images * c,
                          c, (const T *)bias, (T *)y);
    return ONT_LAUNCH(channel_bias_kernel<T>, piece_blocks(images * c, d), channel_threads(d), 0, stream, images * c, c,
                      d, (const T *)bias, (T *)y);
}

extern "C" int ont_launch_channel_bias(int dtype, int64_t images, int64_t c, int64_t d, const void *bias, void *y,
                                       void *stream)
{
    if (!images || !c || !d) return 0;
    switch (dtype) {
    case ONT_FLOAT32: return add_bias<float>(images, c, d, bias, y, stream);
    case ONT_FLOAT64: return add_bias<double>(images, c, d, bias, y, stream);
    case ONT_FLOAT16: return add_bias<ont_f16>(images, c, d, bias, y, stream);
    default: return add_bias<ont_bf16>(images, c, d, bias, y, stream);
    }
}
