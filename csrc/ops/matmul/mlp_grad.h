/*
 * MlpGrad: the backward of an MLP, X -> products -> elementwise -> product, where backward computes the hidden values
 * again. It takes some hidden columns at a time, so that hidden values and their gradients exist for these columns
 * only. passes/tile_mlp.c builds it.
 *
 * Inputs: X (..., k), dY (..., m), whose rows correspond, then weights and biases, then further operands of the
 * elementwise program: single numbers, or rows with a number for each hidden column. For each tile of columns:
 *   products      L W (+ bias), L being X or dY, give the first operands of the program
 *   program       of ops/elementwise/tile_program.h; its results are (rows, columns of the tile)
 *   weight grads  R' L or L' R, R being a result: complete for these columns
 *   row grads     R W', added up over all tiles: together the gradient of X
 *   sums          of a result over the rows: gradients of biases
 * Outputs: the gradient of X or NULL, the weight gradients, the sums.
 *
 * Tiles of rows would add to each weight gradient once a tile instead. These are larger than X where a step has fewer
 * rows than the hidden layer has columns.
 */
#ifndef ONT_OPS_MLP_GRAD_H
#define ONT_OPS_MLP_GRAD_H

#include "ops/elementwise/tile_program.h"

enum { ONT_MLP_PRODUCTS = 3, ONT_MLP_WEIGHT_GRADS = 3, ONT_MLP_ROW_GRADS = 2, ONT_MLP_SUMS = 3 }; /* at most */
enum { ONT_MLP_X, ONT_MLP_DY, ONT_MLP_WEIGHTS }; /* inputs; weights and biases follow */

typedef struct ont_mlp {
    int64_t n_products, n_weight_grads, n_row_grads, n_sums;
    /* left: ONT_MLP_X or ONT_MLP_DY. transposed: W is (hidden, k) instead of (k, hidden). bias: input, or 0 */
    struct {
        int64_t left, weight, transposed, bias;
    } products[ONT_MLP_PRODUCTS];
    /* transposed: the gradient is (hidden, k), not (k, hidden) */
    struct {
        int64_t result, left, transposed;
    } weight_grads[ONT_MLP_WEIGHT_GRADS];
    /* transposed: W is (k, hidden) instead of (hidden, k) */
    struct {
        int64_t result, weight, transposed;
    } row_grads[ONT_MLP_ROW_GRADS];
    int64_t sums[ONT_MLP_SUMS]; /* results */
    int64_t first_operand;      /* input that is the program's operand number n_products */
} ont_mlp;

ont_status ont_mlp_write(ont_graph *g, ont_node *node, const ont_mlp *m) ONT_MUST_USE;
/* Bytes of the values of one tile. */
size_t ont_mlp_tile_bytes(const ont_node *node);

#endif
