/*
 * Iteration over operands that broadcast to one output. Adjacent dims are merged where all operands allow it, so that
 * most calls become one long row; rows are divided among threads.
 */
#ifndef ONT_OPS_BROADCAST_H
#define ONT_OPS_BROADCAST_H

#include "ops/op.h"

enum { ONT_BCAST_MAX = 16 }; /* operands, the output included */

typedef struct ont_bcast {
    int n;                  /* operands; operand 0 is the output */
    int rank;               /* merged outer dims */
    int64_t dims[ONT_MAX_RANK];
    int64_t strides[ONT_BCAST_MAX][ONT_MAX_RANK]; /* bytes */
    int64_t inner;          /* elements of a row */
    int64_t inner_stride[ONT_BCAST_MAX]; /* elements: 0 or 1 */
    int64_t step[ONT_BCAST_MAX];         /* inner stride in bytes */
    int64_t size[ONT_BCAST_MAX];         /* of an element, in bytes */
    bool dense[ONT_BCAST_MAX];           /* contiguous, in the order of the output */
    int64_t count;          /* output elements */
} ont_bcast;

/* Operands are out(0) and the node's first `n_in` inputs. */
void ont_bcast_init(ont_bcast *b, const ont_node *node, int n_in);

/* The same over any shape: operand 0 has stride 0. */
void ont_bcast_init_over(ont_bcast *b, const ont_node *node, int n_in, const ont_shape *shape);

/* Called for each row: one pointer per operand, n elements. */
typedef void (*ont_bcast_row)(const void *context, const ont_bcast *b, char *const *at, int64_t n);
/* Elements [first, last) on the calling thread, in order. */
void ont_bcast_range(const ont_bcast *b, char *const *base, ont_bcast_row row, const void *context, int64_t first,
                     int64_t last);
void ont_bcast_run(const ont_bcast *b, char *const *base, ont_bcast_row row, const void *context);

#endif
