/*
 * The order of passes before and after differentiation.
 */
#ifndef ONT_PASSES_PIPELINE_H
#define ONT_PASSES_PIPELINE_H

#include "passes/pass.h"

/* Returns early if known->n_required is left above 0. */
ont_status ont_passes_before_grad(ont_graph *g, ont_known_values *known) ONT_MUST_USE;
ont_status ont_passes_after_grad(ont_graph *g) ONT_MUST_USE;

#endif
