/*
 * CTCLoss and its gradient, by the formulas of csrc/ops/loss/ctc.c. A block takes a sample and goes through its frames,
 * a thread for each state; the gradient then takes every frame of every sample at once, a thread for each class.
 * A length or target that is out of range is reported, and the sample counts as empty or the target as blank.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

/* Frames and targets of one sample. Its sums over paths begin at `cells` times the number of steps. */
struct ctc_sample {
    int64_t frames, length, first, cells;
    double loss;
};

template <class T> struct ctc_operands {
    const T *x;
    const void *targets, *frames, *lengths;
    ctc_sample *samples;
    T *alpha, *beta, *losses; /* beta and losses may be NULL */
};

ONT_DEVICE int64_t read_int(const void *values, bool wide, int64_t i)
{
    return wide ? ((const int64_t *)values)[i] : ((const int32_t *)values)[i];
}

ONT_DEVICE int64_t length_at(const ont_ctc &s, const void *values, bool wide, int64_t n, int64_t most)
{
    const int64_t length = read_int(values, wide, n);
    if (length >= 0 && length <= most) return length;
    ont_report(s.fault, ONT_FAULT_LENGTH, s.step, length, n, most);
    return 0;
}

/* Targets in a row begin behind those of the samples before. */
template <class T> ONT_DEVICE ctc_sample sample_at(const ont_ctc &s, const ctc_operands<T> &o, int64_t n)
{
    const bool in_rows = s.padded >= 0;
    int64_t before = 0;
    for (int64_t i = 0; i < n && !in_rows; i++) before += length_at(s, o.lengths, s.wide[2], i, s.total - before);
    ctc_sample p = {0, 0, in_rows ? n * s.padded : before, in_rows ? n * (2 * s.padded + 1) : 2 * before + n, 0};
    p.frames = length_at(s, o.frames, s.wide[1], n, s.steps);
    p.length = length_at(s, o.lengths, s.wide[2], n, in_rows ? s.padded : s.total - before);
    return p;
}

/* Class of state k: blanks alternate with targets, and stand at both ends. */
ONT_DEVICE int64_t class_of(const ont_ctc &s, const void *targets, const ctc_sample &p, int64_t k)
{
    if (k % 2 == 0) return s.blank;
    const int64_t at = p.first + k / 2, target = read_int(targets, s.wide[0], at);
    if (target >= 0 && target < s.classes) return target;
    ont_report(s.fault, ONT_FAULT_LABEL, s.step, target, at, s.classes);
    return s.blank;
}

/* log(exp(a) + exp(b)) */
template <class T> ONT_DEVICE T add_logs(T a, T b)
{
    const T most = a > b ? a : b, least = a > b ? b : a;
    return least == -(T)INFINITY ? most : most + log(1 + exp(least - most));
}

/* alpha (frames, 2 * length + 1): log-probability of the paths that end in a state at a frame. */
template <class T> ONT_DEVICE T paths_to(const ont_ctc &s, const ctc_operands<T> &o, const ctc_sample &p, int64_t n)
{
    const int64_t states = 2 * p.length + 1;
    T *alpha = o.alpha + p.cells * s.steps;
    for (int64_t t = 0; t < p.frames; t++) {
        const T *x = o.x + (t * s.batch + n) * s.classes, *last = alpha + (t - 1) * states;
        for (int64_t k = threadIdx.x; k < states; k += blockDim.x) {
            const int64_t c = class_of(s, o.targets, p, k);
            T sum = t ? last[k] : k < 2 ? (T)0 : -(T)INFINITY;
            if (t && k > 0) sum = add_logs(sum, last[k - 1]);
            if (t && k > 1 && class_of(s, o.targets, p, k - 2) != c) sum = add_logs(sum, last[k - 2]);
            alpha[t * states + k] = sum + x[c];
        }
        __syncthreads();
    }
    if (!p.frames) return p.length ? (T)INFINITY : (T)0;
    const T *end = alpha + p.frames * states;
    return -(p.length ? add_logs(end[-1], end[-2]) : end[-1]);
}

/* beta (frames, 2 * length + 1): log-probability of the paths that go on from a state at a frame. */
template <class T>
ONT_DEVICE void paths_from(const ont_ctc &s, const ctc_operands<T> &o, const ctc_sample &p, int64_t n)
{
    const int64_t states = 2 * p.length + 1;
    T *beta = o.beta + p.cells * s.steps;
    for (int64_t t = p.frames - 1; t >= 0; t--) {
        const T *x = o.x + (t * s.batch + n) * s.classes, *next = beta + (t + 1) * states;
        const bool end = t == p.frames - 1;
        for (int64_t k = threadIdx.x; k < states; k += blockDim.x) {
            const int64_t c = class_of(s, o.targets, p, k);
            T sum = !end ? next[k] : k >= states - 2 ? (T)0 : -(T)INFINITY;
            if (!end && k + 1 < states) sum = add_logs(sum, next[k + 1]);
            if (!end && k + 2 < states && class_of(s, o.targets, p, k + 2) != c) sum = add_logs(sum, next[k + 2]);
            beta[t * states + k] = sum + x[c];
        }
        __syncthreads();
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS) ctc_paths_kernel(const ont_ctc s, const ctc_operands<T> o)
{
    __shared__ ctc_sample p;
    for (int64_t n = blockIdx.x; n < s.batch; n += gridDim.x) {
        __syncthreads();
        if (!threadIdx.x) p = sample_at(s, o, n);
        __syncthreads();
        const T loss = paths_to(s, o, p, n);
        if (o.beta) paths_from(s, o, p, n);
        if (threadIdx.x) continue;
        if (o.losses) o.losses[n] = s.zero_infinity && loss == (T)INFINITY ? (T)0 : loss;
        o.samples[n] = p;
        o.samples[n].loss = (double)loss;
    }
}

/* A block for each frame of each sample. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    ctc_grad_kernel(const ont_ctc s, const ctc_operands<T> o, const T *dy, T *dx)
{
    for (int64_t row = blockIdx.x; row < s.steps * s.batch; row += gridDim.x) {
        const int64_t t = row / s.batch, n = row - t * s.batch;
        const ctc_sample p = o.samples[n];
        const int64_t states = 2 * p.length + 1, at = p.cells * s.steps + t * states;
        const T loss = (T)p.loss;
        const bool counts = t < p.frames && !(s.zero_infinity && loss == (T)INFINITY);
        for (int64_t c = threadIdx.x; c < s.classes; c += blockDim.x) {
            const T x = o.x[row * s.classes + c];
            T share = -(T)INFINITY; /* log-sum over the states of the class */
            for (int64_t k = states - 1; k >= 0 && counts; k--)
                if (class_of(s, o.targets, p, k) == c) share = add_logs(share, o.alpha[at + k] + o.beta[at + k]);
            dx[row * s.classes + c] = counts ? (exp(x) - exp(share + loss - x)) * dy[n] : (T)0;
        }
    }
}

static inline size_t samples_bytes(const ont_ctc *s) { return ((size_t)s->batch * sizeof(ctc_sample) + 63) / 64 * 64; }

/* Numbers of alpha, and of beta. */
static inline size_t cells_of(const ont_ctc *s) { return (size_t)((2 * s->total + s->batch) * s->steps); }

extern "C" size_t ont_ctc_work(const ont_ctc *s, int gradient)
{
    const size_t size = s->dtype == ONT_FLOAT32 ? sizeof(float) : sizeof(double);
    return samples_bytes(s) + cells_of(s) * (gradient ? 2 : 1) * size;
}

/* dy: NULL for the loss */
template <class T>
static int launch(const ont_ctc *s, const void *const *in, const T *dy, T *out, void *work, void *stream)
{
    const int64_t states = 2 * (s->padded >= 0 ? s->padded : s->total) + 1;
    T *alpha = (T *)((char *)work + samples_bytes(s)), *beta = dy ? alpha + cells_of(s) : NULL;
    const ctc_operands<T> o = {(const T *)in[0], in[1], in[2], in[3], (ctc_sample *)work, alpha, beta, dy ? NULL : out};
    if (!s->batch) return 0;
    int error = ONT_LAUNCH(ctc_paths_kernel<T>, ont_blocks(s->batch, 1), ont_row_threads(states), 0, stream, *s, o);
    if (error || !dy || !s->steps) return error;
    return ONT_LAUNCH(ctc_grad_kernel<T>, ont_blocks(s->steps * s->batch, 1), ont_row_threads(s->classes), 0, stream,
                      *s, o, dy, out);
}

extern "C" int ont_launch_ctc(const ont_ctc *s, const void *const *in, void *losses, void *work, void *stream)
{
    return s->dtype == ONT_FLOAT32 ? launch<float>(s, in, NULL, (float *)losses, work, stream)
                                   : launch<double>(s, in, NULL, (double *)losses, work, stream);
}

extern "C" int ont_launch_ctc_grad(const ont_ctc *s, const void *const *in, void *dx, void *work, void *stream)
{
    return s->dtype == ONT_FLOAT32 ? launch<float>(s, in, (const float *)in[4], (float *)dx, work, stream)
                                   : launch<double>(s, in, (const double *)in[4], (double *)dx, work, stream);
}
