"""Pairs of features through torch.compile(backend="onnxtrain"), against eager: those of fixed seeds, which have every
feature twice. pairs.py by hand takes any."""

import collections
from pathlib import Path

import pairs
import pytest
import torch

SEEDS = (
    8, 14, 15, 18, 19, 22, 26, 32, 33, 34, 39, 43, 44, 45, 47, 50, 53, 55, 58, 64, 65, 66, 67, 68, 69, 80, 85,
    87, 89, 93, 94, 95, 98, 103, 108, 111, 115, 121, 127, 132, 133, 135, 145, 149, 156, 159, 160, 161, 162, 164,
    168, 171, 180, 186, 188, 192, 193, 196, 198, 201, 202, 205, 206, 213, 214, 219, 220, 223, 227, 233, 239,
    240, 241, 244, 248, 251, 261, 264, 265, 266, 267, 272, 277, 279, 283, 284, 289, 291, 295, 299, 301, 302,
    305, 310, 311, 312, 313, 326, 336, 337, 340, 342, 346, 347, 348,
)
# With these a graph, or a call, may run in PyTorch, which is said and counted.
REFUSED = {"arguments: views of one memory", "modes: enable_grad inside, no_grad outside",
           "modes: function mode outside", "modes: gradient inside forward", "shared: parameter changed in forward",
           "shared: running mean by hand"}
# Where Dynamo has to cut a graph inside a loop, a `with` or a `try`, torch runs the whole frame.
NOT_CAPTURED = {"control: loop around the other", "control: own context manager around the other",
                "control: try and except around the other", "state: config with __getattr__"}
if torch.__version__ >= (2, 15):  # which does so where `with torch.enable_grad()` is around a derivative
    NOT_CAPTURED.add("modes: gradient inside forward")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", SEEDS)
def test_pair(seed):
    plan = pairs.planned(seed)
    verdict = pairs.judged(plan, "dynamo")
    said = f"{plan.names}: {verdict.text}; python tests/capture/pairs.py --seed {seed} --count 1"
    refused = verdict.kind in ("refused", "in PyTorch")
    if torch.__version__ < (2, 11):  # whose Dynamo lacks guards and methods, whatever the backend
        assert verdict.kind == "equal" or refused or pairs.judged(plan, "eager").kind != "equal", said
        return
    assert verdict.kind == "equal" or refused and REFUSED.intersection(plan.names), said
    assert verdict.engine_steps or refused or NOT_CAPTURED.intersection(plan.names), said


def test_the_seeds_have_every_feature_twice():
    counts = collections.Counter(name for seed in SEEDS for name in pairs.pair(seed))
    assert {name for name in pairs.NAMES if counts[name] < 2} == pairs.KNOWN
    assert not pairs.KNOWN.intersection(counts)


def test_every_pair_has_its_seed():
    count = len(pairs.NAMES)
    assert len({frozenset(pairs.pair(seed)) for seed in range(count * (count - 1) // 2)}) == count * (count - 1) // 2


class Stale:
    """A wrapper that remembers: calls with the state of the first one, as a bad guard does."""

    def __init__(self, module):
        self.module, self.scale = module, module.a_scale

    def __call__(self, *args):
        now, self.module.a_scale = self.module.a_scale, self.scale
        try:
            return self.module(*args)
        finally:
            self.module.a_scale = now


def twice(module):
    def call(*args):
        module(*args)
        return module(*args)
    return call


def without_gradient(module):
    return lambda *args: module(*args).detach()


def raising(module):
    def call(*args):
        raise LookupError
    return call


@pytest.mark.parametrize("wrap, names, found", [
    (Stale, ("state: attribute", "state: slots"), "result"),
    (twice, ("state: nested log", "state: class attribute"), "result"),
    (twice, ("hooks: forward hook that counts", "state: class attribute"), "result"),
    (without_gradient, ("state: attribute", "state: slots"), "False"),
    (raising, ("state: attribute", "state: slots"), "LookupError"),
], ids=lambda value: getattr(value, "__name__", None))
def test_differences_are_found(wrap, names, found, monkeypatch):
    monkeypatch.setitem(pairs.WRAPS, "dynamo", wrap)
    verdict = pairs.judged(pairs.planned(3, names), "dynamo")
    assert verdict.kind == "different" and found in verdict.text


def test_the_document_lists_what_dynamo_does_otherwise():
    text = (Path(__file__).resolve().parents[2] / "docs" / "capture.md").read_text(encoding="utf-8")
    for name in pairs.KNOWN:
        assert f"| {name} | {pairs.FEATURES[name]['known']} |" in text, name
