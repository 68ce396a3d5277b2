"""device.c with a stand-in for the CUDA runtime: which GPUs of a machine become devices."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = """
typedef int cudaError_t;
typedef void *cudaStream_t, *cudaEvent_t, *cudaGraph_t, *cudaGraphExec_t;
enum { cudaSuccess, cudaErrorMemoryAllocation = 2, cudaErrorNoDevice = 100 };
enum { cudaHostAllocMapped, cudaHostAllocPortable, cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice,
       cudaMemcpyDeviceToHost, cudaEventDisableTiming, cudaStreamNonBlocking, cudaStreamCaptureModeThreadLocal };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor, cudaDevAttrMultiProcessorCount,
       cudaDevAttrMaxThreadsPerMultiProcessor };
const char *cudaGetErrorString(int);
int cudaGetLastError(), cudaHostAlloc(), cudaMemcpyAsync(), cudaMemsetAsync(), cudaStreamSynchronize(),
    cudaEventCreateWithFlags(), cudaEventRecord(), cudaStreamWaitEvent(), cudaEventDestroy(), cudaStreamIsCapturing(),
    cudaStreamCreateWithFlags(), cudaStreamBeginCapture(), cudaStreamDestroy(), cudaStreamEndCapture(),
    cudaGraphInstantiate(), cudaGraphDestroy(), cudaGraphLaunch(), cudaGraphExecDestroy(), cudaGetDevice(),
    cudaGetDeviceCount(), cudaDriverGetVersion(), cudaDeviceGetAttribute();
"""
MAIN = """
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "device/plugin.h"
#include "ops/plugin_api.h"

static int n, capabilities[8];
static char message[400];

const char *cudaGetErrorString(int error) { return error ? "no CUDA-capable device is detected" : "?"; }
int cudaGetDeviceCount(int *count) { *count = n; return n ? 0 : 100; }
int cudaDeviceGetAttribute(int *value, int which, int id)
{
    *value = which == 0 ? capabilities[id] / 10 : which == 1 ? capabilities[id] % 10 : 1024;
    return 0;
}
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
#define NOTHING(name) int name() { return 0; }
NOTHING(cudaGetLastError) NOTHING(cudaHostAlloc) NOTHING(cudaMemcpyAsync) NOTHING(cudaMemsetAsync)
NOTHING(cudaStreamSynchronize) NOTHING(cudaEventCreateWithFlags) NOTHING(cudaEventRecord) NOTHING(cudaStreamWaitEvent)
NOTHING(cudaEventDestroy) NOTHING(cudaStreamIsCapturing) NOTHING(cudaStreamCreateWithFlags)
NOTHING(cudaStreamBeginCapture) NOTHING(cudaStreamDestroy) NOTHING(cudaStreamEndCapture) NOTHING(cudaGraphInstantiate)
NOTHING(cudaGraphDestroy) NOTHING(cudaGraphLaunch) NOTHING(cudaGraphExecDestroy) NOTHING(cudaGetDevice)

const ont_kernel_list ont_cuda_lists[1];
const size_t ont_cuda_n_lists = 1;
#define ABSENT(type, name) type name() { return 0; }
ABSENT(void *, ont_blas_get) ABSENT(void *, ont_dnn_get) ABSENT(void *, ont_jit_get) ABSENT(void *, ont_nccl_get)
ABSENT(int, ont_launch_optim) ABSENT(int, ont_launch_store) ABSENT(int, ont_copy_strided_launch)
ABSENT(int, ont_shared_take) ABSENT(int, ont_shared_give) ABSENT(int, ont_current_enter)
ABSENT(int, ont_current_leave)

static void keep(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
}

ont_status ont_plugin_open(const ont_core *core, const ont_allocator *allocator, ont_plugin *plugin);

int main(int argc, char **argv)
{
    const ont_core core = {.set_error = keep};
    const ont_allocator allocator = {0};
    ont_plugin plugin;
    for (int i = 1; i < argc; i++) capabilities[n++] = atoi(argv[i]);
    ont_status status = ont_plugin_open(&core, &allocator, &plugin);
    for (int i = 0; i < plugin.n_devices && status == ONT_OK; i++)
        printf("%s:%d ", plugin.devices[i]->ops->name, plugin.devices[i]->id);
    printf("| %s\\n", status != ONT_OK ? message : plugin.left_out ? plugin.left_out : "");
    return 0;
}
"""


@pytest.fixture(scope="module")
def opener(tmp_path_factory) -> Path:
    """A program that opens the plugin, built for 8.0 and 9.0, on a machine with GPUs of the given capabilities."""
    folder = tmp_path_factory.mktemp("device")
    (folder / "cuda_runtime_api.h").write_text(RUNTIME, encoding="utf-8")
    (folder / "main.c").write_text(MAIN, encoding="utf-8")
    subprocess.run(["cc", "-std=gnu11", "-w", "-D_GNU_SOURCE", '-DONT_CUDA_ARCHS="80 90"', f"-I{folder}", f"-I{ROOT}/cuda",
                    f"-I{ROOT}/csrc", str(ROOT / "cuda/device.c"), str(ROOT / "cuda/images.c"), str(folder / "main.c"),
                    "-o", str(folder / "open")], check=True)
    return folder / "open"


@pytest.mark.parametrize(("gpus", "said"), [
    (("80", "90"), "cuda:0 cuda:1 |"),
    (("70", "90"), "cuda:1 | cuda:0 has compute capability 7.0, and this build has kernels for 80 90"),
    (("90", "75", "100"), "cuda:0 cuda:2 | cuda:1 has compute capability 7.5, and this build has kernels for 80 90"),
    (("75",), "| cuda:0 has compute capability 7.5, and this build has kernels for 80 90"),
    ((), "| no CUDA device: no CUDA-capable device is detected"),
])
def test_gpus_without_kernels_are_no_devices(opener, gpus, said):
    """Without its machine code, the first launch on such a GPU would fail in a user's step."""
    done = subprocess.run([str(opener), *gpus], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said
