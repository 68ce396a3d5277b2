"""libs/rnn.c and ops/rnn.c on the emulated cuDNN: recurrent layers agree with torch, and planted faults are found."""

from __future__ import annotations

import pytest
from planted import Fault
from test_emulated import built, run

FILE = "libs/rnn.c"
FAULTS = {
    "gates of an LSTM in torch's order": Fault(
        FILE, "[ONT_CELL_LSTM] = {0, 3, 1, 2}", "[ONT_CELL_LSTM] = {0, 1, 2, 3}", "recurrent", "differ from those"),
    "gates of a GRU in torch's order": Fault(
        FILE, "[ONT_CELL_GRU] = {1, 0, 2}", "[ONT_CELL_GRU] = {0, 1, 2}", "recurrent", "differ from those"),
    "the other bias": Fault(
        FILE, "(of_state ? gates : 0) + g)", "(of_state ? 0 : gates) + g)", "recurrent", "differ from those"),
    "the other direction": Fault(
        FILE, "p->rnn, direction, p->bytes.weights", "p->rnn, s->directions - 1 - direction, p->bytes.weights",
        "recurrent", "differ from those"),
    "gradients of weights that are added to what was there": Fault(
        "ops/rnn.c", "if (wanted) ONT_TRY(ops->clear(", "if (!wanted) ONT_TRY(ops->clear(", "recurrent", "tensor"),
    "outputs in cuDNN's order": Fault(
        "ops/rnn.c", "outer = back ? b : d, inner = back ? d : b;", "outer = back ? d : b, inner = back ? b : d;", "recurrent", "tensor"),
}


def test_layers_agree_with_torch():
    report = run("rnn.py", built("asan", "--sanitize"))
    assert report["passed"] == 6 and not report["failed"], report["failed"]
    assert {"LSTM:cuda_rnn_dnn", "RecurrentGrad:cuda_rnn_dnn_grad"} <= set(report["ran"])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(planted_faults, name):
    planted_faults.assert_found(name)
