"""The emulated CUDA runtime: what is not allowed while a graph is captured ends the process, and says which call."""

from __future__ import annotations

import pytest
from planted import Fault

BEGIN = "static ont_status run(const ont_call *call)\n{\n    const state *s = call->state;\n"
MATMUL = "ops/matmul.c"


def in_a_product(code: str, message: str) -> Fault:
    """Each product of a program also runs this code; the phase is captured at its third call."""
    return Fault(MATMUL, BEGIN, f"{BEGIN}    const ont_device *device = call->device;\n    {code}\n", "graphs",
                 f"{message}: not allowed while a graph is captured")


FAULTS = {
    "allocates": in_a_product(
        "ont_memory m; ONT_TRY(device->ops->alloc(device, 64, ONT_UINT8, &m)); device->ops->free(device, &m, 64);", "cudaMalloc"),
    "allocates for the host": in_a_product(
        "void *p; ONT_TRY(device->ops->alloc_shared(device, 64, &p));", "cudaHostAlloc"),
    "waits": in_a_product("ONT_TRY(device->ops->synchronize(device, call->stream));", "cudaStreamSynchronize"),
    "reads": in_a_product(
        "char byte; ONT_TRY(device->ops->read(device, &byte, call->in[0], 1, call->stream));", "cudaStreamSynchronize"),
    "copies from the host": in_a_product(
        "char byte = 0; ONT_TRY(device->ops->write(device, call->out[0], &byte, 1, call->stream));",
        "cudaMemcpyAsync from the host"),
    "joins another stream": in_a_product(
        "ONT_TRY(device->ops->join(device, call->stream, (void *)1));", "cudaStreamWaitEvent"),
    "compiles a kernel": Fault(
        "ops/elementwise.c", "    const state *s = call->state;\n    ont_ew e = s->program;\n",
        "    const state *s = call->state;\n    ont_ew e = s->program;\n    static long unlike = 8;\n    ont_ew fresh = e;\n"
        "    ont_generated *made = NULL;\n    fresh.dims[0] = fresh.count = unlike++;\n    fresh.rank = 1;\n"
        "    ONT_TRY(ont_generate(&fresh, &made));\n    ont_generated_destroy(made);\n", "graph_variants",
        "cudaLibraryLoadData: not allowed while a graph is captured"),
    "is measured": Fault(
        "libs/cublas.c", "call.list->choice < 0) status = choose(&call);\n",
        "call.list->choice < 0) status = choose(&call);\n    if (status == ONT_OK) measure(&call, 0);\n", "graphs",
        "cudaEventSynchronize: not allowed while a graph is captured"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_captured_step_that(planted_faults, name):
    planted_faults.assert_found(name)
