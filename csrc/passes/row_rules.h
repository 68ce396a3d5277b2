/*
 * Which rows of its inputs a node reads for some rows of its result. Rows are the entries of a value's leading dims,
 * flattened; the rule of an operator is a field of its descriptor (ont_row_rule in ops/op.h).
 */
#ifndef ONT_PASSES_ROW_RULES_H
#define ONT_PASSES_ROW_RULES_H

#include "ops/op.h"

/* How an input is read: whole, by rows, or by an entry for each row (a row dim is broadcast). */
typedef enum ont_row_reads { ONT_READS_WHOLE, ONT_READS_ROWS, ONT_READS_BROADCAST } ont_row_reads;

/* The number of leading dims that make n rows; -1: there are none. */
int ont_rows_leading(const ont_shape *shape, int64_t n);
/* The shape of `rows` of the n rows: (rows, 1, ..., 1, rest). */
ont_shape ont_rows_packed_shape(const ont_shape *shape, int64_t n, int64_t rows);
/* Fills read[n_inputs] for n rows of `out`, an output of the node; false if they cannot be computed alone. */
bool ont_rows_apply_rule(const ont_node *node, const ont_value *out, int64_t n, ont_row_reads *read);
/* Whether the node selects rows of input 0. Sets *n to the rows of input 0, *m to the selected ones. */
bool ont_rows_is_selection(const ont_node *node, int64_t *n, int64_t *m);
/* The dims of the node's input 0 that are the n rows of the selection. */
ont_shape ont_rows_of_selection(const ont_node *node, int64_t n);

#endif
