"""RecurrentSteps, which recurrent.c builds for torch's cells: every kernel, lengths in any order, both directions; and
what stays unrolled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import R, V, call, model_of, run_case
from test_recurrent import case

from onnxtrain import _C

LENGTHS = V([2, 5, 0, 3, 1, 5, 3], np.int64)
CELLS = {"tanh": ("RNN", {}), "relu": ("RNN", {"activations": ["Relu", "Relu"]}),
         "gru": ("GRU", {"linear_before_reset": 1}), "lstm": ("LSTM", {})}


@pytest.mark.parametrize("lens", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("cell", CELLS)
def test_both_directions(cell, lens):
    op, attrs = CELLS[cell]
    run_case(case(op, "B", "h0", "c0", steps=5, batch=7, size=4, hidden=19, lens=lens, direction="bidirectional",
                  alloc=True, **attrs))


@pytest.mark.parametrize("given", [
    case("GRU", "h0", batch=3, hidden=17, lens=V([3, 1, 2], np.int32), linear_before_reset=1, direction="reverse"),
    case("GRU", "B", batch=3, lens=V([3, 1, 2], np.int32), linear_before_reset=1, n_outputs=1, layout=1),
    case("LSTM", "B", steps=4, batch=8, size=24, hidden=64, lens=V([4, 4, 2, 3, 4, 1, 1, 4], np.int64)),
    case("GRU", "B", steps=4, batch=8, size=24, hidden=64, linear_before_reset=1),
    case("LSTM", batch=2, lens=V([0, 0], np.int64), name="nothing to do"),
], ids=str)
def test_more(given):
    run_case(given)


LARGE = [case(op, "B", "h0", steps=4, batch=9, size=24, hidden=64, lens=V([4, 4, 2, 3, 4, 1, 1, 4, 2], np.int64), **attrs)
         for op, attrs in (("GRU", {"linear_before_reset": 1}), ("LSTM", {}))]


@pytest.mark.parametrize("gemm", ["native", "onednn", "torch"])
@pytest.mark.parametrize("given", LARGE, ids=str)
def test_products(given, gemm, monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_GEMM", gemm)
    run_case(given)


@pytest.mark.parametrize("given", LARGE, ids=str)
def test_gradients_of_the_reference(given):
    _C.disable_kernels(["recurrent_steps"])
    try:
        run_case(given)
    finally:
        _C.disable_kernels([])


@pytest.mark.parametrize("op,attrs,one_node", [
    ("RNN", {}, True), ("RNN", {"activations": ["Relu"]}, True), ("RNN", {"activations": ["Elu"]}, False),
    ("GRU", {"linear_before_reset": 1}, True), ("GRU", {}, False), ("GRU", {"linear_before_reset": 1, "clip": 1.0}, False),
    ("LSTM", {}, True), ("LSTM", {"input_forget": 1}, False), ("LSTM", {"P": True}, False),
    ("LSTM", {"activations": ["HardSigmoid", "Tanh", "Tanh"]}, False)])
def test_which_cells(op, attrs, one_node):
    given = case(op, *(["P"] if attrs.pop("P", False) else []), **attrs)
    arrays = [None if spec is None else spec.make(0).astype(np.float32) for spec in given.inputs]
    session = _C.Session(model_of(given, arrays))
    tensors = [torch.from_numpy(a) for a in arrays if a is not None]
    call(session, tensors, bytes(len(tensors)), None)
    kernels = [kernel for _, kernel, _ in session.kernels()]
    assert ("recurrent_steps" in kernels) == one_node, kernels


def test_more_steps_than_are_unrolled():
    x = torch.randn(5000, 1, 2, dtype=torch.float64, requires_grad=True)
    module = torch.nn.RNN(2, 3).double()
    want = module(x)[0]
    given = case("RNN", steps=5000, batch=1, size=2, hidden=3)
    w, r = (getattr(module, f"weight_{k}_l0").detach() for k in ("ih", "hh"))
    bias = torch.cat([module.bias_ih_l0, module.bias_hh_l0]).detach()[None]
    given.inputs.append(R(1, 6))
    arrays = [t.detach().numpy() for t in (x, w[None], r[None], bias)]
    (got, _), _ = call(_C.Session(model_of(given, arrays)), [torch.from_numpy(a) for a in arrays], bytes(4), None)
    torch.testing.assert_close(got[:, 0], want.detach(), rtol=1e-10, atol=1e-12)
