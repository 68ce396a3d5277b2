"""Where the random numbers of a run come from: torch's generator of the device, so that ``torch.manual_seed`` rules
them.

On a GPU dropout draws what eager's own kernel would draw, and the generator moves on as far as eager's would have moved
it.
"""

from __future__ import annotations

from typing import Any

import torch


def as_torch(device: str) -> bool:
    """Whether sessions on a device draw torch's own numbers (``Session(torch_random=...)``)."""
    return device.startswith("cuda")


def generator(device: str) -> torch.Generator:
    """torch's default generator of "cuda" or "cuda:1"."""
    return torch.cuda.default_generators[torch.device(device).index or 0]


def seed(session: Any, device: str) -> int | torch.Generator:
    """What ``Session.forward`` takes as seed: a number drawn on the CPU, or the GPU's generator;
    0 where nothing is random.
    """
    if not session.random:
        return 0
    if as_torch(device) and not torch.cuda.is_current_stream_capturing():  # under a capture the run is refused, by name
        return generator(device)
    return int(torch.randint(0, 2**62, ()).item())


def state(device: str) -> tuple[torch.Tensor, int]:
    """Of the generators that a run on the device draws from, for restore()."""
    return torch.get_rng_state(), generator(device).get_offset() if as_torch(device) else 0


def restore(device: str, saved: tuple[torch.Tensor, int]) -> None:
    """Puts back what state() gave."""
    torch.set_rng_state(saved[0])
    if as_torch(device):
        generator(device).set_offset(saved[1])
