/*
 * The geometry of a reduction, for all its kernels: which dims are reduced and which kept; adjacent dims of the same
 * kind are merged.
 */
#ifndef ONT_OPS_REDUCE_H
#define ONT_OPS_REDUCE_H

#include "ops/op.h"
#include "simd/simd.h"

typedef enum ont_reduce_kind {
    ONT_REDUCE_SUM,
    ONT_REDUCE_MEAN,
    ONT_REDUCE_MAX,
    ONT_REDUCE_MIN,
    ONT_REDUCE_PROD,
    ONT_REDUCE_L1,
    ONT_REDUCE_L2,
    ONT_REDUCE_SUM_SQUARE,
    ONT_REDUCE_LOG_SUM,
    ONT_REDUCE_LOG_SUM_EXP,
} ont_reduce_kind;

typedef struct ont_reduce {
    ont_reduce_kind kind;
    int n_kept, n_reduced;
    int64_t kept[ONT_MAX_RANK], kept_stride[ONT_MAX_RANK];
    int64_t reduced[ONT_MAX_RANK], reduced_stride[ONT_MAX_RANK];
    int64_t outputs, each; /* results, and elements reduced to each */
    int64_t lead, n, tail; /* if one run of dims is reduced: (lead, n, tail) -> (lead, tail); otherwise n is -1 */
    const ont_simd_table *simd;
} ont_reduce;

/* reduce_desc.c */
ont_reduce_kind ont_reduce_kind_of(const ont_node *node);
/* reduce[d]: whether dim d is reduced. Axes are an input or an attribute; without any, all are, or none with
 * noop_with_empty_axes. */
ont_status ont_reduce_axes(const ont_node *node, const ont_shape *x, bool *reduce) ONT_MUST_USE;
/* The same where x is summed to the shape `to`, of SumTo. */
ont_status ont_reduce_sum_to_axes(const ont_shape *x, const ont_shape *to, bool *reduce) ONT_MUST_USE;
ont_status ont_reduce_read(const ont_node *node, ont_reduce *s) ONT_MUST_USE;

/* reduce_rows.c */
const char *ont_reduce_rows_accept(const ont_node *node);
ont_status ont_reduce_rows_run(const ont_call *call);

/* reduce_run.c */
const char *ont_reduce_run_accept(const ont_node *node);
ont_status ont_reduce_run_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out) ONT_MUST_USE;
ont_status ont_reduce_run_run(const ont_call *call);

#endif
