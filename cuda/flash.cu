/*
 * Attention without stored probabilities for any float type and size: tiles of 32 rows by 32 columns in shared memory,
 * two rows by four columns of scores to a thread. Gradients of queries and of keys are two kernels, so that nothing is
 * added by two blocks and the result does not depend on their order. What tensor cores can take goes to flash_mma.cu.
 * Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", NeurIPS 2022.
 */
#include "flash.cuh"

enum { TILE = 32, THREADS = 128, WARPS = THREADS / 32, PITCH = TILE + 4, VECTOR = 4 };

template <class C> struct alignas(16) vector4 {
    C x[VECTOR];
};

ONT_DEVICE int row_group() { return (int)threadIdx.x >> 3; }   /* has rows 2 r and 2 r + 1 */
ONT_DEVICE int column_group() { return (int)threadIdx.x & 7; } /* has columns 4 c to 4 c + 3 */
/* Row j of a tile that is read by columns: lanes side by side find theirs side by side. */
ONT_DEVICE int slot_of(int j) { return (j & 3) * 8 + (j >> 2); }

static __host__ __device__ inline int width_of(int64_t size, int64_t v_size)
{
    return ((int)(size > v_size ? size : v_size) + VECTOR - 1) / VECTOR * VECTOR + VECTOR;
}

/* Rows [first, first + TILE) of `n` with zeros behind their ends, into shared memory; by slot_of() where `slots`. */
template <class T, class C>
ONT_DEVICE void load_tile(const T *from, int64_t step, int64_t first, int64_t n, int size, int width, bool slots,
                          C *tile)
{
    for (int r = (int)threadIdx.x >> 5; r < TILE; r += WARPS) {
        const T *row = from + (first + r) * step;
        C *to = tile + (slots ? slot_of(r) : r) * width;
        for (int c = (int)threadIdx.x & 31; c < width; c += 32)
            to[c] = first + r < n && c < size ? ont_load(&row[c]) : (C)0;
    }
}

/* s = two rows of `own` times four of `other` */
template <class C> ONT_DEVICE void products(const C *own, const C *other, int size, int width, C s[2][VECTOR])
{
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < VECTOR; k++) s[r][k] = 0;
    for (int c = 0; c < size; c += VECTOR) {
        vector4<C> a[2];
        for (int r = 0; r < 2; r++) a[r] = *(const vector4<C> *)(own + (2 * row_group() + r) * width + c);
        ONT_UNROLL
        for (int k = 0; k < VECTOR; k++) {
            vector4<C> b = *(const vector4<C> *)(other + (k * 8 + column_group()) * width + c);
        ONT_UNROLL
            for (int r = 0; r < 2; r++)
                for (int e = 0; e < VECTOR; e++) s[r][k] += a[r].x[e] * b.x[e];
        }
    }
}

/* acc += two rows of weights times the tile; a thread has four of every 32 columns */
template <int NV, class C>
ONT_DEVICE void add_rows(C acc[2][NV][VECTOR], const C *weights, const C *tile, int size, int width)
{
    for (int j = 0; j < TILE; j++) {
        C w[2];
        for (int r = 0; r < 2; r++) w[r] = weights[(2 * row_group() + r) * PITCH + j];
        ONT_UNROLL
        for (int n = 0; n < NV; n++) {
            int c = VECTOR * column_group() + 32 * n;
            if (c >= size) continue;
            vector4<C> v = *(const vector4<C> *)(tile + slot_of(j) * width + c);
        ONT_UNROLL
            for (int r = 0; r < 2; r++)
                for (int e = 0; e < VECTOR; e++) acc[r][n][e] += w[r] * v.x[e];
        }
    }
}

/* Rows belong to one warp each: it writes its weights, and alone reads them. */
template <class C> ONT_DEVICE void put_weights(C *weights, const C w[2][VECTOR])
{
    __syncwarp();
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < VECTOR; k++) weights[(2 * row_group() + r) * PITCH + VECTOR * column_group() + k] = w[r][k];
    __syncwarp();
}

template <class T, int NV, class C>
ONT_DEVICE void put_rows(T *to, int64_t step, int64_t first, int64_t n, int size, const C acc[2][NV][VECTOR],
                         const C factor[2], const bool zero[2])
{
    for (int r = 0; r < 2; r++) {
        int64_t i = first + 2 * row_group() + r;
        if (i >= n) continue;
        ONT_UNROLL
        for (int v = 0; v < NV; v++)
            for (int e = 0; e < VECTOR; e++) {
                int c = VECTOR * column_group() + 32 * v + e;
                if (c < size) ont_store(&to[i * step + c], zero[r] ? (C)0 : acc[r][v][e] * factor[r]);
            }
    }
}

/* Over the eight lanes that have the same rows. */
template <class C> ONT_DEVICE C row_max(C v)
{
    for (int lanes = 4; lanes; lanes >>= 1) {
        C other = __shfl_xor_sync(0xffffffffu, v, lanes);
        v = other > v ? other : v;
    }
    return v;
}
template <class C> ONT_DEVICE C row_sum(C v)
{
    for (int lanes = 4; lanes; lanes >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lanes);
    return v;
}

/* ---- forward ---- */

template <class T, int NV> __global__ void __launch_bounds__(THREADS, 2) flash_kernel(const ont_flash f)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    int size = (int)f.size, v_size = (int)f.v_size, width = width_of(size, v_size);
    C *own = shared, *keys = own + TILE * width, *values = keys + TILE * width, *weights = values + TILE * width;
    int64_t tiles = (f.rows + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.count * tiles; item += gridDim.x) {
        int64_t lead = item / tiles,
                first_row = (tiles - 1 - item % tiles) * TILE; /* under a causal mask the longest first */
        int64_t end = flash_visible(f, first_row + TILE < f.rows ? first_row + TILE - 1 : f.rows - 1);
        flash_masks masks = flash_masks_of(f, lead);
        C acc[2][NV][VECTOR] = {}, most[2] = {-(C)INFINITY, -(C)INFINITY}, sum[2] = {0, 0};
        __syncthreads(); /* the last item's rows are no longer read */
        load_tile((const T *)f.q + flash_at(f, ONT_FLASH_Q, lead), f.view[ONT_FLASH_Q].row, first_row, f.rows, size,
                  width, false, own);
        for (int64_t first = 0; first < end; first += TILE) {
            __syncthreads();
            load_tile((const T *)f.k + flash_at(f, ONT_FLASH_K, lead), f.view[ONT_FLASH_K].row, first, f.columns, size,
                      width, true, keys);
            load_tile((const T *)f.v + flash_at(f, ONT_FLASH_V, lead), f.view[ONT_FLASH_V].row, first, f.columns,
                      v_size, width, true, values);
            __syncthreads();
            C s[2][VECTOR];
            products(own, keys, size, width, s);
            for (int r = 0; r < 2; r++) {
                int64_t i = first_row + 2 * row_group() + r, j = first + VECTOR * column_group();
                C next = most[r];
                for (int k = 0; k < VECTOR; k++) {
                    bool inside = i < f.rows && j + k < f.columns;
                    s[r][k] = inside ? flash_score(f, masks, i, j + k, s[r][k] * (C)f.scale) : -(C)INFINITY;
                    next = s[r][k] > next ? s[r][k] : next;
                }
                next = row_max(next);
                C base = next == -(C)INFINITY ? (C)0 : next, shrink = vexp(most[r] - base), part = 0;
                uint32_t words[VECTOR];
                if (f.drops) flash_words<VECTOR>(f, (lead * f.rows + i) * f.columns + j, words);
                for (int k = 0; k < VECTOR; k++) {
                    C e = vexp(s[r][k] - base);
                    part += e;
                    s[r][k] = !f.drops ? e : words[k] >= f.threshold ? e * (C)f.keep_scale : e * (C)0;
                }
                sum[r] = sum[r] * shrink + row_sum(part);
                most[r] = next;
                for (int n = 0; n < NV; n++)
                    for (int e = 0; e < VECTOR; e++) acc[r][n][e] *= shrink;
            }
            put_weights(weights, s);
            add_rows<NV>(acc, weights, values, v_size, width);
        }
        C inverse[2];
        bool zero[2];
        for (int r = 0; r < 2; r++) {
            int64_t i = first_row + 2 * row_group() + r;
            inverse[r] = 1 / sum[r];
            zero[r] = i < f.rows && (flash_is_void(f, sum[r]) || flash_is_empty(f, lead, i));
            if (!f.stats || column_group() || i >= f.rows) continue;
            ((C *)f.stats)[(lead * f.rows + i) * 2] = most[r];
            ((C *)f.stats)[(lead * f.rows + i) * 2 + 1] = sum[r];
        }
        put_rows<T, NV>((T *)f.y + flash_at(f, ONT_FLASH_Y, lead), f.view[ONT_FLASH_Y].row, first_row, f.rows, v_size,
                        acc, inverse, zero);
    }
}

/* ---- backward ---- */

/* delta = sum of y * dy of a row, a warp each: what the row's probabilities times their gradients come to */
template <class T> __global__ void __launch_bounds__(THREADS) flash_delta_kernel(const ont_flash f)
{
    typedef typename ont_compute<T>::type C;
    int lane = (int)threadIdx.x & 31;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5); row < f.count * f.rows;
         row += (int64_t)gridDim.x * WARPS) {
        int64_t at = flash_at(f, ONT_FLASH_Y, row / f.rows) + row % f.rows * f.view[ONT_FLASH_Y].row;
        C sum = 0;
        for (int64_t c = lane; c < f.v_size; c += 32)
            sum += ont_load((const T *)f.y + at + c) * ont_load((const T *)f.dy + at + c);
        sum = ont_warp_sum(sum);
        if (!lane) ((C *)f.delta)[row] = sum;
    }
}

/* What the gradient knows of a row: its probabilities are exp(score - most) / sum. */
template <class C> struct row_facts {
    C most, sum, delta;
    bool dead; /* outside, or taken out: no gradient */
};

template <class C> ONT_DEVICE row_facts<C> facts_of(const ont_flash &f, int64_t lead, int64_t i)
{
    row_facts<C> x = {0, 1, 0, true};
    if (i >= f.rows) return x;
    const C *stats = (const C *)f.stats + (lead * f.rows + i) * 2;
    x.most = stats[0] == -(C)INFINITY ? (C)0 : stats[0];
    x.sum = stats[1];
    x.delta = ((const C *)f.delta)[lead * f.rows + i];
    x.dead = flash_is_void(f, x.sum) || flash_is_empty(f, lead, i);
    return x;
}

template <class T, int NV>
__global__ void __launch_bounds__(THREADS, 2) flash_dq_kernel(const ont_flash f, unsigned mask, int64_t n_shared)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    int size = (int)f.size, v_size = (int)f.v_size, width = width_of(size, v_size);
    C *own = shared, *given = own + TILE * width, *keys = given + TILE * width, *values = keys + TILE * width,
      *weights = values + TILE * width;
    int64_t tiles = (f.rows + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.count / n_shared * tiles; item += gridDim.x) {
        int64_t first_row = (tiles - 1 - item % tiles) * TILE;
        int64_t end = flash_visible(f, first_row + TILE < f.rows ? first_row + TILE - 1 : f.rows - 1);
        if (f.dbias) end = f.columns; /* which is zero where nothing is seen */
        C acc[2][NV][VECTOR] = {};
        for (int64_t other = 0; other < n_shared; other++) {
            int64_t lead = flash_lead(f, mask, item / tiles, other);
            flash_masks masks = flash_masks_of(f, lead);
            row_facts<C> row[2];
            for (int r = 0; r < 2; r++) row[r] = facts_of<C>(f, lead, first_row + 2 * row_group() + r);
            __syncthreads();
            load_tile((const T *)f.q + flash_at(f, ONT_FLASH_Q, lead), f.view[ONT_FLASH_Q].row, first_row, f.rows, size,
                      width, false, own);
            load_tile((const T *)f.dy + flash_at(f, ONT_FLASH_Y, lead), f.view[ONT_FLASH_Y].row, first_row, f.rows,
                      v_size, width, false, given);
            for (int64_t first = 0; first < end; first += TILE) {
                __syncthreads();
                load_tile((const T *)f.k + flash_at(f, ONT_FLASH_K, lead), f.view[ONT_FLASH_K].row, first, f.columns,
                          size, width, true, keys);
                load_tile((const T *)f.v + flash_at(f, ONT_FLASH_V, lead), f.view[ONT_FLASH_V].row, first, f.columns,
                          v_size, width, true, values);
                __syncthreads();
                C s[2][VECTOR], dp[2][VECTOR];
                products(own, keys, size, width, s);
                products(given, values, v_size, width, dp);
                for (int r = 0; r < 2; r++) {
                    int64_t i = first_row + 2 * row_group() + r, j = first + VECTOR * column_group();
                    uint32_t words[VECTOR];
                    if (f.drops) flash_words<VECTOR>(f, (lead * f.rows + i) * f.columns + j, words);
                    for (int k = 0; k < VECTOR; k++) {
                        C ds = 0;
                        if (!row[r].dead && j + k < f.columns && !flash_replaced(f, masks, i, j + k)) {
                            C p = vexp(flash_score(f, masks, i, j + k, s[r][k] * (C)f.scale) - row[r].most) /
                                  row[r].sum;
                            C kept = !f.drops ? (C)1 : words[k] >= f.threshold ? (C)f.keep_scale : (C)0;
                            ds = p * (dp[r][k] * kept - row[r].delta);
                        }
                        if (f.dbias && i < f.rows && j + k < f.columns)
                            flash_put_number(f.dbias, f.bias_dtype, (lead * f.rows + i) * f.columns + j + k, ds);
                        s[r][k] = ds * (C)f.scale;
                    }
                }
                put_weights(weights, s);
                if (f.dq) add_rows<NV>(acc, weights, keys, size, width);
            }
        }
        C one[2] = {1, 1};
        bool zero[2] = {false, false};
        if (!f.dq) continue;
        int64_t at = flash_at(f, ONT_FLASH_Q, flash_lead(f, mask, item / tiles, 0));
        put_rows<T, NV>((T *)f.dq + at, f.view[ONT_FLASH_Q].row, first_row, f.rows, size, acc, one, zero);
    }
}

/* A block has 32 keys, and goes over the queries of every lead that shares them. */
template <class T, int NV>
__global__ void __launch_bounds__(THREADS, 2) flash_dkv_kernel(const ont_flash f, unsigned mask, int64_t n_shared)
{
    typedef typename ont_compute<T>::type C;
    ONT_SHARED(C, shared);
    int size = (int)f.size, v_size = (int)f.v_size, width = width_of(size, v_size);
    C *keys = shared, *values = keys + TILE * width, *queries = values + TILE * width, *given = queries + TILE * width,
      *weights = given + TILE * width;
    int64_t tiles = (f.columns + TILE - 1) / TILE;
    for (int64_t item = blockIdx.x; item < f.count / n_shared * tiles; item += gridDim.x) {
        int64_t first_key = item % tiles * TILE, begin = flash_first_row(f, first_key) / TILE * TILE,
                j0 = first_key + 2 * row_group();
        C dk[2][NV][VECTOR] = {}, dv[2][NV][VECTOR] = {};
        for (int64_t other = 0; other < n_shared; other++) {
            int64_t lead = flash_lead(f, mask, item / tiles, other);
            flash_masks masks = flash_masks_of(f, lead);
            __syncthreads();
            load_tile((const T *)f.k + flash_at(f, ONT_FLASH_K, lead), f.view[ONT_FLASH_K].row, first_key, f.columns,
                      size, width, false, keys);
            load_tile((const T *)f.v + flash_at(f, ONT_FLASH_V, lead), f.view[ONT_FLASH_V].row, first_key, f.columns,
                      v_size, width, false, values);
            for (int64_t first = begin; first < f.rows; first += TILE) {
                __syncthreads();
                load_tile((const T *)f.q + flash_at(f, ONT_FLASH_Q, lead), f.view[ONT_FLASH_Q].row, first, f.rows, size,
                          width, true, queries);
                load_tile((const T *)f.dy + flash_at(f, ONT_FLASH_Y, lead), f.view[ONT_FLASH_Y].row, first, f.rows,
                          v_size, width, true, given);
                __syncthreads();
                C s[2][VECTOR], dp[2][VECTOR], p[2][VECTOR];
                products(keys, queries, size, width, s);
                products(values, given, v_size, width, dp);
                for (int k = 0; k < VECTOR; k++) {
                    int64_t i = first + VECTOR * column_group() + k;
                    row_facts<C> row = facts_of<C>(f, lead, i);
                    uint32_t words[2];
                    if (f.drops) flash_words<2>(f, (lead * f.rows + i) * f.columns + j0, words);
                    for (int r = 0; r < 2; r++) {
                        p[r][k] = 0;
                        C ds = 0;
                        if (!row.dead && j0 + r < f.columns) {
                            C kept = !f.drops ? (C)1 : words[r] >= f.threshold ? (C)f.keep_scale : (C)0;
                            C e = vexp(flash_score(f, masks, i, j0 + r, s[r][k] * (C)f.scale) - row.most) / row.sum;
                            p[r][k] = e * kept;
                            if (!flash_replaced(f, masks, i, j0 + r))
                                ds = e * (dp[r][k] * kept - row.delta) * (C)f.scale;
                        }
                        s[r][k] = ds;
                    }
                }
                if (f.dv) {
                    put_weights(weights, p);
                    add_rows<NV>(dv, weights, given, v_size, width);
                }
                if (f.dk) {
                    put_weights(weights, s);
                    add_rows<NV>(dk, weights, queries, size, width);
                }
            }
        }
        C one[2] = {1, 1};
        bool zero[2] = {false, false};
        int64_t lead = flash_lead(f, mask, item / tiles, 0);
        if (f.dk)
            put_rows<T, NV>((T *)f.dk + flash_at(f, ONT_FLASH_K, lead), f.view[ONT_FLASH_K].row, first_key, f.columns,
                            size, dk, one, zero);
        if (f.dv)
            put_rows<T, NV>((T *)f.dv + flash_at(f, ONT_FLASH_V, lead), f.view[ONT_FLASH_V].row, first_key, f.columns,
                            v_size, dv, one, zero);
    }
}

/* ---- launchers ---- */

static size_t shared_bytes(const ont_flash *f, int gradient)
{
    size_t z = f->dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float);
    return (size_t)((gradient ? 4 : 3) * TILE * width_of(f->size, f->v_size) + TILE * PITCH) * z;
}

extern "C" int ont_flash_fits(const ont_flash *f, int gradient)
{
    int64_t most = f->size > f->v_size ? f->size : f->v_size;
    return most <= (f->dtype == ONT_FLOAT64 ? 128 : ONT_FLASH_MAX_SIZE) &&
           shared_bytes(f, gradient) <= ont_shared_limit();
}

static unsigned blocks_of(int64_t leads, int64_t length) { return ont_blocks(leads * ((length + TILE - 1) / TILE), 1); }

template <class T, int NV> static int forward(const ont_flash *f, void *stream)
{
    size_t bytes = shared_bytes(f, 0);
    int error = ONT_ALLOW_SHARED((flash_kernel<T, NV>), bytes);
    return error ? error : ONT_LAUNCH((flash_kernel<T, NV>), blocks_of(f->count, f->rows), THREADS, bytes, stream, *f);
}

/* Gradients of K and V in one launch where the same leads share both. */
template <class T, int NV> static int keys_backward(const ont_flash *f, void *stream)
{
    size_t bytes = shared_bytes(f, 1);
    unsigned k = flash_shared_leads(f, ONT_FLASH_K), v = flash_shared_leads(f, ONT_FLASH_V);
    int error = ONT_ALLOW_SHARED((flash_dkv_kernel<T, NV>), bytes);
    for (int turn = 0; turn < 2 && !error; turn++) {
        ont_flash part = *f;
        bool both = k == v;
        if (!both) (turn ? part.dk : part.dv) = nullptr;
        unsigned mask = both || !turn ? k : v;
        if ((both && turn) || (!part.dk && !part.dv)) continue;
        error = ONT_LAUNCH((flash_dkv_kernel<T, NV>), blocks_of(flash_count(f, mask, false), f->columns), THREADS,
                           bytes, stream, part, mask, flash_count(f, mask, true));
    }
    return error;
}

template <class T, int NV> static int backward(const ont_flash *f, void *stream)
{
    size_t bytes = shared_bytes(f, 1);
    unsigned mask = f->dq ? flash_shared_leads(f, ONT_FLASH_Q) : 0;
    int error = ONT_ALLOW_SHARED((flash_dq_kernel<T, NV>), bytes);
    if (!error && (f->dq || f->dbias))
        error = ONT_LAUNCH((flash_dq_kernel<T, NV>), blocks_of(flash_count(f, mask, false), f->rows), THREADS, bytes,
                           stream, *f, mask, flash_count(f, mask, true));
    return error || (!f->dk && !f->dv) ? error : keys_backward<T, NV>(f, stream);
}

template <class T> static int delta_of(const ont_flash *f, void *stream)
{
    return ONT_LAUNCH(flash_delta_kernel<T>, ont_blocks(f->count * f->rows, WARPS), THREADS, 0, stream, *f);
}

template <class T> static int launch(const ont_flash *f, bool gradient, void *stream)
{
    int64_t most = f->size > f->v_size ? f->size : f->v_size;
    if constexpr (sizeof(T) == 4)
        if (most <= 64) return (gradient ? backward<T, 2> : forward<T, 2>)(f, stream);
    if constexpr (sizeof(T) < 8)
        if (most > 128) return (gradient ? backward<T, 8> : forward<T, 8>)(f, stream);
    return (gradient ? backward<T, 4> : forward<T, 4>)(f, stream);
}

extern "C" int ont_launch_flash(const ont_flash *f, void *stream)
{
    if (ont_flash_has_mma(f, 0)) return ont_launch_flash_mma(f, stream);
    switch (f->dtype) {
    case ONT_FLOAT32: return launch<float>(f, false, stream);
    case ONT_FLOAT64: return launch<double>(f, false, stream);
    case ONT_FLOAT16: return launch<ont_f16>(f, false, stream);
    default: return launch<ont_bf16>(f, false, stream);
    }
}

extern "C" int ont_launch_flash_grad(const ont_flash *f, void *stream)
{
    int error;
    switch (f->dtype) {
    case ONT_FLOAT32: error = delta_of<float>(f, stream); break;
    case ONT_FLOAT64: error = delta_of<double>(f, stream); break;
    case ONT_FLOAT16: error = delta_of<ont_f16>(f, stream); break;
    default: error = delta_of<ont_bf16>(f, stream);
    }
    if (error) return error;
    if (ont_flash_has_mma(f, 1)) return ont_launch_flash_mma_grad(f, stream);
    switch (f->dtype) {
    case ONT_FLOAT32: return launch<float>(f, true, stream);
    case ONT_FLOAT64: return launch<double>(f, true, stream);
    case ONT_FLOAT16: return launch<ont_f16>(f, true, stream);
    default: return launch<ont_bf16>(f, true, stream);
    }
}
