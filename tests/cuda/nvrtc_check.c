/*
 * libs/nvrtc.c without a device, for tests/cuda/facts.py: what it puts in front of a generated kernel, and compiling
 * one for any architecture.
 */
#include <cuda_runtime_api.h> /* the emulation's */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* What nvrtc.c calls of a device: none is there. */
typedef void *cudaLibrary_t, *cudaKernel_t;
typedef struct dim3 {
    unsigned x, y, z;
} dim3;
enum { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
static cudaError_t no_device(const void *first, ...)
{
    (void)first;
    return cudaErrorInvalidValue;
}
#define cudaGetLastError() no_device(NULL)
#define cudaGetErrorString(error) (no_device(&(error)), "there is no device")
#define cudaGetDevice no_device
#define cudaDeviceGetAttribute no_device
#define cudaLibraryLoadData no_device
#define cudaLibraryGetKernel no_device
#define cudaLaunchKernel no_device

#include "libs/nvrtc.c"

static void keep_error(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}

static const ont_core core = {.set_error = keep_error, .malloc = malloc, .calloc = calloc, .free = free};
const ont_core *ont_cuda_core = &core;

const char *ont_check_preamble(void)
{
    return preamble;
}

/* Bytes of machine code; 0: NVRTC is not found, or refuses the source, which stderr then explains. */
size_t ont_check_compile(const char *source, int architecture)
{
    code c = {0};
    if (!ont_jit_get() || build(source, architecture, &c) != ONT_OK) return 0;
    free(c.bytes);
    return c.size;
}
