/*
 * One step of a recurrent cell for one sequence, and its gradient, compiled once per instruction set.
 * ops/recurrent/recurrent_steps.c calls them: it computes q = R h by one product for all sequences first.
 *
 *   RNN    h' = tanh or relu (x + q)                                          saved: h', h
 *   GRU    z, r = sigmoid(x + q), a = q_n + bias, n = tanh(x_n + r a),        saved: z, r, n, a, h
 *          h' = (1 - z) n + z h
 *   LSTM   i, o, f = sigmoid(x + q), g = tanh(x + q), c' = f c + i g,         saved: i, o, f, g, c, tanh(c'), h
 *          h' = o tanh(c')
 *
 * Gates are in the order of ONNX. Each of the names above is a run of `hidden` numbers.
 */
#ifndef ONT_SIMD_RECURRENT_H
#define ONT_SIMD_RECURRENT_H

#include "base/dtype.h"

typedef enum ont_cell { ONT_CELL_TANH, ONT_CELL_RELU, ONT_CELL_GRU, ONT_CELL_LSTM, ONT_CELLS } ont_cell;

typedef struct ont_cell_row {
    int64_t hidden;
    const void *x, *q;
    const void *bias; /* GRU alone, or NULL */
    void *h, *c;      /* the state, which becomes that after the step; c: LSTM alone */
    void *saved;
} ont_cell_row;

typedef struct ont_cell_grad_row {
    int64_t hidden;
    const void *saved;
    const void *dy; /* NULL: zero */
    const void *dr; /* gradient of h' through the product of the step after it */
    void *dh, *dc;  /* of h' by other ways, and of c'; they become those of h by other ways than q, and of c */
    void *dx, *dq;  /* dx: NULL where nothing needs a second copy of dq; not NULL for a GRU */
} ont_cell_grad_row;

typedef struct ont_cell_loops {
    void (*step)(const ont_cell_row *r);
    void (*grad)(const ont_cell_grad_row *r);
} ont_cell_loops;

/* Gates of a cell, and runs of numbers that it saves. */
static inline int ont_cell_gates(ont_cell cell)
{
    return cell == ONT_CELL_LSTM ? 4 : cell == ONT_CELL_GRU ? 3 : 1;
}
static inline int ont_cell_saved(ont_cell cell)
{
    return cell == ONT_CELL_LSTM ? 7 : cell == ONT_CELL_GRU ? 5 : 2;
}

/* Loops of the instruction set in use, or with `plain` of none, for float32 or float64. */
const ont_cell_loops *ont_simd_cell(ont_cell cell, ont_dtype dtype, bool plain);

#endif
