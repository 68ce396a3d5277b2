"""Functions of torch through ORTModule: outputs and gradients are eager's, in float64 where it can, or the module says
that it runs in PyTorch.

A run takes a sample by a printed seed; ONNXTRAIN_SLOW=1 takes all.
"""

import os
import random

import pytest
import torch
import torch.nn as nn
from seeds import drawn_seed
from torch_functions import FUNCTIONS

import onnxtrain
from onnxtrain.ortmodule import ORTModule

SEED = drawn_seed()
#: Of these torch.onnx leaves out an argument, or gives other numbers: always run.
MENDED = ["cdist_equal", "conv3d", "multilabel_margin", "avg_pool_div", "avg_pool_div_pad", "avg_pool3d_div", "sr_mean",
          "sr_mean_ns", "sr_amin_ns", "hypot", "copysign", "fmax", "fmin", "cumprod", "lgamma", "digamma", "polygamma", "erfinv",
          "multigammaln", "cov", "corrcoef", "logcumsumexp0", "max_ties",
          "ce_ignores_size", "nll_ignores_size", "cholesky", "inverse", "solve",
          "up_nex_sf", "up_aa_sf", "up_bic_aa_sf", "up_tri_sf", "up_bil_sf_ac", "emb_bag_freq"]
#: What no exporter translates: these run in PyTorch, and say so.
IN_PYTORCH = {"combinations", "diagonal_scatter"}
CHOSEN = sorted(FUNCTIONS) if os.environ.get("ONNXTRAIN_SLOW") == "1" else sorted(
    {*MENDED, *random.Random(SEED).sample(sorted(FUNCTIONS), 20)})
print(f"ONNXTRAIN_TEST_SEED={SEED}: {len(CHOSEN)} of {len(FUNCTIONS)} functions")


class Scaled(nn.Module):
    """A function of its inputs, the first times a parameter."""

    def __init__(self, function, dtype):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, first, *rest):
        return self.function(first * self.scale, *rest)


def step(model, inputs, dtype):
    leaves = [x.to(dtype).clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    output = model(*leaves)
    if output.requires_grad:
        (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return output.detach(), [x.grad for x in leaves]


@pytest.mark.parametrize("name", CHOSEN)
def test_function(name):
    function, *inputs = FUNCTIONS[name]
    dtype, tol = torch.float64, 1e-6
    try:
        want, want_grads = step(Scaled(function, dtype), inputs, dtype)
    except RuntimeError:  # the function has float32 constants, which torch does not mix with float64
        dtype, tol = torch.float32, 2e-4
        want, want_grads = step(Scaled(function, dtype), inputs, dtype)
    model = ORTModule(Scaled(function, dtype))
    got, got_grads = step(model, inputs, dtype)
    torch.testing.assert_close(got, want, rtol=tol, atol=tol, equal_nan=True)
    for g, w in zip(got_grads, want_grads, strict=True):
        zero = next((torch.zeros_like(t) for t in (w, g) if t is not None), None)
        torch.testing.assert_close(zero if g is None else g, zero if w is None else w, rtol=tol, atol=tol,
                                   equal_nan=True)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] + counts["fallback_steps"] == 1
    assert (name in IN_PYTORCH) == bool(counts["fallback_steps"]), counts["reasons"]
    assert not counts["fallback_steps"] or counts["reasons"], "in PyTorch, and no reason given"
