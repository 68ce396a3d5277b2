/*
 * Multi-tensor optimizers: a block for each chunk of a tensor, one launch for all tensors of all groups with equal
 * hyperparameters. Norms are sums of chunks that one block adds in order, so that the result does not depend on the
 * grid.
 */
#include "kernels/launch.cuh"

#include "kernels/math.cuh"
#include "device/multi.h"

/* Coefficients of a tensor's update, from hyperparameters and step; see csrc/simd/optim/optim.h. */
template <class C> struct update {
    C grad, l2, keep_before, keep_after, rate, beta1, beta2, eps, one_minus_beta1, one_minus_beta2, decay, correct;
};

enum { LR, BETA1, BETA2, EPS, DECAY, ADAM_MODE, ADAM_CORRECT, ADAM_AMSGRAD };
enum { LAMB_CORRECT = 5, LAMB_MIN, LAMB_MAX };
enum { SGD_MOMENTUM = 1, SGD_DAMPENING, SGD_DECAY, SGD_NESTEROV };
enum { ADAGRAD_LR_DECAY = 1, ADAGRAD_EPS, ADAGRAD_DECAY, LION_DECAY = 3 };
enum { MODE_L2, MODE_TRANSFORMERS, MODE_TORCH, MODE_TORCH_L2 };

ONT_DEVICE bool skipped(const ont_cuda_optim &o) { return o.found_inf && *o.found_inf != 0; }

/* work: two sums for each chunk, then the factor of all gradients, then the ratios of LAMB */
ONT_DEVICE double *own_factor(const ont_cuda_optim &o) { return o.work + 2 * o.n_chunks; }
ONT_DEVICE double factor_of(const ont_cuda_optim &o) { return o.factor ? *o.factor : *own_factor(o); }
ONT_DEVICE double *ratio_of(const ont_cuda_optim &o, int64_t tensor) { return o.work + 2 * o.n_chunks + 2 + tensor; }

template <class C> ONT_DEVICE update<C> adam_update(const double *h, double lr, double step)
{
    update<C> u = {};
    int mode = (int)h[ADAM_MODE];
    double c1 = h[ADAM_CORRECT] != 0 ? 1 - pow(h[BETA1], step) : 1,
           root = h[ADAM_CORRECT] != 0 ? sqrt(1 - pow(h[BETA2], step)) : 1;
    u.rate = (C)(lr * root / c1);
    u.eps = (C)(mode == MODE_TORCH || mode == MODE_TORCH_L2 ? h[EPS] * root : h[EPS]);
    u.l2 = (C)(mode == MODE_L2 || mode == MODE_TORCH_L2 ? h[DECAY] : 0);
    u.keep_after = (C)(mode == MODE_TRANSFORMERS ? 1 - lr * h[DECAY] : 1);
    u.keep_before = (C)(mode == MODE_TORCH ? 1 - lr * h[DECAY] : 1);
    return u;
}

template <class C> ONT_DEVICE update<C> make_update(const ont_cuda_optim &o, const ont_cuda_tensor &t)
{
    const double *h = o.hyper;
    double step = t.step ? (double)*t.step + 1 : 1, lr = o.lr ? (double)*o.lr : h[LR];
    update<C> u = {};
    u.keep_before = u.keep_after = 1;
    switch (o.rule) {
    case ONT_CUDA_ADAM: u = adam_update<C>(h, lr, step); break;
    case ONT_CUDA_LAMB: {
        double c1 = h[LAMB_CORRECT] != 0 ? 1 - pow(h[BETA1], step) : 1,
               root = h[LAMB_CORRECT] != 0 ? sqrt(1 - pow(h[BETA2], step)) : 1;
        u.correct = (C)(root / c1);
        u.eps = (C)(h[EPS] * root);
        u.rate = (C)lr;
        u.decay = (C)h[DECAY];
        break;
    }
    case ONT_CUDA_SGD:
        u.rate = (C)lr;
        u.l2 = (C)h[SGD_DECAY];
        u.beta1 = (C)(t.fresh ? 0 : h[SGD_MOMENTUM]);
        u.one_minus_beta1 = (C)(t.fresh ? 1 : 1 - h[SGD_DAMPENING]);
        u.beta2 = (C)h[SGD_MOMENTUM];
        break;
    case ONT_CUDA_ADAGRAD:
        u.l2 = (C)h[ADAGRAD_DECAY];
        u.eps = (C)h[ADAGRAD_EPS];
        u.rate = (C)(lr / (1 + (step - 1) * h[ADAGRAD_LR_DECAY]));
        break;
    default:
        u.rate = (C)lr;
        u.keep_before = (C)(1 - lr * h[LION_DECAY]);
    }
    if (o.rule != ONT_CUDA_SGD && o.rule != ONT_CUDA_ADAGRAD) {
        u.beta1 = (C)h[BETA1];
        u.beta2 = (C)h[BETA2];
        u.one_minus_beta1 = (C)(1 - h[BETA1]);
        u.one_minus_beta2 = (C)(1 - h[BETA2]);
    }
    u.grad = (C)((o.maximize ? -1 : 1) * factor_of(o));
    return u;
}

template <class C> ONT_DEVICE C load_as(const void *p, int dtype, int64_t i)
{
    switch (dtype) {
    case ONT_FLOAT32: return (C)((const float *)p)[i];
    case ONT_FLOAT64: return (C)((const double *)p)[i];
    case ONT_FLOAT16: return (C)ont_load((const ont_f16 *)p + i);
    default: return (C)ont_load((const ont_bf16 *)p + i);
    }
}

template <class C> ONT_DEVICE void store_as(void *p, int dtype, int64_t i, C v)
{
    switch (dtype) {
    case ONT_FLOAT32: ((float *)p)[i] = (float)v; break;
    case ONT_FLOAT64: ((double *)p)[i] = (double)v; break;
    case ONT_FLOAT16: ont_store((ont_f16 *)p + i, (float)v); break;
    default: ont_store((ont_bf16 *)p + i, (float)v);
    }
}

/* ---- four elements for each thread, in one access where the tensor's memory is aligned ---- */

enum { FOUR = 4, STATES = 3 };

template <class T> struct __align__(sizeof(T) * FOUR) four_of { T v[FOUR]; };
template <class C> struct four { C v[FOUR]; };

ONT_DEVICE double widened(float v) { return v; }
ONT_DEVICE double widened(double v) { return v; }
ONT_DEVICE double widened(const ont_f16 &v) { return ont_load(&v); }
ONT_DEVICE double widened(const ont_bf16 &v) { return ont_load(&v); }

template <class C, class T> ONT_DEVICE four<C> load_wide(const void *p, int64_t i)
{
    const four_of<T> from = *(const four_of<T> *)((const T *)p + i);
    four<C> to;
    ONT_UNROLL
    for (int k = 0; k < FOUR; k++) to.v[k] = (C)widened(from.v[k]);
    return to;
}

template <class C, class T> ONT_DEVICE void store_wide(void *p, int64_t i, const four<C> &from)
{
    four_of<T> to;
    ONT_UNROLL
    for (int k = 0; k < FOUR; k++) ont_store(&to.v[k], (decltype(ont_load(&to.v[k])))from.v[k]);
    *(four_of<T> *)((T *)p + i) = to;
}

/* Elements i to i + n; those beyond the end are zeros. */
template <class C> ONT_DEVICE four<C> load_four(const void *p, int dtype, int64_t i, int n)
{
    four<C> to = {};
    if (n < FOUR) {
        ONT_UNROLL
        for (int k = 0; k < FOUR; k++)
            if (k < n) to.v[k] = load_as<C>(p, dtype, i + k);
        return to;
    }
    switch (dtype) {
    case ONT_FLOAT32: return load_wide<C, float>(p, i);
    case ONT_FLOAT64: return load_wide<C, double>(p, i);
    case ONT_FLOAT16: return load_wide<C, ont_f16>(p, i);
    default: return load_wide<C, ont_bf16>(p, i);
    }
}

template <class C> ONT_DEVICE void store_four(void *p, int dtype, int64_t i, int n, const four<C> &from)
{
    if (n < FOUR) {
        ONT_UNROLL
        for (int k = 0; k < FOUR; k++)
            if (k < n) store_as<C>(p, dtype, i + k, from.v[k]);
        return;
    }
    switch (dtype) {
    case ONT_FLOAT32: store_wide<C, float>(p, i, from); break;
    case ONT_FLOAT64: store_wide<C, double>(p, i, from); break;
    case ONT_FLOAT16: store_wide<C, ont_f16>(p, i, from); break;
    default: store_wide<C, ont_bf16>(p, i, from);
    }
}

/* Elements that a thread takes at once. Chunks begin at multiples of four, so the addresses of the tensors decide. */
ONT_DEVICE int width_of(const ont_cuda_tensor &t)
{
    uintptr_t all = (uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.master;
    for (int k = 0; k < STATES; k++) all |= (uintptr_t)t.state[k];
    return all % (FOUR * sizeof(double)) ? 1 : FOUR;
}

ONT_DEVICE int min_width(int width, int64_t rest) { return rest < width ? (int)rest : width; }

/* Updates one element: returns the new parameter, and writes its states. */
template <class C> ONT_DEVICE C adam(const ont_cuda_optim &o, const update<C> &u, C x, C g, C &m, C &v, C &most)
{
    g += u.l2 * x;
    m += u.one_minus_beta1 * (g - m);
    v = u.beta2 * v + u.one_minus_beta2 * g * g;
    C root = v;
    if (o.hyper[ADAM_AMSGRAD] != 0) root = most = v < most ? most : v;
    return (x * u.keep_before - u.rate * m / (vsqrt(root) + u.eps)) * u.keep_after;
}

template <class C>
ONT_DEVICE C apply(const ont_cuda_optim &o, const update<C> &u, C x, C g, C &first, C &second, C &third)
{
    switch (o.rule) {
    case ONT_CUDA_ADAM: return adam(o, u, x, g, first, second, third);
    case ONT_CUDA_SGD: {
        g += u.l2 * x;
        if (o.hyper[SGD_MOMENTUM] != 0) {
            first = u.beta1 * first + u.one_minus_beta1 * g;
            g = o.hyper[SGD_NESTEROV] != 0 ? g + u.beta2 * first : first;
        }
        return x - u.rate * g;
    }
    case ONT_CUDA_ADAGRAD: {
        g += u.l2 * x;
        first += g * g;
        return x - u.rate * g / (vsqrt(first) + u.eps);
    }
    default: {
        C mixed = u.beta1 * first + u.one_minus_beta1 * g;
        C sign = (C)(mixed > 0) - (C)(mixed < 0) + (mixed - mixed); /* NaN stays NaN, as in torch.sign */
        first = u.beta2 * first + u.one_minus_beta2 * g;
        return x * u.keep_before - u.rate * sign;
    }
    }
}

/* As on the CPU: in double where a parameter or its state is double. */
ONT_DEVICE bool is_wide(const ont_cuda_tensor &t) { return t.param_dtype == ONT_FLOAT64 ||
                                                   t.state_dtype == ONT_FLOAT64; }

ONT_DEVICE int64_t chunk_end(const ont_cuda_tensor &t, int64_t first)
{
    return first + ONT_OPTIM_CHUNK < t.count ? first + ONT_OPTIM_CHUNK : t.count;
}

template <class C> ONT_DEVICE four<C> read_param(const ont_cuda_tensor &t, int64_t i, int n)
{
    return t.master ? load_four<C>(t.master, ONT_FLOAT32, i, n) : load_four<C>(t.param, t.param_dtype, i, n);
}

template <class C> ONT_DEVICE void write_param(const ont_cuda_tensor &t, int64_t i, int n, const four<C> &x)
{
    if (t.master) store_four<C>(t.master, ONT_FLOAT32, i, n, x);
    store_four<C>(t.param, t.param_dtype, i, n, x);
}

template <class C> ONT_DEVICE void update_chunk(const ont_cuda_optim &o, const ont_cuda_tensor &t, int64_t first)
{
    __shared__ update<C> shared; /* powers in double, once for each block */
    __syncthreads();
    if (!threadIdx.x) shared = make_update<C>(o, t);
    __syncthreads();
    const update<C> u = shared;
    const int64_t end = chunk_end(t, first);
    const int width = width_of(t);
    for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
        const int n = min_width(width, end - i);
        four<C> x = read_param<C>(t, i, n), g = load_four<C>(t.grad, t.grad_dtype, i, n), s[STATES];
        ONT_UNROLL
        for (int k = 0; k < STATES; k++) s[k] = t.state[k] ? load_four<C>(t.state[k], t.state_dtype, i, n) : four<C>{};
        ONT_UNROLL
        for (int k = 0; k < FOUR; k++) x.v[k] = apply(o, u, x.v[k], g.v[k] * u.grad, s[0].v[k], s[1].v[k], s[2].v[k]);
        ONT_UNROLL
        for (int k = 0; k < STATES; k++)
            if (t.state[k]) store_four<C>(t.state[k], t.state_dtype, i, n, s[k]);
        write_param(t, i, n, x);
    }
}

/* Two kernels, since the one in double has twice the registers: each skips the tensors of the other. */
template <class C> ONT_DEVICE void update_all(const ont_cuda_optim &o)
{
    if (skipped(o)) return;
    for (int64_t chunk = blockIdx.x; chunk < o.n_chunks; chunk += gridDim.x) {
        const ont_cuda_tensor &t = o.tensors[o.chunk_tensor[chunk]];
        if (is_wide(t) == (sizeof(C) == sizeof(double)))
            update_chunk<C>(o, t, (chunk - t.first_chunk) * ONT_OPTIM_CHUNK);
    }
}

__global__ void __launch_bounds__(ONT_THREADS, 4) optim_update_kernel(const ont_cuda_optim o) { update_all<float>(o); }

__global__ void __launch_bounds__(ONT_THREADS) optim_update_wide_kernel(const ont_cuda_optim o)
{
    update_all<double>(o);
}

/* ---- LAMB: moments and the two norms, ratios, update ---- */

template <class C> ONT_DEVICE C lamb_step(const update<C> &u, C x, C m, C v)
{
    return u.correct * m / (vsqrt(v) + u.eps) + u.decay * x;
}

/* The norm of the update from the moments as stored: 16-bit states have been rounded, and are what is applied. */
template <class C>
ONT_DEVICE void norms(const ont_cuda_tensor &t, const update<C> &u, int64_t i, int n, const four<C> &x, double &pp,
                      double &uu)
{
    const four<C> m = load_four<C>(t.state[0], t.state_dtype, i, n), v = load_four<C>(t.state[1], t.state_dtype, i, n);
    ONT_UNROLL
    for (int k = 0; k < FOUR; k++) {
        double step = k < n ? (double)lamb_step(u, x.v[k], m.v[k], v.v[k]) : 0;
        pp += (double)x.v[k] * (double)x.v[k];
        uu += step * step;
    }
}

template <class C>
ONT_DEVICE void lamb_chunk(const ont_cuda_optim &o, const ont_cuda_tensor &t, int64_t first, int64_t chunk,
                           bool applies)
{
    __shared__ update<C> shared;
    __shared__ double scratch[32];
    __syncthreads();
    if (!threadIdx.x) shared = make_update<C>(o, t);
    __syncthreads();
    const update<C> u = shared;
    C rate = applies ? (C)((double)u.rate * *ratio_of(o, o.chunk_tensor[chunk])) : (C)0;
    double pp = 0, uu = 0;
    const int64_t end = chunk_end(t, first);
    const int width = width_of(t);
    for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
        const int n = min_width(width, end - i);
        four<C> x = read_param<C>(t, i, n), m = load_four<C>(t.state[0], t.state_dtype, i, n);
        four<C> v = load_four<C>(t.state[1], t.state_dtype, i, n);
        if (applies) {
            ONT_UNROLL
            for (int k = 0; k < FOUR; k++) x.v[k] -= rate * lamb_step(u, x.v[k], m.v[k], v.v[k]);
            write_param(t, i, n, x);
            continue;
        }
        const four<C> g = load_four<C>(t.grad, t.grad_dtype, i, n);
        ONT_UNROLL
        for (int k = 0; k < FOUR; k++) {
            C d = g.v[k] * u.grad;
            m.v[k] += u.one_minus_beta1 * (d - m.v[k]);
            v.v[k] = u.beta2 * v.v[k] + u.one_minus_beta2 * d * d;
        }
        store_four<C>(t.state[0], t.state_dtype, i, n, m);
        store_four<C>(t.state[1], t.state_dtype, i, n, v);
        norms(t, u, i, n, x, pp, uu);
    }
    if (applies) return;
    pp = ont_block_sum(pp, scratch);
    uu = ont_block_sum(uu, scratch);
    if (!threadIdx.x) {
        o.work[2 * chunk] = pp;
        o.work[2 * chunk + 1] = uu;
    }
}

__global__ void __launch_bounds__(ONT_THREADS) lamb_kernel(const ont_cuda_optim o, bool applies)
{
    if (skipped(o)) return;
    for (int64_t chunk = blockIdx.x; chunk < o.n_chunks; chunk += gridDim.x) {
        const ont_cuda_tensor &t = o.tensors[o.chunk_tensor[chunk]];
        int64_t first = (chunk - t.first_chunk) * ONT_OPTIM_CHUNK;
        is_wide(t) ? lamb_chunk<double>(o, t, first, chunk, applies)
                                     : lamb_chunk<float>(o, t, first, chunk, applies);
    }
}

__global__ void __launch_bounds__(ONT_THREADS) lamb_ratio_kernel(const ont_cuda_optim o)
{
    if (skipped(o)) return;
    ONT_FOR(i, o.n_tensors) {
        const ont_cuda_tensor &t = o.tensors[i];
        int64_t last = t.first_chunk + (t.count + ONT_OPTIM_CHUNK - 1) / ONT_OPTIM_CHUNK;
        double pp = 0, uu = 0;
        for (int64_t chunk = t.first_chunk; chunk < last; chunk++) {
            pp += o.work[2 * chunk];
            uu += o.work[2 * chunk + 1];
        }
        double ratio = sqrt(pp) / sqrt(uu);
        *ratio_of(o, i) = pp == 0 || uu == 0          ? 1
                          : ratio < o.hyper[LAMB_MIN] ? o.hyper[LAMB_MIN]
                          : ratio > o.hyper[LAMB_MAX] ? o.hyper[LAMB_MAX]
                                                      : ratio;
    }
}

/* ---- norm, clipping, unscaling, steps ---- */

__global__ void __launch_bounds__(ONT_THREADS) optim_squares_kernel(const ont_cuda_optim o)
{
    __shared__ double scratch[32];
    for (int64_t chunk = blockIdx.x; chunk < o.n_chunks; chunk += gridDim.x) {
        const ont_cuda_tensor &t = o.tensors[o.chunk_tensor[chunk]];
        int64_t first = (chunk - t.first_chunk) * ONT_OPTIM_CHUNK;
        double sum = 0;
        const int64_t end = chunk_end(t, first);
        const int width = width_of(t);
        for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
            const four<double> g = load_four<double>(t.grad, t.grad_dtype, i, min_width(width, end - i));
            ONT_UNROLL
            for (int k = 0; k < FOUR; k++) sum += g.v[k] * g.v[k];
        }
        sum = ont_block_sum(sum, scratch);
        if (!threadIdx.x) o.work[2 * chunk] = sum;
    }
}

/* The norm, and the factor of all gradients: the inverse scale and, where wanted, clipping. */
__global__ void __launch_bounds__(ONT_THREADS) optim_factor_kernel(const ont_cuda_optim o, bool measured)
{
    __shared__ double scratch[32];
    double sum = 0, inverse = o.inv_scale ? (double)*o.inv_scale : 1;
    for (int64_t chunk = threadIdx.x; measured && chunk < o.n_chunks; chunk += blockDim.x) sum += o.work[2 * chunk];
    sum = ont_block_sum(sum, scratch);
    if (threadIdx.x) return;
    double norm = sqrt(sum) * fabs(inverse), clip = o.max_norm / (norm + 1e-6);
    if (measured && o.norm) *o.norm = (float)norm;
    if (measured && o.wide_out) *o.wide_out = norm;
    *own_factor(o) = inverse * (!measured || o.max_norm < 0 || clip > 1 ? 1 : clip);
}

/* Several threads call it for one flag. Plain stores would be a data race, even of one value; volatile ones are relaxed
 * (PTX ISA, "Memory Consistency Model"). */
ONT_DEVICE void set_flag(float *flag)
{
#ifdef ONT_EMULATE
    atomicExch(flag, 1.0f);
#else
    *(volatile float *)flag = 1;
#endif
}

__global__ void __launch_bounds__(ONT_THREADS) optim_scale_kernel(const ont_cuda_optim o, float *found_inf)
{
    for (int64_t chunk = blockIdx.x; chunk < o.n_chunks; chunk += gridDim.x) {
        const ont_cuda_tensor &t = o.tensors[o.chunk_tensor[chunk]];
        int64_t first = (chunk - t.first_chunk) * ONT_OPTIM_CHUNK;
        double factor = factor_of(o);
        if (factor == 1 && !found_inf) return;
        const int64_t end = chunk_end(t, first);
        const int width = width_of(t);
        for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
            const int n = min_width(width, end - i);
            four<double> g = load_four<double>(t.grad, t.grad_dtype, i, n);
            ONT_UNROLL
            for (int k = 0; k < FOUR; k++) {
                if (found_inf && !(fabs(g.v[k]) <= 1.7976931348623157e308)) set_flag(found_inf);
                g.v[k] = t.grad_dtype == ONT_FLOAT64 ? g.v[k] * factor : (double)((float)g.v[k] * (float)factor);
            }
            store_four<double>((void *)t.grad, t.grad_dtype, i, n, g);
        }
    }
}

__global__ void __launch_bounds__(ONT_THREADS) optim_count_kernel(const ont_cuda_optim o)
{
    if (skipped(o)) return;
    ONT_FOR(i, o.n_tensors) if (o.tensors[i].step) *o.tensors[i].step += 1;
}

__global__ void __launch_bounds__(ONT_THREADS) optim_sums_kernel(const ont_cuda_optim o)
{
    ONT_FOR(i, o.n_tensors) {
        const ont_cuda_tensor &t = o.tensors[i];
        int64_t last = t.first_chunk + (t.count + ONT_OPTIM_CHUNK - 1) / ONT_OPTIM_CHUNK;
        double sum = 0;
        for (int64_t chunk = t.first_chunk; chunk < last; chunk++) sum += o.work[2 * chunk];
        o.wide_out[i] = sum;
    }
}

/* Gradients of float32 copies, from 16-bit ones: in float32 unless the target is wider, as in PyTorch's unscaling. */
__global__ void __launch_bounds__(ONT_THREADS) optim_into_kernel(const ont_cuda_optim o, float *found_inf)
{
    const double factor = o.inv_scale ? (double)*o.inv_scale : 1, keep = o.hyper[0];
    for (int64_t chunk = blockIdx.x; chunk < o.n_chunks; chunk += gridDim.x) {
        const ont_cuda_tensor &t = o.tensors[o.chunk_tensor[chunk]];
        int64_t first = (chunk - t.first_chunk) * ONT_OPTIM_CHUNK;
        const int64_t end = chunk_end(t, first);
        const int width = width_of(t);
        for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
            const int n = min_width(width, end - i);
            four<double> g = load_four<double>(t.grad, t.grad_dtype, i, n), x = {};
            if (keep != 0) x = load_four<double>(t.param, t.param_dtype, i, n);
            ONT_UNROLL
            for (int k = 0; k < FOUR; k++) {
                x.v[k] = g.v[k] * factor + keep * x.v[k];
                if (t.param_dtype != ONT_FLOAT64) x.v[k] = (double)(float)x.v[k];
                if (found_inf && !(fabs(x.v[k]) <= 1.7976931348623157e308)) set_flag(found_inf);
            }
            store_four<double>(t.param, t.param_dtype, i, n, x);
        }
    }
}

static unsigned threads() { return ont_row_threads(ONT_OPTIM_CHUNK); }

static int launch_squares(const ont_cuda_optim *o, void *stream)
{
    return !o->n_chunks ? 0 : ONT_LAUNCH(optim_squares_kernel, ont_blocks(o->n_chunks, 1), threads(), 0, stream, *o);
}

extern "C" int ont_launch_optim_norm(const ont_cuda_optim *o, void *stream)
{
    int error = launch_squares(o, stream);
    return error ? error : ONT_LAUNCH(optim_factor_kernel, 1, threads(), 0, stream, *o, true);
}

extern "C" int ont_launch_optim_clip(const ont_cuda_optim *o, void *stream)
{
    int error = ont_launch_optim_norm(o, stream);
    if (error || !o->n_chunks) return error;
    return ONT_LAUNCH(optim_scale_kernel, ont_blocks(o->n_chunks, 1), threads(), 0, stream, *o, (float *)nullptr);
}

extern "C" int ont_launch_optim_unscale(const ont_cuda_optim *o, float *found_inf, void *stream)
{
    int error = ONT_LAUNCH(optim_factor_kernel, 1, threads(), 0, stream, *o, false);
    if (error || !o->n_chunks) return error;
    return ONT_LAUNCH(optim_scale_kernel, ont_blocks(o->n_chunks, 1), threads(), 0, stream, *o, found_inf);
}

extern "C" int ont_launch_optim_step(const ont_cuda_optim *o, void *stream)
{
    unsigned blocks = ont_blocks(o->n_chunks, 1);
    int error = o->factor ? 0
                : o->max_norm >= 0 ? ont_launch_optim_norm(o, stream)
                                   : ONT_LAUNCH(optim_factor_kernel, 1, threads(), 0, stream, *o, false);
    if (error || !o->n_chunks) return error;
    if (o->rule == ONT_CUDA_LAMB) {
        error = ONT_LAUNCH(lamb_kernel, blocks, threads(), 0, stream, *o, false);
        if (!error)
            error = ONT_LAUNCH(lamb_ratio_kernel, ont_blocks(o->n_tensors, ONT_THREADS), ONT_THREADS, 0, stream, *o);
        if (!error) error = ONT_LAUNCH(lamb_kernel, blocks, threads(), 0, stream, *o, true);
    } else {
        error = ONT_LAUNCH(optim_update_kernel, blocks, threads(), 0, stream, *o);
        if (!error && !o->all_narrow) error = ONT_LAUNCH(optim_update_wide_kernel, blocks, threads(), 0, stream, *o);
    }
    return error ? error
                 : ONT_LAUNCH(optim_count_kernel, ont_blocks(o->n_tensors, ONT_THREADS), ONT_THREADS, 0, stream, *o);
}

extern "C" int ont_launch_optim(int what, const ont_cuda_optim *o, float *found_inf, void *stream)
{
    switch (what) {
    case ONT_OPTIM_STEP: return ont_launch_optim_step(o, stream);
    case ONT_OPTIM_NORM: return ont_launch_optim_norm(o, stream);
    case ONT_OPTIM_SQUARES: return launch_squares(o, stream);
    case ONT_OPTIM_FACTOR: return ONT_LAUNCH(optim_factor_kernel, 1, threads(), 0, stream, *o, true);
    case ONT_OPTIM_SUMS: {
        int error = launch_squares(o, stream);
        return error ? error
                     : ONT_LAUNCH(optim_sums_kernel, ont_blocks(o->n_tensors, ONT_THREADS), ONT_THREADS, 0, stream, *o);
    }
    case ONT_OPTIM_SCALE:
        return !o->n_chunks ? 0 : ONT_LAUNCH(optim_into_kernel, ont_blocks(o->n_chunks, 1), threads(), 0, stream, *o,
                                             found_inf);
    case ONT_OPTIM_CLIP: return ont_launch_optim_clip(o, stream);
    default: return ont_launch_optim_unscale(o, found_inf, stream);
    }
}
