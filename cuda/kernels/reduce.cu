/*
 * Reductions, of 16-bit floats with arithmetic in float32. Sums of columns (bias gradients) and reductions of
 * contiguous rows read chunks of 16 bytes; ranges of rows, or of one long row, are reduced by a block each and then in
 * order. All else: a block per result. Nothing depends on the order in which blocks run.
 */
#include "kernels/launch.cuh"

#include "kernels/chunks.cuh"
#include "kernels/kernels.h"
#include "kernels/math.cuh"
#include "kernels/units.cuh"

#ifdef __CUDACC__
#pragma nv_diag_suppress 186 /* an unsigned number is never below 0 */
#endif

enum { SUM, MEAN, MAX, MIN, PROD, L1, L2, SUM_SQUARE, LOG_SUM, LOG_SUM_EXP }; /* ont_reduce_kind */

template <class A> ONT_DEVICE double as_double(A v) { return (double)v; }

template <class A, class T> ONT_DEVICE A read(const T *p) { return (A)*p; }
template <class A> ONT_DEVICE A read(const ont_f16 *p) { return ont_load(p); }
template <class A> ONT_DEVICE A read(const ont_bf16 *p) { return ont_load(p); }
template <class T, class A> ONT_DEVICE void write(T *p, A v) { *p = (T)v; }
template <class A> ONT_DEVICE void write(ont_f16 *p, A v) { ont_store(p, v); }
template <class A> ONT_DEVICE void write(ont_bf16 *p, A v) { ont_store(p, v); }

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

struct reduced_dims {
    wide_dims kept, reduced;
};

ONT_DEVICE int64_t offset_of(const wide_dims &dims, const int64_t *strides, int rank, int64_t i)
{
    uint64_t rest = (uint64_t)i;
    int64_t offset = 0;
    for (int d = rank - 1; d > 0; d--) offset += split(&rest, dims.size[d]) * strides[d];
    return offset + (int64_t)rest * strides[0];
}

template <class T, class A>
__global__ void __launch_bounds__(ONT_THREADS)
    reduce_kernel(const ont_reduction r, const reduced_dims dims, A lowest, A highest, const T *x, T *y)
{
    __shared__ A scratch[32];
    for (int64_t out = blockIdx.x; out < r.outputs; out += gridDim.x) {
        const T *from = x + offset_of(dims.kept, r.kept_stride, r.n_kept, out);
        A max_value = 0;
        if (r.kind == LOG_SUM_EXP && r.each) {
            max_value = read<A>(from);
            for (int64_t e = threadIdx.x; e < r.each; e += blockDim.x)
                max_value = ont_larger(read<A>(from + offset_of(dims.reduced, r.reduced_stride, r.n_reduced, e)),
                                       max_value);
            max_value = block_combine((int)MAX, max_value, scratch);
            if (isinf(as_double(max_value))) max_value = 0;
        }
        A acc = neutral(r.kind, lowest, highest);
        for (int64_t e = threadIdx.x; e < r.each; e += blockDim.x) {
            const T *at = from + offset_of(dims.reduced, r.reduced_stride, r.n_reduced, e);
            A v = prepared(r.kind, read<A>(at), max_value);
            acc = v != v ? v : combine(r.kind, acc, v);
        }
        acc = block_combine((int)r.kind, acc, scratch);
        if (!threadIdx.x) write(y + out, finished(r.kind, acc, max_value, r.each));
    }
}

/* ---- columns: (lead, n, tail) -> (lead, tail), sums and means of floats ---- */

static inline bool is_float(const ont_reduction *r)
{
    return r->dtype == ONT_FLOAT32 || r->dtype == ONT_FLOAT64 || r->dtype == ONT_FLOAT16 || r->dtype == ONT_BFLOAT16;
}

static inline bool is_columns(const ont_reduction *r)
{
    return r->n > 0 && r->tail > 1 && (r->kind == SUM || r->kind == MEAN) && is_float(r);
}

static inline int64_t chunk_of(const ont_reduction *r)
{
    return r->dtype == ONT_FLOAT64 ? 2 : r->dtype == ONT_FLOAT32 ? 4 : 8;
}

/* A block has this many threads side by side, and the others in rows below. */
static inline int lanes_for(int64_t chunks)
{
    int lanes = 1;
    while (lanes < 32 && lanes < chunks) lanes *= 2;
    return lanes;
}

/* Ranges of rows: enough for about a thousand blocks, with at least eight rows for each thread. */
static inline int64_t column_parts(const ont_reduction *r)
{
    const int64_t chunks = r->lead * r->tail / (r->tail % chunk_of(r) ? 1 : chunk_of(r));
    const int64_t lanes = lanes_for(chunks), blocks = (chunks + lanes - 1) / lanes;
    const int64_t most = r->n * lanes / (8 * ONT_THREADS), wanted = 1024 / blocks;
    const int64_t parts = wanted < most ? wanted : most;
    return parts < 1 ? 1 : parts > 256 ? 256 : parts;
}

struct columns_operands {
    int64_t lead, n, tail, parts;
    double scale;
    int lanes;
};

template <class T, class D, int N>
__global__ void __launch_bounds__(ONT_THREADS) columns_kernel(const columns_operands r, const T *x, D *y)
{
    typedef typename ont_compute<T>::type C;
    enum { LINE = ONT_THREADS + 1, AT_ONCE = 4 };
    __shared__ C sums[N * LINE];
    const int lanes = r.lanes, rows = ONT_THREADS / lanes, lane = (int)threadIdx.x % lanes;
    const int64_t part = blockIdx.y, first = r.n * part / r.parts + threadIdx.x / lanes;
    const int64_t last = r.n * (part + 1) / r.parts, width = r.tail / N, chunks = r.lead * width;
    for (int64_t block = blockIdx.x; block * lanes < chunks; block += gridDim.x) {
        const int64_t i = block * lanes + lane;
        const T *from = x + i / width * r.n * r.tail + i % width * N;
        C sum[N] = {};
        int64_t row = i < chunks ? first : last;
        for (; row + (AT_ONCE - 1) * rows < last; row += AT_ONCE * rows) {
            C v[AT_ONCE][N];
            ONT_UNROLL
            for (int j = 0; j < AT_ONCE; j++) load_chunk(from + (row + j * rows) * r.tail, v[j]);
            ONT_UNROLL
            for (int j = 0; j < AT_ONCE; j++)
                for (int k = 0; k < N; k++) sum[k] += v[j][k];
        }
        for (; row < last; row += rows) {
            C v[N];
            load_chunk(from + row * r.tail, v);
            for (int k = 0; k < N; k++) sum[k] += v[k];
        }
        for (int k = 0; k < N; k++) sums[k * LINE + (int)threadIdx.x] = sum[k];
        __syncthreads();
        for (int c = (int)threadIdx.x; c < lanes * N && block * lanes * N + c < chunks * N; c += ONT_THREADS) {
            C total = 0;
            for (int j = 0; j < rows; j++) total += sums[c % N * LINE + j * lanes + c / N];
            ont_store(&y[part * chunks * N + block * lanes * N + c], total * (C)r.scale);
        }
        __syncthreads();
    }
}

template <class T, class D, int N>
static int launch_columns(const columns_operands &r, const void *x, void *y, void *stream)
{
    const int64_t chunks = r.lead * r.tail / N;
    columns_operands s = r;
    s.lanes = lanes_for(chunks);
    const dim3 grid(ont_blocks(chunks, s.lanes), (unsigned)r.parts);
    return ONT_LAUNCH((columns_kernel<T, D, N>), grid, ONT_THREADS, 0, stream, s, (const T *)x, (D *)y);
}

template <class T, class D> static int columns_stage(const columns_operands &r, const void *x, void *y, void *stream)
{
    enum { N = 16 / sizeof(T) };
    if (r.tail % N || !are_aligned(&x, 1)) return launch_columns<T, D, 1>(r, x, y, stream);
    return launch_columns<T, D, N>(r, x, y, stream);
}

template <class T> static int columns(const ont_reduction *r, const void *x, void *y, void *work, void *stream)
{
    typedef typename ont_compute<T>::type C;
    columns_operands s = {r->lead, r->n, r->tail, column_parts(r), 1, 1};
    const double scale = r->kind == MEAN ? 1 / (double)r->n : 1;
    if (s.parts > 1) {
        const int error = columns_stage<T, C>(s, x, work, stream);
        if (error) return error;
        s = columns_operands{1, s.parts, r->lead * r->tail, 1, scale, 1};
        return columns_stage<C, T>(s, work, y, stream);
    }
    s.scale = scale;
    return columns_stage<T, T>(s, x, y, stream);
}

/* ---- rows: (rows, n) -> (rows), of floats ---- */

static inline bool is_rows(const ont_reduction *r)
{
    return r->n > 0 && r->tail == 1 && r->kind != LOG_SUM_EXP && is_float(r);
}

/* Ranges of a row, where there are few rows. */
static inline int64_t row_parts(const ont_reduction *r)
{
    const int64_t most = r->n / (16 * ONT_THREADS), wanted = 1024 / r->lead, parts = wanted < most ? wanted : most;
    return parts < 1 ? 1 : parts;
}

/* FIRST: x are elements, else results of ranges. LAST: y are results. */
template <class T, class D, int N, bool FIRST, bool LAST>
__global__ void __launch_bounds__(ONT_THREADS)
    rows_kernel(int kind, int64_t each, int64_t rows, int64_t n, int64_t parts, const T *x, D *y)
{
    typedef typename ont_compute<T>::type C;
    __shared__ C scratch[32];
    const int64_t chunks = n / N;
    for (int64_t i = blockIdx.x; i < rows * parts; i += gridDim.x) {
        const int64_t part = i % parts, last = chunks * (part + 1) / parts;
        const T *from = x + i / parts * n;
        C acc = neutral(kind, (C)-INFINITY, (C)INFINITY);
        for (int64_t c = chunks * part / parts + threadIdx.x; c < last; c += blockDim.x) {
            C v[N];
            load_chunk(from + c * N, v);
            ONT_UNROLL
            for (int k = 0; k < N; k++) {
                const C w = FIRST ? prepared(kind, v[k], (C)0) : v[k];
                acc = w != w ? w : combine(kind, acc, w);
            }
        }
        acc = block_combine(kind, acc, scratch);
        if (!threadIdx.x) ont_store(&y[i], LAST ? finished(kind, acc, (C)0, each) : acc);
    }
}

template <class T, class D, int N, bool FIRST, bool LAST>
static int rows_stage(const ont_reduction *r, int64_t n, int64_t parts, const void *x, void *y, void *stream)
{
    const unsigned threads = ont_row_threads(n / parts / N);
    return ONT_LAUNCH((rows_kernel<T, D, N, FIRST, LAST>), ont_blocks(r->lead * parts, 1), threads, 0, stream, r->kind,
                      r->each, r->lead, n, parts, (const T *)x, (D *)y);
}

template <class T, int N> static int rows(const ont_reduction *r, const void *x, void *y, void *work, void *stream)
{
    typedef typename ont_compute<T>::type C;
    const int64_t parts = row_parts(r);
    if (parts == 1) return rows_stage<T, T, N, true, true>(r, r->n, 1, x, y, stream);
    const int error = rows_stage<T, C, N, true, false>(r, r->n, parts, x, work, stream);
    return error ? error : rows_stage<C, T, 1, false, true>(r, parts, 1, work, y, stream);
}

/* ---- launchers ---- */

extern "C" size_t ont_reduce_work(const ont_reduction *r)
{
    if (is_columns(r)) return (size_t)(column_parts(r) * r->lead * r->tail) * sizeof(double);
    return is_rows(r) ? (size_t)(row_parts(r) * r->lead) * sizeof(double) : 0;
}

template <class T, class A>
static int general(const ont_reduction *r, A lowest, A highest, const void *x, void *y, void *stream)
{
    const reduced_dims dims = {wide_dims_of(r->kept, r->n_kept), wide_dims_of(r->reduced, r->n_reduced)};
    return ONT_LAUNCH((reduce_kernel<T, A>), ont_blocks(r->outputs, 1), ont_row_threads(r->each), 0, stream, *r, dims,
                      lowest, highest, (const T *)x, (T *)y);
}

template <class T> static int floats(const ont_reduction *r, const void *x, void *y, void *work, void *stream)
{
    typedef typename ont_compute<T>::type C;
    enum { N = 16 / sizeof(T) };
    if (is_columns(r)) return columns<T>(r, x, y, work, stream);
    if (!is_rows(r)) return general<T, C>(r, (C)-INFINITY, (C)INFINITY, x, y, stream);
    if (r->n % N || !are_aligned(&x, 1)) return rows<T, 1>(r, x, y, work, stream);
    return rows<T, N>(r, x, y, work, stream);
}

extern "C" int ont_launch_reduce(const ont_reduction *r, const void *x, void *y, void *work, void *stream)
{
    if (!r->outputs) return 0;
    switch (r->dtype) {
    case ONT_FLOAT32: return floats<float>(r, x, y, work, stream);
    case ONT_FLOAT64: return floats<double>(r, x, y, work, stream);
    case ONT_FLOAT16: return floats<ont_f16>(r, x, y, work, stream);
    case ONT_BFLOAT16: return floats<ont_bf16>(r, x, y, work, stream);
    case ONT_INT32: return general<int32_t, int64_t>(r, INT32_MIN, INT32_MAX, x, y, stream);
    case ONT_INT64: return general<int64_t, int64_t>(r, INT64_MIN, INT64_MAX, x, y, stream);
    case ONT_UINT64: return general<uint64_t, uint64_t>(r, 0, UINT64_MAX, x, y, stream);
    default: return general<uint8_t, int64_t>(r, 0, 1, x, y, stream);
    }
}

/* ---- columns of pieces ---- */

static ont_reduction columns_of(int dtype, int64_t rows, int64_t columns)
{
    ont_reduction r = {};
    r.kind = SUM;
    r.dtype = dtype;
    r.lead = 1;
    r.n = rows;
    r.tail = columns;
    return r;
}

extern "C" int64_t ont_column_parts(int dtype, int64_t rows, int64_t columns)
{
    const ont_reduction r = columns_of(dtype, rows, columns);
    return column_parts(&r);
}

template <class T> static int piece(int64_t rows, int64_t columns, int64_t parts, const void *x, void *y, void *stream)
{
    typedef typename ont_compute<T>::type C;
    return columns_stage<T, C>(columns_operands{1, rows, columns, parts, 1, 1}, x, y, stream);
}

extern "C" int ont_launch_column_parts(int dtype, int64_t rows, int64_t columns, const void *x, void *parts,
                                       void *stream)
{
    const int64_t n = ont_column_parts(dtype, rows, columns);
    switch (dtype) {
    case ONT_FLOAT32: return piece<float>(rows, columns, n, x, parts, stream);
    case ONT_FLOAT64: return piece<double>(rows, columns, n, x, parts, stream);
    case ONT_FLOAT16: return piece<ont_f16>(rows, columns, n, x, parts, stream);
    default: return piece<ont_bf16>(rows, columns, n, x, parts, stream);
    }
}

extern "C" int ont_launch_column_sum(int dtype, int64_t parts, int64_t columns, double scale, const void *x, void *y,
                                     void *stream)
{
    const columns_operands s = {1, parts, columns, 1, scale, 1};
    if (dtype == ONT_FLOAT64) return columns_stage<double, double>(s, x, y, stream);
    return columns_stage<float, float>(s, x, y, stream);
}
