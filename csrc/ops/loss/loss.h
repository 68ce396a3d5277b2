/*
 * Shared by the operators with labels: reduction, and the check of labels before anything is computed.
 */
#ifndef ONT_OPS_LOSS_H
#define ONT_OPS_LOSS_H

#include "ops/op.h"

typedef enum ont_reduction { ONT_REDUCE_NONE, ONT_REDUCE_SUM, ONT_REDUCE_MEAN } ont_reduction;

typedef struct ont_labels {
    int64_t count, classes;
    bool wide, ignores; /* wide: labels are int64, else int32; ignores: whether rows with label `ignored` do not
                         * count */
    int64_t ignored;
    ont_reduction reduction;
} ont_labels;

/* Reads the attributes of a loss or of its gradient. */
ont_status ont_labels_read(const ont_node *node, const ont_value *labels, int64_t classes, ont_labels *l) ONT_MUST_USE;
/* ONT_EINDEX names the first label that is out of range, and its position. */
ont_status ont_labels_check(const ont_labels *l, const ont_value *value, const void *labels) ONT_MUST_USE;

/* n scores of a row, float32 or 16 bits. */
typedef struct ont_score_row {
    const void *x;
    ont_dtype dtype;
    int64_t n;
} ont_score_row;

/* Adds scores to a row's largest score and its sum of exp(score - largest): -INFINITY and 0 before the first. */
void ont_scores_add(const ont_score_row *row, double *row_max, double *sum);
/*
 * dx (n) = scale * (softmax - [class is `label`]), rounded once to the 16-bit dtype `to`. stats (2): the largest score
 * and the logarithm of the sum. dx may begin where the scores do.
 */
void ont_scores_grad(const ont_score_row *row, const float *stats, float scale, int64_t label, ont_dtype to,
                     uint16_t *dx);

static inline int64_t ont_label_at(const ont_labels *l, const void *labels, int64_t i)
{
    return l->wide ? ((const int64_t *)labels)[i] : ((const int32_t *)labels)[i];
}

static inline bool ont_label_counts(const ont_labels *l, int64_t label)
{
    return !l->ignores || label != l->ignored;
}

#endif
