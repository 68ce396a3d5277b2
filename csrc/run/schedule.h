/*
 * The order in which a program's steps run, and its memory plan. For run/program.c alone.
 */
#ifndef ONT_RUN_SCHEDULE_H
#define ONT_RUN_SCHEDULE_H

#include "run/program.h"

/*
 * Plans the memory of bound steps into p->plan. Where another order takes less, steps and the graph's list of nodes
 * have it afterwards; what they compute is the same. needs: per step, put into the same order. applied, gradient_of: as
 * in ont_plan_memory().
 */
ont_status ont_program_schedule(ont_program *p, ont_plan_step *needs, const ont_value *const *delivered,
                                const int32_t *gradient_of) ONT_MUST_USE;

#endif
