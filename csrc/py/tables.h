/*
 * Tables of tensors in device memory, for launches over many tensors (device/multi.h); uploaded only if they differ
 * from those of the last call. Used by py/optim_device.c and py/grads_device.c.
 */
#ifndef ONT_PY_TABLES_H
#define ONT_PY_TABLES_H

#include "device/device.h"
#include "device/multi.h"

typedef struct ont_device_tables {
    const ont_device *device;
    ont_memory memory;
    void *host; /* host copy of the device's tables */
    size_t bytes, host_capacity, device_capacity;
    bool recorded; /* a captured graph reads this memory */
    void *last;    /* the stream of the last call */
    struct ont_kept_tables *kept;
} ont_device_tables;

typedef struct ont_table_sizes {
    size_t head, bytes, work; /* bytes of the tensors; of tensors and chunks; of the kernels' work memory behind them */
} ont_table_sizes;

/*
 * Makes the device's tables equal to `fresh`. A stream under capture cannot be written to: different tables are refused
 * there, and tables that a captured graph reads are kept until ont_tables_free(). Work on `stream` may use them until
 * the next call: a call on another stream waits for that work, and so does memory that is given back.
 */
ont_status ont_tables_put(ont_device_tables *t, const ont_device *device, const void *fresh,
                          const ont_table_sizes *sizes, void *stream) ONT_MUST_USE;
void ont_tables_free(ont_device_tables *t);

#endif
