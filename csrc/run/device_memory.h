/*
 * Memory and streams of a device; NULL is the CPU.
 */
#ifndef ONT_RUN_DEVICE_MEMORY_H
#define ONT_RUN_DEVICE_MEMORY_H

#include "device/device.h"
#include "run/program.h"

ont_status ont_device_alloc(const ont_device *device, size_t bytes, ont_memory *memory) ONT_MUST_USE;
void ont_device_free(const ont_device *device, ont_memory *memory, size_t bytes);
/*
 * Frees memory that stream `last` used last. The stream that it was allocated on, whose work may get it next, waits for
 * `last` first. Memory for which no stream can wait is never freed.
 */
void ont_device_free_after(const ont_device *device, ont_memory *memory, size_t bytes, void *last);
/* Lets that stream wait without freeing the memory; whether it does. A failure is logged. */
bool ont_device_wait_for_use(const ont_device *device, const ont_memory *memory, void *last);
ont_status ont_device_enter(const ont_device *device, ont_scope *scope) ONT_MUST_USE;
void ont_device_leave(const ont_device *device, const ont_scope *scope);
ont_status ont_device_copy(const ont_device *device, void *to, const void *from, size_t bytes,
                           void *stream) ONT_MUST_USE;
ont_status ont_device_clear(const ont_device *device, void *to, size_t bytes, void *stream) ONT_MUST_USE;
ont_status ont_device_copy_view(const ont_device *device, const ont_tensor_view *view, void *to,
                                void *stream) ONT_MUST_USE;

/* Uploads the graph's constants to the device and sets constant_addresses (one per value). */
ont_status ont_device_upload_constants(ont_program *p) ONT_MUST_USE;
/* EINDEX or EINVAL for a fault that a kernel has recorded since the last call. */
ont_status ont_device_check_fault(const ont_program *p) ONT_MUST_USE;

#endif
