/*
 * The emulated devices: memory of the process, work that is done when a call returns, graphs as lists of launches. They
 * have CUDA's operators, so that a whole step runs as on a GPU. For tests alone.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core_shim.h"
#include "device/multi.h"
#include "images.h"
#include "shared.h"
#include "ops_common.h"
#include "emulate/contract.h"
#include "emulate/devices.h"
#include "libs/nccl.h"

#define EXPORTED __attribute__((visibility("default")))

const ont_core *ont_cuda_core;
const ont_allocator *ont_cuda_allocator;
const char *ont_emulate_error(void);
bool ont_emulate_recording(void);
int ont_emulate_record(int (*work)(void *), void *context, void (*forget)(void *));
void ont_emulate_capture_begin(void);
void *ont_emulate_capture_end(void);
int ont_emulate_graph_launch(void *graph);
void ont_emulate_graph_destroy(void *graph);

const char *ont_cuda_error_text(int error)
{
    (void)error;
    return ont_emulate_error();
}

/* ---- for tests: which streams have waited, memory that runs out, memory that is one device's ---- */

static void *last_waiting, *last_awaited;
static int joins, shared_pages;
static size_t largest = SIZE_MAX; /* bytes of an allocation */
static bool is_apart;

/* From now on the first device, too, has memory of its own instead of torch's, which both may use. */
EXPORTED void ont_emulate_set_apart(void)
{
    is_apart = true;
}

/* How often a stream has waited for another one, and which did last. */
EXPORTED int ont_emulate_joins(void **waiting, void **awaited)
{
    *waiting = last_waiting;
    *awaited = last_awaited;
    return joins;
}

EXPORTED void ont_emulate_set_largest(size_t bytes)
{
    largest = bytes;
}

EXPORTED int ont_emulate_shared_pages(void)
{
    return shared_pages;
}

static ont_status alloc_shared(const ont_device *device, size_t bytes, void **data);

EXPORTED void *ont_emulate_shared_take(void)
{
    void *block = NULL;
    return alloc_shared(NULL, ONT_SHARED_BLOCK, &block) == ONT_OK ? block : NULL;
}

EXPORTED void ont_emulate_shared_give(void *block)
{
    ont_shared_give(block);
}

EXPORTED bool ont_emulate_images_run_on(const char *architectures, int capability)
{
    return ont_images_run_on(architectures, capability);
}

static ont_status enter(const ont_device *device, ont_scope *scope)
{
    *scope = (ont_scope){.stream = ont_emulate_stream(device->id), .previous = ont_emulate_set_device(device->id)};
    return ONT_OK;
}

static void leave(const ont_device *device, const ont_scope *scope)
{
    (void)device;
    ont_emulate_set_device(scope->previous);
}

/* May call cudaMalloc, as torch does. Filled with NaN, so that a kernel that relies on zeros fails. */
static ont_status alloc(const ont_device *device, size_t bytes, ont_dtype dtype, ont_memory *memory)
{
    ont_emulate_outside_capture("cudaMalloc");
    if (bytes > largest) return ont_fail(ONT_ENOMEM, "the device has not %zu bytes", bytes);
    if (is_apart || device->id) {
        *memory = (ont_memory){.data = ont_emulate_take(device->id, bytes)};
        return memory->data ? ONT_OK : ont_fail(ONT_ENOMEM, "the device has not %zu bytes", bytes);
    }
    const ont_allocator *torch = ont_cuda_allocator;
    ONT_TRY(torch->take(torch->context, device->ops->dlpack, device->id, bytes, dtype, memory));
    memset(memory->data, 0x7f, bytes);
    return ONT_OK;
}

static void release(const ont_device *device, ont_memory *memory, size_t bytes)
{
    (void)device;
    (void)bytes;
    if (memory->owner || memory->tensor) ont_cuda_allocator->give(memory);
    else ont_emulate_give(memory->data);
}

static ont_status shared_page(void **page)
{
    *page = malloc(ONT_SHARED_PAGE);
    shared_pages++;
    return *page ? ONT_OK : ont_fail(ONT_ENOMEM, "out of memory");
}

static ont_status alloc_shared(const ont_device *device, size_t bytes, void **data)
{
    (void)device;
    ont_emulate_outside_capture("cudaHostAlloc"); /* where the pool is empty */
    if (bytes > ONT_SHARED_BLOCK) return ont_fail(ONT_EINVAL, "%zu bytes of shared memory are too many", bytes);
    return ont_shared_take(shared_page, data);
}

static void free_shared(const ont_device *device, void *data)
{
    (void)device;
    ont_shared_give(data);
}

/* ---- copies and clears: executed, or recorded ---- */

typedef struct move {
    void *to;
    const void *from; /* NULL: zeros */
    size_t bytes;
} move;

static int do_move(void *context)
{
    const move *m = context;
    ont_emulate_begin_work(m->from ? "cudaMemcpyAsync" : "cudaMemsetAsync");
    if (m->from)
        memmove(m->to, m->from, m->bytes);
    else
        memset(m->to, 0, m->bytes);
    ont_emulate_end_work();
    return 0;
}

static ont_status move_or_record(move m, void *stream)
{
    ont_emulate_check_stream(m.from ? "cudaMemcpyAsync" : "cudaMemsetAsync", stream);
    if (!ont_emulate_recording()) {
        do_move(&m);
        return ONT_OK;
    }
    move *kept = malloc(sizeof *kept);
    if (!kept) return ont_fail(ONT_ENOMEM, "out of memory");
    *kept = m;
    ont_emulate_record(do_move, kept, free);
    return ONT_OK;
}

static ont_status copy(const ont_device *device, void *to, const void *from, size_t bytes, void *stream)
{
    (void)device;
    return move_or_record((move){to, from, bytes}, stream);
}

/* A graph would read the host's memory at every replay. */
static ont_status write_host(const ont_device *device, void *to, const void *host, size_t bytes, void *stream)
{
    ont_emulate_outside_capture("cudaMemcpyAsync from the host");
    return copy(device, to, host, bytes, stream);
}

static ont_status read_device(const ont_device *device, void *host, const void *from, size_t bytes, void *stream)
{
    ont_emulate_outside_capture("cudaStreamSynchronize");
    ONT_TRY(copy(device, host, from, bytes, stream));
    ont_emulate_wait_for_stream(stream);
    return ONT_OK;
}

static ont_status store(const ont_device *device, void *to, const uint64_t *words, int n, void *stream)
{
    (void)device;
    return ont_launched(ont_launch_store(to, words, n, stream));
}

static ont_status copy_strided(const ont_device *device, const ont_device_strided *layout, const void *from, void *to,
                               void *stream)
{
    (void)device;
    return ont_copy_strided_launch(layout, from, to, stream);
}

static ont_status clear(const ont_device *device, void *to, size_t bytes, void *stream)
{
    (void)device;
    return move_or_record((move){to, NULL, bytes}, stream);
}

static ont_status synchronize(const ont_device *device, void *stream)
{
    (void)device;
    ont_emulate_outside_capture("cudaStreamSynchronize");
    ont_emulate_check_stream("cudaStreamSynchronize", stream);
    ont_emulate_wait_for_stream(stream);
    return ONT_OK;
}

static ont_status join(const ont_device *device, void *stream, void *other)
{
    (void)device;
    ont_emulate_outside_capture("cudaStreamWaitEvent");
    ont_emulate_check_stream("cudaEventRecord", other);
    ont_emulate_check_stream("cudaStreamWaitEvent", stream);
    ont_emulate_join_streams(stream, other);
    last_waiting = stream;
    last_awaited = other;
    joins++;
    return ONT_OK;
}

typedef struct graph {
    void *work;
    int device; /* that was current when it was captured */
} graph;

static bool capturing(const ont_device *device, void *stream)
{
    (void)device;
    (void)stream;
    return ont_emulate_recording();
}

static ont_status capture_begin(const ont_device *device, void *stream, void **private_stream)
{
    (void)device;
    ont_emulate_outside_capture("cudaStreamBeginCapture");
    ont_emulate_capture_begin();
    *private_stream = stream;
    return ONT_OK;
}

static ont_status capture_end(const ont_device *device, void *private_stream, bool keep, void **graph)
{
    (void)device;
    (void)private_stream;
    struct graph *made = keep ? malloc(sizeof *made) : NULL;
    void *done = ont_emulate_capture_end();
    if (!made) ont_emulate_graph_destroy(done);
    if (!made) return keep ? ont_fail(ONT_ENOMEM, "out of memory") : ONT_OK;
    *made = (struct graph){done, ont_emulate_device()};
    *graph = made;
    return ONT_OK;
}

static ont_status graph_launch(const ont_device *device, void *opaque, void *stream)
{
    const graph *g = opaque;
    (void)device;
    ont_emulate_outside_capture("cudaGraphLaunch");
    ont_emulate_check_stream("cudaGraphLaunch", stream);
    ONT_REQUIRE(g->device == ont_emulate_device(), "cudaGraphLaunch: a graph of device %d, but device %d is current",
                g->device, ont_emulate_device());
    return ont_launched(ont_emulate_graph_launch(g->work));
}

static void graph_destroy(const ont_device *device, void *opaque)
{
    (void)device;
    ont_emulate_graph_destroy(((graph *)opaque)->work);
    free(opaque);
}

static ont_status optim(const ont_device *device, int what, const ont_cuda_optim *job, float *found_inf, void *stream)
{
    (void)device;
    return ont_launched(ont_launch_optim(what, job, found_inf, stream));
}

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

static void guard(const ont_device *device, void *data, size_t bytes, bool accessible)
{
    (void)device;
    if (accessible)
        __asan_unpoison_memory_region(data, bytes);
    else
        __asan_poison_memory_region(data, bytes);
}
#define GUARD guard
#else
#define GUARD NULL
#endif

enum { DLPACK_CPU = 1 };

static const ont_device_ops ops = {
    .name = "emulated",
    .dlpack = DLPACK_CPU,
    .waits = true,
    .enter = enter,
    .leave = leave,
    .alloc = alloc,
    .free = release,
    .alloc_shared = alloc_shared,
    .free_shared = free_shared,
    .write = write_host,
    .store = store,
    .copy = copy,
    .copy_strided = copy_strided,
    .clear = clear,
    .read = read_device,
    .synchronize = synchronize,
    .join = join,
    .capturing = capturing,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .graph_launch = graph_launch,
    .graph_destroy = graph_destroy,
    .optim = optim,
    .comm = ont_nccl_get,
    .guard = GUARD,
};

static ont_device devices[ONT_EMULATE_DEVICES];

const ont_device *ont_cuda_device(void)
{
    return &devices[ont_emulate_device()];
}

EXPORTED ont_status ont_plugin_open(const ont_core *core, const ont_allocator *torch, ont_plugin *plugin)
{
    if (!torch) return ont_fail(ONT_EIO, "the emulation needs the DLPack exchange table: torch 2.10 or later");
    ont_cuda_core = core;
    ont_cuda_allocator = torch;
    *plugin = (ont_plugin){.version = ONT_PLUGIN_VERSION, .about = "CUDA's kernels, emulated on the host"};
    for (int id = 0; id < ONT_EMULATE_DEVICES; id++) {
        devices[id] = (ont_device){.ops = &ops, .id = id, .lists = ont_cuda_lists, .n_lists = ont_cuda_n_lists,
                                   .random_blocks = 3}; /* few, so that small tensors need several rounds */
        plugin->devices[plugin->n_devices++] = &devices[id];
    }
    return ONT_OK;
}
