/*
 * A fused group of elementwise operators of one shape, executed as a small program over tiles that stay in L1.
 *
 * tile() of an operator's descriptor says which step it is; fuse_elementwise.c builds groups, fused_elementwise.c runs
 * them. Intermediate values live in registers: scratch of one tile each. Steps use the loops of simd/, so a group gives
 * bit for bit the results of its operators.
 */
#ifndef ONT_OPS_TILE_H
#define ONT_OPS_TILE_H

#include "ops/support/broadcast.h"
#include "simd/simd.h"

enum {
    ONT_TILE = 1024, /* elements of a tile, at most */
    ONT_TILE_DEFAULT = 512,
    ONT_TILE_REGISTERS = 8,
    ONT_TILE_STEPS = 32,
    ONT_TILE_OPERANDS = 14,
    ONT_TILE_RESULTS = 6,
    ONT_TILE_SINKS = 4,
};

typedef enum ont_tile_kind {
    ONT_TILE_UNARY,   /* loop, p */
    ONT_TILE_BINARY,  /* loop, p */
    ONT_TILE_WHERE,   /* condition, two branches */
    ONT_TILE_DROPOUT, /* p: threshold, scale; stream: of Philox */
    ONT_TILE_CAST,    /* one of ont_tile_casts() */
    ONT_TILE_KINDS,
} ont_tile_kind;

struct ont_tile_step {
    ont_tile_kind kind;
    ont_loop loop;
    ont_dtype in, out; /* of the operands (Where: of the branches), and of the result */
    int n_operands;
    int operand[3]; /* i < n_operands: operand i of the program; otherwise: result of step i - n_operands */
    double p[2];
    int64_t stream;
};

typedef struct ont_tile_program {
    int n_operands, n_steps, n_results, n_sinks;
    size_t operand_size[ONT_TILE_OPERANDS], result_size[ONT_TILE_RESULTS]; /* bytes; ont_tile_read() sets them */
    ont_tile_step steps[ONT_TILE_STEPS];
    int result[ONT_TILE_RESULTS]; /* the step of each; result 0 may share an operand's storage if the last step's */
    int sink[ONT_TILE_SINKS];     /* steps whose results are reduced, stored or not */
    int location[ONT_TILE_STEPS]; /* of a step's result, by ont_tile_link(): a register, or -1 - k for result k */
} ont_tile_program;

/* Assigns a register or a result to each step. False where too many registers are live at once. */
bool ont_tile_link(ont_tile_program *p);

typedef struct ont_tile_bind {
    const char *operand[ONT_TILE_OPERANDS];
    int64_t stride[ONT_TILE_OPERANDS]; /* elements: 0 or 1 */
    char *result[ONT_TILE_RESULTS];
    int64_t first; /* index of the first element, for Dropout */
    uint64_t seed;
    int64_t tile;  /* elements of a tile; 0: ONT_TILE_DEFAULT */
    /* Receives the next n elements of sink k while they are in L1; NULL without sinks. */
    void (*drain)(void *context, int k, const void *x, int64_t n);
    void *context;
} ont_tile_bind;

/*
 * Binds a row of a broadcast walk whose operand 0 is not an input: the row's operands, and the results of the call from
 * element bind->first on.
 */
void ont_tile_bind_row(ont_tile_bind *bind, const ont_tile_program *p, const ont_call *call, const ont_bcast *walk,
                       char *const *at);
void ont_tile_run(const ont_simd_table *simd, const ont_tile_program *p, const ont_tile_bind *bind, int64_t n);

/* Whether a vector loop converts between these dtypes. */
bool ont_tile_casts(ont_dtype from, ont_dtype to);

/* Stores a program in a node's attributes, and reads it back linked. Without sinks, result 0 is the last step's. */
ont_status ont_tile_write(ont_graph *g, ont_node *node, const ont_tile_program *p) ONT_MUST_USE;
ont_status ont_tile_read(const ont_node *node, ont_tile_program *p) ONT_MUST_USE;
const char *ont_tile_accept(const ont_node *node); /* an accept(): NULL where the attributes are valid */

/* tile() of operators that use ont_unary_kernels or ont_binary_kernels. */
bool ont_unary_tile(const ont_node *node, ont_tile_step *step);
bool ont_binary_tile(const ont_node *node, ont_tile_step *step);

#endif
