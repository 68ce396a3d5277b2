/*
 * Convolution and its gradients without a library: a thread per result that walks its window, a block per weight for
 * the weight's gradient, all sums in one order. For what cuDNN declines (padding that differs before and behind),
 * where it is not found, and for what its results are compared with.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

/* Position of the input that output `o` reads through kernel position `k` along dim d; -1: padding. */
ONT_DEVICE int64_t input_at(const ont_conv_shape &s, int d, int64_t o, int64_t k)
{
    int64_t i = o * s.stride[d] - s.pad[d] + k * s.dilation[d];
    return i < s.in[d] ? i : -1;
}

/* An element of (lead, channels, cells), or of (lead, cells, channels). */
struct element {
    int64_t lead, channel, cell;
};

ONT_DEVICE element element_of(const ont_conv_shape &s, int64_t i, int64_t channels, int64_t cells)
{
    if (s.channels_last) return {i / channels / cells, i % channels, i / channels % cells};
    return {i / cells / channels, i / cells % channels, i % cells};
}

/* A channel of one lead, whose cells lie `step` apart. */
template <class T> struct plane {
    const T *first;
    int64_t step;
};

template <class T>
ONT_DEVICE plane<T> plane_of(const ont_conv_shape &s, const T *data, int64_t lead, int64_t channel, int64_t channels,
                             int64_t cells)
{
    data += lead * channels * cells;
    if (s.channels_last) return {data + channel, channels};
    return {data + channel * cells, 1};
}

template <class T> ONT_DEVICE typename ont_compute<T>::type value_at(const plane<T> &p, int64_t cell)
{
    return ont_load(p.first + cell * p.step);
}

/* y (N, M, out) = x (N, C, in) * w (M, C / groups, kernel). `skipped`: results in front of the first one. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    conv_forward_kernel(ont_conv_shape s, const T *x, const T *w, T *y, int64_t skipped, int64_t count)
{
    typedef typename ont_compute<T>::type A;
    int64_t channels = s.c / s.groups, each = s.m / s.groups;
    ONT_FOR(i, count)
    {
        element e = element_of(s, skipped + i, s.m, s.out_count);
        int64_t at[3] = {e.cell / s.out[2] / s.out[1], e.cell / s.out[2] % s.out[1], e.cell % s.out[2]};
        A sum = 0;
        for (int64_t c = 0; c < channels; c++) {
            plane<T> image = plane_of(s, x, e.lead, e.channel / each * channels + c, s.c, s.in_count);
            plane<T> weight = plane_of(s, w, e.channel, c, channels, s.kernel_count);
            for (int64_t a = 0; a < s.kernel[0]; a++) {
                int64_t p = input_at(s, 0, at[0], a);
                for (int64_t b = 0; p >= 0 && b < s.kernel[1]; b++) {
                    int64_t q = input_at(s, 1, at[1], b);
                    for (int64_t k = 0; q >= 0 && k < s.kernel[2]; k++) {
                        int64_t r = input_at(s, 2, at[2], k);
                        if (r < 0) continue;
                        sum += value_at(image, (p * s.in[1] + q) * s.in[2] + r) *
                               value_at(weight, (a * s.kernel[1] + b) * s.kernel[2] + k);
                    }
                }
            }
        }
        ont_store(y + i, sum);
    }
}

/* Output position that reads input `i` through kernel position `k` along dim d; -1: none. */
ONT_DEVICE int64_t output_at(const ont_conv_shape &s, int d, int64_t i, int64_t k)
{
    int64_t from = i + s.pad[d] - k * s.dilation[d];
    if (from < 0 || from % s.stride[d]) return -1;
    return from / s.stride[d] < s.out[d] ? from / s.stride[d] : -1;
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    conv_grad_input_kernel(ont_conv_shape s, const T *dy, const T *w, T *dx, int64_t skipped, int64_t count)
{
    typedef typename ont_compute<T>::type A;
    int64_t channels = s.c / s.groups, each = s.m / s.groups;
    ONT_FOR(i, count)
    {
        element e = element_of(s, skipped + i, s.c, s.in_count);
        int64_t at[3] = {e.cell / s.in[2] / s.in[1], e.cell / s.in[2] % s.in[1], e.cell % s.in[2]};
        int64_t group = e.channel / channels;
        A sum = 0;
        for (int64_t m = group * each; m < (group + 1) * each; m++) {
            plane<T> image = plane_of(s, dy, e.lead, m, s.m, s.out_count);
            plane<T> weight = plane_of(s, w, m, e.channel % channels, channels, s.kernel_count);
            for (int64_t a = 0; a < s.kernel[0]; a++) {
                int64_t p = output_at(s, 0, at[0], a);
                for (int64_t b = 0; p >= 0 && b < s.kernel[1]; b++) {
                    int64_t q = output_at(s, 1, at[1], b);
                    for (int64_t k = 0; q >= 0 && k < s.kernel[2]; k++) {
                        int64_t r = output_at(s, 2, at[2], k);
                        if (r < 0) continue;
                        sum += value_at(image, (p * s.out[1] + q) * s.out[2] + r) *
                               value_at(weight, (a * s.kernel[1] + b) * s.kernel[2] + k);
                    }
                }
            }
        }
        ont_store(dx + i, sum);
    }
}

/* A block per weight: its threads share the outputs of all images. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    conv_grad_weight_kernel(ont_conv_shape s, const T *dy, const T *x, T *dw, int64_t skipped, int64_t count)
{
    typedef typename ont_compute<T>::type A;
    __shared__ A scratch[32];
    int64_t channels = s.c / s.groups, each = s.m / s.groups;
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
        element e = element_of(s, skipped + i, channels, s.kernel_count);
        int64_t k = e.cell, m = e.lead;
        int64_t tap[3] = {k / s.kernel[2] / s.kernel[1], k / s.kernel[2] % s.kernel[1], k % s.kernel[2]};
        A sum = 0;
        for (int64_t j = threadIdx.x; j < s.n * s.out_count; j += blockDim.x) {
            int64_t o = j % s.out_count, n = j / s.out_count;
            int64_t p = input_at(s, 0, o / s.out[2] / s.out[1], tap[0]),
                    q = input_at(s, 1, o / s.out[2] % s.out[1], tap[1]);
            int64_t r = input_at(s, 2, o % s.out[2], tap[2]);
            if (p < 0 || q < 0 || r < 0) continue;
            plane<T> left = plane_of(s, dy, n, m, s.m, s.out_count);
            plane<T> right = plane_of(s, x, n, m / each * channels + e.channel, s.c, s.in_count);
            sum += value_at(left, o) * value_at(right, (p * s.in[1] + q) * s.in[2] + r);
        }
        sum = ont_block_sum(sum, scratch);
        if (!threadIdx.x) ont_store(dw + i, sum);
        __syncthreads();
    }
}

template <class T> __global__ void __launch_bounds__(ONT_THREADS) relu_kernel(T *y, int64_t count)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        auto value = ont_load(y + i);
        if (value < 0) ont_store(y + i, decltype(value)(0));
    }
}

static int64_t results_of(int kind, const ont_conv_shape *s)
{
    return kind == ONT_CONV_FORWARD      ? s->n * s->m * s->out_count
           : kind == ONT_CONV_GRAD_INPUT ? s->n * s->c * s->in_count
                                         : s->m * (s->c / s->groups) * s->kernel_count;
}

template <class T>
static int launch(int kind, const ont_conv_shape *s, const void *first, const void *second, void *to, int64_t count,
                  void *stream)
{
    const T *a = (const T *)first, *b = (const T *)second;
    int64_t skipped = results_of(kind, s) - count;
    if (!count) return 0;
    unsigned blocks = ont_blocks(count, ONT_THREADS);
    if (kind == ONT_CONV_FORWARD)
        return ONT_LAUNCH(conv_forward_kernel<T>, blocks, ONT_THREADS, 0, stream, *s, a, b, (T *)to, skipped, count);
    if (kind == ONT_CONV_GRAD_INPUT)
        return ONT_LAUNCH(conv_grad_input_kernel<T>, blocks, ONT_THREADS, 0, stream, *s, a, b, (T *)to, skipped, count);
    return ONT_LAUNCH(conv_grad_weight_kernel<T>, ont_blocks(count, 1), ont_row_threads(s->n * s->out_count), 0,
                      stream, *s, a, b, (T *)to, skipped, count);
}

extern "C" int ont_launch_conv(int kind, const ont_conv_shape *s, const void *first, const void *second, void *to,
                               int64_t count, void *stream)
{
    switch (s->dtype) {
    case ONT_FLOAT32: return launch<float>(kind, s, first, second, to, count, stream);
    case ONT_FLOAT64: return launch<double>(kind, s, first, second, to, count, stream);
    case ONT_FLOAT16: return launch<ont_f16>(kind, s, first, second, to, count, stream);
    default: return launch<ont_bf16>(kind, s, first, second, to, count, stream);
    }
}

template <class T> static int relu(void *y, int64_t count, void *stream)
{
    return ONT_LAUNCH(relu_kernel<T>, ont_blocks(count, ONT_THREADS), ONT_THREADS, 0, stream, (T *)y, count);
}

extern "C" int ont_launch_relu(int dtype, void *y, int64_t count, void *stream)
{
    switch (dtype) {
    case ONT_FLOAT32: return relu<float>(y, count, stream);
    case ONT_FLOAT16: return relu<ont_f16>(y, count, stream);
    default: return relu<ont_bf16>(y, count, stream);
    }
}
