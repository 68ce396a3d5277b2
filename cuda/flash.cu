/*
 * Flash attention with plain tiles: 32 keys (or queries) at a time in shared memory, a warp per row, a lane per entry of the tile
 * for products and per column for sums. Gradients of queries and of keys are two kernels, so that nothing is added by two blocks
 * and the result does not depend on their order.
 * Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", NeurIPS 2022.
 */
#include "launch.cuh"

#include "flash.h"
#include "math.cuh"

enum { TILE = 32, WARPS = 8, COLUMNS = ONT_FLASH_MAX_D / 32 }; /* columns: of one lane */

struct place { /* of one row of queries */
    int64_t b, h, kv, i;
};

ONT_DEVICE place place_of(const ont_flash &f, int64_t row)
{
    place p;
    p.i = row % f.lq;
    p.h = row / f.lq % f.heads;
    p.b = row / f.lq / f.heads;
    p.kv = p.b * f.kv_heads + p.h / (f.heads / f.kv_heads);
    return p;
}

/* The score of query i and key j, whose product is given; -infinity: not seen. */
ONT_DEVICE float score(const ont_flash &f, const place &p, int64_t j, float product)
{
    float s = product * f.scale;
    if (f.causal && j > p.i + (f.causal == 2 ? f.lk - f.lq : 0)) return -INFINITY;
    if (!f.bias) return s;
    int64_t at = p.b * f.bias_stride[0] + p.h * f.bias_stride[1] + p.i * f.bias_stride[2] + j * f.bias_stride[3];
    if (f.bias_dtype == ONT_BOOL) return ((const uint8_t *)f.bias)[at] ? s : -INFINITY;
    return s + ((const float *)f.bias)[at];
}

/* What a probability is multiplied by: 0 where it is dropped. */
ONT_DEVICE float kept(const ont_flash &f, int64_t row, int64_t j)
{
    if (f.drop <= 0) return 1;
    uint32_t word = ont_philox_word(*f.seed, f.stream, row * f.lk + j);
    return word >= (uint32_t)((double)f.drop * 4294967296.0) ? 1 / (1 - f.drop) : 0.0f;
}

/* Rows [first, first + TILE) of a matrix (n, d) into shared memory, zeros behind its end; a row is d + 1 apart. */
template <class T> ONT_DEVICE void load_tile(const T *from, int64_t first, int64_t n, int d, float *tile)
{
    for (int e = (int)threadIdx.x; e < TILE * d; e += (int)blockDim.x) {
        int r = e / d, c = e % d;
        tile[r * (d + 1) + c] = first + r < n ? ont_load(&from[(first + r) * d + c]) : 0.0f;
    }
}

ONT_DEVICE float product(const float *a, const float *b, int d)
{
    float sum = 0;
    for (int c = 0; c < d; c++) sum += a[c] * b[c];
    return sum;
}

/* sums[] += weight of each lane's row times that row; a lane has every 32nd column. */
ONT_DEVICE void add_rows(float *sums, float weight, const float *tile, int d)
{
    int lane = (int)threadIdx.x & 31;
    for (int r = 0; r < TILE; r++) {
        float w = __shfl_sync(0xffffffffu, weight, r);
        for (int c = 0; c < COLUMNS; c++)
            if (lane + 32 * c < d) sums[c] += w * tile[r * (d + 1) + lane + 32 * c];
    }
}

/* ---- forward: a block has WARPS rows of one head ---- */

template <class T>
__global__ void __launch_bounds__(32 * WARPS)
    flash_kernel(const ont_flash f, const T *q, const T *k, const T *v, T *out, float *lse)
{
    ONT_SHARED(float, shared);
    int d = (int)f.d, lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    float *keys = shared, *values = keys + TILE * (d + 1), *own = values + TILE * (d + 1) + warp * d;
    int64_t head = blockIdx.y, i = (int64_t)blockIdx.x * WARPS + warp, row = head * f.lq + (i < f.lq ? i : f.lq - 1);
    place p = place_of(f, row);
    for (int c = lane; c < d; c += 32) own[c] = ont_load(&q[row * d + c]);
    __syncwarp();
    float most = -INFINITY, sum = 0, acc[COLUMNS] = {0};
    for (int64_t first = 0; first < f.lk; first += TILE) {
        __syncthreads();
        load_tile(k + p.kv * f.lk * d, first, f.lk, d, keys);
        load_tile(v + p.kv * f.lk * d, first, f.lk, d, values);
        __syncthreads();
        int64_t j = first + lane;
        float s = j < f.lk ? score(f, p, j, product(own, keys + lane * (d + 1), d)) : -INFINITY;
        float next = ont_larger(most, ont_warp_max(s)), shrink = 1, e = 0;
        if (next != -INFINITY) {
            shrink = most == -INFINITY ? 0 : expf(most - next);
            e = s == -INFINITY ? 0 : expf(s - next);
        }
        sum = sum * shrink + ont_warp_sum(e);
        for (int c = 0; c < COLUMNS; c++) acc[c] *= shrink;
        add_rows(acc, j < f.lk ? e * kept(f, row, j) : 0, values, d);
        most = next;
    }
    if (i >= f.lq) return;
    for (int c = 0; c < COLUMNS; c++)
        if (lane + 32 * c < d) ont_store(&out[row * d + lane + 32 * c], acc[c] / sum);
    if (!lane && lse) lse[row] = most + logf(sum);
}

/* ---- backward ---- */

/* delta = sum of out * dout of a row, a warp each */
template <class T>
__global__ void __launch_bounds__(32 * WARPS)
    flash_delta_kernel(int64_t rows, int64_t d, const T *out, const T *dout, float *delta)
{
    int lane = (int)threadIdx.x & 31;
    int64_t row = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5);
    float sum = 0;
    for (int64_t c = lane; row < rows && c < d; c += 32)
        sum += ont_load(&out[row * d + c]) * ont_load(&dout[row * d + c]);
    sum = ont_warp_sum(sum);
    if (row < rows && !lane) delta[row] = sum;
}

template <class T>
__global__ void __launch_bounds__(32 * WARPS)
    flash_dq_kernel(const ont_flash f, const T *q, const T *k, const T *v, const T *dout, const float *lse,
                    const float *delta, T *dq)
{
    ONT_SHARED(float, shared);
    int d = (int)f.d, lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    float *keys = shared, *values = keys + TILE * (d + 1), *own = values + TILE * (d + 1) + 2 * warp * d,
          *given = own + d;
    int64_t head = blockIdx.y, i = (int64_t)blockIdx.x * WARPS + warp, row = head * f.lq + (i < f.lq ? i : f.lq - 1);
    place p = place_of(f, row);
    for (int c = lane; c < d; c += 32) {
        own[c] = ont_load(&q[row * d + c]);
        given[c] = ont_load(&dout[row * d + c]);
    }
    __syncwarp();
    float acc[COLUMNS] = {0};
    for (int64_t first = 0; first < f.lk; first += TILE) {
        __syncthreads();
        load_tile(k + p.kv * f.lk * d, first, f.lk, d, keys);
        load_tile(v + p.kv * f.lk * d, first, f.lk, d, values);
        __syncthreads();
        int64_t j = first + lane;
        float ds = 0;
        if (j < f.lk) {
            float s = score(f, p, j, product(own, keys + lane * (d + 1), d));
            float e = s == -INFINITY ? 0 : expf(s - lse[row]);
            ds = e * (product(given, values + lane * (d + 1), d) * kept(f, row, j) - delta[row]) * f.scale;
        }
        add_rows(acc, ds, keys, d);
    }
    if (i >= f.lq) return;
    for (int c = 0; c < COLUMNS; c++)
        if (lane + 32 * c < d) ont_store(&dq[row * d + lane + 32 * c], acc[c]);
}

/* A warp has one key and goes over the queries of every head that shares it. */
template <class T>
__global__ void __launch_bounds__(32 * WARPS)
    flash_dkv_kernel(const ont_flash f, const T *q, const T *k, const T *v, const T *dout, const float *lse,
                     const float *delta, T *dk, T *dv)
{
    ONT_SHARED(float, shared);
    int d = (int)f.d, lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    float *queries = shared, *given = queries + TILE * (d + 1), *key = given + TILE * (d + 1) + 2 * warp * d,
          *value = key + d;
    int64_t kv = blockIdx.y, j = (int64_t)blockIdx.x * WARPS + warp, at = kv * f.lk + (j < f.lk ? j : f.lk - 1);
    for (int c = lane; c < d; c += 32) {
        key[c] = ont_load(&k[at * d + c]);
        value[c] = ont_load(&v[at * d + c]);
    }
    __syncwarp();
    float dkey[COLUMNS] = {0}, dvalue[COLUMNS] = {0};
    int64_t group = f.heads / f.kv_heads, first_head = kv / f.kv_heads * f.heads + kv % f.kv_heads * group;
    for (int64_t head = first_head; head < first_head + group; head++)
        for (int64_t first = 0; first < f.lq; first += TILE) {
            __syncthreads();
            load_tile(q + head * f.lq * d, first, f.lq, d, queries);
            load_tile(dout + head * f.lq * d, first, f.lq, d, given);
            __syncthreads();
            int64_t i = first + lane, row = head * f.lq + i;
            float weight = 0, ds = 0;
            if (i < f.lq && j < f.lk) {
                place p = place_of(f, row);
                float s = score(f, p, j, product(key, queries + lane * (d + 1), d)), keep = kept(f, row, j);
                float e = s == -INFINITY ? 0 : expf(s - lse[row]);
                weight = e * keep;
                ds = e * (product(value, given + lane * (d + 1), d) * keep - delta[row]) * f.scale;
            }
            add_rows(dvalue, weight, given, d);
            add_rows(dkey, ds, queries, d);
        }
    if (j >= f.lk) return;
    for (int c = 0; c < COLUMNS; c++) {
        if (lane + 32 * c >= d) continue;
        ont_store(&dk[at * d + lane + 32 * c], dkey[c]);
        ont_store(&dv[at * d + lane + 32 * c], dvalue[c]);
    }
}

static size_t shared_bytes(const ont_flash *f, int rows)
{
    return (size_t)(2 * TILE * (f->d + 1) + rows * WARPS * f->d) * sizeof(float);
}

static dim3 grid_of(int64_t length, int64_t heads) { return dim3(ont_blocks(length, WARPS), (unsigned)heads); }

template <class T>
static int forward(const ont_flash *f, const void *q, const void *k, const void *v, void *out, float *lse, void *stream)
{
    return ONT_LAUNCH(flash_kernel<T>, grid_of(f->lq, f->batch * f->heads), 32 * WARPS, shared_bytes(f, 1), stream, *f,
                      (const T *)q, (const T *)k, (const T *)v, (T *)out, lse);
}

template <class T>
static int backward(const ont_flash *f, const void *q, const void *k, const void *v, const void *out, const float *lse,
                    const void *dout, void *dq, void *dk, void *dv, float *delta, void *stream)
{
    int64_t rows = f->batch * f->heads * f->lq;
    int error = ONT_LAUNCH(flash_delta_kernel<T>, ont_blocks(rows, WARPS), 32 * WARPS, 0, stream, rows, f->d,
                           (const T *)out, (const T *)dout, delta);
    if (!error)
        error = ONT_LAUNCH(flash_dq_kernel<T>, grid_of(f->lq, f->batch * f->heads), 32 * WARPS, shared_bytes(f, 2),
                           stream, *f, (const T *)q, (const T *)k, (const T *)v, (const T *)dout, lse,
                           (const float *)delta, (T *)dq);
    if (!error)
        error = ONT_LAUNCH(flash_dkv_kernel<T>, grid_of(f->lk, f->batch * f->kv_heads), 32 * WARPS, shared_bytes(f, 2),
                           stream, *f, (const T *)q, (const T *)k, (const T *)v, (const T *)dout, lse,
                           (const float *)delta, (T *)dk, (T *)dv);
    return error;
}

extern "C" int ont_launch_flash(const ont_flash *f, const void *q, const void *k, const void *v, void *out, float *lse,
                                void *stream)
{
    if (!f->batch || !f->heads || !f->lq || !f->d) return 0;
    switch (f->dtype) {
    case ONT_FLOAT32: return forward<float>(f, q, k, v, out, lse, stream);
    case ONT_FLOAT16: return forward<ont_f16>(f, q, k, v, out, lse, stream);
    default: return forward<ont_bf16>(f, q, k, v, out, lse, stream);
    }
}

extern "C" int ont_launch_flash_grad(const ont_flash *f, const void *q, const void *k, const void *v, const void *out,
                                     const float *lse, const void *dout, void *dq, void *dk, void *dv, float *work,
                                     void *stream)
{
    if (!f->batch || !f->heads || !f->lq || !f->lk || !f->d) return 0;
    switch (f->dtype) {
    case ONT_FLOAT32: return backward<float>(f, q, k, v, out, lse, dout, dq, dk, dv, work, stream);
    case ONT_FLOAT16: return backward<ont_f16>(f, q, k, v, out, lse, dout, dq, dk, dv, work, stream);
    default: return backward<ont_bf16>(f, q, k, v, out, lse, dout, dq, dk, dv, work, stream);
    }
}
