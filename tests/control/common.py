"""Models in ONNX text, and a step through a session against torch autograd in float64."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import onnx
import onnx.parser
import torch
from harness import failing_allocations

from onnxtrain import _C


def model_of(text: str, opset: int = 20) -> onnx.ModelProto:
    """A model from the text of its graph (and functions)."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')


def session_of(text: str, opset: int = 20) -> _C.Session:
    return _C.Session(model_of(text, opset).SerializeToString())


def flat(outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Items of sequences in a row, as backward counts them."""
    return [t for o in outputs if o is not None for t in (o if isinstance(o, list) else [o])]


def step(session: _C.Session, inputs: Sequence[torch.Tensor], seed: int = 0,
         wanted: Sequence[int] | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor | None],
                                                       list[torch.Tensor]]:
    """Outputs, input gradients for output gradients that depend on nothing but shapes, and those output gradients."""
    mask = bytes(t.is_floating_point() and (wanted is None or i in wanted) for i, t in enumerate(inputs))
    outputs, run = session.forward(inputs, mask, seed)
    outputs = flat(outputs)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.rand(o.shape, generator=generator, dtype=torch.float64) + 0.5 for o in outputs]
    if run is None:
        return outputs, [None] * len(inputs), grads
    saved = [inputs[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    given = [g.to(o.dtype) if flag else None for g, o, flag in zip(grads, outputs, run.differentiable)]
    return outputs, list(run.backward(saved, given)), grads


def check(session: _C.Session, inputs: Sequence[torch.Tensor], expected: Callable[..., Any], seed: int = 0) -> None:
    """Outputs and every gradient of one call against torch; `expected` gives what the session does,
    sequences flattened.
    """
    outputs, grads, out_grads = step(session, inputs, seed)
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    want = expected(*leaves)
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    assert len(outputs) == len(want)
    for k, (got, value) in enumerate(zip(outputs, want)):
        assert got.dtype == value.dtype and got.shape == value.shape, (k, got.shape, value.shape)
        assert torch.allclose(got, value, rtol=1e-12, atol=1e-12, equal_nan=True), (k, got, value)
    pairs = [(v, g) for v, g in zip(want, out_grads) if v.requires_grad]
    floats = [t for t in leaves if t.is_floating_point()]
    reference = iter(torch.autograd.grad([v for v, _ in pairs], floats, [g.to(v.dtype) for v, g in pairs],
                                         allow_unused=True)
                     if pairs else [None] * len(floats))
    for k, (leaf, got) in enumerate(zip(leaves, grads)):
        if not leaf.is_floating_point():
            assert got is None
            continue
        value = next(reference)
        value = torch.zeros_like(leaf) if value is None else value
        got = torch.zeros_like(leaf) if got is None else got
        assert torch.allclose(got, value, rtol=1e-10, atol=1e-10), (k, got, value)


def sweep_allocations(text: str, inputs: Sequence[torch.Tensor], opset: int = 20) -> None:
    """Every allocation fails once: MemoryError, and nothing is leaked."""
    data = model_of(text, opset).SerializeToString()
    step(_C.Session(data), inputs)
    live = _C.live_blocks()
    failing_allocations(lambda: step(_C.Session(data), inputs), limit=20000)
    assert _C.live_blocks() == live
