/*
 * GatherElements, GatherND, ScatterElements, ScatterND and GatherNDGrad; ReverseSequence and SearchSorted. Of the first
 * five, a kernel computes for each index, or tuple of indices, the slice of the data that it names ("places"). Several
 * updates of one slice have one result:
 *   none      the last one in order of positions stays (atomicMax of the positions, which are integers)
 *   add       floats: the sorted sums of gather.cu, added to the data
 *   others    a thread goes through all updates of a line along the axis, or of a column of the slices, in order
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/units.cuh"

struct index_dims {
    divisor size[ONT_INDEX_RANK];
};

ONT_DEVICE int64_t given_index(const ont_index *s, const void *indices, int64_t i)
{
    return s->wide ? ((const int64_t *)indices)[i] : ((const int32_t *)indices)[i];
}

/* The index counted from the front; -1, and a reported fault, where it is out of range. */
ONT_DEVICE int64_t checked_index(const ont_index *s, const void *indices, int64_t i, int64_t size)
{
    const int64_t given = given_index(s, indices, i), v = given < 0 ? given + size : given;
    if (v >= 0 && v < size && (given >= 0 || s->from_end)) return v;
    ont_report(s->fault, ONT_FAULT_INDEX, s->step, given, i, size);
    return -1;
}

/* Offset in the data of element i of the indices, along an axis; -1 where the index is out of range. */
ONT_DEVICE int64_t element_place(const ont_index *s, const index_dims &dims, const void *indices, uint32_t i)
{
    const int64_t index = checked_index(s, indices, i, s->sizes[0]);
    int64_t at = index * s->strides[0];
    uint32_t rest = i;
    for (int d = s->rank - 1; d >= 0; d--)
        at += split(&rest, dims.size[d]) * s->data_strides[d]; /* 0 for the axis */
    return index < 0 ? -1 : at;
}

/* The slice that tuple i names; -1 where an index is out of range. */
ONT_DEVICE int64_t tuple_place(const ont_index *s, const divisor &per_batch, const void *indices, uint32_t i)
{
    int64_t at = quotient(i, per_batch) * s->batch_slices;
    bool outside = false;
    for (int d = 0; d < s->depth; d++) {
        const int64_t index = checked_index(s, indices, (int64_t)i * s->depth + d, s->sizes[d]);
        outside = outside || index < 0;
        at += index * s->strides[d];
    }
    return outside ? -1 : at;
}

/* depth 0: an index for each element */
ONT_DEVICE int64_t place_of(const ont_index *s, const index_dims &dims, const void *indices, uint32_t i)
{
    return s->depth ? tuple_place(s, dims.size[0], indices, i) : element_place(s, dims, indices, i);
}

/* Places that are out of range become `outside`. */
__global__ void __launch_bounds__(ONT_THREADS)
    places_kernel(const ont_index s, const index_dims dims, const void *indices, int32_t *places, int32_t outside)
{
    ONT_FOR(i, s.count)
    {
        const int64_t place = place_of(&s, dims, indices, (uint32_t)i);
        places[i] = place < 0 ? outside : (int32_t)place;
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    gather_places_kernel(const ont_index s, const index_dims dims, const divisor slice, const void *indices,
                         const T *data, T *out)
{
    ONT_FOR(i, s.count * s.slice)
    {
        const uint32_t row = quotient((uint32_t)i, slice), column = (uint32_t)i - row * slice.value;
        const int64_t place = place_of(&s, dims, indices, row);
        out[i] = place < 0 ? T() : data[place * s.slice + column];
    }
}

/* last[place] = 1 + the position of the last update there, 0 where there is none */
__global__ void __launch_bounds__(ONT_THREADS)
    last_kernel(const ont_index s, const index_dims dims, const void *indices, int32_t *last)
{
    ONT_FOR(i, s.count)
    {
        const int64_t place = place_of(&s, dims, indices, (uint32_t)i);
        if (place >= 0) atomicMax(&last[place], (int32_t)i + 1);
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    put_kernel(const ont_index s, const divisor slice, const int32_t *last, const T *data, const T *updates, T *out)
{
    ONT_FOR(i, s.places * s.slice)
    {
        const uint32_t place = quotient((uint32_t)i, slice), column = (uint32_t)i - place * slice.value;
        out[i] = last[place] ? updates[(last[place] - 1) * s.slice + column] : data[i];
    }
}

/* out += sums */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS) add_kernel(int64_t n, const T *data, const T *sums, T *out)
{
    ONT_FOR(i, n) { ont_store(&out[i], ont_load(&data[i]) + ont_load(&sums[i])); }
}

template <class T> ONT_DEVICE T combined(int reduction, T a, T v)
{
    switch (reduction) {
    case ONT_INDEX_ADD: return (T)(a + v);
    case ONT_INDEX_MUL: return (T)(a * v);
    case ONT_INDEX_MAX: return a != a || a > v ? a : v;
    default: return a != a || a < v ? a : v;
    }
}

/* out, a copy of the data, takes all updates; a thread goes through those of one column of the slices, or of one line
 * along the axis. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    combine_kernel(const ont_index s, const divisor inner, const int32_t *places, const T *updates, T *out)
{
    const int64_t lines = s.depth ? s.slice : s.count / s.along;
    ONT_FOR(line, lines)
    {
        const uint32_t outer = s.depth ? 0 : quotient((uint32_t)line, inner);
        const int64_t first = s.depth ? 0 : (int64_t)outer * s.along * s.inner + (line - (int64_t)outer * s.inner);
        const int64_t n = s.depth ? s.count : s.along, stride = s.depth ? 1 : s.inner, column = s.depth ? line : 0;
        for (int64_t k = 0; k < n; k++) {
            const int64_t i = first + k * stride, place = places[i];
            if (place >= s.places) continue;
            T *to = &out[place * s.slice + column];
            *to = combined(s.reduction, *to, updates[i * s.slice + column]);
        }
    }
}

static index_dims dims_of(const ont_index *s)
{
    index_dims dims = {};
    if (s->depth) dims.size[0] = divisor_of(s->per_batch ? (uint32_t)s->per_batch : 1);
    for (int d = 0; !s->depth && d < s->rank; d++) dims.size[d] = divisor_of((uint32_t)s->index_dims[d]);
    return dims;
}

extern "C" int ont_launch_index_gather(const ont_index *s, const void *data, const void *indices, void *out,
                                       void *stream)
{
    const int64_t n = s->count * s->slice;
    const index_dims dims = dims_of(s);
    if (!n) return 0;
#define GATHER(type) \
    ONT_LAUNCH(gather_places_kernel<type>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s, dims, \
               divisor_of((uint32_t)s->slice), indices, (const type *)data, (type *)out)
    switch (s->size) {
    case 1: return GATHER(uint8_t);
    case 2: return GATHER(uint16_t);
    case 4: return GATHER(uint32_t);
    default: return GATHER(uint64_t);
    }
#undef GATHER
}

extern "C" int ont_launch_places(const ont_index *s, const void *indices, int32_t *places, void *stream)
{
    if (!s->count) return 0;
    return ONT_LAUNCH(places_kernel, ont_blocks(s->count, ONT_THREADS), ONT_THREADS, 0, stream, *s, dims_of(s), indices,
                      places, (int32_t)s->places);
}

extern "C" int ont_launch_put(const ont_index *s, const void *const *in, void *out, int32_t *last, void *stream)
{
    const int64_t n = s->places * s->slice;
    int error = 0;
    if (s->count)
        error = ONT_LAUNCH(last_kernel, ont_blocks(s->count, ONT_THREADS), ONT_THREADS, 0, stream, *s, dims_of(s),
                           in[1], last);
    if (error || !n) return error;
#define PUT(type) \
    ONT_LAUNCH(put_kernel<type>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s, \
               divisor_of((uint32_t)s->slice), (const int32_t *)last, (const type *)in[0], (const type *)in[2], \
               (type *)out)
    switch (s->size) {
    case 1: return PUT(uint8_t);
    case 2: return PUT(uint16_t);
    case 4: return PUT(uint32_t);
    default: return PUT(uint64_t);
    }
#undef PUT
}

extern "C" int ont_launch_index_add(int dtype, int64_t n, const void *data, const void *sums, void *out, void *stream)
{
    if (!n) return 0;
#define ADD(type) \
    ONT_LAUNCH(add_kernel<type>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, n, (const type *)data, \
               (const type *)sums, (type *)out)
    switch (dtype) {
    case ONT_FLOAT32: return ADD(float);
    case ONT_FLOAT64: return ADD(double);
    case ONT_FLOAT16: return ADD(ont_f16);
    default: return ADD(ont_bf16);
    }
#undef ADD
}

extern "C" int ont_launch_combine(const ont_index *s, const int32_t *places, const void *updates, void *out,
                                  void *stream)
{
    const int64_t lines = s->depth ? s->slice : s->along ? s->count / s->along : 0;
    if (!lines || !s->count) return 0;
#define COMBINE(name, type) \
    case ONT_##name: \
        return ONT_LAUNCH(combine_kernel<type>, ont_blocks(lines, ONT_THREADS), ONT_THREADS, 0, stream, *s, \
                          divisor_of(s->inner ? (uint32_t)s->inner : 1), places, (const type *)updates, (type *)out);
    switch (s->dtype) {
        COMBINE(FLOAT32, float)
        COMBINE(FLOAT64, double)
        COMBINE(INT8, int8_t)
        COMBINE(INT16, int16_t)
        COMBINE(INT32, int32_t)
        COMBINE(UINT8, uint8_t)
        COMBINE(UINT16, uint16_t)
        COMBINE(UINT32, uint32_t)
        COMBINE(UINT64, uint64_t)
        COMBINE(INT64, int64_t)
#undef COMBINE
    default: return 0; /* accept() refuses these */
    }
}

/* ---- ReverseSequence ---- */

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    reverse_kernel(const ont_reverse s, const T *x, const void *lengths, T *y)
{
    ONT_FOR(i, s.count)
    {
        const int64_t b = i / s.batch_stride % s.batch, t = i / s.time_stride % s.steps;
        const int64_t n = s.wide ? ((const int64_t *)lengths)[b] : ((const int32_t *)lengths)[b];
        const bool valid = n >= 0 && n <= s.steps;
        if (!valid) ont_report(s.fault, ONT_FAULT_LENGTH, s.step, n, b, s.steps);
        y[i] = x[valid && t < n ? i + (n - 1 - 2 * t) * s.time_stride : i];
    }
}

extern "C" int ont_launch_reverse(const ont_reverse *s, const void *x, const void *lengths, void *y, void *stream)
{
    if (!s->count) return 0;
#define REVERSE(type) \
    ONT_LAUNCH(reverse_kernel<type>, ont_blocks(s->count, ONT_THREADS), ONT_THREADS, 0, stream, *s, (const type *)x, \
               lengths, (type *)y)
    switch (s->size) {
    case 1: return REVERSE(uint8_t);
    case 2: return REVERSE(uint16_t);
    case 4: return REVERSE(uint32_t);
    default: return REVERSE(uint64_t);
    }
#undef REVERSE
}

/* ---- SearchSorted ---- */

/* NaN sorts behind all numbers. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    search_kernel(const ont_sorted_search s, const T *sorted, const T *values, int64_t *to)
{
    ONT_FOR(i, s.count)
    {
        const T *row = sorted + (s.width ? i / s.width * s.n : 0);
        const T v = values[i];
        int64_t from = 0, length = s.n;
        while (length) {
            const int64_t half = length / 2;
            const T middle = row[from + half];
            const bool beyond = s.right ? !(middle > v) : !(middle >= v);
            from = beyond ? from + half + 1 : from;
            length = beyond ? length - half - 1 : half;
        }
        to[i] = from;
    }
}

extern "C" int ont_launch_search(const ont_sorted_search *s, const void *sorted, const void *values, int64_t *to,
                                 void *stream)
{
    if (!s->count) return 0;
#define SEARCH(type) \
    ONT_LAUNCH(search_kernel<type>, ont_blocks(s->count, ONT_THREADS), ONT_THREADS, 0, stream, *s, \
               (const type *)sorted, (const type *)values, to)
    switch (s->dtype) {
    case ONT_FLOAT32: return SEARCH(float);
    case ONT_FLOAT64: return SEARCH(double);
    case ONT_INT32: return SEARCH(int32_t);
    default: return SEARCH(int64_t);
    }
#undef SEARCH
}
