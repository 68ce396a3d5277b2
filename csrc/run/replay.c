/*
 * Chooses which calls are captured and launched. See replay.h; run.c acts on the choice.
 */
#include "run/replay.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "run/device_memory.h"

static bool enabled = true;
static ont_replay_counts counts;

void ont_replay_enable(bool on)
{
    __atomic_store_n(&enabled, on, __ATOMIC_RELAXED);
}

bool ont_replay_enabled(void)
{
    return __atomic_load_n(&enabled, __ATOMIC_RELAXED);
}

void ont_replay_count(ont_replay_mode mode)
{
    if (mode == ONT_REPLAY_CAPTURE) __atomic_fetch_add(&counts.captured, 1, __ATOMIC_RELAXED);
    if (mode == ONT_REPLAY_LAUNCH) __atomic_fetch_add(&counts.launched, 1, __ATOMIC_RELAXED);
}

ont_replay_counts ont_replay_get_counts(void)
{
    return (ont_replay_counts){__atomic_load_n(&counts.captured, __ATOMIC_RELAXED),
                               __atomic_load_n(&counts.launched, __ATOMIC_RELAXED)};
}

static void destroy_graph(ont_replay *r, const ont_device *device)
{
    if (r->graph) device->ops->graph_destroy(device, r->graph);
    r->graph = NULL;
}

static void free_static_buffers(ont_replay *r, const ont_device *device, void *last)
{
    for (uint32_t i = 0; i < r->n_tensors; i++)
        ont_device_free_after(device, &r->tensors[i].static_buffer, r->tensors[i].bytes, last);
}

/* Gives a tensor that has moved a static buffer, and destroys the graph, which contains the old address. */
static void on_moved(ont_replay *r, const ont_device *device, ont_replay_tensor *tensor, const char **reason)
{
    destroy_graph(r, device);
    *reason = "a tensor has moved";
    if (tensor->bytes > ONT_REPLAY_STATIC_BYTES) {
        *reason = "a tensor of more than 1 GiB has moved";
        r->warm_calls = 0;
    } else if (ont_device_alloc(device, tensor->bytes, &tensor->static_buffer) != ONT_OK) {
        r->no_room = true;
    }
}

static const char *const NO_ROOM = "no room for a static buffer";

ont_status ont_replay_choose_mode(ont_replay *r, const ont_device *device, const ont_replay_call *call,
                                  ont_replay_mode *mode, const char **reason)
{
    bool first = !r->tensors, moved = false;
    *mode = ONT_REPLAY_EAGER;
    *reason = r->no_room ? NO_ROOM : "an earlier capture failed";
    if (r->capture_failed || r->no_room) return ONT_OK;
    if (first) {
        r->tensors = ont_calloc(call->n + 1, sizeof *r->tensors);
        if (!r->tensors) return ONT_ENOMEM;
        r->n_tensors = call->n;
    }
    ONT_ASSERT(call->n == r->n_tensors);
    *reason = "the first calls";
    for (uint32_t i = 0; i < call->n; i++) {
        ont_replay_tensor *tensor = &r->tensors[i];
        bool same = first || !call->bytes[i] || tensor->address == call->addresses[i];
        tensor->address = call->addresses[i];
        tensor->bytes = call->bytes[i];
        if (same || tensor->static_buffer.data || r->no_room) continue;
        on_moved(r, device, tensor, reason);
        moved = true;
    }
    if (r->no_room) {
        free_static_buffers(r, device, call->stream);
        *reason = NO_ROOM;
        return ONT_OK;
    }
    bool cold = r->warm_calls < ONT_REPLAY_WARMUP_CALLS;
    r->warm_calls += cold;
    if (cold || moved) return ONT_OK;
    *reason = NULL;
    *mode = r->graph ? ONT_REPLAY_LAUNCH : ONT_REPLAY_CAPTURE;
    return ONT_OK;
}

void ont_replay_deinit(ont_replay *r, const ont_device *device, void *last)
{
    destroy_graph(r, device);
    free_static_buffers(r, device, last);
    ont_free(r->tensors);
    *r = (ont_replay){0};
}
