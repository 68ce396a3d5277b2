/*
 * Tables of tensors on a device, for launches over many of them (device/multi.h): written again only where something is
 * not as it was at the last call. Used by py/optim_device.c and py/grads_device.c.
 */
#ifndef ONT_PY_TABLES_H
#define ONT_PY_TABLES_H

#include "device/device.h"
#include "device/multi.h"

typedef struct ont_device_tables {
    const ont_device *device;
    ont_memory memory;
    void *host; /* what the device's hold */
    size_t bytes, host_capacity, device_capacity;
    bool recorded; /* somebody's graph reads the memory */
    struct ont_kept_tables *kept;
} ont_device_tables;

typedef struct ont_table_sizes {
    size_t head, bytes, work; /* tensors; with the chunks behind them; what kernels write behind that */
} ont_table_sizes;

/*
 * The tables on the device, `fresh` being what they should be. On a stream that is recorded nothing can be written:
 * tables that differ are refused, and those that are read are kept until ont_tables_free(), whatever comes.
 */
ont_status ont_tables_put(ont_device_tables *t, const ont_device *device, const void *fresh,
                          const ont_table_sizes *sizes, void *stream) ONT_MUST_USE;
void ont_tables_free(ont_device_tables *t);

#endif
