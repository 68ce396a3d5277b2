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


def verdict(model):
    return str(onnxtrain.explain(model)).splitlines()[:2]


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


def test_a_hook_that_leads_to_its_own_wrapper():
    """As opacus has it: an object around the wrapper has hooks on the layers within."""
    class Around:
        def __init__(self, module):
            self._module = module

        def hook(self, layer, args, result):
            return None

    model = ORTModule(nn.Sequential(nn.Linear(4, 4)))
    model.module[0].register_forward_hook(Around(model).hook)
    model(Y).sum().backward()
    assert onnxtrain.stats(model)["engine_steps"] == 1


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
