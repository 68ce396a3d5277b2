/*
 * Inner loops of the optimizers over contiguous memory: update rules, sums of squares, conversions. One table per
 * instruction set, the same choice as simd.h. csrc/optim calls them a piece at a time, from several threads; nothing
 * here knows about tensors, groups or threads. No alignment is asked for; operands of one call do not overlap, except
 * that param and grad may be the same memory.
 */
#ifndef ONT_SIMD_OPTIM_H
#define ONT_SIMD_OPTIM_H

#include "base/dtype.h"

/* storage that a loop can work on in place; others are converted to float (double, for double parameters) first */
#define ONT_STORAGE_LIST(X) X(F32, FLOAT32) X(F64, FLOAT64) X(BF16, BFLOAT16) X(F16, FLOAT16)

typedef enum ont_storage {
#define X(name, dtype) ONT_STORAGE_##name,
    ONT_STORAGE_LIST(X)
#undef X
    ONT_STORAGE_COUNT
} ont_storage;

/* name, function; LAMB needs two passes, of which the second knows the trust ratio; SCALE is no optimizer's rule */
#define ONT_RULE_LIST(X) \
    X(ADAM, adam) \
    X(LAMB, lamb) \
    X(LAMB_APPLY, lamb_apply) \
    X(SGD, sgd) \
    X(ADAGRAD, adagrad) \
    X(LION, lion) \
    X(SCALE, scale)

typedef enum ont_rule {
#define X(name, function) ONT_RULE_##name,
    ONT_RULE_LIST(X)
#undef X
    ONT_RULE_COUNT
} ont_rule;

enum { ONT_RULE_STATES = 3 }; /* the most that a rule keeps per parameter */

enum { ONT_UPDATE_AMSGRAD = 1, ONT_UPDATE_MOMENTUM = 2, ONT_UPDATE_NESTEROV = 4 };

/*
 * What one tensor's update needs, computed once per group and step count; csrc/optim/rules.c fills it and states the
 * formulas. Loops round these to their own precision.
 */
typedef struct ont_update {
    double grad;                     /* g = gradient * grad: sign, unscaling and clipping in one */
    double l2;                       /* g += l2 * p */
    double keep_before, keep_after;  /* p *= keep before, after the step */
    double rate;                     /* learning rate, bias corrected */
    double beta1, beta2, eps;
    double one_minus_beta1, one_minus_beta2;
    double decay, correct;           /* LAMB: u = correct * m / (sqrt(v) + eps) + decay * p */
    double ratio_min, ratio_max;     /* LAMB: limits of the trust ratio, which its caller applies */
    uint32_t flags;
} ont_update;

/* sums: LAMB adds sum(p * p) and sum(u * u), SCALE NaN where grad is not finite, others leave it alone. */
typedef void (*ont_update_loop)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state,
                                double *sums);

enum { ONT_QUANT_BLOCK = 256 }; /* elements that share one scale in 8-bit state */

typedef struct ont_optim_table {
    ont_update_loop update[ONT_RULE_COUNT][ONT_STORAGE_COUNT]; /* NULL for F16 */
    double (*sum_squares[ONT_STORAGE_COUNT])(const void *x, int64_t n); /* NULL for F16 */
    /* to float [0] or double [1]; `stride` in elements */
    void (*load[ONT_STORAGE_COUNT][2])(const void *from, int64_t stride, void *to, int64_t n);
    /* from float or double, rounded to nearest even */
    void (*store[ONT_STORAGE_COUNT][2])(const void *from, void *to, int64_t stride, int64_t n);
    /*
     * float to bfloat16 or float16, rounded up or down with the probability that makes the mean exact: 16 bits of a
     * Philox stream decide, element `first + i` of stream `stream` under `key`.
     */
    void (*store_stochastic[ONT_STORAGE_COUNT])(const float *from, void *to, int64_t stride, int64_t n, int64_t first,
                                                uint64_t key, uint64_t stream);
    /*
     * 8-bit state, blocks of ONT_QUANT_BLOCK that share a scale (the largest magnitude of the block):
     * signed: x = scale * sign(q) (q / 127)^2; unsigned: x = scale * (q / 255)^4, a nonzero x never becomes 0.
     */
    void (*load_signed)(const int8_t *q, const float *scale, float *to, int64_t n);
    void (*store_signed)(const float *from, int8_t *q, float *scale, int64_t n);
    void (*load_unsigned)(const uint8_t *q, const float *scale, float *to, int64_t n);
    void (*store_unsigned)(const float *from, uint8_t *q, float *scale, int64_t n);
} ont_optim_table;

const ont_optim_table *ont_optim_loops(void); /* of the instruction set that ont_simd() has */

#endif
