"""Our cost per step above a bare no-op autograd Function with the same inputs, and how many of our Python functions a
forward calls: python tests/bench/overhead.py

Beside it that Function behind Dynamo's guards (torch.compile with a backend that calls nothing else), and our step with
parameters that one node holds (ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT=1).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable

import torch
import torch.nn as nn

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

warnings.filterwarnings("ignore")


class Bare(torch.autograd.Function):
    """Takes the inputs and gives a stored result; its backward gives stored gradients."""

    @staticmethod
    def forward(ctx, stored, *tensors):  # noqa: ANN001, ANN205
        ctx.grads = stored[1]
        return stored[0].view_as(stored[0])

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        return (None, *ctx.grads)


class Many(nn.Module):
    """A step with next to no arithmetic: n parameters of 16 elements, summed."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight
        return x


def medians(steps, rounds: int = 300, each: int = 20) -> list[float]:  # noqa: ANN001
    """Seconds a step of each, the median of short rounds that take turns:
    what disturbs one round disturbs its neighbour.
    """
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, own in zip(steps, times):
            start = time.perf_counter()
            for _ in range(each):
                step()
            own.append((time.perf_counter() - start) / each)
    return [statistics.median(own) for own in times]


def checks(model: ORTModule, x: torch.Tensor) -> float:
    """Seconds of what every step checks before it runs besides Dynamo's guards, the least of many: sizes, weights and
    their flags.
    """
    (program,) = model._all_programs()[0][1]
    named = dict(model.named_parameters())
    inputs = [x] * len(program.sources)
    for source, (_, place) in zip(program.exported.inputs, program.sources):
        inputs[place] = named.get(source.target, x)
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        program.guards([x])
        _C.gather(program.sources, inputs, True)
        times.append(time.perf_counter() - start)
    return min(times)


def functions_of_ours(call: Callable[[], object]) -> int:
    """How many Python functions of onnxtrain's a call takes."""
    count = 0

    def look(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and str(frame.f_globals.get("__name__")).startswith("onnxtrain")

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    for n in (4, 150, 1000):
        module = Many(n)
        model, x = ORTModule(module), torch.randn(16)
        grad = torch.ones(16)
        parameters = list(module.parameters())
        stored = (model(x).detach(), [None] + [torch.ones(16) for _ in parameters])

        def ours() -> None:
            model(x).backward(grad)
            for p in parameters:
                p.grad = None

        def bare() -> None:
            Bare.apply(stored, x, *parameters).backward(grad)
            for p in parameters:
                p.grad = None

        def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., tuple[torch.Tensor]]:
            names = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
            kept = stored[0], [None if name == "L_x_" else torch.ones(16) for name in names]
            return lambda *inputs: (Bare.apply(kept, *inputs),)

        guarded = torch.compile(Many(n), dynamic=True, backend=backend)
        own = list(guarded.parameters())

        def behind_dynamo() -> None:
            guarded(x).backward(grad)
            for p in own:
                p.grad = None

        os.environ["ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT"] = "1"
        holding = ORTModule(module)

        def held() -> None:
            holding(x).backward(grad)
            for p in parameters:
                p.grad = None

        ours(), bare(), behind_dynamo(), held()
        del os.environ["ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT"]
        a, b, c, d = medians((ours, bare, held, behind_dynamo), 300 if n < 1000 else 40)
        print(f"{n:>4} parameters: {functions_of_ours(lambda: model(x))} Python functions of onnxtrain's in a forward")
        print(f"{n:>4} parameters: checks {1e6 * checks(model, x):.1f} us a step (goal 20 for 150)")
        print(f"{n:>4} parameters: ours {1e6 * a:.0f} us, bare Function {1e6 * b:.0f} us, above it {1e6 * (a - b):.0f} "
              f"us, of which Dynamo's guards {1e6 * (d - b):.0f} us (goal {20 + 0.3 * n:.0f}); "
              f"held by one node {1e6 * c:.0f} us")


if __name__ == "__main__":
    main()
