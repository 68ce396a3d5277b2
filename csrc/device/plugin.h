/*
 * Device plugins: libraries opened at run time. _cuda.so beside the extension, or the emulation that the tests build. A
 * plugin exports ont_plugin_open() and receives the core's functions as a table (ops/plugin_api.h).
 */
#ifndef ONT_DEVICE_PLUGIN_H
#define ONT_DEVICE_PLUGIN_H

#include "device/device.h"

enum { ONT_PLUGIN_VERSION = 6, ONT_PLUGIN_DEVICES = 16 };

struct ont_core;

/* torch's allocator of device memory; py/ sets it before a plugin is opened. */
typedef struct ont_allocator {
    void *context;
    ont_status (*take)(void *context, int32_t type, int32_t id, size_t bytes, ont_dtype dtype, ont_memory *memory);
    void (*give)(ont_memory *memory);
    ont_status (*current_stream)(void *context, int32_t type, int32_t id, void **stream);
    int tf32, tf32_conv; /* float32 products and convolutions may round their operands to TF32: torch's flags */
} ont_allocator;

typedef struct ont_plugin {
    int version;
    const char *about;      /* one line for `python -m onnxtrain` */
    const char *missing;    /* libraries that it did not find; NULL: none */
    const char *left_out;   /* why a device of the machine is not among `devices`; NULL: all are */
    const ont_device *devices[ONT_PLUGIN_DEVICES];
    int n_devices;
} ont_plugin;

/* Fills the plugin; EIO with a message where the machine lacks something that it needs. */
typedef ont_status (*ont_plugin_open_fn)(const struct ont_core *core, const ont_allocator *allocator,
                                         ont_plugin *plugin);

void ont_plugin_set_allocator(const ont_allocator *allocator); /* kept by reference */
/* The flags of the allocator that decide which kernels a program has, as one number for its key. */
int64_t ont_plugin_flags(void);
/* Opens a plugin; later calls with the same path return the same plugin. */
ont_status ont_plugin_get(const char *path, const struct ont_core *core, const ont_plugin **plugin) ONT_MUST_USE;
/* The path of the CUDA plugin beside the extension, whether or not the file exists. */
const char *ont_plugin_cuda_path(void);

#endif
