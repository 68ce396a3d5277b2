/*
 * RNN, GRU and LSTM: what a node says, for inference, the expansion, and kernels that take the whole node.
 */
#ifndef ONT_OPS_RECURRENT_DESC_H
#define ONT_OPS_RECURRENT_DESC_H

#include "ops/op.h"
#include "simd/recurrent/recurrent.h"

enum { ONT_RECURRENT_ACTIVATIONS = 6 };

typedef enum ont_recurrent_kind { ONT_RECURRENT_RNN, ONT_RECURRENT_GRU, ONT_RECURRENT_LSTM } ont_recurrent_kind;

typedef struct ont_activation_kind {
    const char *name;
    double alpha, beta;      /* defaults */
    int parameters;          /* parameters: how many of alpha and beta the activation has */
    ont_value *(*build)(ont_builder *b, ont_value *x, double alpha, double beta);
} ont_activation_kind;

typedef struct ont_activation {
    const ont_activation_kind *kind;
    double alpha, beta;
} ont_activation;

typedef struct ont_recurrent {
    ont_builder *b;
    ont_recurrent_kind cell;
    int gates;               /* 1 (RNN), 3 (GRU) or 4 (LSTM) */
    int64_t steps, batch, in, hidden;
    int directions;
    bool reversed[2];        /* of each direction: backwards in time */
    bool batch_first, input_forget, linear_before_reset;
    double clip;             /* limit of the activations' inputs; 0: none */
    ont_activation act[ONT_RECURRENT_ACTIVATIONS]; /* of each direction: f, g, h */
    int acts;                /* activations of each direction: 1, 2 or 3 */
    ont_value *lens;         /* sequence lengths, int64 (B, 1), or NULL: all sequences have full length */
    ont_dtype dtype;
} ont_recurrent;

ont_status ont_recurrent_parse(const ont_node *node, ont_recurrent_kind kind, ont_recurrent *r) ONT_MUST_USE;
/* The cell of direction d with torch's activations, or ONT_CELLS if it is another one. */
ont_cell ont_recurrent_torch_cell(const ont_recurrent *r, const ont_node *node, int d);
/* Whether the lengths are known, and are those of full sequences. */
bool ont_recurrent_is_full(const ont_recurrent *r, const ont_value *lens);
/* Clips x, and applies activation k of direction d. */
ont_value *ont_recurrent_activate(const ont_recurrent *r, int d, int k, ont_value *x);

#endif
