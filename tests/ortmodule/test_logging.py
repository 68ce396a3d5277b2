"""What forward prints, logs and warns of: said at each call, in order, with the values of that moment, and no reason to
cut a graph where no large tensor is among them.
"""

import copy
import functools
import logging
import logging.handlers
import warnings

import pytest
import torch
import torch.nn as nn
from agree import X

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
logger = logging.getLogger("a user's")


class Saying(nn.Module):
    def __init__(self, say):
        super().__init__()
        self.fc, self.calls, self.say = nn.Linear(4, 4), 0, say

    def forward(self, x):
        h = self.fc(x)
        self.calls += 1
        self.say(self, h)
        return h * 2


def prints(m, h):
    print("before", h.shape[1], f"{m.training} {h.dtype}")
    print("after")


def warns(m, h):
    warnings.warn("a word", stacklevel=2)
    warnings.warn(f"of {h.shape[-1]}", stacklevel=1)


def logs(m, h):
    logger.debug("not at this level %s", 1)
    logger.info("of %s at %d", "a layer", h.shape[-1])
    logger.warning("a warning")


def all_of_them(m, h):
    print("first")
    logger.warning("second")
    warnings.warn("third", stacklevel=1)
    print("fourth")


def counts(m, h):
    print("call", m.calls)


def prints_a_tensor(m, h):
    with torch.no_grad():
        t = h.detach().round()
        print(t.sum())
        t.add_(1)
        print(f"{t.sum()}")


def prints_numbers(m, h):
    print("mean", h.detach().mean().item(), float(h.detach().max()), h.shape)
    print(h.detach()[0], f"{h.detach().mean():.3f}")


def prints_a_large_tensor(m, h):
    print(h.detach().expand(600, *h.shape))


def prints_apart(m, h):
    print("a", "b", sep="-", end="!\n")


def warns_of_a_kind(m, h):
    warnings.warn("an old name", FutureWarning, stacklevel=2)


def said(module, model, capsys, caplog):
    """Printed, logged and warned in three calls, and gradients."""
    caplog.clear(), capsys.readouterr()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.INFO, logger.name):
        warnings.simplefilter("always")
        for _ in range(3):
            module.zero_grad()
            model(X).square().sum().backward()
    lines = [record.getMessage() for record in caplog.records if record.name == logger.name]
    ours = [(w.category, str(w.message)) for w in warned if "word" in str(w.message) or "of 4" in str(w.message)
            or "third" in str(w.message) or "old name" in str(w.message)]
    return capsys.readouterr().out, lines, ours, module.fc.weight.grad


@pytest.mark.parametrize("say, whole", [
    (prints, True), (warns, True), (logs, True), (all_of_them, True), (counts, False), (prints_a_tensor, True),
    (prints_numbers, True), (prints_a_large_tensor, False), (prints_apart, False), (warns_of_a_kind, False)])
def test_what_forward_says_is_eagers(say, whole, capsys, caplog):
    torch.manual_seed(0)
    eager = Saying(say)
    module = copy.deepcopy(eager)
    model = ORTModule(module)
    want, got = said(eager, eager, capsys, caplog), said(module, model, capsys, caplog)
    assert got[:3] == want[:3]
    torch.testing.assert_close(got[3], want[3])
    stats = onnxtrain.stats(model)
    if whole:
        assert (stats["engine_steps"], stats["fallback_steps"], stats["graph_breaks"]) == (3, 0, [])


class OnceLogger(logging.Logger):
    """transformers' warning_once(): each message is logged once."""

    @functools.lru_cache(None)  # noqa: B019
    def warning_once(self, *args):
        self.warning(*args)


LOG = OnceLogger("test_logging", logging.WARNING)


class Logging(nn.Module):
    """Logs what its level leaves out, and one message once."""

    def __init__(self, method="warning_once"):
        super().__init__()
        self.first, self.last, self.method = nn.Linear(4, 4), nn.Linear(4, 4), method

    def forward(self, x):
        x = self.first(x)
        LOG.info("x is %s", x)
        getattr(LOG, self.method)("the width is 4")
        return self.last(x)


def lines_of(model):
    handler = logging.handlers.MemoryHandler(100)
    LOG.addHandler(handler)
    LOG.warning_once.cache_clear()
    try:
        model(X).sum().backward()
        model(X).sum().backward()
        return [record.getMessage() for record in handler.buffer]
    finally:
        LOG.removeHandler(handler)


def test_lines_that_are_logged_once_or_not_at_all_cut_nothing():
    plain = Logging()
    model = ORTModule(copy.deepcopy(plain))
    assert lines_of(model) == lines_of(plain) == ["the width is 4"]
    assert onnxtrain.stats(model)["graph_breaks"] == []
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (2, 0, 1)


def test_other_lines_are_logged_in_each_step():
    plain = Logging("warning")
    model = ORTModule(copy.deepcopy(plain))
    assert lines_of(model) == lines_of(plain) == ["the width is 4"] * 2
    assert onnxtrain.stats(model)["graph_breaks"] == []
