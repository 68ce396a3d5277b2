/*
 * Elementwise steps over tiles that stay in the first-level cache: what a group of operators of one shape becomes.
 *
 * An operator says by the tile() of its descriptor which step it is; passes/fuse_elementwise.c makes groups,
 * ops/fused.c runs them. Intermediate values live in registers, which are tiles of scratch. The loops are those of
 * simd/, so a group gives the same numbers as its operators one by one.
 */
#ifndef ONT_OPS_TILE_H
#define ONT_OPS_TILE_H

#include "ops/broadcast.h"
#include "simd/simd.h"

enum {
    ONT_TILE = 1024, /* elements at most */
    ONT_TILE_USUAL = 512,
    ONT_TILE_REGISTERS = 8,
    ONT_TILE_STEPS = 24,
    ONT_TILE_OPERANDS = 14,
    ONT_TILE_RESULTS = 6,
    ONT_TILE_SINKS = 4,
};

typedef enum ont_tile_kind {
    ONT_TILE_UNARY,   /* loop, p */
    ONT_TILE_BINARY,  /* loop, p */
    ONT_TILE_WHERE,   /* condition, two branches */
    ONT_TILE_DROPOUT, /* p: threshold, scale; stream */
    ONT_TILE_CAST,    /* one of ont_tile_casts() */
    ONT_TILE_KINDS,
} ont_tile_kind;

struct ont_tile_step {
    ont_tile_kind kind;
    ont_loop loop;
    ont_dtype in, out; /* of the operands (of Where: of its branches) and of the result */
    int n_operands;
    int operand[3]; /* below the program's n_operands: an operand; from there on the result of step (operand -
                       n_operands) */
    double p[2];
    int64_t stream;
};

typedef struct ont_tile_program {
    int n_operands, n_steps, n_results, n_sinks;
    size_t operand_size[ONT_TILE_OPERANDS], result_size[ONT_TILE_RESULTS]; /* by ont_tile_read() */
    ont_tile_step steps[ONT_TILE_STEPS];
    int result[ONT_TILE_RESULTS]; /* the step of each; where result 0 is the last step's, it may share any operand's
                                     storage */
    int sink[ONT_TILE_SINKS];     /* steps whose results go to a reduction, stored or not */
    int place[ONT_TILE_STEPS];    /* by ont_tile_link(): register, or -1 - k for result k */
} ont_tile_program;

/* Gives every step a register or a result. False where more registers are live at once than there are. */
bool ont_tile_link(ont_tile_program *p);

typedef struct ont_tile_bind {
    const char *operand[ONT_TILE_OPERANDS];
    int64_t stride[ONT_TILE_OPERANDS]; /* elements: 0 or 1 */
    char *result[ONT_TILE_RESULTS];
    int64_t first; /* index of the first element, for Dropout */
    uint64_t seed;
    int64_t tile;  /* elements of a tile; 0 stands for ONT_TILE_USUAL */
    /* Sink k's next n elements, while they are in the cache; NULL without sinks. */
    void (*drain)(void *context, int k, const void *x, int64_t n);
    void *context;
} ont_tile_bind;

/* A row of a walk whose operand 0 is no input: its operands, and the call's results from element bind->first on. */
void ont_tile_bind_row(ont_tile_bind *bind, const ont_tile_program *p, const ont_call *call, const ont_bcast *walk,
                       char *const *at);
void ont_tile_run(const ont_simd_table *simd, const ont_tile_program *p, const ont_tile_bind *bind, int64_t n);

/* Between these the vector loops convert. */
bool ont_tile_casts(ont_dtype from, ont_dtype to);

/* The program in a node's attributes, and back; `p` linked. Without sinks there is a result, the last step's. */
ont_status ont_tile_write(ont_graph *g, ont_node *node, const ont_tile_program *p) ONT_MUST_USE;
ont_status ont_tile_read(const ont_node *node, ont_tile_program *p) ONT_MUST_USE;
const char *ont_tile_accept(const ont_node *node); /* an accept(): whether there is one */

/* The tile() of operators with ont_unary_kernels or ont_binary_kernels. */
bool ont_unary_tile(const ont_node *node, ont_tile_step *step);
bool ont_binary_tile(const ont_node *node, ont_tile_step *step);

#endif
