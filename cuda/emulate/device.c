/*
 * The emulated device: memory of the process, work that is done when a call returns, graphs as lists of launches. It
 * has CUDA's operators, so that a whole step runs as on a GPU. For tests alone.
 */
#include <stdlib.h>
#include <string.h>

#include "core_shim.h"
#include "device/multi.h"
#include "ops_common.h"
#include "emulate/contract.h"

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

static ont_status enter(const ont_device *device, ont_scope *scope)
{
    (void)device;
    *scope = (ont_scope){0};
    return ONT_OK;
}

static void leave(const ont_device *device, const ont_scope *scope)
{
    (void)device;
    (void)scope;
}

/* torch's allocator may call cudaMalloc. Filled with NaN, so that a kernel that relies on zeros fails its test. */
static ont_status alloc(const ont_device *device, size_t bytes, ont_memory *memory)
{
    (void)device;
    ont_emulate_outside_capture("cudaMalloc");
    void *data = NULL;
    if (posix_memalign(&data, 64, bytes)) return ont_fail(ONT_ENOMEM, "the device has not %zu bytes", bytes);
    memset(data, 0x7f, bytes);
    *memory = (ont_memory){data, data};
    return ONT_OK;
}

static void release(const ont_device *device, ont_memory *memory, size_t bytes)
{
    (void)device;
    (void)bytes;
    free(memory->owner);
}

static ont_status alloc_shared(const ont_device *device, size_t bytes, void **data)
{
    (void)device;
    ont_emulate_outside_capture("cudaHostAlloc");
    void *fresh = calloc(1, bytes);
    if (!fresh) return ont_fail(ONT_ENOMEM, "out of memory");
    *data = fresh;
    return ONT_OK;
}

static void free_shared(const ont_device *device, void *data)
{
    (void)device;
    ont_emulate_outside_capture("cudaFreeHost");
    free(data);
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
    if (m->from)
        memmove(m->to, m->from, m->bytes);
    else
        memset(m->to, 0, m->bytes);
    return 0;
}

static ont_status move_or_record(move m)
{
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
    (void)stream;
    return move_or_record((move){to, from, bytes});
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
    return copy(device, host, from, bytes, stream);
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
    (void)stream;
    return move_or_record((move){to, NULL, bytes});
}

static ont_status synchronize(const ont_device *device, void *stream)
{
    (void)device;
    ont_emulate_outside_capture("cudaStreamSynchronize");
    (void)stream;
    return ONT_OK;
}

static ont_status join(const ont_device *device, void *stream, void *other)
{
    (void)device;
    ont_emulate_outside_capture("cudaStreamWaitEvent");
    (void)stream;
    (void)other;
    return ONT_OK;
}

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
    void *done = ont_emulate_capture_end();
    if (keep)
        *graph = done;
    else
        ont_emulate_graph_destroy(done);
    return ONT_OK;
}

static ont_status graph_launch(const ont_device *device, void *graph, void *stream)
{
    (void)device;
    ont_emulate_outside_capture("cudaGraphLaunch");
    (void)stream;
    return ont_launched(ont_emulate_graph_launch(graph));
}

static void graph_destroy(const ont_device *device, void *graph)
{
    (void)device;
    ont_emulate_graph_destroy(graph);
}

static ont_status optim(const ont_device *device, int what, const ont_cuda_optim *job, float *found_inf, void *stream)
{
    (void)device;
    return ont_launched(ont_launch_optim(what, job, found_inf, stream));
}

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
};

static ont_device device = {.ops = &ops, .random_blocks = 3}; /* few, so that small tensors need several rounds */

__attribute__((visibility("default"))) ont_status ont_plugin_open(const ont_core *core, const ont_allocator *allocator,
                                                                  ont_plugin *plugin)
{
    static const ont_allocator plain = {0}; /* where there is no torch: no TF32 */
    ont_cuda_core = core;
    ont_cuda_allocator = allocator ? allocator : &plain;
    device.lists = ont_cuda_lists;
    device.n_lists = ont_cuda_n_lists;
    *plugin = (ont_plugin){.version = ONT_PLUGIN_VERSION, .about = "CUDA's kernels, emulated on the host",
                            .devices = {&device},
                           .n_devices = 1};
    return ONT_OK;
}
