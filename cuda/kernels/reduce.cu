/*
 * Reductions: a block per result where the reduced elements of one lie together or anywhere; for columns (bias
 * gradients) a thread per column and range of rows, then the ranges in order. Nothing depends on the order in which
 * blocks run.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/math.cuh"

#ifdef __CUDACC__
#pragma nv_diag_suppress 186 /* an unsigned number is never below 0 */
#endif

enum { SUM, MEAN, MAX, MIN, PROD, L1, L2, SUM_SQUARE, LOG_SUM, LOG_SUM_EXP }; /* ont_reduce_kind */

template <class A> ONT_DEVICE double as_double(A v) { return (double)v; }

/* What is combined with v changes nothing. Integers: the type's own limits, given by the launcher. */
template <class A> ONT_DEVICE A neutral(int kind, A lowest, A highest)
{
    return kind == MAX ? lowest : kind == MIN ? highest : kind == PROD ? (A)1 : (A)0;
}

template <class A> ONT_DEVICE A combine(int kind, A a, A b)
{
    switch (kind) {
    case MAX: return a > b || a != a ? a : b;
    case MIN: return a < b || a != a ? a : b;
    case PROD: return a * b;
    default: return a + b;
    }
}

template <class A> ONT_DEVICE A prepared(int kind, A v, A max_value)
{
    switch (kind) {
    case L1: return v < 0 ? 0 - v : v;
    case L2:
    case SUM_SQUARE: return v * v;
    case LOG_SUM_EXP: return (A)vexp((double)(v - max_value));
    default: return v;
    }
}

template <class A> ONT_DEVICE A finished(int kind, A acc, A max_value, int64_t each)
{
    switch (kind) {
    case MEAN: return acc / (A)each;
    case L2: return (A)vsqrt((double)acc);
    case LOG_SUM: return (A)vlog((double)acc);
    case LOG_SUM_EXP: return (A)vlog((double)acc) + max_value;
    default: return acc;
    }
}

/* NaN in either operand passes through MAX and MIN, since combine() is called in both orders. */
template <class A> ONT_DEVICE A block_combine(int kind, A v, A *scratch)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    for (int lanes = 16; lanes; lanes >>= 1) {
        A other = __shfl_xor_sync(0xffffffffu, v, lanes);
        v = other != other ? other : combine(kind, v, other);
    }
    __syncthreads();
    if (!lane) scratch[warp] = v;
    __syncthreads();
    v = scratch[0];
    for (int w = 1; w < warps; w++) v = scratch[w] != scratch[w] ? scratch[w] : combine(kind, v, scratch[w]);
    return v;
}

template <class T> ONT_DEVICE int64_t offset_of(const int64_t *dims, const int64_t *strides, int rank, int64_t i)
{
    int64_t offset = 0;
    for (int d = rank - 1; d >= 0; d--) {
        offset += i % dims[d] * strides[d];
        i /= dims[d];
    }
    return offset;
}

template <class T, class A>
__global__ void __launch_bounds__(ONT_THREADS)
    reduce_kernel(const ont_reduction r, A lowest, A highest, const T *x, T *y)
{
    __shared__ A scratch[32];
    for (int64_t out = blockIdx.x; out < r.outputs; out += gridDim.x) {
        const T *from = x + offset_of<T>(r.kept, r.kept_stride, r.n_kept, out);
        A max_value = 0;
        if (r.kind == LOG_SUM_EXP && r.each) {
            max_value = (A)from[0];
            for (int64_t e = threadIdx.x; e < r.each; e += blockDim.x)
                max_value = ont_larger((A)from[offset_of<T>(r.reduced, r.reduced_stride, r.n_reduced, e)], max_value);
            max_value = block_combine((int)MAX, max_value, scratch);
            if (isinf(as_double(max_value))) max_value = 0;
        }
        A acc = neutral(r.kind, lowest, highest);
        for (int64_t e = threadIdx.x; e < r.each; e += blockDim.x) {
            A v = prepared(r.kind, (A)from[offset_of<T>(r.reduced, r.reduced_stride, r.n_reduced, e)], max_value);
            acc = v != v ? v : combine(r.kind, acc, v);
        }
        acc = block_combine((int)r.kind, acc, scratch);
        if (!threadIdx.x) y[out] = (T)finished(r.kind, acc, max_value, r.each);
    }
}

/* ---- columns: (lead, n, tail) -> (lead, tail), sums and means of floats ---- */

static inline int64_t parts_of(const ont_reduction *r)
{
    int64_t parts = (r->n + 63) / 64, room = 65536 / (r->lead * r->tail / ONT_THREADS + 1) + 1;
    return parts > room ? room : parts > 256 ? 256 : parts;
}

static inline bool is_columns(const ont_reduction *r)
{
    return r->n > 0 && r->tail > 1 && (r->kind == SUM || r->kind == MEAN) &&
           (r->dtype == ONT_FLOAT32 || r->dtype == ONT_FLOAT64);
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    columns_kernel(const ont_reduction r, int64_t parts, T scale, const T *x, T *y)
{
    int64_t part = blockIdx.y, first = r.n * part / parts, last = r.n * (part + 1) / parts;
    int64_t n = r.lead * r.tail;
    ONT_FOR(i, n) {
        const T *from = x + i / r.tail * r.n * r.tail + i % r.tail;
        T sum = 0;
        for (int64_t row = first; row < last; row++) sum += from[row * r.tail];
        y[part * r.lead * r.tail + i] = sum * scale;
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) parts_kernel(int64_t n, int64_t parts, T scale, const T *partial, T *y)
{
    ONT_FOR(i, n) {
        T sum = 0;
        for (int64_t part = 0; part < parts; part++) sum += partial[part * n + i];
        y[i] = sum * scale;
    }
}

template <class T> static int columns(const ont_reduction *r, const void *x, void *y, void *work, void *stream)
{
    int64_t parts = parts_of(r), n = r->lead * r->tail;
    T scale = r->kind == MEAN ? 1 / (T)r->n : (T)1;
    dim3 grid(ont_blocks(n, ONT_THREADS), (unsigned)parts);
    if (parts == 1)
        return ONT_LAUNCH(columns_kernel<T>, grid, ONT_THREADS, 0, stream, *r, parts, scale, (const T *)x, (T *)y);
    int error = ONT_LAUNCH(columns_kernel<T>, grid, ONT_THREADS, 0, stream, *r, parts, (T)1, (const T *)x, (T *)work);
    if (error) return error;
    return ONT_LAUNCH(parts_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, n, parts, scale,
                      (const T *)work, (T *)y);
}

extern "C" size_t ont_reduce_work(const ont_reduction *r)
{
    return is_columns(r) ? (size_t)(parts_of(r) * r->lead * r->tail) * sizeof(double) : 0;
}

template <class T, class A>
static int general(const ont_reduction *r, A lowest, A highest, const void *x, void *y, void *stream)
{
    return ONT_LAUNCH((reduce_kernel<T, A>), ont_blocks(r->outputs, 1), ont_row_threads(r->each), 0, stream, *r, lowest,
                      highest, (const T *)x, (T *)y);
}

extern "C" int ont_launch_reduce(const ont_reduction *r, const void *x, void *y, void *work, void *stream)
{
    if (!r->outputs) return 0;
    if (is_columns(r)) return (r->dtype == ONT_FLOAT32 ? columns<float> : columns<double>)(r, x, y, work, stream);
    switch (r->dtype) {
    case ONT_FLOAT32: return general<float, float>(r, -INFINITY, INFINITY, x, y, stream);
    case ONT_FLOAT64: return general<double, double>(r, -INFINITY, INFINITY, x, y, stream);
    case ONT_INT32: return general<int32_t, int64_t>(r, INT32_MIN, INT32_MAX, x, y, stream);
    case ONT_INT64: return general<int64_t, int64_t>(r, INT64_MIN, INT64_MAX, x, y, stream);
    case ONT_UINT64: return general<uint64_t, uint64_t>(r, 0, UINT64_MAX, x, y, stream);
    default: return general<uint8_t, int64_t>(r, 0, 1, x, y, stream);
    }
}
