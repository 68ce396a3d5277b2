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

/* Lowers *verdict by the difference of two tensors of `rows` rows of n elements; float32 are statistics. */
static inline ont_status ont_compare_rows(const ont_call *call, int dtype, const void *got, const void *want,
                                          int64_t rows, int64_t n, ont_verdict *verdict)
{
    double tolerance = dtype == ONT_FLOAT32 ? 1e-3 : dtype == ONT_FLOAT16 ? 0.01 : 0.05;
    size_t bytes = (size_t)rows * 2 * sizeof(float);
    ont_memory device = {0};
    float *host = ont_malloc(bytes);
    ont_status status = host ? call->device->ops->alloc(call->device, bytes, ONT_UINT8, &device) : ONT_ENOMEM;
    if (status == ONT_OK)
        status = ont_launched(ont_launch_row_differences(dtype, got, want, device.data, rows, n, call->stream));
    if (status == ONT_OK) status = call->device->ops->read(call->device, host, device.data, bytes, call->stream);
    if (status == ONT_OK) {
        ont_verdict found = ont_judge_rows(host, rows, tolerance);
        if (*verdict != ONT_VERDICT_REFUSED && found != ONT_VERDICT_ACCEPTED) *verdict = found;
    }
    if (device.data) call->device->ops->free(call->device, &device, bytes);
    ont_free(host);
    return status;
}

#endif
