/*
 * Inner loops over contiguous memory: a table for each instruction set, chosen once at run time.
 *
 * Kernels call through ont_simd(); reference kernels call ont_simd_plain(), whose loops use libm and the baseline
 * instruction set. In all loops `out` may equal an operand with stride 1, partial overlap is not allowed, n >= 0, and
 * memory needs no alignment. Accuracy of the vector math (float32): exp 1 ulp, tanh 2 ulp, erf 2 ulp of 1.0, the normal
 * distribution (Gelu) 5e-8; lgamma, digamma, trigamma 0.6 ulp; sin, cos, exp2 1 ulp, asin, acos, atanh, expm1, log1p,
 * erfinv, pow 2 ulp, tan, atan, atan2 2.7 ulp, erfc 6 ulp.
 */
#ifndef ONT_SIMD_SIMD_H
#define ONT_SIMD_SIMD_H

#include "base/dtype.h"

/* For operands far from zero, float32's vector math leaves the argument reduction to libm. */
#define ONT_CIRCULAR_LIST(X) \
    X(Sin, vsin(a)) \
    X(Cos, vcos(a)) \
    X(Tan, vtan(a))

/* Name and expression: `a` is the operand, p0 and p1 are parameters; for float32 (vector math) and float64 (libm). */
#define ONT_UNARY_DIRECT_LIST(X) \
    X(Sqrt, vsqrt(a)) \
    X(Reciprocal, 1 / a) \
    X(Exp, vexp(a)) \
    X(Log, vlog(a)) \
    X(Exp2, vexp2(a)) \
    X(Expm1, vexpm1(a)) \
    X(Log1p, vlog1p(a)) \
    X(Erf, verf(a)) \
    X(Erfc, verfc(a)) \
    X(Tanh, vtanh(a)) \
    X(Sigmoid, vsigmoid(a)) \
    X(LeakyRelu, a < 0 ? P0 * a : a) \
    X(Elu, a < 0 ? P0 * vexpm1(a) : a) \
    X(Selu, P1 * (a < 0 ? P0 * vexpm1(a) : a)) \
    X(Softplus, vmax(a, 0) + vlog1p(vexp(-vabs(a)))) /* with vexp_low GCC does not vectorise the loop */ \
    X(Softsign, a / (1 + vabs(a))) \
    X(HardSigmoid, vmax(0, vmin(1, P0 * a + P1))) \
    X(HardSwish, a * vmax(0, vmin(1, a * SIXTH + HALF))) \
    X(Mish, a > 20 ? a : a * tanh_softplus(vexp_low(vmin(a, 20)))) \
    X(Swish, a * vsigmoid(P0 * a)) \
    X(GeluErf, a * vnormal(a)) \
    X(GeluTanh, a * vsigmoid(GELU_W(a))) \
    X(Asin, vasin(a)) \
    X(Acos, vacos(a)) \
    X(Atan, vatan(a)) \
    X(Sinh, vsinh(a)) \
    X(Cosh, vcosh(a)) \
    X(Asinh, vasinh(a)) \
    X(Acosh, vacosh(a)) \
    X(Atanh, vatanh(a)) \
    X(Lgamma, vlgamma(a)) \
    X(Digamma, vdigamma(a)) \
    X(Trigamma, vtrigamma(a)) \
    X(Erfinv, verfinv(a)) \
    X(Logit, vlog(a / (1 - a))) \
    X(Floor, vfloor(a)) \
    X(Ceil, vceil(a)) \
    X(Round, vround(a))
#define ONT_UNARY_FLOAT_LIST(X) ONT_UNARY_DIRECT_LIST(X) ONT_CIRCULAR_LIST(X)

/* For float32, float64 and every integer type. */
#define ONT_UNARY_NUMBER_LIST(X) \
    X(Relu, a < 0 ? 0 : a) \
    X(Neg, -a) \
    X(Abs, a <= 0 ? 0 - a : a) \
    X(Sign, (a > 0) - (a < 0))

/* For some operands, float32's vector math leaves the result to libm. Remainders are exact, with the sign of a or b. */
#define ONT_BINARY_FAR_LIST(X) \
    X(Pow, vpow(a, b)) \
    X(Fmod, vfmod(a, b)) \
    X(Remainder, vremainder(a, b))

/* For float32 and float64; the second operand of a gradient is dy. */
#define ONT_BINARY_DIRECT_LIST(X) \
    X(Atan2, vatan2(a, b)) \
    X(PRelu, a > 0 ? a : a * b) \
    X(ReluGrad, a <= 0 ? 0 : b) \
    X(SigmoidGrad, b * a * (1 - a)) \
    X(TanhGrad, b * (1 - a * a)) \
    X(LogitGrad, b / (a < 0 || a > 1 ? vsqrt(-(NUM)1) : a * (1 - a))) \
    X(ErfGrad, b * TWO_INV_SQRT_PI * vexp(-a * a)) \
    X(GeluErfGrad, b * (vnormal(a) + a * INV_SQRT_2PI * vexp_low(-HALF * a * a))) \
    X(GeluTanhGrad, b * gelu_tanh_slope(a)) \
    X(LeakyReluGrad, a > 0 ? b : P0 * b) \
    X(EluGrad, a <= 0 ? b * P0 * vexp(a) : b) \
    X(SeluGrad, b * P1 * (a <= 0 ? P0 * vexp(a) : 1)) \
    X(SoftplusGrad, b * vsigmoid(a)) \
    X(HardSigmoidGrad, a > -P1 / P0 && a < (1 - P1) / P0 ? P0 * b : 0) \
    X(HardSwishGrad, a <= -3 ? 0 : a < 3 ? b * (a * THIRD + HALF) : b) \
    X(AbsGrad, b * (NUM)((a > 0) - (a < 0)))
#define ONT_BINARY_FLOAT_LIST(X) ONT_BINARY_DIRECT_LIST(X) ONT_BINARY_FAR_LIST(X)

/* For float32, float64 and every integer type. */
#define ONT_BINARY_NUMBER_LIST(X) \
    X(Add, a + b) \
    X(Sub, a - b) \
    X(Mul, a * b) \
    X(Div, vdiv(a, b)) \
    X(Min, vminimum(a, b)) \
    X(Max, vmaximum(a, b))

/* For the same operands and bool, with bool results. */
#define ONT_COMPARE_LIST(X) \
    X(Equal, a == b) \
    X(Greater, a > b) \
    X(Less, a < b) \
    X(GreaterOrEqual, a >= b) \
    X(LessOrEqual, a <= b)

typedef enum ont_loop {
    ONT_LOOP_NONE,
#define X(name, expression) ONT_LOOP_##name,
    ONT_UNARY_FLOAT_LIST(X) ONT_UNARY_NUMBER_LIST(X) ONT_BINARY_FLOAT_LIST(X) ONT_BINARY_NUMBER_LIST(X)
        ONT_COMPARE_LIST(X)
#undef X
            ONT_LOOP_COUNT
} ont_loop;

/* a, b: n elements, or one element (stride 0). `p` are the operator's parameters. */
typedef void (*ont_unary_loop)(const void *a, void *out, int64_t n, const double *p);
typedef void (*ont_binary_loop)(const void *a, int64_t stride_a, const void *b, int64_t stride_b, void *out, int64_t n,
                                const double *p);

/* Of all rows of a layer norm; scale and bias may be NULL. */
typedef struct ont_layernorm_params {
    const float *scale, *bias;
    float eps;
    int64_t n;
} ont_layernorm_params;

/* scale may be NULL, and so may the sums dscale and dbias. */
typedef struct ont_layernorm_grad_params {
    const float *scale;
    float *dscale, *dbias;
    int64_t n;
} ont_layernorm_grad_params;

/* An element is kept, and multiplied by `scale`, where its word of the Philox stream is at least `threshold`. */
typedef struct ont_dropout_params {
    uint64_t key, stream;
    uint32_t threshold;
    float scale;
} ont_dropout_params;

typedef struct ont_simd_table {
    const char *isa;
    ont_unary_loop unary[ONT_LOOP_COUNT][ONT_DTYPE_COUNT]; /* NULL: not for that dtype */
    ont_binary_loop binary[ONT_LOOP_COUNT][ONT_DTYPE_COUNT];

    /* out = condition ? x : y, for elements of `size` bytes; strides of condition, x and y, in elements. `out` may
     * equal x or y if its stride is 1. */
    void (*where)(size_t size, const uint8_t *condition, const void *x, const void *y, const int64_t strides[3],
                  void *out, int64_t n);
    /* the smallest and the largest of n indices of int64, or of int32; INT64_MAX and INT64_MIN for none */
    void (*index_bounds)(const void *indices, bool wide, int64_t n, int64_t *lowest, int64_t *highest);
    /* 16-bit floats to float32 and back, rounded to nearest even */
    void (*half_to_float)(const void *x, float *y, int64_t n);
    void (*float_to_half)(const float *x, void *y, int64_t n);
    void (*bfloat_to_float)(const void *x, float *y, int64_t n);
    void (*float_to_bfloat)(const float *x, void *y, int64_t n);
    /* out (2 n) = what n bytes of two 4-bit numbers count of 16 levels; the high half is the earlier number */
    void (*decode_nibbles)(const uint8_t *codes, const uint16_t *levels, uint16_t *out, int64_t n);
    /* acc (n) += each of `rows` rows of bfloat16, in order; `stride`: elements from row to row */
    void (*add_bfloat_rows)(float *acc, const void *x, int64_t rows, int64_t stride, int64_t n);

    /* float32 rows */
    float (*sum)(const float *x, int64_t n);
    float (*dot)(const float *x, const float *y, int64_t n);
    float (*max)(const float *x, int64_t n);              /* n >= 1; NaN where there is a NaN */
    void (*add_to)(float *acc, const float *x, int64_t n); /* acc += x */
    /* y[i] += sum over k of w[k] * x[i + at[k]] */
    void (*add_taps)(float *y, const float *x, const float *w, const int64_t *at, int64_t taps, int64_t n);
    void (*softmax)(const float *x, float *y, int64_t n);
    void (*log_softmax)(const float *x, float *y, int64_t n);
    /* the largest element, and log(sum(exp(x - largest))); n >= 1 */
    void (*log_sum_exp)(const float *x, int64_t n, float *row_max, float *log_sum);
    /* y = scale * exp(x - row_max - log_sum) */
    void (*scaled_softmax)(const float *x, float row_max, float log_sum, float scale, float *y, int64_t n);
    void (*softmax_grad)(const float *y, const float *dy, float *dx, int64_t n);
    void (*log_softmax_grad)(const float *y, const float *dy, float *dx, int64_t n);
    /* y = (x - mean) * inv_std * scale + bias; mean and inv_std may be NULL */
    void (*layernorm)(const ont_layernorm_params *norm, const float *x, float *y, float *mean, float *inv_std);
    /* dx of one row, which may be NULL; adds to dscale and dbias */
    void (*layernorm_grad)(const ont_layernorm_grad_params *norm, const float *x, float mean, float inv_std,
                           const float *dy, float *dx);
    /* mask[i]: whether element first + i is kept; y[i] = mask[i] ? x[i] * scale : 0; y and x, or mask, may be NULL */
    void (*dropout)(const ont_dropout_params *dropout, const float *x, float *y, uint8_t *mask, int64_t first,
                    int64_t n);
    /*
     * y = x * c + (-b, a) * s for a row x = (a, b) of two halves; with `back`, y = x * c + (q, -p) where (p, q) = x *
     * s. y may equal x.
     */
    void (*rotate)(const float *x, const float *c, const float *s, float *y, int64_t half, bool back);
    void (*rotate_wide)(const double *x, const double *c, const double *s, double *y, int64_t half, bool back);
} ont_simd_table;

const ont_simd_table *ont_simd(void);       /* the best for this processor, or the one that ONNXTRAIN_ISA names */
const ont_simd_table *ont_simd_plain(void);

#endif
