"""Why a gradient of the sample may differ from eager's by more than rounding: python tests/bench/relu_kinks.py [--data DIR]
[--steps 200]

Eager trains as in accuracy.py, dropout 0, and onnxtrain computes each step's gradients at its weights. Where they differ
by more than LIMIT of a gradient's largest entry, float64 decides: a ReLU's input may be so near 0 that rounding gives
its sign. The gradient in float64 is taken once as it is and once for each of the inputs nearest to 0 with that one on
the other side; each float32 gradient must be one of these to ROUNDING, else the script fails.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accuracy import Sample, along, farthest
from model import TransformerModel
from tqdm import tqdm

from onnxtrain.ortmodule import ORTModule

warnings.filterwarnings("ignore")
LIMIT, ROUNDING, NEAREST = 1e-4, 5e-5, 3


class Corner(torch.autograd.Function):
    """ReLU whose element `flipped` lets a gradient through where it should not, or none where it should."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, flipped: int | None) -> torch.Tensor:
        passes = z > 0
        if flipped is not None:
            passes.view(-1)[flipped] ^= True
        ctx.save_for_backward(passes)
        return z.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def in_float64(sample: Sample, module: nn.Module, step: int,
               flipped: tuple[int, int] | None = None) -> tuple[nn.Module, list[torch.Tensor]]:
    """A copy with the gradients of the step, and each layer's inputs of ReLU. `flipped`: a layer and its element."""
    exact = copy.deepcopy(module).double()
    exact.mask = exact.mask.double()
    inputs: list[torch.Tensor] = []

    def activation(z: torch.Tensor) -> torch.Tensor:
        inputs.append(z.detach())
        return Corner.apply(z, flipped[1] if flipped and flipped[0] == len(inputs) - 1 else None)

    for layer in exact.encoder.layers:
        layer.activation, layer.activation_relu_or_gelu = activation, 0
    sample.gradients(exact, step)
    return exact, inputs


def explain(sample: Sample, step: int, eager: nn.Module, ours: nn.Module) -> bool:
    """Prints where both stand; whether each gradient is float64's, as it is or with one corner turned."""
    exact, inputs = in_float64(sample, eager, step)
    nearest = sorted((abs(z.view(-1)[i].item()), layer, i) for layer, z in enumerate(inputs)
                     for i in z.abs().view(-1).topk(NEAREST, largest=False).indices.tolist())[:NEAREST]
    rows = [("as it is", exact)] + [(f"with the ReLU of {size:.1e} in layer {layer} turned",
                                     in_float64(sample, eager, step, (layer, i))[0]) for size, layer, i in nearest]
    explained = True
    tqdm.write(f"step {step + 1}: onnxtrain and eager differ by {farthest(eager, ours):.1e}")
    for name, module in (("onnxtrain", ours), ("eager", eager)):
        off, what = min((farthest(reference, module), label) for label, reference in rows)
        explained &= off < ROUNDING
        tqdm.write(f"  {name}: float64's gradient {what}, but for {off:.1e}")
    return explained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    sample = Sample(args.data)
    torch.manual_seed(0)
    eager = TransformerModel(sample.words, dropout=0.0)
    ours = ORTModule(copy.deepcopy(eager))
    unexplained = []
    for step, _ in along(sample, eager, [ours], args.steps):
        sample.gradients(ours, step)
        if farthest(eager, ours) > LIMIT and not explain(sample, step, eager, ours):
            unexplained.append(step + 1)
    if unexplained:
        raise SystemExit(f"not explained: steps {unexplained}")


if __name__ == "__main__":
    main()
