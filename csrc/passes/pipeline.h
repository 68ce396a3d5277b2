/*
 * The order of passes, on both sides of differentiation.
 */
#ifndef ONT_PASSES_PIPELINE_H
#define ONT_PASSES_PIPELINE_H

#include "passes/pass.h"

/* Stops early where facts->n_needs is left above 0. */
ont_status ont_passes_before_grad(ont_graph *g, ont_facts *facts) ONT_MUST_USE;
ont_status ont_passes_after_grad(ont_graph *g) ONT_MUST_USE;

/* Comma-separated pass names that are skipped from now on (for a bisect); NULL or "": none. */
ont_status ont_passes_disable(const char *names) ONT_MUST_USE;

#endif
