/*
 * Softmax cross-entropy and negative log-likelihood over rows of scores, 16-bit scores included, with arithmetic in
 * float32 (float64 for float64). One pass over a row finds the largest score and the sum of exponentials relative to
 * it; these two numbers are saved for the gradient, which may overwrite the scores. Rows whose classes are contiguous
 * are accessed in chunks of 16 bytes, between a head and a tail of single scores. Scores that exist in pieces of rows
 * alone (ops/streamed_loss.c) have the same kernels, or one that computes losses and gradients of its rows.
 */
#include "kernels/launch.cuh"

#include "kernels/chunks.cuh"
#include "kernels/kernels.h"
#include "kernels/math.cuh"

/* ---- exponentials ---- */

/* exp(a) with a relative error of about 1e-7 times (2 + |a|), and 0 below 2^-126: for results of 16 bits. */
ONT_DEVICE float exp_of_half(float a) { return ont_exp2(a * 1.44269504f); }

/* exp(a), as precise as scores or gradients of type T need. */
template <class T, class C> ONT_DEVICE C exp_for(C a)
{
    return sizeof(T) == 2 ? (C)exp_of_half((float)a) : vexp(a);
}

/* ---- chunks of a row ---- */

/* The part [from, to) of a row that is accessed in chunks of N elements. It is empty if classes are not contiguous, or
 * if x and y, in which the elements are read and written, are not aligned to 16 bytes at the same elements. */
struct chunked {
    int64_t from, to;
};
template <int N, class T, class D>
ONT_DEVICE chunked chunked_part(const T *x, const D *y, int64_t n, int64_t stride)
{
    int64_t from = (int64_t)((16 - (uintptr_t)y % 16) % 16 / sizeof(D));
    if (stride != 1 || from + N > n || (uintptr_t)(x + from) % 16) return {n, n};
    return {from, from + (n - from) / N * N};
}

/* Calls single(c) for the classes outside the chunked part, pair(c, step) for two chunks at c and c + step, whose loads
 * overlap, and chunk(c) for the last one. */
template <int N, class Single, class Pair, class Chunk>
ONT_DEVICE void for_row(const chunked part, int64_t n, Single single, Pair pair, Chunk chunk)
{
    const int64_t inside = part.to - part.from, step = (int64_t)blockDim.x * N;
    for (int64_t i = threadIdx.x; i < n - inside; i += blockDim.x) single(i < part.from ? i : i + inside);
    int64_t c = part.from + (int64_t)threadIdx.x * N;
    for (; c + step < part.to; c += 2 * step) pair(c, step);
    if (c < part.to) chunk(c);
}

/* ---- rows ---- */

ONT_DEVICE int64_t label_at(const ont_loss &s, const void *labels, int64_t i)
{
    return s.wide ? ((const int64_t *)labels)[i] : ((const int32_t *)labels)[i];
}

/* Whether row i counts. A label out of range is reported, and counts as ignored. */
ONT_DEVICE bool counts(const ont_loss &s, int64_t label, int64_t i, bool report)
{
    if (s.ignores && label == s.ignored) return false;
    if (label >= 0 && label < s.classes) return true;
    if (report) ont_report(s.fault, ONT_FAULT_LABEL, s.step, label, i, s.classes);
    return false;
}

/* Element i of an array of T, or of the type of the arithmetic. */
template <class T> ONT_DEVICE typename ont_compute<T>::type element_at(const void *values, bool computed, int64_t i)
{
    typedef typename ont_compute<T>::type C;
    return computed ? ((const C *)values)[i] : (C)ont_load((const T *)values + i);
}

template <class C> struct row_sum {
    C max, sum; /* sum of exp(x - max) */
};

/* What exponents are relative to: a row of nothing but minus infinity has sum 0, not NaN. */
template <class C> ONT_DEVICE C exp_base(C largest)
{
    return largest == (C)-INFINITY ? (C)0 : largest;
}

/* NaN among the scores is not in the maximum (fmax), but in the sum. */
template <class T, class C, int N> ONT_DEVICE void add_scores(row_sum<C> &r, const C (&x)[N])
{
    C largest = r.max;
    ONT_UNROLL
    for (int k = 0; k < N; k++) largest = fmax(largest, x[k]);
    const C base = exp_base(largest);
    if (largest > r.max) {
        r.sum *= exp_for<T>(r.max - base);
        r.max = largest;
    }
    ONT_UNROLL
    for (int k = 0; k < N; k++) r.sum += exp_for<T>(x[k] - base);
}

/* Of the whole row, in all threads of the block. */
template <class T, class C> ONT_DEVICE row_sum<C> sum_of_row(const T *x, int64_t n, int64_t stride, C *scratch)
{
    enum { N = 16 / sizeof(T) };
    row_sum<C> r = {(C)-INFINITY, 0};
    for_row<N>(
        chunked_part<N>(x, x, n, stride), n,
        [&](int64_t c) {
            const C v[1] = {(C)ont_load(&x[c * stride])};
            add_scores<T>(r, v);
        },
        [&](int64_t c, int64_t step) {
            C v[2][N];
            load_chunk(x + c, v[0]);
            load_chunk(x + c + step, v[1]);
            add_scores<T>(r, v[0]);
            add_scores<T>(r, v[1]);
        },
        [&](int64_t c) {
            C v[N];
            load_chunk(x + c, v);
            add_scores<T>(r, v);
        });
    const C largest = ont_block_max(r.max, scratch);
    r.sum *= exp_for<T>(r.max - exp_base(largest));
    return {largest, ont_block_sum(r.sum, scratch)};
}

/* terms (rows * inner, 2): weighted loss and weight of each row, as double */
template <class T, class C>
__global__ void __launch_bounds__(ONT_THREADS)
    loss_kernel(const ont_loss s, const T *x, const void *labels, const void *weights, T *logp, C *stats, double *terms)
{
    __shared__ C scratch[32];
    for (int64_t i = blockIdx.x; i < s.rows * s.inner; i += gridDim.x) {
        int64_t base = i / s.inner * s.columns * s.inner + i % s.inner, label = label_at(s, labels, i);
        bool real = counts(s, label, i, !threadIdx.x);
        C score = real ? (C)ont_load(&x[base + label * s.inner]) : (C)0; /* early: the end of the row waits for it */
        C w = !real ? (C)0 : weights ? element_at<T>(weights, s.wide_weights, label) : (C)1;
        C row_max = 0, log_sum = 0;
        if (s.softmax) {
            const row_sum<C> sum = sum_of_row(x + base, s.classes, s.inner, scratch);
            row_max = sum.max;
            log_sum = vlog(sum.sum);
        }
        for (int64_t c = threadIdx.x; logp && c < s.classes; c += blockDim.x) {
            int64_t at = base + c * s.inner;
            ont_store(&logp[at], ((C)ont_load(&x[at]) - row_max) - log_sum);
        }
        if (threadIdx.x) continue;
        terms[2 * i] = real ? (double)(-w * ((score - row_max) - log_sum)) : 0;
        terms[2 * i + 1] = (double)w;
        if (stats) {
            stats[2 * i] = row_max;
            stats[2 * i + 1] = log_sum;
        }
    }
}

enum { MAX_SUM_THREADS = 1024 };

/* Of the one block that sums over all rows. */
static unsigned sum_threads(int64_t rows)
{
    return rows > 4096 ? (unsigned)MAX_SUM_THREADS : ont_row_threads(rows);
}

template <class T>
__global__ void __launch_bounds__(MAX_SUM_THREADS) loss_sum_kernel(const ont_loss s, const double *terms, T *loss)
{
    __shared__ double scratch[32];
    double sum = 0, norm = 0;
    for (int64_t i = threadIdx.x; i < s.rows * s.inner; i += blockDim.x) {
        sum += terms[2 * i];
        norm += terms[2 * i + 1];
        if (!s.reduction) ont_store(&loss[i], (typename ont_compute<T>::type)terms[2 * i]);
    }
    sum = ont_block_sum(sum, scratch);
    norm = ont_block_sum(norm, scratch);
    if (!threadIdx.x && s.reduction)
        ont_store(loss, (typename ont_compute<T>::type)(s.reduction == 2 ? sum / norm : sum));
}

/* The sum of the weights of the rows that count; `report`: labels out of range. */
template <class T>
__global__ void __launch_bounds__(MAX_SUM_THREADS)
    loss_norm_kernel(const ont_loss s, const void *labels, const void *weights, bool report, double *norm)
{
    __shared__ double scratch[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < s.rows * s.inner; i += blockDim.x) {
        int64_t label = label_at(s, labels, i);
        if (counts(s, label, i, report)) sum += weights ? (double)element_at<T>(weights, s.wide_weights, label) : 1;
    }
    sum = ont_block_sum(sum, scratch);
    if (!threadIdx.x) *norm = sum;
}

/* ---- gradients: T is the type of the scores, D that of the gradient ---- */

template <class T, class D> struct gradient_operands {
    const T *x;
    const void *labels, *weights, *dloss;
    const typename ont_compute<T>::type *stats;
    const double *norm;
    D *dx;
};

template <class C> struct row_gradient {
    C max, log_sum, scale;
    int64_t label; /* -1 for a row that does not count */
    bool dense;    /* false: zero but for the label */
};

template <class T, class D, class C = typename ont_compute<T>::type>
ONT_DEVICE row_gradient<C> row_gradient_of(const ont_loss &s, const gradient_operands<T, D> &f, int64_t i)
{
    int64_t label = label_at(s, f.labels, i);
    row_gradient<C> r = {0, 0, 0, label, false};
    if (!counts(s, label, i, false)) {
        r.label = -1;
        return r;
    }
    r.scale = (f.weights ? element_at<T>(f.weights, s.wide_weights, label) : (C)1) *
              element_at<T>(f.dloss, s.wide_loss, s.reduction ? 0 : i);
    if (s.reduction == 2) r.scale = (C)((double)r.scale / *f.norm);
    if (!s.softmax) return r;
    r.dense = true;
    r.max = f.stats[2 * i];
    r.log_sum = f.stats[2 * i + 1];
    return r;
}

/* Scores of the classes c, c + 1, ... become their gradient. */
template <class D, class C, int N> ONT_DEVICE void scores_to_gradient(const row_gradient<C> &r, int64_t c, C (&v)[N])
{
    ONT_UNROLL
    for (int k = 0; k < N; k++) v[k] = r.dense ? r.scale * exp_for<D>((v[k] - r.max) - r.log_sum) : (C)0;
    const int64_t label = r.label - c;
    if (label < 0 || label >= N) return;
    ONT_UNROLL
    for (int k = 0; k < N; k++)
        if (k == label) v[k] -= r.scale;
}

/* The gradient of a row of scores x, which it may overwrite. */
template <class T, class D, class C>
ONT_DEVICE void write_gradient(const ont_loss &s, const row_gradient<C> &r, const T *x, D *dx)
{
    enum { N = 16 / sizeof(D) };
    for_row<N>(
        chunked_part<N>(x, dx, s.classes, s.inner), s.columns,
        [&](int64_t c) {
            const bool is_class = c < s.classes;
            C v[1] = {r.dense && is_class ? (C)ont_load(&x[c * s.inner]) : (C)0};
            scores_to_gradient<D>(r, c, v);
            ont_store(&dx[c * s.inner], is_class ? v[0] : (C)0);
        },
        [&](int64_t c, int64_t step) {
            C v[2][N] = {};
            if (r.dense) {
                load_chunk(x + c, v[0]);
                load_chunk(x + c + step, v[1]);
            }
            scores_to_gradient<D>(r, c, v[0]);
            store_chunk(dx + c, v[0]);
            scores_to_gradient<D>(r, c + step, v[1]);
            store_chunk(dx + c + step, v[1]);
        },
        [&](int64_t c) {
            C v[N] = {};
            if (r.dense) load_chunk(x + c, v);
            scores_to_gradient<D>(r, c, v);
            store_chunk(dx + c, v);
        });
}

template <class T, class D>
__global__ void __launch_bounds__(ONT_THREADS) loss_grad_kernel(const ont_loss s, const gradient_operands<T, D> f)
{
    for (int64_t i = blockIdx.x; i < s.rows * s.inner; i += gridDim.x) {
        const int64_t base = i / s.inner * s.columns * s.inner + i % s.inner;
        write_gradient(s, row_gradient_of(s, f, i), f.x + base, f.dx + base);
    }
}

/* ---- losses and gradients at once: contiguous classes, no weights, and a loss whose own gradient is `scale` ---- */

/* Threads of a block, at most: few rows at a time, so that the second pass over a row may find it in the cache. */
template <class T> struct both_threads {
    enum { MOST = sizeof(T) == 8 ? 512 : 1024 };
};

/* terms (rows, 2): as of loss_kernel */
template <class T, class C = typename ont_compute<T>::type>
__global__ void __launch_bounds__(both_threads<T>::MOST)
    loss_both_kernel(const ont_loss s, T *scores, const void *labels, const double *norm, double scale, double *terms)
{
    __shared__ C scratch[32];
    for (int64_t i = blockIdx.x; i < s.rows; i += gridDim.x) {
        T *x = scores + i * s.columns;
        row_gradient<C> r = {0, 0, 0, label_at(s, labels, i), false};
        r.dense = counts(s, r.label, i, false);
        C score = 0;
        if (r.dense) {
            score = (C)ont_load(&x[r.label]);
            const row_sum<C> sum = sum_of_row(x, s.classes, (int64_t)1, scratch); /* its barriers: x is read */
            r.max = sum.max;
            r.log_sum = vlog(sum.sum);
            r.scale = (C)(s.reduction == 2 ? scale / *norm : scale);
        } else {
            r.label = -1;
        }
        write_gradient(s, r, x, x);
        if (threadIdx.x) continue;
        terms[2 * i] = r.dense ? (double)-((score - r.max) - r.log_sum) : 0;
        terms[2 * i + 1] = r.dense;
    }
}

/* ---- launchers ---- */

extern "C" size_t ont_loss_work(const ont_loss *s)
{
    return (size_t)(2 * s->rows * s->inner + 1) * sizeof(double);
}

template <class T>
static int forward(const ont_loss *s, const void *const *in, void *const *out, void *work, void *stream)
{
    typedef typename ont_compute<T>::type C;
    int64_t rows = s->rows * s->inner;
    const double *terms = (const double *)work;
    int error = 0;
    if (rows)
        error = ONT_LAUNCH((loss_kernel<T, C>), ont_blocks(rows, 1), ont_row_threads(s->softmax ? s->classes : 1), 0,
                           stream, *s, (const T *)in[0], in[1], in[2], (T *)out[1], (C *)out[2], (double *)work);
    if (error) return error;
    if (s->wide_loss) return ONT_LAUNCH(loss_sum_kernel<C>, 1, sum_threads(rows), 0, stream, *s, terms, (C *)out[0]);
    return ONT_LAUNCH(loss_sum_kernel<T>, 1, sum_threads(rows), 0, stream, *s, terms, (T *)out[0]);
}

template <class T, class D>
static int backward(const ont_loss *s, const void *const *in, void *dx, void *work, void *stream)
{
    gradient_operands<T, D> f = {(const T *)in[0], in[1], in[2], in[3], (const typename ont_compute<T>::type *)in[4],
                                 (const double *)work, (D *)dx};
    int64_t rows = s->rows * s->inner;
    int error = 0;
    if (!rows) return 0;
    if (s->reduction == 2)
        error = ONT_LAUNCH(loss_norm_kernel<T>, 1, sum_threads(rows), 0, stream, *s, f.labels, f.weights, false,
                           (double *)work);
    if (error) return error;
    return ONT_LAUNCH((loss_grad_kernel<T, D>), ont_blocks(rows, 1), ont_row_threads(s->classes), 0, stream, *s, f);
}

extern "C" int ont_launch_loss(const ont_loss *s, const void *const *in, void *const *out, void *work, void *stream)
{
    switch (s->dtype) {
    case ONT_FLOAT32: return forward<float>(s, in, out, work, stream);
    case ONT_FLOAT64: return forward<double>(s, in, out, work, stream);
    case ONT_FLOAT16: return forward<ont_f16>(s, in, out, work, stream);
    default: return forward<ont_bf16>(s, in, out, work, stream);
    }
}

extern "C" int ont_launch_loss_grad(const ont_loss *s, const void *const *in, void *dx, void *work, void *stream)
{
    const bool narrows = s->dtype == ONT_FLOAT32;
    switch (s->grad_dtype) {
    case ONT_FLOAT32: return backward<float, float>(s, in, dx, work, stream);
    case ONT_FLOAT64: return backward<double, double>(s, in, dx, work, stream);
    case ONT_FLOAT16: return (narrows ? backward<float, ont_f16> : backward<ont_f16, ont_f16>)(s, in, dx, work, stream);
    default: return (narrows ? backward<float, ont_bf16> : backward<ont_bf16, ont_bf16>)(s, in, dx, work, stream);
    }
}

/* ---- launchers of pieces of rows ---- */

extern "C" int ont_launch_loss_norm(const ont_loss *s, const void *labels, double *norm, void *stream)
{
    return ONT_LAUNCH(loss_norm_kernel<float>, 1, sum_threads(s->rows), 0, stream, *s, labels, (const void *)nullptr,
                      true, norm);
}

template <class T> static int piece(const ont_loss *whole, const ont_loss_piece *p, void *stream)
{
    typedef typename ont_compute<T>::type C;
    const void *labels = (const char *)p->labels + p->first * (whole->wide ? 8 : 4);
    T *x = (T *)p->x;
    C *stats = p->stats ? (C *)p->stats + 2 * p->first : nullptr;
    double *terms = p->terms ? p->terms + 2 * p->first : nullptr;
    const unsigned blocks = ont_blocks(p->rows, 1), threads = ont_row_threads(whole->classes);
    const bool is_long = whole->classes > 8 * ONT_THREADS;
    ont_loss s = *whole;
    s.rows = p->rows;
    s.fault = nullptr;
    if (p->kind == ONT_PIECE_BOTH)
        return ONT_LAUNCH((loss_both_kernel<T, C>), blocks, is_long ? (unsigned)both_threads<T>::MOST : threads, 0,
                          stream, s, x, labels, p->norm, p->scale, terms);
    if (p->kind == ONT_PIECE_LOSS)
        return ONT_LAUNCH((loss_kernel<T, C>), blocks, threads, 0, stream, s, (const T *)x, labels,
                          (const void *)nullptr, (T *)nullptr, stats, terms);
    const C *dloss = (const C *)p->dloss + (s.reduction ? 0 : p->first);
    gradient_operands<T, T> f = {x, labels, nullptr, dloss, stats, p->norm, x};
    return ONT_LAUNCH((loss_grad_kernel<T, T>), blocks, threads, 0, stream, s, f);
}

extern "C" int ont_launch_loss_piece(const ont_loss *s, const ont_loss_piece *p, void *stream)
{
    switch (s->dtype) {
    case ONT_FLOAT32: return piece<float>(s, p, stream);
    case ONT_FLOAT64: return piece<double>(s, p, stream);
    case ONT_FLOAT16: return piece<ont_f16>(s, p, stream);
    default: return piece<ont_bf16>(s, p, stream);
    }
}

extern "C" int ont_launch_loss_sum(const ont_loss *s, const double *terms, void *loss, void *stream)
{
    if (s->dtype == ONT_FLOAT64)
        return ONT_LAUNCH(loss_sum_kernel<double>, 1, sum_threads(s->rows), 0, stream, *s, terms, (double *)loss);
    return ONT_LAUNCH(loss_sum_kernel<float>, 1, sum_threads(s->rows), 0, stream, *s, terms, (float *)loss);
}
