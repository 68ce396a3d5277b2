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
    uint32_t warm_calls;   /* calls since the first, or since a tensor without a static buffer moved */
    bool capture_failed;   /* a capture failed; it is not tried again */
    bool no_room;          /* there was no memory for a static buffer; it is not tried again */
} ont_replay;

typedef struct ont_replay_call { /* the stream of a call, and address and size of each of its n tensors */
    void *stream;
    void **addresses;
    size_t *bytes;
    uint32_t n;
} ont_replay_call;

typedef enum ont_replay_mode { ONT_REPLAY_EAGER, ONT_REPLAY_CAPTURE, ONT_REPLAY_LAUNCH } ont_replay_mode;

/*
 * Chooses how to run a call. The first ONT_REPLAY_WARMUP_CALLS calls run eagerly
 * (algorithms are tuned, kernels are loaded), the next one is captured, later ones are launched. A call in which a
 * tensor moves for the first time runs eagerly, and the next one is captured again: each tensor causes this at most
 * once. Tensors larger than ONT_REPLAY_STATIC_BYTES get no static buffer: after each of their moves the first calls
 * begin again. If there is no memory for a static buffer, all are freed and every call runs eagerly from now on.
 * *reason says why a call runs eagerly; NULL otherwise. ENOMEM.
 */
enum { ONT_REPLAY_STATIC_BYTES = 1 << 30, ONT_REPLAY_WARMUP_CALLS = 2 };
ont_status ont_replay_choose_mode(ont_replay *replay, const ont_device *device, const ont_replay_call *call,
                                  ont_replay_mode *mode, const char **reason) ONT_MUST_USE;
/* `last`: the stream that used the static buffers last. */
void ont_replay_deinit(ont_replay *replay, const ont_device *device, void *last);

typedef struct ont_replay_counts {
    uint64_t captured, launched;
} ont_replay_counts;
ont_replay_counts ont_replay_get_counts(void); /* totals of the process */
void ont_replay_count(ont_replay_mode mode);

void ont_replay_enable(bool on); /* enabled by default */
bool ont_replay_enabled(void);

#endif
