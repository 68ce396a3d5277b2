/*
 * The order of summation. It depends only on the sum's shape. So a sum is bitwise the same whether it is computed alone
 * (reduce.c) or in a fused group (fused_reduce.c), and with any number of threads.
 *
 * A row, or a whole tensor, is divided into blocks: each is summed by the loops of simd/, and the blocks in float64, in
 * order. Columns are divided into units of several rows: a unit is summed row by row, then the units in order, in
 * float32 (float64 for float64).
 */
#ifndef ONT_OPS_SUMS_H
#define ONT_OPS_SUMS_H

#include "ops/reduce/reduce.h"

enum { ONT_SUM_BLOCK = 512 }; /* elements */

/* Of at most one block. float32: the sum (also for a mean), sum of squares or maximum. float64: the sum. */
double ont_sum_block(const ont_simd_table *simd, ont_reduce_kind kind, ont_dtype dtype, const void *x, int64_t n);
/* Combines the result of the blocks so far with that of one more. */
double ont_sum_join(ont_reduce_kind kind, bool started, double sum, double more);

/* Rows of a unit of columns (n, tail). */
int64_t ont_sum_unit(int64_t n, int64_t tail);
/* sums += rows of n elements, `stride` apart: float32 sums of float32 and 16-bit floats, float64 of float64. */
void ont_sum_rows(const ont_simd_table *simd, ont_dtype dtype, void *sums, const void *x, int64_t rows, int64_t stride,
                  int64_t n);
/* Writes the sums of n columns over `rows` rows, or their means, as dtype. Overwrites the sums. */
void ont_sum_put(const ont_simd_table *simd, ont_reduce_kind kind, ont_dtype dtype, void *sums, int64_t rows, void *out,
                 int64_t n);

#endif
