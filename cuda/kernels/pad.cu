/*
 * Pad in all modes, and its gradient, which adds for each element the elements of dy that were copied from it, in order
 * of their positions. Positions are computed in 32 bits: the operators take fewer than 2^31 elements.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/units.cuh"

struct dims {
    divisor size[ONT_PAD_RANK]; /* of the tensor that a thread has an element of */
};

static dims dims_of(const ont_pad_shape *p, const int32_t *sizes)
{
    dims d = {};
    for (int i = 0; i < p->rank; i++) d.size[i] = divisor_of((uint32_t)sizes[i]);
    return d;
}

/* Position among n entries that position i, counted from the first entry, is copied from; -1: none. */
ONT_DEVICE int32_t source(int mode, int32_t i, int32_t n)
{
    if (i >= 0 && i < n) return i;
    if (mode == ONT_PAD_EDGE) return i < 0 ? 0 : n - 1;
    if (mode == ONT_PAD_CONSTANT) return -1;
    const int32_t period = mode == ONT_PAD_WRAP ? n : n > 1 ? 2 * (n - 1) : 1, at = (i % period + period) % period;
    return at < n ? at : period - at;
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    pad_kernel(const ont_pad_shape p, const dims wide, const T *x, const T *value, T *y)
{
    const T fill = value ? *value : (T)p.fill;
    ONT_FOR(i, p.wide_count)
    {
        uint32_t rest = (uint32_t)i;
        int64_t from = 0;
        for (int d = p.rank - 1; d >= 0; d--) {
            const int32_t at = source(p.mode, (int32_t)split(&rest, wide.size[d]) - p.low[d], p.narrow[d]);
            from = at < 0 || from < 0 ? -1 : from + at * p.stride[d];
        }
        y[i] = from < 0 ? fill : x[from];
    }
}

extern "C" int ont_launch_pad(const ont_pad_shape *p, int size, const void *x, const void *value, void *y,
                              void *stream)
{
    const dims wide = dims_of(p, p->wide);
    const unsigned blocks = ont_blocks(p->wide_count, ONT_THREADS);
    if (!p->wide_count) return 0;
#define PAD(type) \
    ONT_LAUNCH(pad_kernel<type>, blocks, ONT_THREADS, 0, stream, *p, wide, (const type *)x, (const type *)value, \
               (type *)y)
    switch (size) {
    case 1: return PAD(uint8_t);
    case 2: return PAD(uint16_t);
    case 4: return PAD(uint32_t);
    default: return PAD(uint64_t);
    }
#undef PAD
}

/* The next position above `after` of n padded ones that is copied from position i of n entries; -1: none. */
ONT_DEVICE int32_t next_copy(const ont_pad_shape &p, int d, int32_t i, int32_t after)
{
    const int32_t n = p.narrow[d], wide = p.wide[d], low = p.low[d];
    int32_t next;
    if (p.mode == ONT_PAD_CONSTANT || p.mode == ONT_PAD_EDGE) {
        const bool edge = p.mode == ONT_PAD_EDGE;
        const int32_t first = edge && i == 0 ? 0 : low + i, last = edge && i == n - 1 ? wide - 1 : low + i;
        next = after + 1 > first ? after + 1 : first;
        if (next > last) return -1;
    } else {
        const int32_t period = p.mode == ONT_PAD_WRAP ? n : n > 1 ? 2 * (n - 1) : 1;
        const int32_t start = ((after + 1 - low) % period + period) % period;
        const int32_t mirrored = p.mode == ONT_PAD_WRAP ? i : (period - i) % period;
        const int32_t straight = i >= start ? i - start : i - start + period;
        const int32_t back = mirrored >= start ? mirrored - start : mirrored - start + period;
        next = after + 1 + (straight < back ? straight : back);
    }
    return next < wide ? next : -1;
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    pad_grad_kernel(const ont_pad_shape p, const dims narrow, const T *dy, T *dx)
{
    typedef typename ont_compute<T>::type C;
    ONT_FOR(i, p.narrow_count)
    {
        int32_t index[ONT_PAD_RANK], at[ONT_PAD_RANK];
        uint32_t rest = (uint32_t)i;
        bool none = false;
        for (int d = p.rank - 1; d >= 0; d--) {
            index[d] = (int32_t)split(&rest, narrow.size[d]);
            at[d] = next_copy(p, d, index[d], -1);
            none = none || at[d] < 0;
        }
        C sum = 0;
        while (!none) {
            int64_t from = 0;
            for (int d = 0; d < p.rank; d++) from = from * p.wide[d] + at[d];
            sum += ont_load(&dy[from]);
            int d = p.rank - 1; /* the next combination of positions, the last dim first */
            for (; d >= 0; d--) {
                at[d] = next_copy(p, d, index[d], at[d]);
                if (at[d] >= 0) break;
                at[d] = next_copy(p, d, index[d], -1);
            }
            none = d < 0;
        }
        ont_store(&dx[i], sum);
    }
}

extern "C" int ont_launch_pad_grad(const ont_pad_shape *p, int dtype, const void *dy, void *dx, void *stream)
{
    const dims narrow = dims_of(p, p->narrow);
    const unsigned blocks = ont_blocks(p->narrow_count, ONT_THREADS);
    if (!p->narrow_count) return 0;
#define GRAD(type) \
    ONT_LAUNCH(pad_grad_kernel<type>, blocks, ONT_THREADS, 0, stream, *p, narrow, (const type *)dy, (type *)dx)
    switch (dtype) {
    case ONT_FLOAT32: return GRAD(float);
    case ONT_FLOAT64: return GRAD(double);
    case ONT_FLOAT16: return GRAD(ont_f16);
    default: return GRAD(ont_bf16);
    }
#undef GRAD
}
