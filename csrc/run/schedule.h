/*
 * Chooses the order of a program's steps and plans their memory. For run/program.c only.
 */
#ifndef ONT_RUN_SCHEDULE_H
#define ONT_RUN_SCHEDULE_H

#include "run/program.h"

/*
 * Plans the memory of the bound steps into p->plan. If another order needs less memory, the steps and the graph's node
 * list are reordered; results are unchanged. plan_steps: one per step, reordered with them. delivered: as in
 * ont_plan_memory().
 */
ont_status ont_program_schedule(ont_program *p, ont_plan_step *plan_steps,
                                const ont_value *const *delivered) ONT_MUST_USE;

#endif
