/*
 * cuDNN's graph API behind dnn_graph.h, opened at run time: PyTorch's CUDA build has it.
 */
#include "libs/dnn_graph.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>

#include "libs/cudnn.h"
#include "libs/symbols.h"
#include "libs/timing.h"

static ont_status open_device(int *id, int *capability, void **handle)
{
    int major = 0, minor = 0;
    ONT_TRY(ont_cudnn_handle(id, handle));
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *id) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, *id) != cudaSuccess)
        return ont_fail(ONT_ESTATE, "the device has no compute capability");
    *capability = 10 * major + minor;
    return ONT_OK;
}

static double time_on_stream(int (*launch)(const void *call, int candidate), const void *call, int candidate,
                             void *stream)
{
    return ont_cuda_time(launch, call, candidate, stream);
}

static ont_dnn_graph table = {
    .open = open_device, .lock = ont_cudnn_lock, .unlock = ont_cudnn_unlock, .time = time_on_stream};
static bool found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_library(void)
{
    static const char *const names[] = {"libcudnn.so.9"};
    static const ont_symbol symbols[] = {
        {"cudnnGetVersion", offsetof(ont_dnn_graph, version)},
        {"cudnnBackendCreateDescriptor", offsetof(ont_dnn_graph, create)},
        {"cudnnBackendDestroyDescriptor", offsetof(ont_dnn_graph, destroy)},
        {"cudnnBackendSetAttribute", offsetof(ont_dnn_graph, set)},
        {"cudnnBackendGetAttribute", offsetof(ont_dnn_graph, get)},
        {"cudnnBackendFinalize", offsetof(ont_dnn_graph, finalize)},
        {"cudnnBackendExecute", offsetof(ont_dnn_graph, execute)},
        {"cudnnSetStream", offsetof(ont_dnn_graph, set_stream)},
    };
    found = ont_library_open(names, sizeof names / sizeof *names, symbols, sizeof symbols / sizeof *symbols, &table);
}

const ont_dnn_graph *ont_dnn_graph_get(void)
{
    pthread_once(&once, open_library);
    return found ? &table : NULL;
}
