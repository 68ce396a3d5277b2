/*
 * Elementwise programs by interpretation: one thread an element, one step after the other. It takes everything, and
 * is used where there is no generated kernel (cuda/generate.c).
 */
#include "kernels/launch.cuh"

#include "kernels/bits.cuh"
#include "kernels/elementwise.h"
#include "kernels/kernels.h"
#include "kernels/math.cuh"
#include "kernels/units.cuh"
#include "simd/simd.h"

#ifdef __CUDACC__
#pragma nv_diag_suppress 186 /* an unsigned number is never below 0: the list of expressions is one for all types */
#endif

#define P0 p0
#define P1 p1
template <class NUM> ONT_DEVICE uint64_t unary_float(int loop, NUM a, NUM p0, NUM p1)
{
    switch (loop) {
#define X(name, expression) \
    case ONT_LOOP_##name: return ont_bits<NUM>((NUM)(expression));
        ONT_UNARY_FLOAT_LIST(X)
#undef X
    default: return (void)p1, ont_bits<NUM>(p0);
    }
}
template <class NUM> ONT_DEVICE uint64_t unary_number(int loop, NUM a)
{
    switch (loop) {
#define X(name, expression) \
    case ONT_LOOP_##name: return ont_bits<NUM>((NUM)(expression));
        ONT_UNARY_NUMBER_LIST(X)
#undef X
    default: return ont_bits<NUM>(a);
    }
}
template <class NUM> ONT_DEVICE uint64_t binary_float(int loop, NUM a, NUM b, NUM p0, NUM p1)
{
    switch (loop) {
#define X(name, expression) \
    case ONT_LOOP_##name: return ont_bits<NUM>((NUM)(expression));
        ONT_BINARY_FLOAT_LIST(X)
#undef X
    default: return (void)p1, ont_bits<NUM>(p0);
    }
}
template <class NUM> ONT_DEVICE uint64_t binary_number(int loop, NUM a, NUM b)
{
    switch (loop) {
#define X(name, expression) \
    case ONT_LOOP_##name: return ont_bits<NUM>((NUM)(expression));
        ONT_BINARY_NUMBER_LIST(X)
#undef X
#define X(name, expression) \
    case ONT_LOOP_##name: return (uint64_t)((expression) ? 1 : 0);
        ONT_COMPARE_LIST(X)
#undef X
    default: return ont_bits<NUM>(a);
    }
}
#undef P0
#undef P1

#define INTEGERS(X) \
    X(ONT_INT8, int8_t) X(ONT_INT16, int16_t) X(ONT_INT32, int32_t) X(ONT_INT64, int64_t) X(ONT_UINT8, uint8_t) \
    X(ONT_UINT16, uint16_t) X(ONT_UINT32, uint32_t) X(ONT_UINT64, uint64_t)

ONT_DEVICE uint64_t unary_step(const ont_ew_step &s, uint64_t a)
{
    bool number = s.loop >= ONT_LOOP_Relu && s.loop <= ONT_LOOP_Sign;
    switch (s.in) {
    case ONT_FLOAT32:
        return number ? unary_number<float>(s.loop, ont_value<float>(a))
                      : unary_float<float>(s.loop, ont_value<float>(a), (float)s.p[0], (float)s.p[1]);
    case ONT_FLOAT64:
        return number ? unary_number<double>(s.loop, ont_value<double>(a))
                      : unary_float<double>(s.loop, ont_value<double>(a), s.p[0], s.p[1]);
#define X(dtype, type) \
    case dtype: return unary_number<type>(s.loop, ont_value<type>(a));
        INTEGERS(X)
#undef X
    default: return a;
    }
}

ONT_DEVICE uint64_t binary_step(const ont_ew_step &s, uint64_t a, uint64_t b)
{
    bool number = s.loop >= ONT_LOOP_Add;
    switch (s.in) {
    case ONT_FLOAT32:
        return number ? binary_number<float>(s.loop, ont_value<float>(a), ont_value<float>(b))
                      : binary_float<float>(s.loop, ont_value<float>(a), ont_value<float>(b), (float)s.p[0],
                                            (float)s.p[1]);
    case ONT_FLOAT64:
        return number ? binary_number<double>(s.loop, ont_value<double>(a), ont_value<double>(b))
                      : binary_float<double>(s.loop, ont_value<double>(a), ont_value<double>(b), s.p[0], s.p[1]);
#define X(dtype, type) \
    case dtype: return binary_number<type>(s.loop, ont_value<type>(a), ont_value<type>(b));
        INTEGERS(X)
#undef X
    case ONT_BOOL: return binary_number<uint8_t>(s.loop, a != 0, b != 0);
    default: return a;
    }
}

/* ---- the rest ---- */

ONT_DEVICE uint64_t mod_step(const ont_ew_step &s, uint64_t a, uint64_t b)
{
    const bool c_style = s.p[0] != 0;
    switch (s.in) {
    case ONT_UINT8:
    case ONT_UINT16:
    case ONT_UINT32:
    case ONT_UINT64: return vmod<uint64_t>(a, b, c_style);
    default: /* with 64 bits, of which the result's are stored */
        return (uint64_t)vmod((int64_t)ont_cast(s.in, ONT_INT64, a), (int64_t)ont_cast(s.in, ONT_INT64, b), c_style);
    }
}

ONT_DEVICE uint64_t bits_step(int which, uint64_t a, uint64_t b)
{
    switch (which) {
    case ONT_EW_BITS_AND: return a & b;
    case ONT_EW_BITS_OR: return a | b;
    case ONT_EW_BITS_XOR: return a ^ b;
    default: return ~a;
    }
}

ONT_DEVICE uint64_t shift_step(const ont_ew_step &s, uint64_t a, uint64_t b)
{
    const bool left = (int)s.p[0] == ONT_EW_BITS_LEFT;
    switch (s.in) {
#define X(dtype, type) \
    case dtype: return ont_bits<type>(vshift<type>(ont_value<type>(a), ont_value<type>(b), left));
        INTEGERS(X)
#undef X
    default: return a;
    }
}

template <class T> ONT_DEVICE uint64_t clipped(uint64_t v, uint64_t low, uint64_t high)
{
    T x = ont_value<T>(v), a = ont_value<T>(low), b = ont_value<T>(high);
    x = x < a ? a : x;
    return ont_bits<T>(x > b ? b : x);
}

ONT_DEVICE uint64_t clip_step(int dtype, uint64_t v, uint64_t low, uint64_t high)
{
    switch (dtype) {
    case ONT_FLOAT32: return clipped<float>(v, low, high);
    case ONT_FLOAT64: return clipped<double>(v, low, high);
    case ONT_INT32: return clipped<int32_t>(v, low, high);
    case ONT_UINT64: return clipped<uint64_t>(v, low, high);
    default: return clipped<int64_t>(v, low, high);
    }
}

ONT_DEVICE uint64_t run_step(const ont_ew &e, const ont_ew_step &s, int64_t i, const uint64_t *v)
{
    switch (s.kind) {
    case ONT_EW_UNARY: return unary_step(s, v[0]);
    case ONT_EW_BINARY:
        if (s.loop == ONT_LOOP_Div && !v[1] && s.in != ONT_FLOAT32 && s.in != ONT_FLOAT64)
            ont_report(e.fault, ONT_FAULT_ZERO_DIVISION, e.index, 0, i, 0);
        return binary_step(s, v[0], v[1]);
    case ONT_EW_WHERE: return v[0] ? v[1] : v[2];
    case ONT_EW_DROPOUT: {
        bool keep = ont_dropout_word(e.seed, s.stream, i) >= (uint32_t)s.p[0];
        if (s.in == ONT_FLOAT64) return ont_bits<double>(keep ? ont_value<double>(v[0]) * s.p[1] : 0.0);
        return ont_bits<float>(keep ? ont_value<float>(v[0]) * (float)s.p[1] : 0.0f);
    }
    case ONT_EW_MASK: return ont_dropout_word(e.seed, s.stream, i) >= (uint32_t)s.p[0];
    case ONT_EW_CAST: return s.in == s.out ? v[0] : ont_cast(s.in, s.out, v[0]);
    case ONT_EW_AND: return v[0] && v[1];
    case ONT_EW_OR: return v[0] || v[1];
    case ONT_EW_XOR: return !v[0] != !v[1];
    case ONT_EW_NOT: return !v[0];
    case ONT_EW_ISNAN: return ont_is_nan(s.in, v[0]);
    case ONT_EW_ISINF: return ont_is_inf(s.in, v[0], s.p[0] != 0, s.p[1] != 0);
    case ONT_EW_MOD:
        if (!v[1]) ont_report(e.fault, ONT_FAULT_ZERO_DIVISION, e.index, 0, i, 0);
        return mod_step(s, v[0], v[1]);
    case ONT_EW_BITS:
        return s.p[0] >= ONT_EW_BITS_LEFT ? shift_step(s, v[0], v[1]) : bits_step((int)s.p[0], v[0], v[1]);
    case ONT_EW_DIVIDE:
        if (s.in == ONT_FLOAT64) return ont_bits<double>(ont_value<double>(v[0]) / s.p[0]);
        return ont_bits<float>(ont_value<float>(v[0]) / (float)s.p[0]);
    default: return clip_step(s.in, v[0], v[1], v[2]);
    }
}

__global__ void __launch_bounds__(ONT_THREADS) elementwise_kernel(const ont_ew e, const wide_dims dims)
{
    uint64_t results[ONT_EW_STEPS];
    ONT_FOR(i, e.count) {
        int64_t index[ONT_EW_RANK];
        uint64_t rest = (uint64_t)i;
        for (int d = e.rank - 1; d > 0; d--) index[d] = split(&rest, dims.size[d]);
        index[0] = (int64_t)rest;
        for (int j = 0; j < e.n_steps; j++) {
            const ont_ew_step &s = e.steps[j];
            uint64_t v[3] = {0, 0, 0};
            for (int k = 0; k < s.n_operands; k++) {
                int from = s.operand[k];
                if (from >= e.n_operands) {
                    v[k] = results[from - e.n_operands];
                    continue;
                }
                int64_t at = 0;
                for (int d = 0; d < e.rank; d++) at += index[d] * e.strides[from][d];
                v[k] = ont_read_bits(e.in[from], at, e.size[from]);
            }
            results[j] = run_step(e, s, i, v);
        }
        for (int k = 0; k < e.n_results; k++)
            ont_write_bits(e.out[k], i, e.steps[e.result[k]].out, results[e.result[k]]);
    }
}

static_assert(sizeof(ont_ew) + sizeof(wide_dims) <= 4096, "arguments of a launch are at most 4 KiB");

extern "C" int ont_launch_elementwise(const ont_ew *e, void *stream)
{
    if (!e->count) return 0;
    return ONT_LAUNCH(elementwise_kernel, ont_blocks(e->count, ONT_THREADS), ONT_THREADS, 0, stream, *e,
                      wide_dims_of(e->dims, e->rank));
}
