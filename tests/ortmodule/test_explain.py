"""Every way in which a call runs in PyTorch: explain() has its reason in one paragraph,
FALLBACK_DISABLE makes it an error.
"""

import json
import os
import random

import onnx
import pytest
import torch
import torch.nn as nn
from agree import Linear, X, Y, module

import onnxtrain
from onnxtrain import _C, UnsupportedError
from onnxtrain.ortmodule import ORTModule, _program, _runner
from onnxtrain.ortmodule._fallback import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)


def _drawing():
    made = Linear()
    made.random = random.Random(0)
    return made


def _calls(*arguments):
    def use(model):
        for given in arguments:
            model(*given)

    return use


def _transformed(model):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda w: torch.func.functional_call(model, w, (Y,)).sum())(weights)


# what -> (module, use, part of the reason, the exception where it is forbidden)
KINDS = {
    "generator": (_drawing, _calls((Y,)), "random.Random 'random'", ORTModuleTorchModelException),
    "device": (lambda: nn.Linear(4, 4, device="meta"), _calls((torch.empty(3, 4, device="meta"),)), "meta",
               ORTModuleDeviceException),
    "torch.func": (Linear, _transformed, "torch.func differentiates and batches with its own interpreters",
                   ORTModuleTorchModelException),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_reason_is_one_paragraph(kind):
    make, use, reason, _ = KINDS[kind]
    torch.manual_seed(0)
    model = ORTModule(make())
    use(model)
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] >= 1
    (text,) = counts["reasons"]
    assert reason in text and "\n" not in text and "\x1b" not in text and 20 < len(text) < 2500
    lines = [line for line in onnxtrain.explain(model).splitlines() if "in PyTorch because" in line]
    assert lines == [f"  in PyTorch because: {text}"]


@pytest.mark.parametrize("kind", KINDS)
def test_forbidden_it_raises(kind, monkeypatch):
    make, use, _, error = KINDS[kind]
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    model = ORTModule(make())
    for _ in range(2):
        with pytest.raises(error):
            use(model)
    assert onnxtrain.stats(model)["engine_steps"] == 0


def test_an_operator_that_the_engine_lacks(monkeypatch):
    real = _C.Session

    def session(model, *args, **kwargs):
        if any(node.op_type == "Sin" for node in onnx.load_model_from_string(model).graph.node):
            raise UnsupportedError("operator ai.onnx.Sin (opset 20), used by node 'n', is not supported")
        return real(model, *args, **kwargs)

    monkeypatch.setattr(_program._C, "Session", session)
    monkeypatch.setattr(_runner, "MAX_BY_TORCH", 0)
    make = module(lambda self, x: self.fc(x).sin())
    model = ORTModule(make())
    model(Y)
    assert "operator ai.onnx.Sin (opset 20)" in onnxtrain.explain(model)
    assert onnxtrain.stats(model)["fallback_steps"] == 1
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleONNXModelException, match="Sin"):
        ORTModule(make())(Y)


def test_a_policy_that_forces_it(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    model = ORTModule(Linear())
    for _ in range(3):
        model(Y)
    assert "in PyTorch because: the policy FALLBACK_FORCE_TORCH_FORWARD forces every call" in onnxtrain.explain(model)
    assert len(onnxtrain.stats(model)["reasons"]) == 1


def test_a_size_that_does_not_fit_runs_in_the_engine(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    make = module(lambda self, x: self.fc(x) if x.size(0) > 4 else -self.fc(x))
    model = ORTModule(make())
    for rows in (3, 7, 2, 9, 3):
        x = torch.randn(rows, 4, requires_grad=True)
        out = model(x)
        torch.testing.assert_close(out, model.module(x))
        out.sum().backward()
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["reasons"]) == (5, 0, [])


def test_arguments_that_forward_refuses_leave_no_trace():
    """A wrong call between good ones, at a size that no export at hand is for."""
    model = ORTModule(module(lambda self, x: self.fc(x) if x.size(0) > 4 else -self.fc(x))())
    model(Y)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(3, 5))
    big = torch.randn(6, 4)
    torch.testing.assert_close(model(big), model.module(big))
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 2 and counts["fallback_steps"] == 2


def test_the_exceptions_are_of_one_family():
    for error in (ORTModuleTorchModelException, ORTModuleIOError, ORTModuleDeviceException,
                  ORTModuleONNXModelException):
        assert issubclass(error, ORTModuleFallbackException)
    assert "ORTMODULE_FALLBACK_POLICY" not in os.environ and X.requires_grad


@pytest.mark.parametrize("function", [onnxtrain.stats, onnxtrain.explain])
@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.DataParallel(ORTModule(nn.Linear(2, 2))), "a model"])
def test_what_is_not_wrapped_is_refused(function, model):
    with pytest.raises(TypeError, match=f"{function.__name__}\\(\\) takes an ORTModule, but was given a "
                                        f"{type(model).__name__}: model = ORTModule"):
        function(model)


def verdict(model):
    return str(onnxtrain.explain(model)).splitlines()[:2]


def test_the_verdict_comes_first():
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)))
    assert verdict(model) == ["Sequential has not been called", "  to do: run some steps first"]
    for _ in range(4):
        model(torch.randn(512, 256)).sum().backward()
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


def test_a_call_that_raises_is_no_reason_for_pytorch():
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for wrong in (False, True, False):
        if wrong:
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                model(Y[:, :3])
        else:
            model(Y)
    assert not onnxtrain.stats(model)["graph_breaks"]
    first, second = verdict(model)
    assert first.endswith("; 1 of 3 calls raised an exception") and second == "  to do: nothing"


def test_a_submodule_that_is_wrapped_already_is_named():
    model = ORTModule(nn.Sequential(ORTModule(nn.Linear(4, 4)), nn.ReLU()))
    model(Y)
    assert verdict(model)[1] == ("  to do: remove the reason: its '0' is an ORTModule already, which the engine runs alone: "
                                 "wrap one of the two")


@pytest.mark.parametrize("given, text", [
    ((nn.Linear,), "not the class Linear: make an instance of it"), ((3,), "not int"),
    ((nn.Linear(2, 2), "loss"), "DebugOptions as its second argument, not 'loss'; what the script reads is outputs=")])
def test_what_ortmodule_does_not_take(given, text):
    with pytest.raises(TypeError) as error:
        ORTModule(*given)
    assert str(error.value).endswith(text)


class Parsing(nn.Linear):
    def forward(self, x):
        return super().forward(x) * json.loads('{"two": 2}')["two"]


def test_a_cut_in_the_standard_library_names_the_users_line():
    model = ORTModule(Parsing(4, 4))
    model(Y)
    assert f"in {__file__}, line " in verdict(model)[1] and "json.loads" in verdict(model)[1]


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
