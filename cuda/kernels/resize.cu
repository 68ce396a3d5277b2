/*
 * Resize and its gradient: a thread for each element of the result adds its taps, over at most three axes. The lists of
 * taps (csrc/ops/vision/resize.h; transposed for the gradient, so that sums have one order) are computed on the host.
 * Launches carry them to device memory by value, as a captured graph must not read host memory later.
 */
#include "kernels/launch.cuh"

#include <string.h>

#include "kernels/kernels.h"
#include "kernels/units.cuh"

enum { WORDS = 504 }; /* of a launch, whose parameters have at most 4096 bytes */

struct block_of_words {
    uint64_t word[WORDS];
};

__global__ void __launch_bounds__(ONT_THREADS) upload_kernel(const block_of_words b, uint64_t *to, int n)
{
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) to[i] = b.word[i];
}

extern "C" int ont_launch_upload(void *to, const void *host, size_t n_words, void *stream)
{
    int error = 0;
    for (size_t first = 0; !error && first < n_words; first += WORDS) {
        block_of_words b;
        const size_t left = n_words - first, n = left < (size_t)WORDS ? left : (size_t)WORDS;
        memcpy(b.word, (const uint64_t *)host + first, n * sizeof(uint64_t));
        error = ONT_LAUNCH(upload_kernel, 1, ONT_THREADS, 0, stream, b, (uint64_t *)to + first, (int)n);
    }
    return error;
}

struct resample_dims {
    divisor size[ONT_RESAMPLE_RANK];
};

/* One axis: taps [first[p], first[p + 1]) of position p. */
struct axis_taps {
    const int32_t *first, *index;
    const double *weight;
};

ONT_DEVICE axis_taps taps_at(const ont_resample &r, int axis, const uint64_t *tables)
{
    axis_taps t;
    t.first = (const int32_t *)(tables + r.first[axis]);
    t.index = (const int32_t *)(tables + r.index[axis]);
    t.weight = (const double *)(tables + r.weight[axis]);
    return t;
}

/* Offset of the input where every axis has position 0, and the positions of element i in the resized axes. */
ONT_DEVICE int64_t split_position(const ont_resample &r, const resample_dims &dims, uint32_t i, uint32_t *position)
{
    int64_t base = 0;
    for (int a = 0; a < ONT_RESAMPLE_AXES; a++) position[a] = 0;
    for (int d = r.rank - 1; d >= 0; d--) {
        const uint32_t at = split(&i, dims.size[d]);
        if (r.axis[d] < 0)
            base += at * r.stride[d];
        else
            position[r.axis[d]] = at;
    }
    return base;
}

ONT_DEVICE bool is_outside(const ont_resample &r, const uint32_t *position, const uint64_t *tables)
{
    bool outside = false;
    for (int a = 0; a < ONT_RESAMPLE_AXES; a++)
        if (r.outside[a] >= 0) outside = outside || ((const int32_t *)(tables + r.outside[a]))[position[a]];
    return outside;
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    resample_kernel(const ont_resample r, const resample_dims dims, const uint64_t *tables, const T *x, T *y)
{
    typedef typename ont_compute<T>::type C;
    const axis_taps t0 = taps_at(r, 0, tables), t1 = taps_at(r, 1, tables), t2 = taps_at(r, 2, tables);
    ONT_FOR(i, r.count)
    {
        uint32_t p[ONT_RESAMPLE_AXES];
        const int64_t base = split_position(r, dims, (uint32_t)i, p);
        C sum = 0;
        for (int32_t a = t0.first[p[0]]; a < t0.first[p[0] + 1]; a++)
            for (int32_t b = t1.first[p[1]]; b < t1.first[p[1] + 1]; b++) {
                const int64_t row = base + t0.index[a] * r.axis_stride[0] + t1.index[b] * r.axis_stride[1];
                const C weight = (C)t0.weight[a] * (C)t1.weight[b];
                for (int32_t c = t2.first[p[2]]; c < t2.first[p[2] + 1]; c++)
                    sum += weight * (C)t2.weight[c] * ont_load(&x[row + t2.index[c] * r.axis_stride[2]]);
            }
        ont_store(&y[i], is_outside(r, p, tables) ? (C)r.extrapolation : sum);
    }
}

/* Mode 'nearest' of any dtype: each position has one tap. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    nearest_kernel(const ont_resample r, const resample_dims dims, const uint64_t *tables, const T *x, T *y)
{
    const axis_taps t0 = taps_at(r, 0, tables), t1 = taps_at(r, 1, tables), t2 = taps_at(r, 2, tables);
    ONT_FOR(i, r.count)
    {
        uint32_t p[ONT_RESAMPLE_AXES];
        const int64_t base = split_position(r, dims, (uint32_t)i, p);
        y[i] = x[base + t0.index[p[0]] * r.axis_stride[0] + t1.index[p[1]] * r.axis_stride[1] +
                 t2.index[p[2]] * r.axis_stride[2]];
    }
}

extern "C" int ont_launch_resample(const ont_resample *r, const void *tables, const void *x, void *y, void *stream)
{
    const unsigned blocks = ont_blocks(r->count, ONT_THREADS);
    resample_dims dims = {};
    for (int d = 0; d < r->rank; d++) dims.size[d] = divisor_of((uint32_t)r->dims[d]);
    if (!r->count) return 0;
#define RUN(kernel, type) \
    ONT_LAUNCH(kernel<type>, blocks, ONT_THREADS, 0, stream, *r, dims, (const uint64_t *)tables, (const type *)x, \
               (type *)y)
    if (r->copies) switch (r->size) {
        case 1: return RUN(nearest_kernel, uint8_t);
        case 2: return RUN(nearest_kernel, uint16_t);
        case 4: return RUN(nearest_kernel, uint32_t);
        default: return RUN(nearest_kernel, uint64_t);
        }
    switch (r->dtype) {
    case ONT_FLOAT32: return RUN(resample_kernel, float);
    case ONT_FLOAT64: return RUN(resample_kernel, double);
    case ONT_FLOAT16: return RUN(resample_kernel, ont_f16);
    default: return RUN(resample_kernel, ont_bf16);
    }
#undef RUN
}
