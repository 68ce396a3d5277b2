"""Two emulated devices: modules on each, and what is said where work of one touches what is the other's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import peers
import pytest
import torch
from distributed_training import run
from planted import Fault

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "static ont_status run(const ont_call *call)\n{\n    const state *s = call->state;\n"


def in_a_product(code: str, message: str) -> Fault:
    """Each product of a program also runs this code."""
    return Fault("ops/matmul.c", BEGIN, f"{BEGIN}    const ont_device *device = call->device;\n    {code}\n",
                 "two_devices", message)


FAULTS = {
    "of cuBLASLt": Fault("libs/cublas.c", "    *handle = handles[id];\n", "    *handle = handles[0];\n", "two_devices",
                         "a handle of device 0, but device 1 is current"),
    "of cuDNN": Fault("libs/cudnn.c", "    *handle = handles[*id];\n", "    *handle = handles[0];\n",
                      "two_devices_of_layers", "a handle of device 0, but device 1 is current"),
    "that is cleared": in_a_product(
        "static void *kept; if (!kept) kept = call->out[0]; ONT_TRY(device->ops->clear(device, kept, 4, call->stream));",
        "cudaMemsetAsync on device 1 touches memory of device 0"),
    "that is copied": in_a_product(
        "static void *kept; if (!kept) kept = call->out[0]; "
        "ONT_TRY(device->ops->copy(device, call->out[0], kept, 4, call->stream));",
        "cudaMemcpyAsync on device 1 touches memory of device 0"),
    "that a kernel reads": in_a_product(
        "static void *kept; if (!kept) kept = call->out[0]; const uint64_t word = 0; "
        "ONT_TRY(device->ops->store(device, kept, &word, 1, call->stream));",
        "on device 1 touches memory of device 0"),
    "that a product writes": Fault(
        "libs/cublas.c", "    if (status == ONT_OK) status = set_pointers(call.p, x->bias, x->aux);\n",
        "    static void *kept; if (!kept) kept = x->c; ont_blas_operands y = *x; int id; cudaGetDevice(&id);\n"
        "    if (id) y.c = kept;\n    call.x = &y;\n"
        "    if (status == ONT_OK) status = set_pointers(call.p, x->bias, x->aux);\n", "two_devices",
        "cublasLtMatmul on device 1 touches memory of device 0"),
    "whose stream is used": in_a_product(
        "static void *last; if (last && !device->id) ONT_TRY(device->ops->join(device, call->stream, last)); "
        "last = device->id ? call->stream : last;",
        "cudaEventRecord: the stream is device 1's, but device 0 is current"),
    "that is not current": Fault("emulate/device.c", ".previous = ont_emulate_set_device(device->id)",
                                 ".previous = ont_emulate_device()", "two_devices",
                                 "the stream is device 1's, but device 0 is current"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_other_device(planted_faults, name):
    planted_faults.assert_found(name)


def test_modules_on_two_devices(emulated):
    paths = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, str(ROOT / "tests/cuda/devices.py"), str(emulated), "emulated"], cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["passed"] > 6 and not report["failed"], report["failed"]


def test_a_device_for_each_process(emulated, tmp_path):
    """DistributedDataParallel: the weights of one process on the CPU that has all batches."""
    one, other = run(peers.distributed, 2, tmp_path, str(emulated))
    for mine, theirs, want in zip(one, other, peers.fit(peers.layers(), peers.data_of(5, 2)), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, want, rtol=2e-5, atol=2e-6)
