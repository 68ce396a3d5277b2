/*
 * Sets of rows of a tensor, for the operators in rows.c, which passes/pack_rows.c builds.
 *
 * A row is an entry of the leading dims, which are flattened to n rows. A set of rows is a vector of n bools (marks),
 * or the pair (rows, inverse) of SelectRows: rows (r) are the numbers of the marked rows, ascending, and inverse (n) is
 * the place of each row among them, -1 where it is not marked. r is rounded up: the spare entries of `rows` repeat the
 * first one, and no entry of `inverse` refers to them. No node reads a spare row's results, so its gradient is zero.
 */
#ifndef ONT_OPS_INDEX_ROWS_H
#define ONT_OPS_INDEX_ROWS_H

#include "ops/op.h"

enum { ONT_ROW_BUCKETS = 64 };
/* The number of rows of a program for `count` of `n` rows: a multiple of 1/64 of n, and n from nine tenths on. */
int64_t ont_rows_bucket(int64_t count, int64_t n);

#endif
