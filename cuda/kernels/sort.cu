/*
 * Unique and NonMaxSuppression: stable merge sorts of items by keys of 64 bits, and what follows. A merge is by ranks:
 * an item's place is its own in its run and the number of items of the other run before it, found by bisection, so that
 * a pass compares n * log(n) times. Suppression goes through the boxes of a class by falling score, one at a time by a
 * block, whose threads compare a box with all that are kept: boxes * kept / threads comparisons, one class a block.
 */
#include "kernels/launch.cuh"

#define ONT_FUNCTION ONT_DEVICE
#include "kernels/kernels.h"
#include "kernels/order.cuh"
#include "ops/vision/boxes.h"

/* Small integers are promoted. */
template <class T> ONT_DEVICE uint64_t key_of(const T *x) { return ascending(*x); }
ONT_DEVICE uint64_t key_of(const ont_f16 *x) { return ascending(ont_load(x)); }
ONT_DEVICE uint64_t key_of(const ont_bf16 *x) { return ascending(ont_load(x)); }

template <class T> __global__ void __launch_bounds__(ONT_THREADS) keys_kernel(int64_t n, const T *x, uint64_t *keys)
{
    ONT_FOR(i, n) { keys[i] = key_of(x + i); }
}

/* ---- merges ---- */

struct items { /* rows of n items; an item has outer * inner keys, n * inner and 1 apart */
    int64_t rows, n, outer, inner;
};

ONT_DEVICE int compare(const items &s, const uint64_t *keys, int64_t row, int32_t i, int32_t j)
{
    for (int64_t o = 0; o < s.outer; o++)
        for (int64_t k = 0; k < s.inner; k++) {
            const int64_t at = (row * s.outer + o) * s.n;
            const uint64_t a = keys[(at + i) * s.inner + k], b = keys[(at + j) * s.inner + k];
            if (a != b) return a < b ? -1 : 1;
        }
    return 0;
}

__global__ void __launch_bounds__(ONT_THREADS) order_kernel(const items s, int32_t *order)
{
    ONT_FOR(i, s.rows * s.n) { order[i] = (int32_t)(i % s.n); }
}

/* Joins pairs of sorted runs of `width`: an item goes behind those of the other run that are before it. */
__global__ void __launch_bounds__(ONT_THREADS)
    merge_kernel(const items s, int64_t width, const uint64_t *keys, const int32_t *from, int32_t *to)
{
    ONT_FOR(i, s.rows * s.n)
    {
        const int64_t row = i / s.n, at = i % s.n, pair = at / (2 * width) * (2 * width), middle = pair + width;
        const bool left = at < middle;
        const int64_t first = left ? middle : pair, end = left ? middle + width : middle;
        const int32_t own = from[i], *other = from + row * s.n;
        int64_t low = first < s.n ? first : s.n, high = end < s.n ? end : s.n;
        const int64_t start = low;
        while (low < high) {
            const int64_t half = (low + high) / 2;
            const int order = compare(s, keys, row, other[half], own);
            if (order < 0 || (order == 0 && !left))
                low = half + 1;
            else
                high = half;
        }
        to[row * s.n + pair + (at - (left ? pair : middle)) + (low - start)] = own;
    }
}

/* order and other (rows, n); *sorted is the one that has the result */
static int sort_items(const items *s, const uint64_t *keys, int32_t *order, int32_t *other, int32_t **sorted,
                      void *stream)
{
    const unsigned blocks = ont_blocks(s->rows * s->n, ONT_THREADS);
    int error = ONT_LAUNCH(order_kernel, blocks, ONT_THREADS, 0, stream, *s, order);
    for (int64_t width = 1; !error && width < s->n; width *= 2) {
        error = ONT_LAUNCH(merge_kernel, blocks, ONT_THREADS, 0, stream, *s, width, keys, (const int32_t *)order,
                           other);
        int32_t *swap = order;
        order = other;
        other = swap;
    }
    *sorted = order;
    return error;
}

/* ---- Unique ---- */

/* marks[i]: whether the sorted item i differs from the one before */
__global__ void __launch_bounds__(ONT_THREADS)
    unique_marks_kernel(const items s, const uint64_t *keys, const int32_t *order, int32_t *marks)
{
    ONT_FOR(i, s.n) { marks[i] = !i || compare(s, keys, 0, order[i - 1], order[i]) != 0; }
}

/* numbers[i]: 1 + the number of the unique value of sorted item i. begins[u]: its first sorted item. */
__global__ void __launch_bounds__(ONT_THREADS)
    unique_begins_kernel(int64_t n, const int32_t *marks, const int32_t *numbers, int32_t *begins)
{
    ONT_FOR(i, n)
    {
        if (marks[i]) begins[numbers[i] - 1] = (int32_t)i;
        if (i == n - 1) begins[numbers[i]] = (int32_t)n;
    }
}

/* seen[item]: whether it is the first of its value, in the order of items */
__global__ void __launch_bounds__(ONT_THREADS)
    unique_seen_kernel(int64_t n, const int32_t *order, const int32_t *marks, int32_t *seen)
{
    ONT_FOR(i, n) { seen[order[i]] = marks[i]; }
}

/* ranks: 1 + the number of a value's first item among all first ones, by that item; NULL: values stay in their order.
 * Results may be NULL. */
__global__ void __launch_bounds__(ONT_THREADS)
    unique_write_kernel(int64_t n, const int32_t *order, const int32_t *numbers, const int32_t *begins,
                        const int32_t *ranks, const ont_unique_results to)
{
    const int64_t count = n ? numbers[n - 1] : 0;
    ONT_FOR(i, n)
    {
        const int32_t value = numbers[i] - 1, first = order[begins[value]], u = ranks ? ranks[first] - 1 : value;
        if (to.inverse) to.inverse[order[i]] = u;
        if (i == begins[value]) {
            if (to.first) to.first[u] = first;
            if (to.counts) to.counts[u] = begins[value + 1] - begins[value];
        }
        if (i >= count) {
            if (to.first) to.first[i] = 0;
            if (to.counts) to.counts[i] = 0;
        }
        if (i == n - 1 && to.count) *to.count = count;
    }
}

__global__ void __launch_bounds__(1) unique_none_kernel(int64_t *count) { *count = 0; }

struct unique_parts {
    size_t order, other, marks, numbers, begins, bytes; /* keys are first */
};

static unique_parts parts_of(const ont_unique *s)
{
    const size_t each = ((size_t)(s->n + 1) * sizeof(int32_t) + 15) / 16 * 16;
    unique_parts p;
    p.order = ((size_t)(s->outer * s->n * s->inner) * sizeof(uint64_t) + 15) / 16 * 16;
    p.other = p.order + each;
    p.marks = p.other + each;
    p.numbers = p.marks + each;
    p.begins = p.numbers + each;
    p.bytes = p.begins + each;
    return p;
}

extern "C" size_t ont_unique_work(const ont_unique *s) { return parts_of(s).bytes; }

static int write_keys(int dtype, int64_t n, const void *x, uint64_t *keys, void *stream)
{
#define KEYS(name, type) \
    case ONT_##name: \
        return ONT_LAUNCH(keys_kernel<type>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, n, (const type *)x, \
                          keys);
    if (!n) return 0;
    switch (dtype) {
        KEYS(FLOAT32, float)
        KEYS(FLOAT64, double)
        KEYS(FLOAT16, ont_f16)
        KEYS(BFLOAT16, ont_bf16)
        KEYS(INT8, int8_t)
        KEYS(INT16, int16_t)
        KEYS(INT32, int32_t)
        KEYS(INT64, int64_t)
        KEYS(UINT16, uint16_t)
        KEYS(UINT32, uint32_t)
        KEYS(UINT64, uint64_t)
        KEYS(UINT8, uint8_t)
    default: return write_keys(ONT_UINT8, n, x, keys, stream); /* bool */
    }
#undef KEYS
}

extern "C" int ont_launch_unique(const ont_unique *s, const void *x, const ont_unique_results *to, void *work,
                                 void *stream)
{
    const unique_parts p = parts_of(s);
    const items all = {1, s->n, s->outer, s->inner};
    const ont_scan scan = {1, s->n, 1, 0, 0, 0, ONT_INT32};
    const unsigned blocks = ont_blocks(s->n, ONT_THREADS);
    char *base = (char *)work;
    uint64_t *keys = (uint64_t *)work;
    int32_t *marks = (int32_t *)(base + p.marks), *numbers = (int32_t *)(base + p.numbers);
    int32_t *begins = (int32_t *)(base + p.begins), *a = (int32_t *)(base + p.order), *b = (int32_t *)(base + p.other);
    int32_t *order = a;
    if (!s->n) return to->count ? ONT_LAUNCH(unique_none_kernel, 1, 1, 0, stream, to->count) : 0;
    int error = write_keys(s->dtype, s->outer * s->n * s->inner, x, keys, stream);
    if (!error) error = sort_items(&all, keys, a, b, &order, stream);
    if (!error)
        error = ONT_LAUNCH(unique_marks_kernel, blocks, ONT_THREADS, 0, stream, all, (const uint64_t *)keys,
                           (const int32_t *)order, marks);
    if (!error) error = ont_launch_scan(&scan, marks, numbers, stream);
    if (!error)
        error = ONT_LAUNCH(unique_begins_kernel, blocks, ONT_THREADS, 0, stream, s->n, (const int32_t *)marks,
                           (const int32_t *)numbers, begins);
    int32_t *ranks = s->sorted ? nullptr : order == a ? b : a;
    if (!error && ranks)
        error = ONT_LAUNCH(unique_seen_kernel, blocks, ONT_THREADS, 0, stream, s->n, (const int32_t *)order,
                           (const int32_t *)marks, ranks);
    if (!error && ranks) error = ont_launch_scan(&scan, ranks, ranks, stream);
    if (error) return error;
    return ONT_LAUNCH(unique_write_kernel, blocks, ONT_THREADS, 0, stream, s->n, (const int32_t *)order,
                      (const int32_t *)numbers, (const int32_t *)begins, (const int32_t *)ranks, *to);
}

/* ---- NonMaxSuppression ---- */

/* Falling scores; NaN behind all, and last what is no candidate. */
__global__ void __launch_bounds__(ONT_THREADS)
    nms_keys_kernel(int64_t n, const float *scores, const float *limit, uint64_t *keys)
{
    ONT_FOR(i, n)
    {
        const float v = scores[i];
        const bool candidate = !limit || v > *limit;
        keys[i] = !candidate ? UINT64_MAX : v != v ? UINT64_MAX - 1 : ~ascending((double)v);
    }
}

struct candidates {
    const uint64_t *keys;
    const int32_t *order; /* boxes by rising keys */
};

/* A block for each batch and class. kept (batches * classes, n) and its counts. */
__global__ void __launch_bounds__(ONT_THREADS)
    nms_suppress_kernel(const ont_nms s, const float *boxes, const int64_t *most, const float *iou,
                        const candidates from, int32_t *kept, int32_t *counts)
{
    __shared__ int dropped;
    const int64_t max_boxes = most ? *most : 0;
    const double limit = iou ? (double)*iou : 0;
    for (int64_t row = blockIdx.x; row < s.batches * s.classes; row += gridDim.x) {
        const float *own = boxes + row / s.classes * s.n * 4;
        int32_t *to = kept + row * s.n;
        int64_t count = 0;
        for (int64_t c = 0; c < s.n && count < max_boxes; c++) {
            const int32_t box = from.order[row * s.n + c];
            if (from.keys[row * s.n + box] == UINT64_MAX) break;
            __syncthreads(); /* all have read the box that was kept last, and `dropped` */
            if (!threadIdx.x) dropped = 0;
            __syncthreads();
            bool drops = false;
            for (int64_t k = threadIdx.x; k < count && !drops; k += blockDim.x)
                drops = !(ont_box_overlap(own + 4 * box, own + 4 * to[k], s.centre) <= limit);
            if (drops) atomicMax(&dropped, 1);
            __syncthreads();
            if (dropped) continue; /* alike in all threads */
            if (!threadIdx.x) to[count] = box;
            count++;
        }
        if (!threadIdx.x) counts[row] = (int32_t)count;
        __syncthreads();
    }
}

/* ends: sums of the counts. rows (batches * classes * n, 3) of batch, class and box; zeros behind the last one. */
__global__ void __launch_bounds__(ONT_THREADS)
    nms_rows_kernel(const ont_nms s, const int32_t *kept, const int32_t *ends, int64_t *rows, int64_t *total)
{
    const int64_t all = s.batches * s.classes, count = ends[all - 1];
    ONT_FOR(i, all * s.n)
    {
        int64_t low = 0, high = all - 1; /* the first row of kept ones that ends behind i */
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (ends[middle] > i)
                high = middle;
            else
                low = middle + 1;
        }
        const bool here = i < count;
        const int64_t at = here ? i - (low ? ends[low - 1] : 0) : 0;
        rows[3 * i] = here ? low / s.classes : 0;
        rows[3 * i + 1] = here ? low % s.classes : 0;
        rows[3 * i + 2] = here ? kept[low * s.n + at] : 0;
        if (!i && total) *total = count;
    }
}

struct nms_parts {
    size_t order, other, counts, ends, bytes;
};

static nms_parts parts_of(const ont_nms *s)
{
    const int64_t rows = s->batches * s->classes;
    nms_parts p;
    p.order = (size_t)(rows * s->n) * sizeof(uint64_t);
    p.other = p.order + (size_t)(rows * s->n) * sizeof(int32_t);
    p.counts = p.other + (size_t)(rows * s->n) * sizeof(int32_t);
    p.ends = p.counts + (size_t)rows * sizeof(int32_t);
    p.bytes = p.ends + (size_t)rows * sizeof(int32_t);
    return p;
}

extern "C" size_t ont_nms_work(const ont_nms *s) { return parts_of(s).bytes; }

extern "C" int ont_launch_nms(const ont_nms *s, const void *const *in, int64_t *rows, int64_t *total, void *work,
                              void *stream)
{
    const nms_parts p = parts_of(s);
    const int64_t classes = s->batches * s->classes, n = classes * s->n;
    const items all = {classes, s->n, 1, 1};
    const ont_scan scan = {1, classes, 1, 0, 0, 0, ONT_INT32};
    const unsigned blocks = ont_blocks(n, ONT_THREADS);
    char *base = (char *)work;
    uint64_t *keys = (uint64_t *)work;
    int32_t *a = (int32_t *)(base + p.order), *b = (int32_t *)(base + p.other), *order = a;
    int32_t *counts = (int32_t *)(base + p.counts), *ends = (int32_t *)(base + p.ends);
    if (!n) return total ? ONT_LAUNCH(unique_none_kernel, 1, 1, 0, stream, total) : 0;
    int error = ONT_LAUNCH(nms_keys_kernel, blocks, ONT_THREADS, 0, stream, n, (const float *)in[1],
                           (const float *)in[4], keys);
    if (!error) error = sort_items(&all, keys, a, b, &order, stream);
    int32_t *kept = order == a ? b : a;
    if (!error)
        error = ONT_LAUNCH(nms_suppress_kernel, ont_blocks(classes, 1), ont_row_threads(s->n), 0, stream, *s,
                           (const float *)in[0], (const int64_t *)in[2], (const float *)in[3],
                           candidates{keys, order}, kept, counts);
    if (!error) error = ont_launch_scan(&scan, counts, ends, stream);
    if (error) return error;
    return ONT_LAUNCH(nms_rows_kernel, blocks, ONT_THREADS, 0, stream, *s, (const int32_t *)kept,
                      (const int32_t *)ends, rows, total);
}
