/*
 * The order in which a sum adds its elements up. It follows from the sum's shape alone, so the same elements give the
 * same bits alone (reduce.c), in a group whatever else that computes (fused_reduce.c), and with any number of threads.
 *
 * A row, or all of a tensor, is cut into blocks from its start: each is summed by the loops of simd/, and the blocks in
 * double, in order. Columns are summed unit by unit of some rows: in a unit row by row from 0, then the units in order,
 * in float32 (float64 in float64).
 */
#ifndef ONT_OPS_SUMS_H
#define ONT_OPS_SUMS_H

#include "ops/reduce.h"

enum { ONT_SUM_BLOCK = 512 }; /* elements */

/* Of at most a block of float32: the sum, also for a mean, the sum of squares or the largest. Of float64: the sum. */
double ont_sum_block(const ont_simd_table *simd, ont_reduce_kind kind, ont_dtype dtype, const void *x, int64_t n);
/* What blocks gave so far, and one more. */
double ont_sum_join(ont_reduce_kind kind, bool started, double sum, double more);

/* Rows of a unit of columns (n, tail). */
int64_t ont_sum_unit(int64_t n, int64_t tail);
/* sums += rows of n elements, `stride` apart: float32 sums of float32 and 16-bit floats, float64 of float64. */
void ont_sum_rows(const ont_simd_table *simd, ont_dtype dtype, void *sums, const void *x, int64_t rows, int64_t stride,
                  int64_t n);
/* Such sums of n columns of `rows` rows, or their means, as dtype. Overwrites the sums. */
void ont_sum_put(const ont_simd_table *simd, ont_reduce_kind kind, ont_dtype dtype, void *sums, int64_t rows, void *out,
                 int64_t n);

#endif
