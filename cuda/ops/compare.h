/*
 * Results of cuDNN compared with those of the own kernels, row by row, for attention.c and conv.c.
 */
#ifndef ONT_CUDA_COMPARE_H
#define ONT_CUDA_COMPARE_H

#include <math.h>

#include "kernels/sdpa.h"
#include "libs/verdict.h"
#include "ops_common.h"

/*
 * A row of n elements differs where the norm of its difference is above the tolerance times its norm, or, for rows
 * that nearly cancel, times a sixteenth of the mean row's norm. Nothing follows from numbers that are not finite in the
 * own results, or are all 0: then the next call compares.
 */
static inline ont_verdict ont_judge_rows(const float *differences, int64_t rows, double tolerance)
{
    double mean = 0;
    for (int64_t i = 0; i < rows; i++) mean += (double)differences[2 * i + 1] / (double)rows;
    if (!isfinite(mean) || mean <= 0) return ONT_VERDICT_UNKNOWN;
    for (int64_t i = 0; i < rows; i++) {
        double limit = (double)differences[2 * i + 1] + mean / 256;
        if (!((double)differences[2 * i] <= tolerance * tolerance * limit)) return ONT_VERDICT_REFUSED;
    }
    return ONT_VERDICT_ACCEPTED;
}

/* Of results whose operands are rounded to the dtype; those in float32 to TF32, which has as many digits as float16. */
static inline double ont_tolerance_of(int dtype)
{
    return dtype == ONT_BFLOAT16 ? 0.05 : 0.01;
}

typedef struct ont_compared { /* two tensors of `rows` rows of n elements */
    int dtype;
    double tolerance;
    const void *got, *want;
    int64_t rows, n;
} ont_compared;

/* Lowers *verdict by the difference of the two. */
static inline ont_status ont_compare_rows(const ont_call *call, const ont_compared *c, ont_verdict *verdict)
{
    size_t bytes = (size_t)c->rows * 2 * sizeof(float);
    ont_memory device = {0};
    float *host = ont_malloc(bytes);
    ont_status status = host ? call->device->ops->alloc(call->device, bytes, ONT_UINT8, &device) : ONT_ENOMEM;
    if (status == ONT_OK)
        status = ont_launched(ont_launch_row_differences(c->dtype, c->got, c->want, device.data, c->rows, c->n,
                                                         call->stream));
    if (status == ONT_OK) status = call->device->ops->read(call->device, host, device.data, bytes, call->stream);
    if (status == ONT_OK) {
        ont_verdict found = ont_judge_rows(host, c->rows, c->tolerance);
        if (*verdict != ONT_VERDICT_REFUSED && found != ONT_VERDICT_ACCEPTED) *verdict = found;
    }
    if (device.data) call->device->ops->free(call->device, &device, bytes);
    ont_free(host);
    return status;
}

#endif
