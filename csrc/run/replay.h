/*
 * A phase of a run as one recorded graph of its device.
 *
 * A graph knows addresses. Those of weights stay; a batch, an output or a gradient may lie elsewhere at every call:
 * such a tensor gets a place of its own, from which or to which it is copied around the graph. A slot is one graph
 * input or output.
 */
#ifndef ONT_RUN_REPLAY_H
#define ONT_RUN_REPLAY_H

#include "device/device.h"

typedef struct ont_replay_slot {
    void *seen;         /* address of the latest call; NULL: not bound in this phase */
    ont_memory stage;   /* its own place, once its address has changed */
    size_t bytes;
} ont_replay_slot;

typedef struct ont_replay { /* of one run and phase; zeroed is empty */
    void *graph;
    ont_replay_slot *slots;
    uint32_t n_slots;
    uint32_t calm;      /* calls in a row after which no address was new in moving */
    bool refused;       /* a capture failed: not tried again */
} ont_replay;

typedef enum ont_replay_verdict { ONT_REPLAY_EAGER, ONT_REPLAY_CAPTURE, ONT_REPLAY_LAUNCH } ont_replay_verdict;

/*
 * What to do with a call of these addresses: the first ONT_REPLAY_WARM in a row in which no address is new in moving
 * are done step by step (algorithms are measured, kernels are loaded), the next is recorded, later ones replay. Tensors
 * of more than ONT_REPLAY_STAGE bytes are not given places: while they move, every call is done step by step. *reason
 * says why a call is, NULL where it is not. ENOMEM.
 */
enum { ONT_REPLAY_STAGE = 1 << 30, ONT_REPLAY_WARM = 2 };
ont_status ont_replay_decide(ont_replay *replay, const ont_device *device, void *const *addresses, const size_t *bytes,
                             uint32_t n, ont_replay_verdict *verdict, const char **reason) ONT_MUST_USE;
void ont_replay_deinit(ont_replay *replay, const ont_device *device);

typedef struct ont_replay_counts {
    uint64_t captured, launched;
} ont_replay_counts;
ont_replay_counts ont_replay_get_counts(void); /* of the process */
void ont_replay_count(ont_replay_verdict verdict);

void ont_replay_enable(bool on); /* on at first */
bool ont_replay_enabled(void);

#endif
