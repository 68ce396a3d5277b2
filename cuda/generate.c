/*
 * See generate.h.
 */
#include "generate.h"

ont_status ont_generate(const ont_ew *program, ont_generated **generated)
{
    (void)program;
    *generated = NULL;
    return ONT_OK;
}

ont_status ont_generated_run(const ont_generated *generated, const ont_ew *program, void *stream)
{
    (void)generated;
    (void)program;
    (void)stream;
    return ont_fail(ONT_EINTERNAL, "no generated kernel");
}

void ont_generated_destroy(ont_generated *generated)
{
    (void)generated;
}
