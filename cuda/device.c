/*
 * The CUDA devices of this machine. The runtime is linked statically, and finds the driver. Memory and streams are
 * PyTorch's.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "libs/blas.h"
#include "libs/current.h"
#include "libs/dnn.h"
#include "libs/jit.h"
#include "libs/nccl.h"
#include "core_shim.h"
#include "device/multi.h"
#include "images.h"
#include "shared.h"
#include "ops_common.h"

const ont_core *ont_cuda_core;
const ont_allocator *ont_cuda_allocator;

const char *ont_cuda_error_text(int error)
{
    return cudaGetErrorString((cudaError_t)error);
}

static ont_status check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return ONT_OK;
    cudaGetLastError(); /* clears the error, so that no later call finds it */
    return ont_fail(error == cudaErrorMemoryAllocation ? ONT_ENOMEM : ONT_ESTATE, "CUDA, %s: %s", what,
                    cudaGetErrorString(error));
}

static ont_status enter(const ont_device *device, ont_scope *scope)
{
    ONT_TRY(check((cudaError_t)ont_current_enter(device->id, &scope->previous), "choosing a device"));
    ont_status status = ont_cuda_allocator->current_stream(ont_cuda_allocator->context, device->ops->dlpack,
                                                           device->id, &scope->stream);
    if (status != ONT_OK) ont_current_leave(scope->previous);
    return status;
}

static void leave(const ont_device *device, const ont_scope *scope)
{
    (void)device;
    ont_current_leave(scope->previous);
}

static ont_status alloc(const ont_device *device, size_t bytes, ont_dtype dtype, ont_memory *memory)
{
    return ont_cuda_allocator->take(ont_cuda_allocator->context, device->ops->dlpack, device->id, bytes, dtype, memory);
}

static void release(const ont_device *device, ont_memory *memory, size_t bytes)
{
    (void)device;
    (void)bytes;
    ont_cuda_allocator->give(memory);
}

static ont_status shared_page(void **page)
{
    return check(cudaHostAlloc(page, ONT_SHARED_PAGE, cudaHostAllocMapped | cudaHostAllocPortable),
                 "memory that both sides see");
}

static ont_status alloc_shared(const ont_device *device, size_t bytes, void **data)
{
    (void)device;
    if (bytes > ONT_SHARED_BLOCK) return ont_fail(ONT_EINVAL, "%zu bytes of shared memory are too many", bytes);
    return ont_shared_take(shared_page, data);
}

static void free_shared(const ont_device *device, void *data)
{
    (void)device;
    ont_shared_give(data);
}

static ont_status write_host(const ont_device *device, void *to, const void *host, size_t bytes, void *stream)
{
    (void)device;
    return check(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream), "copy to the device");
}

static ont_status store(const ont_device *device, void *to, const uint64_t *words, int n, void *stream)
{
    (void)device;
    return ont_launched(ont_launch_store(to, words, n, stream));
}

static ont_status copy(const ont_device *device, void *to, const void *from, size_t bytes, void *stream)
{
    (void)device;
    return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copy on the device");
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
    return check(cudaMemsetAsync(to, 0, bytes, stream), "clearing memory");
}

static ont_status read_device(const ont_device *device, void *host, const void *from, size_t bytes, void *stream)
{
    (void)device;
    ONT_TRY(check(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream), "copy from the device"));
    return check(cudaStreamSynchronize(stream), "waiting for a copy");
}

static ont_status synchronize(const ont_device *device, void *stream)
{
    (void)device;
    return check(cudaStreamSynchronize(stream), "waiting for a stream");
}

static ont_status join(const ont_device *device, void *stream, void *other)
{
    (void)device;
    cudaEvent_t event;
    ONT_TRY(check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"));
    ont_status status = check(cudaEventRecord(event, other), "recording an event");
    if (status == ONT_OK) status = check(cudaStreamWaitEvent(stream, event, 0), "waiting for an event");
    cudaEventDestroy(event); /* is destroyed once it has happened */
    return status;
}

/* ---- graphs ---- */

static bool capturing(const ont_device *device, void *stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)device;
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess)
        cudaGetLastError(); /* the legacy stream cannot be used during a capture */
    return status != cudaStreamCaptureStatusNone;
}

static ont_status capture_begin(const ont_device *device, void *stream, void **private_stream)
{
    cudaStream_t fresh;
    ONT_TRY(check(cudaStreamCreateWithFlags(&fresh, cudaStreamNonBlocking), "private stream"));
    ont_status status = join(device, fresh, stream);
    if (status == ONT_OK)
        status = check(cudaStreamBeginCapture(fresh, cudaStreamCaptureModeThreadLocal), "begin of capture");
    if (status != ONT_OK) {
        cudaStreamDestroy(fresh);
        return status;
    }
    *private_stream = fresh;
    return ONT_OK;
}

static ont_status capture_end(const ont_device *device, void *private_stream, bool keep, void **graph)
{
    (void)device;
    cudaGraph_t captured = NULL;
    cudaGraphExec_t exec = NULL;
    ont_status status = check(cudaStreamEndCapture(private_stream, &captured), "end of capture");
    if (status == ONT_OK && keep) status = check(cudaGraphInstantiate(&exec, captured, 0), "instantiating a graph");
    if (captured) cudaGraphDestroy(captured);
    cudaStreamDestroy(private_stream);
    if (status == ONT_OK) *graph = exec;
    return status;
}

static ont_status graph_launch(const ont_device *device, void *graph, void *stream)
{
    (void)device;
    return check(cudaGraphLaunch(graph, stream), "launching a graph");
}

static void graph_destroy(const ont_device *device, void *graph)
{
    (void)device;
    cudaGraphExecDestroy(graph);
}

static ont_status optim(const ont_device *device, int what, const ont_cuda_optim *job, float *found_inf, void *stream)
{
    (void)device;
    return ont_launched(ont_launch_optim(what, job, found_inf, stream));
}

enum { DLPACK_CUDA = 2 };

static const ont_device_ops ops = {
    .name = "cuda",
    .dlpack = DLPACK_CUDA,
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
};

/* The grid of PyTorch's random kernels: as many blocks of 256 threads as fill every multiprocessor. 0: unknown, so that
 * Dropout draws our own random words. */
static int32_t random_blocks(int id)
{
    int processors = 0, threads = 0;
    if (cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, id) != cudaSuccess ||
        cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, id) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return processors * (threads / 256);
}

static ont_device devices[ONT_PLUGIN_DEVICES];
static char about[128], left_out[192];

const ont_device *ont_cuda_device(void)
{
    int id = 0;
    return cudaGetDevice(&id) == cudaSuccess && id >= 0 && id < ONT_PLUGIN_DEVICES ? &devices[id] : &devices[0];
}

/* Whether this build has kernels for a GPU; says in left_out if not. */
static bool has_kernels(int id)
{
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id) != cudaSuccess)
        cudaGetLastError();
    else if (ont_images_run_on(ONT_CUDA_ARCHS, major * 10 + minor))
        return true;
    snprintf(left_out, sizeof left_out, "cuda:%d has compute capability %d.%d, and this build has kernels for %s", id,
             major, minor, ONT_CUDA_ARCHS);
    return false;
}

static ont_status add_devices(int n, ont_plugin *plugin)
{
    for (int id = 0; id < n && id < ONT_PLUGIN_DEVICES; id++) {
        if (!has_kernels(id)) continue;
        devices[id] = (ont_device){.ops = &ops, .id = id, .lists = ont_cuda_lists, .n_lists = ont_cuda_n_lists,
                                   .random_blocks = random_blocks(id)};
        plugin->devices[plugin->n_devices++] = &devices[id];
    }
    plugin->left_out = *left_out ? left_out : NULL;
    return plugin->n_devices ? ONT_OK : ont_fail(ONT_EIO, "%s", left_out);
}

__attribute__((visibility("default"))) ont_status ont_plugin_open(const ont_core *core, const ont_allocator *allocator,
                                                                  ont_plugin *plugin)
{
    int n = 0, driver = 0;
    ont_cuda_core = core;
    ont_cuda_allocator = allocator;
    if (!allocator) return ont_fail(ONT_EIO, "CUDA needs the DLPack exchange table: torch 2.10 or later");
    cudaError_t error = cudaGetDeviceCount(&n);
    if (error != cudaSuccess || !n) return ont_fail(ONT_EIO, "no CUDA device: %s", n ? "?" : cudaGetErrorString(error));
    cudaDriverGetVersion(&driver);
    *plugin = (ont_plugin){.version = ONT_PLUGIN_VERSION, .about = about};
    ONT_TRY(add_devices(n, plugin));
    const ont_blas *blas = ont_blas_get();
    const ont_dnn *dnn = ont_dnn_get();
    if (!ont_jit_get())
        plugin->missing = "NVRTC (libnvrtc.so.13 or .12: a CUDA build of torch brings it); elementwise groups are slow "
                          "without it";
    if (!dnn)
        plugin->missing = "cuDNN (libcudnn.so.9: a CUDA build of torch brings it); convolutions are slow without it";
    if (!blas) plugin->missing = "cuBLASLt (libcublasLt.so.13 or .12: a CUDA build of torch brings it)";
    snprintf(about, sizeof about, "%d device%s, driver %d.%d, %s, %s", n, n == 1 ? "" : "s", driver / 1000,
             driver % 1000 / 10, blas ? blas->name : "no cuBLASLt", dnn ? dnn->name : "no cuDNN");
    return ONT_OK;
}
