/*
 * What attention by cuDNN needs beside it: row statistics in its form, and rows compared with those of the own kernels.
 */
#ifndef ONT_CUDA_SDPA_KERNELS_H
#define ONT_CUDA_SDPA_KERNELS_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* stats (n, 2): row_max, row_sum; lse (n): row_max + log(row_sum). */
int ont_launch_stats_to_lse(const float *stats, float *lse, int64_t n, void *stream);
/* As (lse, 1), which has the same probabilities. */
int ont_launch_lse_to_stats(const float *lse, float *stats, int64_t n, void *stream);
/* differences (rows, 2): sum of (got - want)^2 and of want^2 over each row of n elements. */
int ont_launch_row_differences(int dtype, const void *got, const void *want, float *differences, int64_t rows,
                               int64_t n, void *stream);

#ifdef __cplusplus
}
#endif
#endif
