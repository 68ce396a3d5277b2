/*
 * Chooses which calls are captured and launched. See replay.h; run.c acts on the choice.
 */
#include "run/replay.h"

#include "base/alloc.h"

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

/* Gives a tensor that has moved a static buffer, and destroys the graph, which contains the old address. */
static ont_status on_moved(ont_replay *r, const ont_device *device, ont_replay_tensor *tensor, const char **reason)
{
    if (r->graph) device->ops->graph_destroy(device, r->graph);
    r->graph = NULL;
    r->stable_calls = 0;
    *reason = tensor->bytes > ONT_REPLAY_STATIC_BYTES ? "a tensor of more than 1 GiB has moved" : "a tensor has moved";
    if (tensor->bytes > ONT_REPLAY_STATIC_BYTES || !tensor->bytes) return ONT_OK;
    return device->ops->alloc(device, tensor->bytes, &tensor->static_buffer);
}

ont_status ont_replay_choose_mode(ont_replay *r, const ont_device *device, void *const *addresses, const size_t *bytes,
                                  uint32_t n, ont_replay_mode *mode, const char **reason)
{
    bool first = !r->tensors;
    *mode = ONT_REPLAY_EAGER;
    *reason = "an earlier capture failed";
    if (r->capture_failed) return ONT_OK;
    if (first) {
        r->tensors = ont_calloc(n + 1, sizeof *r->tensors);
        if (!r->tensors) return ONT_ENOMEM;
        r->n_tensors = n;
    }
    *reason = "the first calls";
    for (uint32_t i = 0; i < n; i++) {
        ont_replay_tensor *tensor = &r->tensors[i];
        bool same = first || !bytes[i] || tensor->address == addresses[i];
        tensor->address = addresses[i];
        tensor->bytes = bytes[i];
        if (!same && !tensor->static_buffer.data) ONT_TRY(on_moved(r, device, tensor, reason));
    }
    if (r->stable_calls++ < ONT_REPLAY_WARMUP_CALLS) return ONT_OK;
    *reason = NULL;
    *mode = r->graph ? ONT_REPLAY_LAUNCH : ONT_REPLAY_CAPTURE;
    return ONT_OK;
}

void ont_replay_deinit(ont_replay *r, const ont_device *device)
{
    if (r->graph) device->ops->graph_destroy(device, r->graph);
    for (uint32_t i = 0; i < r->n_tensors; i++)
        if (r->tensors[i].static_buffer.data)
            device->ops->free(device, &r->tensors[i].static_buffer, r->tensors[i].bytes);
    ont_free(r->tensors);
    *r = (ont_replay){0};
}
