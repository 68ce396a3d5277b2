/*
 * Tables of tensors in device memory. See tables.h.
 */
#include "py/tables.h"

#include <string.h>

#include "base/alloc.h"
#include "optim/optim.h"
#include "run/device_memory.h"

typedef struct ont_kept_tables {
    struct ont_kept_tables *next;
    const ont_device *device;
    ont_memory memory;
    size_t bytes;
    void *last;
} ont_kept_tables;

void ont_tables_free(ont_device_tables *t)
{
    while (t->kept) {
        ont_kept_tables *kept = t->kept;
        t->kept = kept->next;
        ont_device_free_after(kept->device, &kept->memory, kept->bytes, kept->last);
        ont_free(kept);
    }
    if (t->device) ont_device_free_after(t->device, &t->memory, t->device_capacity, t->last);
    ont_free(t->host);
    *t = (ont_device_tables){0};
}

/* Frees the device memory once its last use is over, or keeps it in a list if a captured graph reads it. */
static ont_status leave_memory(ont_device_tables *t)
{
    if (!t->device) return ONT_OK;
    if (t->recorded) {
        ont_kept_tables *kept = ont_calloc(1, sizeof *kept);
        if (!kept) return ONT_ENOMEM;
        *kept = (ont_kept_tables){t->kept, t->device, t->memory, t->device_capacity, t->last};
        t->kept = kept;
    } else {
        ont_device_free_after(t->device, &t->memory, t->device_capacity, t->last);
    }
    t->device = NULL;
    t->bytes = 0;
    t->recorded = false;
    return ONT_OK;
}

/* Allocates memory on host and device. */
static ont_status reserve(ont_device_tables *t, const ont_device *device, size_t bytes, size_t work)
{
    ONT_TRY(ont_optim_reserve(&t->host, &t->host_capacity, bytes, 1));
    if (t->device == device && t->device_capacity >= bytes + work) return ONT_OK;
    ONT_TRY(leave_memory(t));
    ONT_TRY(ont_device_alloc(device, bytes + work, &t->memory));
    t->device = device;
    t->device_capacity = bytes + work;
    return ONT_OK;
}

ont_status ont_tables_put(ont_device_tables *t, const ont_device *device, const void *fresh,
                          const ont_table_sizes *sizes, void *stream)
{
    bool recording = device->ops->capturing && device->ops->capturing(device, stream);
    bool same = t->device == device && t->bytes == sizes->bytes && t->device_capacity >= sizes->bytes + sizes->work &&
                !memcmp(t->host, fresh, sizes->bytes);
    if (recording && !same)
        return ont_fail(ONT_EUNSUPPORTED, "the caller captures this stream, but the tensors differ from those of the "
                                          "previous call: take a step with the same tensors first, and keep their "
                                          "addresses");
    /* Work on another stream reads the tables, and writes the work memory behind them. An event would become a part of
     * a capture, whose caller orders the two. */
    if (!recording && t->device == device && t->last != stream) ONT_TRY(device->ops->join(device, stream, t->last));
    t->recorded |= recording;
    if (!same && t->recorded) ONT_TRY(leave_memory(t));
    if (!same) ONT_TRY(reserve(t, device, sizes->bytes, sizes->work));
    t->last = stream;
    if (same) return ONT_OK;
    const char *now = fresh, *before = t->host;
    bool moved = t->bytes == sizes->bytes &&
                 !memcmp(before + sizes->head, now + sizes->head, sizes->bytes - sizes->head);
    memcpy(t->host, fresh, sizes->bytes);
    t->bytes = 0;
    ONT_TRY(device->ops->write(device, t->memory.data, t->host, moved ? sizes->head : sizes->bytes, stream));
    t->bytes = sizes->bytes;
    return ONT_OK;
}
