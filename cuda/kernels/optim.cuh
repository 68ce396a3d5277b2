/*
 * What the kernels of the optimizers share: coefficients of a tensor's update, loads and stores of four elements in
 * any dtype, and the rules for one element. Formulas are those of csrc/optim/rules.c.
 */
#ifndef ONT_CUDA_OPTIM_CUH
#define ONT_CUDA_OPTIM_CUH

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

ONT_DEVICE double rate_of(const ont_cuda_optim &o) { return o.lr ? (double)*o.lr : o.hyper[LR]; }

template <class C> ONT_DEVICE update<C> make_update(const ont_cuda_optim &o, const ont_cuda_tensor &t)
{
    const double *h = o.hyper;
    double step = t.step ? (double)*t.step + 1 : 1, lr = rate_of(o);
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

/* For all threads of a block, computed once: powers are in double. */
template <class C> ONT_DEVICE update<C> update_of_block(const ont_cuda_optim &o, const ont_cuda_tensor &t)
{
    __shared__ update<C> shared;
    __syncthreads();
    if (!threadIdx.x) shared = make_update<C>(o, t);
    __syncthreads();
    return shared;
}

ONT_DEVICE const void *grad_of(const ont_cuda_optim &o, const ont_cuda_tensor &t) { return t.grad ? t.grad : o.grad; }

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

/* Elements i to i + n of each operand. Fewer than four, SINGLES at most, are read and written one by one. */
struct place {
    enum { SINGLES = FOUR - 1 };
    int64_t i;
    int n;
    __device__ __forceinline__ bool whole() const { return n >= FOUR; }
};

/* Elements beyond the end are zeros. */
template <class C, class P> ONT_DEVICE four<C> load_four(const void *p, int dtype, const P &at)
{
    four<C> to = {};
    if (!at.whole()) {
        ONT_UNROLL
        for (int k = 0; k < P::SINGLES; k++)
            if (k < at.n) to.v[k] = load_as<C>(p, dtype, at.i + k);
        return to;
    }
    switch (dtype) {
    case ONT_FLOAT32: return load_wide<C, float>(p, at.i);
    case ONT_FLOAT64: return load_wide<C, double>(p, at.i);
    case ONT_FLOAT16: return load_wide<C, ont_f16>(p, at.i);
    default: return load_wide<C, ont_bf16>(p, at.i);
    }
}

template <class C, class P> ONT_DEVICE void store_four(void *p, int dtype, const P &at, const four<C> &from)
{
    if (!at.whole()) {
        ONT_UNROLL
        for (int k = 0; k < P::SINGLES; k++)
            if (k < at.n) store_as<C>(p, dtype, at.i + k, from.v[k]);
        return;
    }
    switch (dtype) {
    case ONT_FLOAT32: store_wide<C, float>(p, at.i, from); break;
    case ONT_FLOAT64: store_wide<C, double>(p, at.i, from); break;
    case ONT_FLOAT16: store_wide<C, ont_f16>(p, at.i, from); break;
    default: store_wide<C, ont_bf16>(p, at.i, from);
    }
}

/* Elements that a thread takes at once. Chunks begin at multiples of four, so the addresses of the tensors decide. */
ONT_DEVICE int width_of(const ont_cuda_optim &o, const ont_cuda_tensor &t)
{
    uintptr_t all = (uintptr_t)t.param | (uintptr_t)grad_of(o, t) | (uintptr_t)t.master;
    for (int k = 0; k < STATES; k++) all |= (uintptr_t)t.state[k];
    return all % (FOUR * sizeof(double)) ? 1 : FOUR;
}

ONT_DEVICE place place_of(int64_t i, int64_t end, int width)
{
    return {i, end - i < width ? (int)(end - i) : width};
}

/* The gradient with its penalty; without one, an infinite parameter stays what it is. */
template <class C> ONT_DEVICE C penalised(const update<C> &u, C x, C g) { return u.l2 != 0 ? g + u.l2 * x : g; }

/* Updates one element: returns the new parameter, and writes its states. */
template <class C> ONT_DEVICE C adam(const ont_cuda_optim &o, const update<C> &u, C x, C g, C &m, C &v, C &most)
{
    g = penalised(u, x, g);
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
        g = penalised(u, x, g);
        if (o.hyper[SGD_MOMENTUM] != 0) {
            first = u.beta1 * first + u.one_minus_beta1 * g;
            g = o.hyper[SGD_NESTEROV] != 0 ? g + u.beta2 * first : first;
        }
        return x - u.rate * g;
    }
    case ONT_CUDA_ADAGRAD: {
        g = penalised(u, x, g);
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
ONT_DEVICE bool is_wide(const ont_cuda_tensor &t)
{
    bool wide = t.param_dtype == ONT_FLOAT64;
    for (int k = 0; k < STATES; k++) wide |= t.state_dtype[k] == ONT_FLOAT64;
    return wide;
}

/* With 8-bit states or random rounding: a warp takes the elements that share a scale (optim_warps.cuh). */
ONT_DEVICE bool is_by_warps(const ont_cuda_tensor &t) { return t.scale[0] || t.scale[1] || t.stochastic; }

ONT_DEVICE int64_t chunk_end(const ont_cuda_tensor &t, int64_t first)
{
    return first + ONT_OPTIM_CHUNK < t.count ? first + ONT_OPTIM_CHUNK : t.count;
}

/* The master copy, unless the 16-bit parameter has been modified since: where it is not the rounding of the copy, its
 * value is taken. */
template <class C, class P> ONT_DEVICE four<C> read_param(const ont_cuda_tensor &t, const P &at)
{
    four<C> x = load_four<C>(t.param, t.param_dtype, at);
    if (!t.master) return x;
    const four<float> copy = load_four<float>(t.master, ONT_FLOAT32, at);
    ONT_UNROLL
    for (int k = 0; k < FOUR; k++) {
        const float rounded = t.param_dtype == ONT_FLOAT16 ? ont_f16_to_float(ont_float_to_f16(copy.v[k]))
                                                           : ont_bf16_to_float(ont_float_to_bf16(copy.v[k]));
        if (rounded == (float)x.v[k]) x.v[k] = (C)copy.v[k];
    }
    return x;
}

template <class C, class P> ONT_DEVICE void write_param(const ont_cuda_tensor &t, const P &at, const four<C> &x)
{
    if (t.master) store_four<C>(t.master, ONT_FLOAT32, at, x);
    store_four<C>(t.param, t.param_dtype, at, x);
}

template <class C> ONT_DEVICE C lamb_step(const update<C> &u, C x, C m, C v)
{
    return u.correct * m / (vsqrt(v) + u.eps) + u.decay * x;
}

#endif
