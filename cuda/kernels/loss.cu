/*
 * Softmax cross-entropy and negative log-likelihood over rows of scores. For the gradient two numbers are saved for
 * each row, the largest score and the logarithm of the sum of exponentials; the gradient overwrites the scores.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"
#include "kernels/math.cuh"

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

/* terms (rows * inner, 2): weighted loss and weight of each row, as double */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    loss_kernel(const ont_loss s, const T *x, const void *labels, const T *weights, T *logp, T *stats, double *terms)
{
    __shared__ T scratch[32];
    for (int64_t i = blockIdx.x; i < s.rows * s.inner; i += gridDim.x) {
        int64_t base = i / s.inner * s.classes * s.inner + i % s.inner, label = label_at(s, labels, i);
        T row_max = 0, log_sum = 0;
        if (s.softmax) {
            row_max = x[base];
            for (int64_t c = threadIdx.x; c < s.classes; c += blockDim.x)
                row_max = ont_larger(row_max, x[base + c * s.inner]);
            row_max = ont_block_max(row_max, scratch);
            T sum = 0;
            for (int64_t c = threadIdx.x; c < s.classes; c += blockDim.x) sum += vexp(x[base + c * s.inner] - row_max);
            log_sum = vlog(ont_block_sum(sum, scratch));
        }
        for (int64_t c = threadIdx.x; logp && c < s.classes; c += blockDim.x)
            logp[base + c * s.inner] = (x[base + c * s.inner] - row_max) - log_sum;
        if (threadIdx.x) continue;
        bool real = counts(s, label, i, true);
        T w = !real ? (T)0 : weights ? weights[label] : (T)1;
        terms[2 * i] = real ? (double)(-w * ((x[base + label * s.inner] - row_max) - log_sum)) : 0;
        terms[2 * i + 1] = (double)w;
        if (stats) {
            stats[2 * i] = row_max;
            stats[2 * i + 1] = log_sum;
        }
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) loss_sum_kernel(const ont_loss s, const double *terms, T *loss)
{
    __shared__ double scratch[32];
    double sum = 0, norm = 0;
    for (int64_t i = threadIdx.x; i < s.rows * s.inner; i += blockDim.x) {
        sum += terms[2 * i];
        norm += terms[2 * i + 1];
        if (!s.reduction) loss[i] = (T)terms[2 * i];
    }
    sum = ont_block_sum(sum, scratch);
    norm = ont_block_sum(norm, scratch);
    if (!threadIdx.x && s.reduction) *loss = (T)(s.reduction == 2 ? sum / norm : sum);
}

/* The sum of the weights of the rows that count. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    loss_norm_kernel(const ont_loss s, const void *labels, const T *weights, double *norm)
{
    __shared__ double scratch[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < s.rows * s.inner; i += blockDim.x) {
        int64_t label = label_at(s, labels, i);
        if (counts(s, label, i, false)) sum += weights ? (double)weights[label] : 1;
    }
    sum = ont_block_sum(sum, scratch);
    if (!threadIdx.x) *norm = sum;
}

template <class T> struct gradient_operands {
    const T *x;
    const void *labels;
    const T *weights, *dloss, *stats;
    const double *norm;
    T *dx;
};

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) loss_grad_kernel(const ont_loss s, const gradient_operands<T> f)
{
    for (int64_t i = blockIdx.x; i < s.rows * s.inner; i += gridDim.x) {
        int64_t base = i / s.inner * s.classes * s.inner + i % s.inner, label = label_at(s, f.labels, i);
        bool real = counts(s, label, i, false);
        T scale = 0;
        if (real) {
            scale = (f.weights ? f.weights[label] : (T)1) * f.dloss[s.reduction ? 0 : i];
            if (s.reduction == 2) scale = (T)((double)scale / *f.norm);
        }
        for (int64_t c = threadIdx.x; c < s.classes; c += blockDim.x) {
            int64_t at = base + c * s.inner;
            T d = real && s.softmax ? scale * vexp((f.x[at] - f.stats[2 * i]) - f.stats[2 * i + 1]) : (T)0;
            f.dx[at] = real && c == label ? d - scale : d;
        }
    }
}

extern "C" size_t ont_loss_work(const ont_loss *s)
{
    return (size_t)(2 * s->rows * s->inner + 1) * sizeof(double);
}

template <class T>
static int forward(const ont_loss *s, const void *const *in, void *const *out, void *work, void *stream)
{
    int64_t rows = s->rows * s->inner;
    int error = 0;
    if (rows)
        error = ONT_LAUNCH(loss_kernel<T>, ont_blocks(rows, 1), ont_row_threads(s->softmax ? s->classes : 1), 0, stream,
                           *s, (const T *)in[0], in[1], (const T *)in[2], (T *)out[1], (T *)out[2], (double *)work);
    if (error) return error;
    return ONT_LAUNCH(loss_sum_kernel<T>, 1, ont_row_threads(rows), 0, stream, *s, (const double *)work, (T *)out[0]);
}

template <class T>
static int backward(const ont_loss *s, const void *const *in, void *dx, void *work, void *stream)
{
    gradient_operands<T> f = {(const T *)in[0], in[1], (const T *)in[2], (const T *)in[3], (const T *)in[4],
                              (const double *)work, (T *)dx};
    int64_t rows = s->rows * s->inner;
    int error = 0;
    if (!rows) return 0;
    if (s->reduction == 2)
        error = ONT_LAUNCH(loss_norm_kernel<T>, 1, ont_row_threads(rows), 0, stream, *s, f.labels, f.weights,
                           (double *)work);
    if (error) return error;
    return ONT_LAUNCH(loss_grad_kernel<T>, ont_blocks(rows, 1), ont_row_threads(s->classes), 0, stream, *s, f);
}

extern "C" int ont_launch_loss(const ont_loss *s, const void *const *in, void *const *out, void *work, void *stream)
{
    return (s->dtype == ONT_FLOAT32 ? forward<float> : forward<double>)(s, in, out, work, stream);
}

extern "C" int ont_launch_loss_grad(const ont_loss *s, const void *const *in, void *dx, void *work, void *stream)
{
    return (s->dtype == ONT_FLOAT32 ? backward<float> : backward<double>)(s, in, dx, work, stream);
}
