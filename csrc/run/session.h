/*
 * A session: one loaded graph, its pool, and the programs specialised from it (least recently used goes first).
 * Not locked: py/ calls it with the GIL held; kernels run without.
 */
#ifndef ONT_RUN_SESSION_H
#define ONT_RUN_SESSION_H

#include "run/run.h"

typedef struct ont_session ont_session;

typedef struct ont_session_stats {
    uint64_t programs_built, program_hits; /* probes left out */
    uint64_t probes_built, probe_runs;
    double build_seconds;                  /* all programs */
    double last_build_seconds;
    size_t slab_bytes, slab_lower_bound;   /* of the program used last */
    size_t recomputed_bytes;               /* that it would keep from forward to backward besides */
    uint32_t recomputed_nodes;
    uint32_t steps, forward_steps;
    ont_pool_stats pool;
} ont_session_stats;

/* Takes the graph over, also on failure. */
ont_status ont_session_create(ont_graph *graph, uint32_t max_programs, const ont_device *device,
                              ont_session **session) ONT_MUST_USE;
void ont_session_destroy(ont_session *session); /* programs with live runs stay until those end; see session.c */
const ont_graph *ont_session_graph(const ont_session *session);
ont_pool *ont_session_pool(ont_session *session);
const ont_device *ont_session_device(const ont_session *session); /* NULL: the CPU */
/* Whether any operator of the graph draws random numbers. */
bool ont_session_is_random(const ont_session *session);

/* What probes have found out in one call. Zeroed at the start, ont_probed_values_deinit() at the end. */
typedef struct ont_probed_values {
    ont_tensor *values; /* contents are owned */
    uint32_t n_values;
} ont_probed_values;

/*
 * Borrowed until the next call. `wants`: per input, nonzero where a gradient will be asked for. Where shapes depend on
 * contents *program may be a probe: the caller runs its forward with the same inputs and seed, hands the outputs to
 * ont_probed_values_add() and asks again.
 */
ont_status ont_session_program(ont_session *session, const ont_tensor_view *inputs, const uint8_t *wants,
                               const ont_probed_values *probed, ont_program **program) ONT_MUST_USE;
ont_status ont_probed_values_add(ont_session *session, ont_probed_values *probed, ont_block *const *outputs,
                                 uint32_t n) ONT_MUST_USE;
void ont_probed_values_deinit(ont_probed_values *probed);
const ont_program *ont_session_last_program(const ont_session *session); /* NULL before the first */
void ont_session_get_stats(const ont_session *session, ont_session_stats *stats);

#endif
