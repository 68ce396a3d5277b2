"""libs/conv_graph.c on the emulated cuDNN: a fault in it, or in the library, is found, and costs no result."""

from __future__ import annotations

import pytest
from planted import Fault
from test_emulated import built, run

FILE = "libs/conv_graph.c"
FAULTS = {
    "strides of another layout": Fault(
        FILE, "{channels * rows * columns, 1, channels * columns, channels}",
        "{channels * rows * columns, rows * columns, columns, 1}", "channels_last", "strides of a convolution"),
    "another stride": Fault(
        FILE, "rank, s->stride + 1)", "rank, s->stride)", "channels_last", "a dim of a convolution"),
    "another bias": Fault(
        FILE, "UID_BIAS, o->bias)", "UID_BIAS, o->w)", "channels_last", "differ from those"),
    "no bias": Fault(
        FILE, "k.has_bias = has_bias;", "k.has_bias = has_bias && false;", "channels_last", "differ from those"),
    "a kernel that is not deterministic": Fault(
        FILE, "1u << DNN_NUMERICAL_NOTE_NONDETERMINISTIC", "0u", "channels_last", "an engine that is not deterministic"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(planted_faults, name):
    planted_faults.assert_found(name)


def test_faults_of_the_library_cost_no_result():
    report = run("conv_graph.py", built("asan", "--sanitize"), "faults")
    assert report["passed"] == 1 and not report["failed"], report["failed"]
