/*
 * A session: one loaded graph, its pool, and an LRU cache of the programs specialised from it. Not thread-safe: py/
 * calls it with the GIL held; kernels run without the GIL.
 */
#ifndef ONT_RUN_SESSION_H
#define ONT_RUN_SESSION_H

#include "run/run.h"

typedef struct ont_session ont_session;

typedef struct ont_session_stats {
    uint64_t programs_built, program_hits; /* probes excluded */
    uint64_t probes_built, probe_runs;
    double build_seconds;                  /* total over all programs */
    double last_build_seconds;
    size_t slab_bytes, slab_lower_bound; /* of the last used program */
    size_t phase_bytes[2], kept_bytes;   /* at most live in forward and in backward, and what lives through both */
    size_t recomputed_bytes;             /* bytes that recomputation saves */
    uint32_t recomputed_nodes;
    double recomputed_share; /* cost of the nodes that run again, as a fraction of the step's, in the model of passes */
    size_t budget_bytes;     /* that the slab should stay within; 0: no budget */
    uint32_t packed_nodes;     /* forward nodes that compute some rows only */
    int64_t packed_rows[3][2]; /* as in graph->packed */
    uint32_t steps, forward_steps;
    ont_pool_stats pool;
} ont_session_stats;

/* Takes ownership of the graph, also on failure. */
ont_status ont_session_create(ont_graph *graph, uint32_t max_programs, const ont_device *device,
                              ont_session **session) ONT_MUST_USE;
/*
 * Slabs of later programs stay within `budget`: a number of bytes, or where it is at most 1 a fraction of the slab that
 * the program has without it; 0: none. If even the smallest plan is larger, that one is used, and a warning says so.
 */
void ont_session_set_budget(ont_session *session, double budget);
void ont_session_destroy(ont_session *session); /* programs with live runs live until those end; see session.c */
const ont_graph *ont_session_graph(const ont_session *session);
ont_pool *ont_session_pool(ont_session *session);
const ont_device *ont_session_device(const ont_session *session); /* NULL: the CPU */
/* Whether any operator of the graph draws random numbers. */
bool ont_session_is_random(const ont_session *session);

/* Values computed by the probes of one call. Initialise to zero, release with ont_probed_values_deinit(). */
typedef struct ont_probed_values {
    ont_tensor *values; /* elements are owned */
    uint32_t n_values;
} ont_probed_values;

/*
 * Returns the program of a call, borrowed until the next call. `wants`: per input, nonzero if its gradient is needed.
 * With data-dependent shapes *program may be a value probe: the caller runs its forward with the same inputs and seed,
 * adds the outputs by ont_probed_values_add() and calls this again.
 */
ont_status ont_session_program(ont_session *session, const ont_tensor_view *inputs, const uint8_t *wants,
                               const ont_probed_values *probed, ont_program **program) ONT_MUST_USE;
ont_status ont_probed_values_add(ont_session *session, ont_probed_values *probed, ont_block *const *outputs,
                                 uint32_t n) ONT_MUST_USE;
void ont_probed_values_deinit(ont_probed_values *probed);
/* The program of the latest call, with a reference that the caller drops; NULL before the first call. */
ont_program *ont_session_ref_program(const ont_session *session);
void ont_session_get_stats(const ont_session *session, ont_session_stats *stats);

#endif
