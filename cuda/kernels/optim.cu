/*
 * Multi-tensor optimizers: a block for each chunk of a tensor, one launch for all tensors of all groups with equal
 * hyperparameters. Tensors with 8-bit states or random rounding have kernels of their own (optim_warps.cuh). Norms are
 * sums of chunks that one block adds in order, so that the result does not depend on the grid.
 */
#include "kernels/optim.cuh"

#include "kernels/optim_warps.cuh"

template <class C> ONT_DEVICE void update_chunk(const ont_cuda_optim &o, const ont_cuda_tensor &t, int64_t first)
{
    const update<C> u = update_of_block<C>(o, t);
    const int64_t end = chunk_end(t, first);
    const int width = width_of(o, t);
    for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
        const place at = place_of(i, end, width);
        four<C> x = read_param<C>(t, at), g = load_four<C>(grad_of(o, t), t.grad_dtype, at), s[STATES];
        ONT_UNROLL
        for (int k = 0; k < STATES; k++) s[k] = t.state[k] ? load_four<C>(t.state[k], t.state_dtype[k], at) : four<C>{};
        ONT_UNROLL
        for (int k = 0; k < FOUR; k++) x.v[k] = apply(o, u, x.v[k], g.v[k] * u.grad, s[0].v[k], s[1].v[k], s[2].v[k]);
        ONT_UNROLL
        for (int k = 0; k < STATES; k++)
            if (t.state[k]) store_four<C>(t.state[k], t.state_dtype[k], at, s[k]);
        write_param(t, at, x);
    }
}

/* Two kernels, since the one in double has twice the registers: each skips the tensors of the others. */
template <class C> ONT_DEVICE void update_all(const ont_cuda_optim &o)
{
    if (skipped(o)) return;
    for (int64_t chunk = blockIdx.x; chunk < o.n_chunks; chunk += gridDim.x) {
        const ont_cuda_tensor &t = o.tensors[o.chunk_tensor[chunk]];
        if (is_wide(t) == (sizeof(C) == sizeof(double)) && !is_by_warps(t))
            update_chunk<C>(o, t, (chunk - t.first_chunk) * ONT_OPTIM_CHUNK);
    }
}

__global__ void __launch_bounds__(ONT_THREADS, 4) optim_update_kernel(const ont_cuda_optim o) { update_all<float>(o); }

__global__ void __launch_bounds__(ONT_THREADS) optim_update_wide_kernel(const ont_cuda_optim o)
{
    update_all<double>(o);
}

/* ---- LAMB: moments and the two norms, ratios, update ---- */

/* The norm of the update from the moments as stored: 16-bit states have been rounded, and are what is applied. */
template <class C>
ONT_DEVICE void norms(const ont_cuda_tensor &t, const update<C> &u, const place &at, const four<C> &x, double &pp,
                      double &uu)
{
    const four<C> m = load_four<C>(t.state[0], t.state_dtype[0], at);
    const four<C> v = load_four<C>(t.state[1], t.state_dtype[1], at);
    ONT_UNROLL
    for (int k = 0; k < FOUR; k++) {
        double step = k < at.n ? (double)lamb_step(u, x.v[k], m.v[k], v.v[k]) : 0;
        pp += (double)x.v[k] * (double)x.v[k];
        uu += step * step;
    }
}

template <class C>
ONT_DEVICE void lamb_chunk(const ont_cuda_optim &o, const ont_cuda_tensor &t, int64_t first, int64_t chunk,
                           bool applies)
{
    __shared__ double scratch[32];
    const update<C> u = update_of_block<C>(o, t);
    C rate = applies ? (C)((double)u.rate * *ratio_of(o, o.chunk_tensor[chunk])) : (C)0;
    double pp = 0, uu = 0;
    const int64_t end = chunk_end(t, first);
    const int width = width_of(o, t);
    for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
        const place at = place_of(i, end, width);
        four<C> x = read_param<C>(t, at), m = load_four<C>(t.state[0], t.state_dtype[0], at);
        four<C> v = load_four<C>(t.state[1], t.state_dtype[1], at);
        if (applies) {
            ONT_UNROLL
            for (int k = 0; k < FOUR; k++) x.v[k] -= rate * lamb_step(u, x.v[k], m.v[k], v.v[k]);
            write_param(t, at, x);
            continue;
        }
        const four<C> g = load_four<C>(grad_of(o, t), t.grad_dtype, at);
        ONT_UNROLL
        for (int k = 0; k < FOUR; k++) {
            C d = g.v[k] * u.grad;
            m.v[k] += u.one_minus_beta1 * (d - m.v[k]);
            v.v[k] = u.beta2 * v.v[k] + u.one_minus_beta2 * d * d;
        }
        store_four<C>(t.state[0], t.state_dtype[0], at, m);
        store_four<C>(t.state[1], t.state_dtype[1], at, v);
        norms(t, u, at, x, pp, uu);
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
        if (is_by_warps(t)) continue;
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
        const int width = width_of(o, t);
        for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
            const four<double> g = load_four<double>(t.grad, t.grad_dtype, place_of(i, end, width));
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
        const int width = width_of(o, t);
        for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
            const place at = place_of(i, end, width);
            four<double> g = load_four<double>(t.grad, t.grad_dtype, at);
            ONT_UNROLL
            for (int k = 0; k < FOUR; k++) {
                if (found_inf && !(fabs(g.v[k]) <= 1.7976931348623157e308)) set_flag(found_inf);
                g.v[k] = t.grad_dtype == ONT_FLOAT64 ? g.v[k] * factor : (double)((float)g.v[k] * (float)factor);
            }
            store_four<double>((void *)t.grad, t.grad_dtype, at, g);
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
        const int width = width_of(o, t);
        for (int64_t i = first + (int64_t)threadIdx.x * width; i < end; i += (int64_t)blockDim.x * width) {
            const place at = place_of(i, end, width);
            four<double> g = load_four<double>(t.grad, t.grad_dtype, at), x = {};
            if (keep != 0) x = load_four<double>(t.param, t.param_dtype, at);
            ONT_UNROLL
            for (int k = 0; k < FOUR; k++) {
                x.v[k] = g.v[k] * factor + keep * x.v[k];
                if (t.param_dtype != ONT_FLOAT64) x.v[k] = (double)(float)x.v[k];
                if (found_inf && !(fabs(x.v[k]) <= 1.7976931348623157e308)) set_flag(found_inf);
            }
            store_four<double>(t.param, t.param_dtype, at, x);
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

static bool has(const ont_cuda_optim *o, ont_optim_kind kind) { return o->n_chunks && !(o->absent & kind); }

/* One pass of LAMB over all tensors. */
static int launch_lamb(const ont_cuda_optim *o, bool applies, void *stream)
{
    const unsigned blocks = ont_blocks(o->n_chunks, 1);
    int error = 0;
    if (has(o, ONT_OPTIM_NARROW) || has(o, ONT_OPTIM_WIDE))
        error = ONT_LAUNCH(lamb_kernel, blocks, threads(), 0, stream, *o, applies);
    if (!error && has(o, ONT_OPTIM_BY_WARPS))
        error = ONT_LAUNCH(lamb_warps_kernel, blocks, threads(), 0, stream, *o, applies);
    return error;
}

static int launch_update(const ont_cuda_optim *o, void *stream)
{
    const unsigned blocks = ont_blocks(o->n_chunks, 1);
    int error = 0;
    if (has(o, ONT_OPTIM_NARROW)) error = ONT_LAUNCH(optim_update_kernel, blocks, threads(), 0, stream, *o);
    if (!error && has(o, ONT_OPTIM_WIDE))
        error = ONT_LAUNCH(optim_update_wide_kernel, blocks, threads(), 0, stream, *o);
    if (!error && has(o, ONT_OPTIM_BY_WARPS))
        error = ONT_LAUNCH(optim_warps_kernel, blocks, threads(), 0, stream, *o);
    return error;
}

extern "C" int ont_launch_optim_step(const ont_cuda_optim *o, void *stream)
{
    const unsigned per_tensor = ont_blocks(o->n_tensors, ONT_THREADS);
    int error = o->factor ? 0
                : o->max_norm >= 0 ? ont_launch_optim_norm(o, stream)
                                   : ONT_LAUNCH(optim_factor_kernel, 1, threads(), 0, stream, *o, false);
    if (error || !o->n_tensors) return error;
    if (o->rule == ONT_CUDA_LAMB) {
        error = launch_lamb(o, false, stream);
        if (!error) error = ONT_LAUNCH(lamb_ratio_kernel, per_tensor, ONT_THREADS, 0, stream, *o);
        if (!error) error = launch_lamb(o, true, stream);
    } else {
        error = launch_update(o, stream);
    }
    return error ? error : ONT_LAUNCH(optim_count_kernel, per_tensor, ONT_THREADS, 0, stream, *o);
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
