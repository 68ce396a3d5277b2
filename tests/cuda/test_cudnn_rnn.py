"""libs/rnn.c on the emulated cuDNN: each rule of the library finds the fault that breaks it."""

from __future__ import annotations

import pytest
from planted import Fault

FILE = "libs/rnn.c"
FAULTS = {
    "states that are described otherwise": Fault(
        FILE, "dims[3] = {s->directions, ", "dims[3] = {1, ", "recurrent", "the states are described otherwise"),
    "outputs of one direction": Fault(
        FILE, "type, s->hidden * s->directions));", "type, s->hidden));", "recurrent",
        "the sequences are described otherwise"),
    "a workspace that is too small": Fault(
        FILE, "work[RNN_INFERENCE] > work[RNN_TRAINING] ? work[RNN_INFERENCE] : work[RNN_TRAINING];",
        "work[RNN_TRAINING] / 2;", "recurrent", "of workspace, which needs"),
    "a workspace that begins anywhere": Fault(
        "ops/rnn.c", "char *at = align(call->work);", "char *at = (char *)align(call->work) + 64;", "recurrent",
        "at 0x"),
    "a gradient of what forward did not save": Fault(
        FILE, "o->saved ? RNN_TRAINING : RNN_INFERENCE, NULL", "RNN_INFERENCE, NULL", "recurrent",
        "the reserve space is of another layer"),
    "no projection": Fault(
        FILE, "(int32_t)s->hidden, (int32_t)s->hidden, 1, p->dropout", "(int32_t)s->hidden, 0, 1, p->dropout",
        "recurrent", "cudnnSetRNNDescriptor_v8: sizes"),
    "arithmetic of another dtype": Fault(
        FILE, "RNN_LINEAR_INPUT, type, sums,", "RNN_LINEAR_INPUT, type, 1 - sums,", "recurrent",
        "cudnnSetRNNDescriptor_v8: types"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(planted_faults, name):
    planted_faults.assert_found(name)
