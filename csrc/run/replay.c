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

void ont_replay_count(ont_replay_verdict verdict)
{
    if (verdict == ONT_REPLAY_CAPTURE) __atomic_fetch_add(&counts.captured, 1, __ATOMIC_RELAXED);
    if (verdict == ONT_REPLAY_LAUNCH) __atomic_fetch_add(&counts.launched, 1, __ATOMIC_RELAXED);
}

ont_replay_counts ont_replay_get_counts(void)
{
    return (ont_replay_counts){__atomic_load_n(&counts.captured, __ATOMIC_RELAXED),
                               __atomic_load_n(&counts.launched, __ATOMIC_RELAXED)};
}

/* Gives a tensor that has moved a static buffer, and destroys the graph, which contains the old address. */
static ont_status moved(ont_replay *r, const ont_device *device, ont_replay_slot *slot, const char **reason)
{
    if (r->graph) device->ops->graph_destroy(device, r->graph);
    r->graph = NULL;
    r->calm = 0;
    *reason = slot->bytes > ONT_REPLAY_STAGE ? "a tensor of more than 1 GiB has moved" : "a tensor has moved";
    if (slot->bytes > ONT_REPLAY_STAGE || !slot->bytes) return ONT_OK;
    return device->ops->alloc(device, slot->bytes, &slot->stage);
}

ont_status ont_replay_decide(ont_replay *r, const ont_device *device, void *const *addresses, const size_t *bytes,
                             uint32_t n, ont_replay_verdict *verdict, const char **reason)
{
    bool first = !r->slots;
    *verdict = ONT_REPLAY_EAGER;
    *reason = "a recording failed";
    if (r->refused) return ONT_OK;
    if (first) {
        r->slots = ont_calloc(n + 1, sizeof *r->slots);
        if (!r->slots) return ONT_ENOMEM;
        r->n_slots = n;
    }
    *reason = "the first calls";
    for (uint32_t i = 0; i < n; i++) {
        ont_replay_slot *slot = &r->slots[i];
        bool same = first || !bytes[i] || slot->seen == addresses[i];
        slot->seen = addresses[i];
        slot->bytes = bytes[i];
        if (!same && !slot->stage.data) ONT_TRY(moved(r, device, slot, reason));
    }
    if (r->calm++ < ONT_REPLAY_WARM) return ONT_OK;
    *reason = NULL;
    *verdict = r->graph ? ONT_REPLAY_LAUNCH : ONT_REPLAY_CAPTURE;
    return ONT_OK;
}

void ont_replay_deinit(ont_replay *r, const ont_device *device)
{
    if (r->graph) device->ops->graph_destroy(device, r->graph);
    for (uint32_t i = 0; i < r->n_slots; i++)
        if (r->slots[i].stage.data) device->ops->free(device, &r->slots[i].stage, r->slots[i].bytes);
    ont_free(r->slots);
    *r = (ont_replay){0};
}
