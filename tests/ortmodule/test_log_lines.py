"""Methods of a logger in forward: what cuts no graph, and what is logged."""

import copy
import functools
import logging
import logging.handlers

import pytest
import torch.nn as nn
from agree import X

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class OnceLogger(logging.Logger):
    """transformers' warning_once(): each message is logged once."""

    @functools.lru_cache(None)  # noqa: B019
    def warning_once(self, *args):
        self.warning(*args)


LOG = OnceLogger("test_log_lines", logging.WARNING)


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
