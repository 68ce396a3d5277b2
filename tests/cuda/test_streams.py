"""The emulated streams: the engine's work on two of them in turns, and what is said where a wait is missing."""

from __future__ import annotations

import pytest
from planted import Fault
from test_emulated import run
from test_runtime import BEGIN, MATMUL


def in_a_product(code: str, message: str) -> Fault:
    """Each product of a program also runs this code."""
    return Fault(MATMUL, BEGIN, f"{BEGIN}    const ont_device *device = call->device;\n    {code}\n", "streams_in_turns",
                 message)


FAULTS = {
    "that nobody waits for": Fault(
        "emulate/device.c", "    ont_emulate_join_streams(stream, other);\n", "", "streams_in_turns", "and has not waited"),
    "that the other stream waits for": Fault(
        "emulate/device.c", "ont_emulate_join_streams(stream, other)", "ont_emulate_join_streams(other, stream)",
        "streams_in_turns", "and has not waited"),
    "of a graph on another stream": Fault(
        "emulate/device.c", 'ont_emulate_check_stream("cudaGraphLaunch", stream);',
        'ont_emulate_check_stream("cudaGraphLaunch", (char *)stream + 4);', "streams_in_turns", "on stream 0x5"),
    "of a copy on another stream": in_a_product(
        "ONT_TRY(device->ops->copy(device, call->out[0], call->in[0], 4, (void *)5));",
        "cudaMemcpyAsync on stream 0x5"),
    "that is under way when its memory is freed": in_a_product(
        "ont_memory m; ONT_TRY(device->ops->alloc(device, 64, ONT_UINT8, &m)); "
        "ONT_TRY(device->ops->clear(device, m.data, 64, (void *)5)); device->ops->free(device, &m, 64);",
        "memory of stream 0x1 is freed, which has not waited for cudaMemsetAsync on stream 0x5"),
    "that uses freed memory": in_a_product(
        "ont_memory m; ONT_TRY(device->ops->alloc(device, 64, ONT_UINT8, &m)); void *freed = m.data; "
        "device->ops->free(device, &m, 64); "
        "ONT_TRY(device->ops->copy(device, call->out[0], freed, 4, call->stream));",
        "cudaMemcpyAsync uses memory that was freed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_work(planted_faults, name):
    planted_faults.assert_found(name)


def test_the_engine_waits(emulated):
    report = run("streams.py", emulated)
    assert report["passed"] == 5 and not report["failed"], report["failed"]
