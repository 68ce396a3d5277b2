"""libs/cudnn.c on the emulated cuDNN: each rule of the library finds the fault that breaks it."""

from __future__ import annotations

import pytest
from planted import Fault

FILE = "libs/cudnn.c"
FAULTS = {
    "a stream that is not set": Fault(
        FILE, 'check(dnn.set_stream(call.p->handle, call.stream), "a stream")', "ONT_OK", "vision",
        "the handle has no stream"),
    "an algorithm that is not supported": Fault(
        FILE, "all[i].status || ", "", "by_rule", "which is not supported"),
    "an algorithm that is not deterministic": Fault(
        FILE, "all[i].determinism != DETERMINISTIC || ", "", "by_rule", "which is not deterministic"),
    "a workspace that is too small": Fault(
        FILE, "p->conv, a->algorithm, c->work, a->memory,\n                                &zero, p->y",
        "p->conv, a->algorithm, c->work, a->memory / 2,\n                                &zero, p->y", "by_rule",
        "bytes of workspace, and the algorithm needs"),
    "arithmetic that an algorithm is not for": Fault(
        FILE, "p->math == MATH_FMA ? MATH_FMA : a->math", "p->math", "vision_in_planes",
        "and the algorithm is for"),
    "a refusal that ends the step": Fault(
        FILE, "while (is_refusal(status) && ++candidate", "while (is_refusal(0 * status) && ++candidate", "by_rule",
        "cuDNN, a convolution: status 3000"),
    "another stride": Fault(
        FILE, "stride[d - skip] = (int)s->stride[d];", "stride[d - skip] = (int)s->stride[d] + 1;", "vision",
        "of the output is"),
    "strides of another layout": Fault(
        FILE, "stride *= dims[d];", "stride += dims[d];", "vision", "cudnnSetTensorNdDescriptor: stride"),
    "a convolution in 16 bits": Fault(
        FILE, "dilation, CROSS_CORRELATION, DATA_FLOAT)", "dilation, CROSS_CORRELATION, type)", "vision_in_planes",
        "cudnnSetConvolutionNdDescriptor: mode 1, type 2"),
    "operands that begin anywhere": Fault(
        "ops/conv.c", "!s->dnn || !is_aligned(first, second, to)", "!s->dnn && is_aligned(first, second, to)",
        "unaligned", "is not a multiple of 16"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(planted_faults, name):
    planted_faults.assert_found(name)
