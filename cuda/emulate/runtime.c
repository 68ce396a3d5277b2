/*
 * The CUDA runtime and the loader of libraries where kernels are emulated, and the rules of contract.h.
 */
#include <cuda_runtime_api.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulate/contract.h"
#include "emulate/devices.h"
#include "libs/symbols.h"

bool ont_emulate_recording(void);

void ont_emulate_refuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("emulated device: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
    abort();
}

void ont_emulate_outside_capture(const char *call)
{
    ONT_REQUIRE(!ont_emulate_recording(), "%s: not allowed while a graph is captured", call);
}

uint64_t ont_emulate_key(const void *bytes, size_t n)
{
    const char *seed = getenv("ONT_EMULATE_SEED");
    uint64_t h = 0xcbf29ce484222325u + (seed ? strtoull(seed, NULL, 10) : 0); /* FNV-1a */
    for (size_t i = 0; i < n; i++) h = (h ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return h;
}

uint64_t ont_emulate_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* SplitMix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* ---- libraries ---- */

static void (*find_function(const char *name))(void)
{
    const ont_emulate_function *const lists[] = {ont_emulate_cublas, ont_emulate_cudnn, ont_emulate_cudnn_rnn,
                                                 ont_emulate_nccl};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const ont_emulate_function *f = lists[i]; f->name; f++)
            if (!strcmp(f->name, name)) return f->function;
    return NULL;
}

bool ont_library_open(const char *const *names, size_t n_names, const ont_symbol *symbols, size_t n_symbols,
                      void *table)
{
    const char *missing = getenv("ONT_EMULATE_MISSING"); /* a library that is not found */
    (void)n_names;
    if (missing && !strcmp(missing, names[0])) return false;
    for (size_t i = 0; i < n_symbols; i++) {
        void (*function)(void) = find_function(symbols[i].name);
        if (!function) return false;
        memcpy((char *)table + symbols[i].offset, &function, sizeof function);
    }
    return true;
}

/* ---- the runtime ---- */

struct ont_emulate_event {
    int device, epilogues;
    bool recorded;
    uint64_t state;
};

static int epilogues, slow = -1;

/* 1: a product with GELU in its epilogue is slow; 0: every other one; -1: neither, times are random. */
__attribute__((visibility("default"))) void ont_emulate_set_slow_epilogues(int on)
{
    slow = on;
}

void ont_emulate_note_epilogue(void)
{
    epilogues++;
}

cudaError_t cudaGetDevice(int *id)
{
    *id = ont_emulate_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int id)
{
    ont_emulate_set_device(id);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    (void)stream;
    *status = ont_emulate_recording() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = calloc(1, sizeof **event);
    if (*event) (*event)->device = ont_emulate_device();
    return *event ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

static uint64_t records;

/* How many times have been taken. */
__attribute__((visibility("default"))) uint64_t ont_emulate_times(void)
{
    return records;
}

/* Times are random, so that every proposal of a library is the fastest once. */
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    uint64_t n = __atomic_add_fetch(&records, 1, __ATOMIC_RELAXED);
    ont_emulate_check_stream("cudaEventRecord", stream);
    ONT_REQUIRE(event->device == ont_emulate_device(),
                "cudaEventRecord: an event of device %d, but device %d is current", event->device,
                ont_emulate_device());
    event->state = ont_emulate_key(&n, sizeof n);
    event->epilogues = epilogues;
    event->recorded = !ont_emulate_recording(); /* in a graph, the event has not happened yet */
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    ont_emulate_outside_capture("cudaEventSynchronize");
    return event->recorded ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    ont_emulate_outside_capture("cudaEventElapsedTime");
    if (!begin->recorded || !end->recorded) return cudaErrorInvalidValue;
    *ms = 0.001f + (float)(ont_emulate_random(&end->state) % 1000) / 1000;
    if (slow == (end->epilogues > begin->epilogues)) *ms += 10;
    return cudaSuccess;
}
