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
        FILE, "(int32_t)epilogue;", "(int32_t)(epilogue == ONT_CONV_BIAS ? ONT_CONV_PLAIN : epilogue);",
        "channels_last", "differ from those"),
    "no Relu": Fault(
        FILE, "DNN_POINTWISE_RELU_FWD, &sum, NULL, NULL, &y, 0);", "DNN_POINTWISE_ADD, &sum, &bias, NULL, &y, 0);",
        "channels_last", "its Relu is a kernel of its own"),
    "the Relu in front of the bias": Fault(
        FILE,
        "ont_dnn_pointwise(b, DNN_POINTWISE_ADD, &product, &bias, NULL, &sum, 0);\n"
        "    if (k->epilogue == ONT_CONV_BIAS_RELU) ont_dnn_pointwise(b, DNN_POINTWISE_RELU_FWD, &sum, NULL, NULL, &y, 0);",
        "bool relu = k->epilogue == ONT_CONV_BIAS_RELU;\n"
        "    if (relu) ont_dnn_pointwise(b, DNN_POINTWISE_RELU_FWD, &product, NULL, NULL, &sum, 0);\n"
        "    ont_dnn_pointwise(b, DNN_POINTWISE_ADD, relu ? &sum : &product, &bias, NULL, &y, 0);",
        "channels_last", "its Relu is a kernel of its own"),
    "a Relu that loses NaN": Fault(
        FILE, '#include "libs/dnn_build.h"',
        '#include "libs/dnn_graph.h"\n#define DNN_PROPAGATE_NAN 0\n#include "libs/dnn_build.h"', "channels_last",
        "treatment of NaN"),
    "a kernel that is not deterministic": Fault(
        FILE, "1u << DNN_NUMERICAL_NOTE_NONDETERMINISTIC", "0u", "channels_last", "an engine that is not deterministic"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(planted_faults, name):
    planted_faults.assert_found(name)


def test_faults_of_the_library_cost_no_result():
    report = run("conv_graph.py", built("asan", "--sanitize"), "faults")
    assert report["passed"] == 3 and not report["failed"], report["failed"]
