"""explain() gives the verdict first, then counts captures, graphs and what ran in PyTorch."""

import pytest
import torch
import torch.nn as nn
from agree import Linear, Y, module
from test_explain import _drawing, verdict

import onnxtrain
from onnxtrain import explain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._fallback import ORTModuleFallbackException


@pytest.mark.parametrize("function", [onnxtrain.stats, onnxtrain.explain])
@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.DataParallel(ORTModule(nn.Linear(2, 2))), "a model"])
def test_what_is_not_wrapped_is_refused(function, model):
    with pytest.raises(TypeError, match=f"{function.__name__}\\(\\) takes an ORTModule, but was given a "
                                        f"{type(model).__name__}: model = ORTModule"):
        function(model)


def test_the_verdict_comes_first():
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)))
    assert verdict(model) == ["Sequential has not been called", "  to do: run some steps first"]
    for _ in range(4):
        model(torch.randn(4096, 256)).sum().backward()
    first, second = verdict(model)
    share = onnxtrain.stats(model)["engine_share"]
    assert first == f"Sequential runs in the engine, which takes {share:.0%} of forward's time" and share > 0.5
    assert second == "  to do: nothing; onnxtrain.profile(model) shows where the time goes"
    small = ORTModule(Linear())
    for _ in range(4):
        small(Y)
    assert verdict(small)[1] == "  to do: use larger batches: Python around the engine takes the rest"


def test_the_verdict_on_a_cut_names_the_line():
    model = ORTModule(module(lambda m, x: m.fc(x) if x.sum() > 0 else m.fc(-x))())
    for _ in range(3):
        model(Y)
    first, second = verdict(model)
    assert first.startswith("Made runs in part in the engine, which takes ") and "(model = ORTModule(module(" in second
    assert second.startswith(f"  to do: change the code at which the graph is cut: Data-dependent branching, in {__file__}")


def test_the_verdict_on_what_runs_in_pytorch():
    model = ORTModule(_drawing())
    model(Y)
    (reason,) = onnxtrain.stats(model)["reasons"]
    assert verdict(model) == ["Linear runs in PyTorch, no call of it in the engine", f"  to do: remove the reason: {reason}"]


def test_the_verdict_on_a_part_in_pytorch(caplog):
    def forward(m, x):
        h = m.fc(x)
        torch._dynamo.graph_break()
        return m.fc(h) * torch.histc(h.detach(), 4).sum()

    model = ORTModule(module(forward)())
    for _ in range(3):
        model(Y).sum().backward()
    first, second = verdict(model)
    assert "runs in part in the engine, which takes " in first and first.endswith("; PyTorch runs a part of each call")
    assert second.startswith("  to do: remove the reason: ")
    assert "ORTModule: Made runs in PyTorch" not in caplog.text


class Growing(nn.Linear):
    """A Python value of another length at each call."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = []

    def forward(self, x):
        self.seen.append(1.0)
        return super().forward(x)


def test_captures_are_counted_and_named():
    model = ORTModule(Growing())
    for _ in range(5):
        model(Y)
    counts = onnxtrain.stats(model)
    assert (counts["captures"], counts["engine_steps"]) == (5, 5) and counts["capture_seconds"] > 0
    assert verdict(model) == ["Growing runs in the engine, but Dynamo captures most calls again",
                              "  to do: find the Python value that changes from call to call; TORCH_LOGS=recompiles "
                              "names it"]
    for _ in range(6):
        model(Y)
    first, second = verdict(model)
    assert first.endswith("but 3 of 11 calls in PyTorch")
    assert f"len(module.seen) == 7, in {__file__}, line " in second and "self.seen.append(1.0)" in second
    assert onnxtrain.stats(model)["captures"] == 8


def test_captures_for_sizes_are_said_to_be_for_sizes():
    model = ORTModule(nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1)))
    for rows, height in ((2, 6), (1, 6), (3, 7), (2, 8), (1, 9)):
        model(torch.randn(rows, 1, height, 6))
    first, second = verdict(model)
    assert first.endswith("but most calls have sizes that need a capture of their own")
    assert second.endswith("The latest: (1, 1, 9, 6)")


def test_calls_that_are_no_captures_alone_have_a_share():
    model = ORTModule(Linear())
    model(Y)
    assert onnxtrain.stats(model)["engine_share"] is None and onnxtrain.stats()["captures"] >= 1
    model(Y)
    assert 0 < onnxtrain.stats(model)["engine_share"] < 1


class InSixGraphs(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        x = x.relu()
        torch._dynamo.graph_break()
        x = x.exp()
        torch._dynamo.graph_break()
        return x - 3


def test_four_graphs_are_described():
    model = ORTModule(InSixGraphs(4, 4))
    for _ in range(2):
        model(Y)
    text = onnxtrain.explain(model)
    assert text.count("training graph: ") == 4 and text.endswith("and 2 graphs that took less time")


def test_explain_names_opset_time_and_fallbacks(capsys):
    model = ORTModule(nn.Linear(3, 3))
    model(torch.randn(2, 3))
    model(torch.randn(5, 3))
    text = explain(model)
    assert not capsys.readouterr().out and repr(text) == str(text)  # a notebook shows it, print() prints it once
    for part in ("training graph: opset 20", "2 steps", "ms on average", "MiB", "2 in the engine, 0 in PyTorch",
                 "captures: 1 in ", "with 1 export in "):
        assert part in text


class GrowingBehindACut(Growing):
    def forward(self, x):
        h = nn.Linear.forward(self, x)
        if h.abs().max() > 100:
            h = h / 2
        self.seen.append(1.0)
        return nn.functional.linear(h, self.weight) * len(self.seen)


def test_what_pytorch_runs_behind_a_cut_counts_as_pytorchs(monkeypatch, caplog):
    model = ORTModule(GrowingBehindACut())
    for _ in range(20):
        model(Y)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (8, 12)
    first, second = verdict(model)
    assert first.endswith("runs in PyTorch in 12 of 20 calls") and "self.seen.append(1.0)" in second
    assert caplog.text.count("a guard of a capture behind a cut, len(self.seen) == ") == 1
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch._dynamo.reset()
    model = ORTModule(GrowingBehindACut())
    with pytest.raises(ORTModuleFallbackException, match="behind a cut"):
        for _ in range(20):
            model(Y)
