/*
 * Memory and order of work on a program's device, the CPU (NULL) included. For run/ alone.
 */
#ifndef ONT_RUN_DEVICE_MEMORY_H
#define ONT_RUN_DEVICE_MEMORY_H

#include "device/device.h"
#include "run/program.h"

ont_status ont_device_alloc(const ont_device *device, size_t bytes, ont_memory *memory) ONT_MUST_USE;
void ont_device_free(const ont_device *device, ont_memory *memory, size_t bytes);
ont_status ont_device_enter(const ont_device *device, ont_scope *scope) ONT_MUST_USE;
void ont_device_leave(const ont_device *device, const ont_scope *scope);
ont_status ont_device_copy(const ont_device *device, void *to, const void *from, size_t bytes,
                           void *stream) ONT_MUST_USE;
ont_status ont_device_clear(const ont_device *device, void *to, size_t bytes, void *stream) ONT_MUST_USE;
ont_status ont_device_copy_view(const ont_device *device, const ont_tensor_view *view, void *to,
                                void *stream) ONT_MUST_USE;

/* Constants of a graph that will run on a device are uploaded there, once; *at has an address per value. */
ont_status ont_device_upload_constants(ont_program *p) ONT_MUST_USE;
/* EINDEX and the like for what a kernel has found since the last call. */
ont_status ont_device_check_fault(const ont_program *p) ONT_MUST_USE;

#endif
