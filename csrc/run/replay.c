/*
 * Which calls are recorded and replayed. See replay.h; run.c does what is decided here.
 */
#include "run/replay.h"

#include <string.h>

#include "base/alloc.h"

static bool enabled;
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
    return (ont_replay_counts){__atomic_load_n(&counts.captured, __ATOMIC_RELAXED), __atomic_load_n(&counts.launched, __ATOMIC_RELAXED),
                               __atomic_load_n(&counts.dropped, __ATOMIC_RELAXED)};
}

static void drop(ont_replay *r, const ont_device *device)
{
    if (!r->graph) return;
    device->kind->graph_destroy(device, r->graph);
    r->graph = NULL;
    __atomic_fetch_add(&counts.dropped, 1, __ATOMIC_RELAXED);
}

ont_status ont_replay_decide(ont_replay *r, const ont_device *device, void *const *addresses, uint32_t n, ont_replay_verdict *verdict)
{
    *verdict = ONT_REPLAY_EAGER;
    if (!device || !device->kind->capture_begin || r->refused || !ont_replay_enabled()) return ONT_OK;
    if (!r->seen) {
        r->seen = ont_calloc(n + 1, sizeof *r->seen);
        if (!r->seen) return ONT_ENOMEM;
        r->n_seen = n;
    }
    bool same = r->known && r->n_seen == n && !memcmp(r->seen, addresses, n * sizeof *addresses);
    if (same) {
        *verdict = r->graph ? ONT_REPLAY_LAUNCH : ONT_REPLAY_CAPTURE;
        return ONT_OK;
    }
    drop(r, device);
    memcpy(r->seen, addresses, n * sizeof *addresses);
    r->known = true;
    return ONT_OK;
}

void ont_replay_deinit(ont_replay *r, const ont_device *device)
{
    if (r->graph) device->kind->graph_destroy(device, r->graph);
    ont_free(r->seen);
    *r = (ont_replay){0};
}
