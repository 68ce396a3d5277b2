"""kernels/flash_mma_grad.cu: gradients do not depend on the order in which blocks and threads run."""

from __future__ import annotations

import flash
import pytest
import torch

from onnxtrain import _C


@pytest.fixture
def device(emulated, monkeypatch):
    _C.open_plugin(str(emulated))
    monkeypatch.setattr(flash, "DEVICE", "emulated")
    _C.set_timing(True)
    yield
    _C.set_timing(False)
    _C.disable_passes([])
    _C.disable_kernels([])


@pytest.mark.parametrize("what", ["causal", "mask", "causal drop"])
def test_gradients_have_the_same_bits_in_any_order(device, monkeypatch, what):
    _C.disable_kernels(["cuda_attention_dnn", "cuda_attention_grad_dnn"])
    case = (torch.bfloat16, 130, 150, 4, 2, 64, 64, what)  # heads share keys, whose gradients are sums over heads
    results = []
    for order in ("", "reverse", "random 1"):
        monkeypatch.setenv("ONT_EMULATE_ORDER", order)
        results.append(flash.tensor_cores(*case))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
