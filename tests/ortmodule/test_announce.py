"""ORTModule says on rank 0, once per mode, how a module runs, and that a long export goes on."""

import logging
import re
import threading

import pytest
import torch
import torch.nn as nn

from onnxtrain import explain
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule, _announce


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_a_long_export_is_said_while_it_goes_on(rank, lines, caplog, monkeypatch):
    monkeypatch.setattr(_announce, "PROGRESS", (0.0, 3600.0))
    monkeypatch.setenv("RANK", rank)
    model = ORTModule(nn.Sequential(nn.Linear(3, 3)))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(2):
            model(torch.randn(2, 3))
    assert caplog.text.count("Sequential is being captured and exported, 0 s so far") == lines
    with pytest.raises(ZeroDivisionError), _announce.start(model):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name == "onnxtrain-progress"]


def test_start_is_one_line_per_mode_on_rank_0(caplog, monkeypatch):
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(2):
            model(torch.randn(2, 3))
            model(torch.randn(2, 2, 3))
        model.eval()
        model(torch.randn(2, 3))
    lines = [re.sub(r"[\d.]+", "N", record.getMessage()) for record in caplog.records if record.name == "onnxtrain"]
    assert lines == ["ORTModule: Sequential runs in the engine: N kernels, first call N s, N MiB planned",
                     "ORTModule: Sequential runs in the engine without gradients: N kernels, first call N s, N MiB "
                     "planned"]
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            caplog.clear()
            with caplog.at_level(logging.WARNING, "onnxtrain"):
                ORTModule(nn.Linear(3, 3))(torch.randn(2, 3))
            assert "runs in" not in caplog.text


def test_start_at_info_says_what_explain_says(caplog):
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), DebugOptions(LogLevel.INFO))
    with caplog.at_level(logging.INFO, "onnxtrain"):
        model(torch.randn(2, 3))
    [told] = [record.getMessage() for record in caplog.records if "training graph: " in record.getMessage()]
    assert told.removeprefix("ORTModule: ") in explain(model) and "OFF" not in caplog.text


class Branching(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](x) if x.sum() > 0 else self[1](-x)


def test_start_says_where_only_a_part_is_in_the_engine(caplog):
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        ORTModule(Branching(nn.Linear(3, 3), nn.Linear(3, 3)))(torch.ones(2, 3))
    assert "Branching runs partly in the engine: " in caplog.text and " in 2 graphs, " in caplog.text
    assert "planned; onnxtrain.explain(model) names the rest" in caplog.text


def test_start_says_nothing_of_a_call_that_fails(caplog):
    model = ORTModule(nn.Embedding(3, 3))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        with pytest.raises(IndexError):
            model(torch.tensor([7]))
        assert "runs in" not in caplog.text
        for _ in range(2):
            model(torch.tensor([1]))
    assert caplog.text.count("runs in the engine") == 1
