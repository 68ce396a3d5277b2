/*
 * State of the kernels of StreamedCrossEntropy and its gradient. streamed_loss.c has the operators, the loops over
 * tiles and the kernels of float32 and float64; streamed_half.c what differs for bfloat16 operands.
 */
#ifndef ONT_OPS_STREAMED_LOSS_H
#define ONT_OPS_STREAMED_LOSS_H

#include "base/parallel.h"
#include "device/gemm.h"
#include "ops/loss/loss.h"

enum { ONT_STREAM_TO_SCORES, ONT_STREAM_TO_H, ONT_STREAM_TO_W, ONT_STREAM_PRODUCTS };

typedef struct ont_stream_state {
    int64_t width, chunk, block; /* width: columns of h; chunk and block: rows and classes of a tile */
    bool trans_w;                /* W is (classes, width) */
    ont_dtype operand;           /* of h, W and the row */
    ont_dtype dtype;             /* of loss, statistics and gradients: that of operands, or float32 for 16 bits */
    ont_dtype scores;            /* of a tile */
    size_t size;                 /* bytes of an element of `dtype` */
    ont_labels labels;
    const struct ont_stream_parts *parts;
    const ont_gemm_backend *backends[ONT_STREAM_PRODUCTS]; /* of float32 and float64 operands */
    struct ont_stream_half *half;                          /* products of 16-bit operands */
} ont_stream_state;

/* Loops over chunks of rows, and over the tiles of a chunk. */
typedef struct ont_stream_job {
    const ont_call *call;
    const ont_stream_state *s;
    int64_t first, last;  /* rows of the chunk: [first, last) */
    int64_t n, *at;       /* number of its rows without an ignored label, and their indices (n) */
    const void *rows;     /* (n, width): h of these rows; of 16-bit operands (chunk, width), where zeros follow */
    const void *w, *row;  /* row NULL: none is added */
    int64_t from, size;   /* classes of the tile: [from, from + size) */
    void *tile;           /* (n, size), or (chunk, size) as `rows`: scores, or their gradient */
    void *gathered;       /* (chunk, width): rows of h, where some labels are ignored or a chunk has fewer */
    void *part, *work;    /* of 16-bit operands: (chunk, width) of dh, and scratch of their products */
    ont_status status;    /* of these products */
    double *row_max, *score; /* (n): the largest score, and the score of the label */
    double *row_sum;      /* (n): sum of exp(score - row_max) */
    double norm;          /* number of labels that are not ignored */
    bool accumulates;     /* a chunk was written to dW and drow: later ones are added */
    const void *stats, *dloss; /* of the gradient: (rows, 2), and of each row or of all */
    void *dh, *dw, *drow; /* NULL: not needed */
} ont_stream_job;

/* What depends on the type of operands. A failure goes to the job's status. */
typedef struct ont_stream_parts {
    void (*gather)(ont_stream_job *j);       /* finds h of the chunk's rows without an ignored label */
    void (*scores)(ont_stream_job *j);       /* h W of the tile */
    void (*add_to_h)(ont_stream_job *j);     /* adds the tile's part of dh; row i of `at` is summed as row i for now */
    void (*add_to_w)(ont_stream_job *j);     /* adds the tile's part of dW */
    void (*spread)(const ont_stream_job *j); /* moves the chunk's rows of dh to their places; ignored ones are zeros */
    /*
     * Over rows or columns of a tile; the context is an ont_stream_job. sum_rows: adds to the statistics of rows.
     * grad_rows: the gradient of the scores, over the scores. early_rows: losses of whole rows, and the gradient of
     * their scores where the loss's own is 1, over the scores. sum_columns: adds to drow.
     */
    ont_range_fn sum_rows, grad_rows, early_rows, sum_columns;
} ont_stream_parts;

static inline int64_t ont_stream_label(const ont_stream_job *j, int64_t i)
{
    return ont_label_at(&j->s->labels, j->call->in[2], j->at[i]);
}

/* Elements between the stored rows of W and dW. */
static inline int64_t ont_stream_ld_of_w(const ont_stream_state *s)
{
    return s->trans_w ? s->width : s->labels.classes;
}

/* Offset of the tile's first class in W and dW. */
static inline int64_t ont_stream_in_w(const ont_stream_job *j)
{
    return j->s->trans_w ? j->from * j->s->width : j->from;
}

/* ---- streamed_half.c ---- */

/* NULL, or why bfloat16 operands of such products are not multiplied as they are. */
const char *ont_stream_half_refuses(const ont_stream_state *s);
/* Sets s->half, of a state whose tiles are divided; bias: a row is added to the scores. */
ont_status ont_stream_half_prepare(ont_stream_state *s, bool bias, ont_arena *arena) ONT_MUST_USE;
void ont_stream_half_release(ont_stream_state *s);
size_t ont_stream_half_work_bytes(const ont_stream_state *s);
extern const ont_stream_parts ont_stream_half_parts;

#endif
