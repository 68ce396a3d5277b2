/*
 * Kernels of elementwise operators, for the files that list their descriptors.
 */
#ifndef ONT_OPS_ELEMENTWISE_H
#define ONT_OPS_ELEMENTWISE_H

#include "ops/op.h"
#include "ops/elementwise/tile_program.h"

extern const ont_kernel ont_unary_kernels[2];  /* the loop has the operator's name, see simd.h */
extern const ont_kernel ont_binary_kernels[2];
extern const ont_kernel ont_pow_kernels[5]; /* includes the binary ones */
extern const ont_kernel ont_prelu_kernels[3];
extern const ont_kernel ont_mod_kernels[3];

/* elementwise_rows.c: Pow with a constant exponent, with a base of two, and of any two numeric dtypes */
const char *ont_pow_constant_accept(const ont_node *node);
ont_status ont_pow_constant_run(const ont_call *call);
const char *ont_pow_of_two_accept(const ont_node *node);
ont_status ont_pow_of_two_run(const ont_call *call);
const char *ont_pow_ref_accept(const ont_node *node);
ont_status ont_pow_ref_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_pow_ref_run(const ont_call *call);
/* Mod with either sign */
const char *ont_mod_accept(const ont_node *node);
ont_status ont_mod_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_mod_run(const ont_call *call);
/* PRelu of integers */
const char *ont_prelu_int_accept(const ont_node *node);
ont_status ont_prelu_int_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_prelu_int_run(const ont_call *call);

#endif
