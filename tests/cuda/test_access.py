"""Accesses outside of a value, of scratch memory or of an array in shared memory end the process, under AddressSanitizer:
in the memory of a program's activations, which is one allocation, only a step's own operands can be accessed.
"""

from __future__ import annotations

import pytest
from planted import Fault
from test_runtime import BEGIN, MATMUL

OUTSIDE = "AddressSanitizer: use-after-poison"


def in_a_product(code: str) -> Fault:
    """Each product of a program also runs this code."""
    return Fault(MATMUL, BEGIN, f"{BEGIN}    const ont_device *device = call->device;\n    {code}\n", "mlp", OUTSIDE,
                 "--sanitize")


FAULTS = {
    "behind a value": in_a_product(
        "ONT_TRY(device->ops->clear(device, (char *)call->out[0] + s->result_bytes, 4, call->stream));"),
    "before a value": in_a_product("ONT_TRY(device->ops->clear(device, (char *)call->out[0] - 4, 4, call->stream));"),
    "behind scratch memory": in_a_product(
        "if (s->plan) ONT_TRY(device->ops->clear(device, (char *)call->work + s->blas->work_bytes(s->plan), 4, "
        "call->stream));"),
    "of another step's value": in_a_product(
        "static void *kept; if (!kept) kept = call->out[0]; ONT_TRY(device->ops->clear(device, kept, 4, call->stream));"),
    "behind an array in shared memory": Fault(
        "kernels/gather.cu", "__shared__ pair rows[PIECE];", "__shared__ pair rows[PIECE - 1];", "hot_rows",
        "AddressSanitizer: global-buffer-overflow", "--sanitize"),
    "behind shared memory of a launch": Fault(
        "kernels/flash_mma.cu", "THREADS,\n                      bytes, stream, *f);",
        "THREADS,\n                      bytes / 2, stream, *f);", "attention",
        "AddressSanitizer: heap-buffer-overflow", "--sanitize"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_access(planted_faults, name):
    planted_faults.assert_found(name)
