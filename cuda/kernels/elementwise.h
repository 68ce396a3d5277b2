/*
 * An elementwise program as a kernel argument by value: the steps of tile_program.h, with operands that broadcast to
 * the result. C and C++.
 */
#ifndef ONT_CUDA_EW_H
#define ONT_CUDA_EW_H

#include "device/device.h"

enum { ONT_EW_RANK = 12, ONT_EW_OPERANDS = 14, ONT_EW_RESULTS = 6, ONT_EW_STEPS = 32 };

typedef enum ont_ew_kind { /* the first five equal ont_tile_kind */
    ONT_EW_UNARY,
    ONT_EW_BINARY,
    ONT_EW_WHERE,
    ONT_EW_DROPOUT,
    ONT_EW_CAST,
    ONT_EW_AND,
    ONT_EW_OR,
    ONT_EW_XOR,
    ONT_EW_NOT,
    ONT_EW_ISNAN,
    ONT_EW_CLIP, /* value, low, high */
    ONT_EW_MASK, /* the mask of Dropout, as bool */
    ONT_EW_ISINF, /* p: whether -inf counts, whether inf counts */
    ONT_EW_MOD, /* integers; p[0]: 1 if the result has the sign of the dividend, 0: of the divisor */
    ONT_EW_BITS, /* integers; p[0]: ont_ew_bits */
    ONT_EW_DIVIDE, /* float32 and float64, by p[0] */
} ont_ew_kind;

typedef enum ont_ew_bits {
    ONT_EW_BITS_AND,
    ONT_EW_BITS_OR,
    ONT_EW_BITS_XOR,
    ONT_EW_BITS_NOT,
    ONT_EW_BITS_LEFT,
    ONT_EW_BITS_RIGHT, /* keeps the sign */
} ont_ew_bits;

typedef struct ont_ew_step {
    int16_t kind, loop, in, out;
    int16_t operand[3],
        n_operands; /* below n_operands of the program: an operand; from there on: the result of a step */
    double p[2];
    uint64_t stream;
} ont_ew_step;

typedef struct ont_ew {
    int32_t n_operands, n_steps, n_results, rank;
    int64_t count;
    int64_t dims[ONT_EW_RANK];
    int64_t strides[ONT_EW_OPERANDS][ONT_EW_RANK]; /* elements */
    const void *in[ONT_EW_OPERANDS];
    void *out[ONT_EW_RESULTS];
    int16_t size[ONT_EW_OPERANDS];  /* bytes of an element of each operand */
    int16_t result[ONT_EW_RESULTS]; /* by result: the step that gives it */
    const uint64_t *seed; /* three words, see ont_dropout_word() */
    ont_fault *fault;
    int32_t index; /* number of the step in its program, for faults */
    ont_ew_step steps[ONT_EW_STEPS];
} ont_ew;

#endif
