"""A thousand training steps leave nothing behind: blocks and bytes of the core, Python objects, resident memory."""

from __future__ import annotations

import copy
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

WARM = 200  # until caches of torch, of Python and of the pool are filled
SETTLE = 60  # and until what the pool keeps follows these steps alone
STEPS = 1020  # both multiples of what they go round in: the counts are of the same place


def counts(model: ORTModule) -> dict[str, int]:
    gc.collect()
    sessions = [program.session.stats() for _, known in model._all_programs() for program in known]
    return {"blocks of the core": _C.live_blocks(), "bytes lent": sum(s["pool_live_bytes"] for s in sessions),
            "bytes kept": sum(s["pool_cached_bytes"] for s in sessions),
            "most bytes": sum(s["pool_peak_bytes"] for s in sessions), "objects": len(gc.get_objects())}


def settled(model: ORTModule, step: Callable[[int], None], first: int) -> dict[str, int]:
    """Counts after SETTLE steps from `first` on, which the collector does not meet at another place each time."""
    gc.collect()
    gc.disable()
    try:
        for i in range(first, first + SETTLE):
            step(i)
    finally:
        gc.enable()
    return counts(model)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def network() -> ORTModule:
    torch.manual_seed(0)
    return ORTModule(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 3)))


def trained(model: ORTModule) -> Callable[[int], None]:
    """Steps as a script does them, over three batch sizes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> None:
        x = torch.randn((8, 4, 7)[i % 3], 16, requires_grad=i % 2 == 0)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def abandoned(model: ORTModule) -> Callable[[int], None]:
    """Forwards whose backward never comes, several at once, in eval and without gradients, and calls that fail."""
    x, kept = torch.randn(8, 16), []

    def step(i: int) -> None:
        kept.append(model(x))
        if len(kept) == 4:
            kept[i % 4].sum().backward()
            kept.clear()
        with torch.no_grad():
            model(x)
        with pytest.raises((RuntimeError, ValueError)):
            model(torch.randn(8, 15))

    return step


@pytest.fixture(autouse=True)
def one_thread():
    """Small steps of several threads spend their time in waiting for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", [trained, abandoned], ids=lambda kind: kind.__name__)
def test_nothing_is_left(kind):
    model = network()
    step = kind(model)
    for i in range(WARM):
        step(i)
    before, pages = settled(model, step, WARM), [resident()]
    start = WARM + SETTLE
    for i in range(start, start + STEPS):
        step(i)
        if (i - start + 1) % (STEPS // 4) == 0:
            pages.append(resident())
    after = settled(model, step, start + STEPS)
    assert after.pop("objects") - before.pop("objects") < 50
    assert after == before
    if "libasan" not in Path("/proc/self/maps").read_text():  # that one keeps what is freed
        # The heap grows now and then as it fragments; a leak grows in every quarter.
        growth = min(b - a for a, b in zip(pages, pages[1:])) / (STEPS // 4)
        assert growth < 64, f"{growth:.0f} bytes a step in every quarter: {pages}"


def test_a_model_that_is_dropped_leaves_nothing():
    """Programs, weights' references and the session go with the last reference to the module."""
    gc.collect(), gc.collect()  # Dynamo lets a model's graphs go once the model is gone
    before = _C.live_blocks()
    for _ in range(3):
        model = network()
        trained(model)(0)
        twin = copy.deepcopy(model)
        del model, twin
        gc.collect(), gc.collect()
    assert _C.live_blocks() == before


def test_a_leak_would_be_seen():
    """The measure itself: outputs that are kept are counted."""
    model = network()
    step = trained(model)
    step(0)
    counts(model)  # what other tests have left goes with collections before the one that counts
    model(torch.randn(8, 16))
    before, kept = counts(model), [model(torch.randn(8, 16)) for _ in range(10)]
    after = counts(model)
    assert after["blocks of the core"] > before["blocks of the core"] and after["bytes lent"] > before["bytes lent"]
    assert len(kept) == 10 and sys.getrefcount(kept) >= 2
