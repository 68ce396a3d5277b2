"""One step of a model on a device and on the CPU, for programs.py and images.py."""

from __future__ import annotations

import torch

from onnxtrain import _C


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same, contiguous, `by` elements behind an address that allocators give."""
    flat = tensor.new_empty(tensor.numel() + by)
    flat[by:] = tensor.flatten()
    return flat[by:].view(tensor.shape)


def step(model: bytes, tensors: list[torch.Tensor], device: str, seed: int, mask: bytes | None = None,
         offset: int = 0) -> tuple[list, list, set[str]]:
    """Outputs and gradients of one step, and the kernels it used."""
    session = _C.Session(model, 16, device)
    tensors = [shifted(t.to(place(device)), offset) if offset else t.to(place(device)) for t in tensors]
    mask = bytes(t.is_floating_point() for t in tensors) if mask is None else mask
    outputs, run = session.forward(tensors, mask, seed)
    torch.manual_seed(1)
    given = [shifted(torch.randn(o.shape).to(o.dtype).to(place(device)), offset) for o in outputs]
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    grads = run.backward(saved, given)
    text = {line.split("(")[0].strip() for line in session.text("program").splitlines()}
    used = {f"{operator}:{kernel}" for operator, kernel in operators(session)}
    assert text
    return [o.cpu() for o in outputs], [None if g is None else g.cpu() for g in grads], used


def place(device: str) -> str:
    """Where torch has the tensors of a device: the emulated one's are on the CPU."""
    return device if device.startswith("cuda") else "cpu"


def operators(session: _C.Session) -> set[tuple[str, str]]:
    return {(op, kernel) for _, op, kernel, *_ in session.timeline()}


def agree(device: str, model: bytes, tensors: list[torch.Tensor], tol: float = 2e-5, seed: int = 3, mask: bytes | None = None,
          offset: int = 0) -> set[str]:
    """The kernels of one step on the device, whose results are those of the CPU."""
    want, got = step(model, tensors, "cpu", seed, mask), step(model, tensors, device, seed, mask, offset)
    for kind in (0, 1):
        for k, (a, b) in enumerate(zip(want[kind], got[kind], strict=True)):
            assert (a is None) == (b is None)
            if a is not None:
                worst = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
                assert worst <= tol * max(1.0,
                                          a.double().abs().max().item()), f"{('output', 'gradient')[kind]} {k}: {worst}"
    return got[2]
