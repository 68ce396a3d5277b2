/*
 * Capture and replay of a phase of a run as one graph of the device (CUDA graphs).
 *
 * A captured graph contains addresses. Those of weights are stable; a batch, an output or a gradient may be at another
 * address in every call. A tensor that moves gets a static buffer, to or from which it is copied around the graph.
 */
#ifndef ONT_RUN_REPLAY_H
#define ONT_RUN_REPLAY_H

#include "device/device.h"

typedef struct ont_replay_tensor {
    void *address;            /* address in the latest call; NULL: not bound in this phase */
    ont_memory static_buffer; /* allocated once the address has changed */
    size_t bytes;
} ont_replay_tensor;

typedef struct ont_replay { /* of one run and phase; all zero is the empty state */
    void *graph;
    ont_replay_tensor *tensors;
    uint32_t n_tensors;
    uint32_t stable_calls; /* consecutive calls without a newly moving tensor */
    bool capture_failed;   /* a capture failed; it is not tried again */
} ont_replay;

typedef enum ont_replay_mode { ONT_REPLAY_EAGER, ONT_REPLAY_CAPTURE, ONT_REPLAY_LAUNCH } ont_replay_mode;

/*
 * Chooses how to run a call with these addresses. The first ONT_REPLAY_WARMUP_CALLS consecutive calls without a newly
 * moving tensor run eagerly (algorithms are tuned, kernels are loaded), the next one is captured, later ones are
 * launched. Tensors larger than ONT_REPLAY_STATIC_BYTES get no static buffer: while they move, every call runs eagerly.
 * *reason says why a call runs eagerly; NULL otherwise. ENOMEM.
 */
enum { ONT_REPLAY_STATIC_BYTES = 1 << 30, ONT_REPLAY_WARMUP_CALLS = 2 };
ont_status ont_replay_choose_mode(ont_replay *replay, const ont_device *device, void *const *addresses,
                                  const size_t *bytes, uint32_t n, ont_replay_mode *mode,
                                  const char **reason) ONT_MUST_USE;
void ont_replay_deinit(ont_replay *replay, const ont_device *device);

typedef struct ont_replay_counts {
    uint64_t captured, launched;
} ont_replay_counts;
ont_replay_counts ont_replay_get_counts(void); /* totals of the process */
void ont_replay_count(ont_replay_mode mode);

void ont_replay_enable(bool on); /* enabled by default */
bool ont_replay_enabled(void);

#endif
