/*
 * A phase of a run as one recorded graph of its device, replayed while every address that it knows stays the same.
 */
#ifndef ONT_RUN_REPLAY_H
#define ONT_RUN_REPLAY_H

#include "device/device.h"

typedef struct ont_replay { /* of one run and phase; zeroed is empty */
    void *graph;
    void **seen;        /* addresses of the latest call */
    uint32_t n_seen;
    bool known;         /* `seen` holds a call */
    bool refused;       /* capture failed once: not tried again */
} ont_replay;

typedef enum ont_replay_verdict { ONT_REPLAY_EAGER, ONT_REPLAY_CAPTURE, ONT_REPLAY_LAUNCH } ont_replay_verdict;

/*
 * What to do with a call whose addresses are these: the first with an address is done step by step, the second in a row with
 * the same is recorded, later ones replay. An address that changed drops the graph. ENOMEM.
 */
ont_status ont_replay_decide(ont_replay *replay, const ont_device *device, void *const *addresses, uint32_t n,
                             ont_replay_verdict *verdict) ONT_MUST_USE;
void ont_replay_deinit(ont_replay *replay, const ont_device *device);

typedef struct ont_replay_counts {
    uint64_t captured, launched, dropped;
} ont_replay_counts;
/* Of the process, for stats(). */
ont_replay_counts ont_replay_get_counts(void);
void ont_replay_count(ont_replay_verdict verdict);

void ont_replay_enable(bool on); /* off at first */
bool ont_replay_enabled(void);

#endif
