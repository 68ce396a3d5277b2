/*
 * Elementwise programs as source, compiled at run time: one read and one write for each element, with the steps in
 * registers.
 */
#ifndef ONT_CUDA_GENERATE_H
#define ONT_CUDA_GENERATE_H

#include "core_shim.h"
#include "kernels/elementwise.h"

typedef struct ont_generated ont_generated;

/* A kernel for programs with these steps and this layout; NULL where there is no compiler, or the interpreter is
 * better. */
ont_status ont_generate(const ont_ew *program, ont_generated **generated);
/* Whether the addresses are as aligned as the kernel's accesses. */
bool ont_generated_fits(const ont_generated *generated, const ont_ew *program);
ont_status ont_generated_run(const ont_generated *generated, const ont_ew *program, void *stream);
void ont_generated_destroy(ont_generated *generated); /* accepts NULL */

#endif
