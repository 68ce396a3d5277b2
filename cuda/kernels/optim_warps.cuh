/*
 * Updates of tensors with 8-bit states or random rounding, in one pass over memory: a warp takes the elements that
 * share a scale, eight for each lane, decodes their states, updates, finds the largest magnitude of each new state, and
 * encodes with it. Included by optim.cu alone.
 *
 * Levels and random numbers are those of csrc/simd/optim/optim.inc.c, for the same state, key and index the same bits.
 * A new state can be one level beside the CPU's, as those of two instruction sets can: compilers join a product and a
 * sum into one rounding where they choose.
 */
#ifndef ONT_CUDA_OPTIM_WARPS_CUH
#define ONT_CUDA_OPTIM_WARPS_CUH

#include "kernels/optim.cuh"

enum { CODED = 2 /* states that may have 8 bits */, PARTS = ONT_OPTIM_BLOCK / (32 * FOUR) };

/* Four elements of a lane, or fewer at the end; in one access of each operand where the tensor is aligned. */
struct lane_place {
    enum { SINGLES = FOUR };
    int64_t i;
    int n;
    bool aligned;
    __device__ __forceinline__ bool whole() const { return aligned && n == FOUR; }
};

/* In each of the PARTS runs of a warp's elements a lane has four. */
ONT_DEVICE lane_place place_of_lane(int64_t first, int64_t end, int part, bool aligned)
{
    const int64_t i = first + (part * 32 + ((int)threadIdx.x & 31)) * FOUR;
    return {i, end - i >= FOUR ? (int)FOUR : end > i ? (int)(end - i) : 0, aligned};
}

/* ---- 8-bit states ---- */

ONT_DEVICE float value_of(int dtype, uint8_t level, float scale)
{
    if (dtype == ONT_INT8) {
        const float a = (float)(int8_t)level * (1 / 127.0f);
        return scale * (a < 0 ? -a * a : a * a);
    }
    const float a = (float)level * (1 / 255.0f);
    return scale * (a * a) * (a * a);
}

/* `inverse`: of the scale. A nonzero square never becomes zero. */
ONT_DEVICE uint8_t level_of(int dtype, float v, float inverse)
{
    const float x = v * inverse;
    if (dtype == ONT_INT8) {
        const float a = sqrtf(x < 0 ? -x : x) * 127 + 0.5f;
        const int level = a < 127 ? (int)a : 127;
        return (uint8_t)(int8_t)(x < 0 ? -level : level);
    }
    const float a = sqrtf(sqrtf(x > 0 ? x : 0)) * 255 + 0.5f;
    const int level = a < 255 ? (int)a : 255;
    return (uint8_t)(level == 0 && v > 0 ? 1 : level);
}

ONT_DEVICE four<float> decode(const ont_cuda_tensor &t, int k, const lane_place &at)
{
    const uint8_t *levels = (const uint8_t *)t.state[k];
    four_of<uint8_t> read = {};
    four<float> to = {};
    if (!at.n) return to;
    const float scale = t.scale[k][at.i / ONT_OPTIM_BLOCK];
    if (at.whole()) read = *(const four_of<uint8_t> *)(levels + at.i);
    ONT_UNROLL
    for (int j = 0; j < FOUR; j++) {
        if (j >= at.n) continue;
        if (!at.whole()) read.v[j] = levels[at.i + j];
        to.v[j] = value_of(t.state_dtype[k], read.v[j], scale);
    }
    return to;
}

ONT_DEVICE void encode(const ont_cuda_tensor &t, int k, const lane_place &at, const four<float> &from, float inverse)
{
    uint8_t *levels = (uint8_t *)t.state[k];
    four_of<uint8_t> to = {};
    ONT_UNROLL
    for (int j = 0; j < FOUR; j++) {
        if (j >= at.n) continue;
        to.v[j] = level_of(t.state_dtype[k], from.v[j], inverse);
        if (!at.whole()) levels[at.i + j] = to.v[j];
    }
    if (at.whole()) *(four_of<uint8_t> *)(levels + at.i) = to;
}

ONT_DEVICE four<float> read_state(const ont_cuda_tensor &t, int k, const lane_place &at)
{
    if (k < CODED && t.scale[k]) return decode(t, k, at);
    return t.state[k] ? load_four<float>(t.state[k], t.state_dtype[k], at) : four<float>{};
}

/* ---- random rounding of 16-bit parameters, as stochastic_bf16() and stochastic_f16() on the CPU ---- */

ONT_DEVICE uint16_t random_bf16(float x, uint32_t random)
{
    const uint32_t bits = (uint32_t)__float_as_int(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? ont_float_to_bf16(x) : (uint16_t)((bits + random) >> 16);
}

ONT_DEVICE uint16_t random_f16(float x, uint32_t random)
{
    const uint32_t bits = (uint32_t)__float_as_int(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    if (magnitude >= 0x477fe000u) return ont_float_to_f16(x);
    if (magnitude >= 0x38800000u) return (uint16_t)(sign | ((magnitude + (random >> 3) - 0x38000000u) >> 13));
    const float units = __int_as_float((int)magnitude) * 16777216.0f; /* of 2^-24: a subnormal number */
    uint32_t whole = (uint32_t)units;
    whole += units - (float)whole > (float)random * (1 / 65536.0f);
    return (uint16_t)(sign | whole);
}

/* Element e has half e % 8 of the block e / 8; at.i is a multiple of four. */
ONT_DEVICE void store_random(const ont_cuda_optim &o, const ont_cuda_tensor &t, const lane_place &at,
                             const four<float> &x)
{
    const uint64_t stream = (uint64_t)(t.step ? *t.step : 0) << 32 | t.stream;
    uint16_t *param = (uint16_t *)t.param;
    uint32_t words[4];
    four_of<uint16_t> to = {};
    ont_philox(o.seed, stream, (uint64_t)at.i / 8, words);
    const uint32_t low = at.i & 4 ? words[2] : words[0], high = at.i & 4 ? words[3] : words[1];
    ONT_UNROLL
    for (int j = 0; j < FOUR; j++) {
        const uint32_t random = (j < 2 ? low : high) >> (j % 2 * 16) & 0xffff;
        if (j >= at.n) continue;
        to.v[j] = t.param_dtype == ONT_FLOAT16 ? random_f16(x.v[j], random) : random_bf16(x.v[j], random);
        if (!at.whole()) param[at.i + j] = to.v[j];
    }
    if (at.whole()) *(four_of<uint16_t> *)(param + at.i) = to;
}

ONT_DEVICE void write_rounded(const ont_cuda_optim &o, const ont_cuda_tensor &t, const lane_place &at,
                              const four<float> &x)
{
    if (t.stochastic) store_random(o, t, at, x);
    else write_param(t, at, x);
}

/* ---- the update ---- */

/* Writes the coded states and their scales. All lanes call it. */
ONT_DEVICE void write_states(const ont_cuda_tensor &t, int64_t first, int64_t end, bool aligned,
                             const four<float> (&s)[CODED][PARTS])
{
    ONT_UNROLL
    for (int k = 0; k < CODED; k++) {
        if (!t.state[k]) continue;
        uint32_t most = 0; /* magnitudes compare as their bits do, with infinity above all numbers, NaN above that */
        for (int part = 0; t.scale[k] && part < PARTS; part++) {
            const lane_place at = place_of_lane(first, end, part, aligned);
            ONT_UNROLL
            for (int j = 0; j < FOUR; j++) {
                const uint32_t bits = (uint32_t)__float_as_int(s[k][part].v[j]) & 0x7fffffffu;
                if (j < at.n && bits > most) most = bits;
            }
        }
        for (int lanes = 16; t.scale[k] && lanes; lanes >>= 1) {
            const uint32_t other = __shfl_xor_sync(0xffffffffu, most, lanes);
            if (other > most) most = other;
        }
        const float scale = __int_as_float((int)most), inverse = scale > 0 && scale <= 3e38f ? 1 / scale : 0;
        ONT_UNROLL
        for (int part = 0; part < PARTS; part++) {
            const lane_place at = place_of_lane(first, end, part, aligned);
            if (t.scale[k]) encode(t, k, at, s[k][part], inverse);
            else store_four<float>(t.state[k], t.state_dtype[k], at, s[k][part]);
        }
        __syncwarp(); /* all lanes have read the scale of before */
        if (t.scale[k] && !(threadIdx.x & 31)) t.scale[k][first / ONT_OPTIM_BLOCK] = scale;
    }
}

ONT_DEVICE void update_by_warps(const ont_cuda_optim &o, const ont_cuda_tensor &t, int64_t chunk_first)
{
    const update<float> u = update_of_block<float>(o, t);
    const int64_t end = chunk_end(t, chunk_first), stride = (int64_t)(blockDim.x / 32) * ONT_OPTIM_BLOCK;
    const bool aligned = width_of(o, t) == FOUR;
    for (int64_t first = chunk_first + (int64_t)(threadIdx.x / 32) * ONT_OPTIM_BLOCK; first < end; first += stride) {
        four<float> s[CODED][PARTS];
        ONT_UNROLL
        for (int part = 0; part < PARTS; part++) {
            const lane_place at = place_of_lane(first, end, part, aligned);
            four<float> x = read_param<float>(t, at), g = load_four<float>(grad_of(o, t), t.grad_dtype, at);
            four<float> third = read_state(t, CODED, at);
            ONT_UNROLL
            for (int k = 0; k < CODED; k++) s[k][part] = read_state(t, k, at);
            ONT_UNROLL
            for (int j = 0; j < FOUR; j++)
                x.v[j] = apply(o, u, x.v[j], g.v[j] * u.grad, s[0][part].v[j], s[1][part].v[j], third.v[j]);
            if (t.state[CODED]) store_four<float>(t.state[CODED], t.state_dtype[CODED], at, third);
            write_rounded(o, t, at, x);
        }
        write_states(t, first, end, aligned, s);
    }
}

__global__ void __launch_bounds__(ONT_THREADS) optim_warps_kernel(const ont_cuda_optim o)
{
    if (skipped(o)) return;
    for (int64_t chunk = blockIdx.x; chunk < o.n_chunks; chunk += gridDim.x) {
        const ont_cuda_tensor &t = o.tensors[o.chunk_tensor[chunk]];
        if (is_by_warps(t)) update_by_warps(o, t, (chunk - t.first_chunk) * ONT_OPTIM_CHUNK);
    }
}

/* ---- LAMB ---- */

struct square_sums {
    double param, step;
};

/* Moments of four elements, and the two norms, from the moments before they are rounded, as on the CPU. */
ONT_DEVICE void lamb_moments(const ont_cuda_optim &o, const ont_cuda_tensor &t, const update<float> &u,
                             const lane_place &at, four<float> &m, four<float> &v, square_sums &sums)
{
    const four<float> x = read_param<float>(t, at), g = load_four<float>(grad_of(o, t), t.grad_dtype, at);
    ONT_UNROLL
    for (int j = 0; j < FOUR; j++) {
        const float d = g.v[j] * u.grad;
        m.v[j] += u.one_minus_beta1 * (d - m.v[j]);
        v.v[j] = u.beta2 * v.v[j] + u.one_minus_beta2 * d * d;
        const double step = j < at.n ? (double)lamb_step(u, x.v[j], m.v[j], v.v[j]) : 0;
        sums.param += (double)x.v[j] * (double)x.v[j];
        sums.step += step * step;
    }
}

ONT_DEVICE void lamb_by_warps(const ont_cuda_optim &o, const ont_cuda_tensor &t, int64_t chunk_first, int64_t chunk,
                              bool applies)
{
    __shared__ double scratch[32];
    const update<float> u = update_of_block<float>(o, t);
    const float rate = applies ? (float)(rate_of(o) * *ratio_of(o, o.chunk_tensor[chunk])) : 0;
    const int64_t end = chunk_end(t, chunk_first), stride = (int64_t)(blockDim.x / 32) * ONT_OPTIM_BLOCK;
    const bool aligned = width_of(o, t) == FOUR;
    square_sums sums = {};
    for (int64_t first = chunk_first + (int64_t)(threadIdx.x / 32) * ONT_OPTIM_BLOCK; first < end; first += stride) {
        four<float> s[CODED][PARTS];
        ONT_UNROLL
        for (int part = 0; part < PARTS; part++) {
            const lane_place at = place_of_lane(first, end, part, aligned);
            four<float> &m = s[0][part], &v = s[1][part];
            m = read_state(t, 0, at);
            v = read_state(t, 1, at);
            if (!applies) {
                lamb_moments(o, t, u, at, m, v, sums);
                continue;
            }
            four<float> x = read_param<float>(t, at);
            ONT_UNROLL
            for (int j = 0; j < FOUR; j++) x.v[j] -= rate * lamb_step(u, x.v[j], m.v[j], v.v[j]);
            write_rounded(o, t, at, x);
        }
        if (!applies) write_states(t, first, end, aligned, s);
    }
    if (applies) return;
    sums.param = ont_block_sum(sums.param, scratch);
    sums.step = ont_block_sum(sums.step, scratch);
    if (!threadIdx.x) {
        o.work[2 * chunk] = sums.param;
        o.work[2 * chunk + 1] = sums.step;
    }
}

__global__ void __launch_bounds__(ONT_THREADS, 2) lamb_warps_kernel(const ont_cuda_optim o, bool applies)
{
    if (skipped(o)) return;
    for (int64_t chunk = blockIdx.x; chunk < o.n_chunks; chunk += gridDim.x) {
        const ont_cuda_tensor &t = o.tensors[o.chunk_tensor[chunk]];
        if (is_by_warps(t)) lamb_by_warps(o, t, (chunk - t.first_chunk) * ONT_OPTIM_CHUNK, chunk, applies);
    }
}

#endif
