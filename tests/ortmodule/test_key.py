"""A graph is kept for the modes of torch that it was exported in, and for no others."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from agree import Linear, X, Y, both, in_engine, module, step

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Doubled(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.relu else out


@pytest.mark.parametrize("first", [False, True], ids=["after the export", "before it"])
def test_function_modes_see_every_call(first):
    def use(m):
        with Doubled() if first else contextlib.nullcontext():
            one = m(X)
        with contextlib.nullcontext() if first else Doubled():
            two = m(X)
        with torch.device("cpu"):  # a mode of torch's own, which changes no function
            return one, two, m(X)
    model = both(module(lambda self, x: F.relu(self.fc(x))), use)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (2, 1) and "Doubled" in counts["reasons"][0]


def test_transforms_of_torch_func_run_in_pytorch():
    def use(m):
        weights = {name: p.detach() for name, p in m.named_parameters()}
        loss = lambda w, x: torch.func.functional_call(m, w, (x,)).square().sum()  # noqa: E731
        single = torch.func.grad(loss)(weights, Y)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, Y)
        return single, each

    model = both(Linear, use)
    (reason,) = onnxtrain.stats(model)["reasons"]
    assert reason.startswith("torch.func differentiates and batches with its own interpreters")


def test_what_a_transform_left_behind_is_an_argument_like_any():
    """A tensor kept from within torch.func.grad is a wrapper whose level is gone; torch unwraps it wherever it comes."""
    kept = []

    def square(x):
        kept.append(x * 2)
        return (x * x).sum()

    torch.func.grad(square)(Y)
    assert torch._C._functorch.is_dead_tensor_wrapper(kept[0])

    def use(m):
        first = m(Y)
        out = m(kept[0])
        (first.sum() + out.square().sum()).backward()
        return out, [p.grad for p in m.parameters()]

    in_engine(both(Linear, use), 2)


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_new_tensors_have_the_default_dtype(double_by_default):
    def forward(self, x):
        drawn = torch.bernoulli(torch.full((4,), 0.5)) * torch.rand(4)
        grid = torch.linspace(0, 1, 4) + torch.arange(0, 1, 0.25) + torch.ones(4) + torch.eye(4)[0] + torch.zeros(4)
        return self.fc(x) * drawn + grid / 3, grid

    x = torch.randn(3, 4)
    in_engine(both(module(forward), lambda m: [step(x)(m), step(x + 1)(m)], 1e-14), 2)


def test_the_default_dtype_of_whole_numbers_is_pytorchs_and_draws_the_same(double_by_default):
    x = torch.randn(3, 4)
    model = both(module(lambda self, x: self.fc(x) * torch.rand(4) * (torch.arange(4) / 3)), step(x), 0)
    assert "torch's default dtype" in onnxtrain.stats(model)["reasons"][0]


def test_determinism_is_part_of_what_a_graph_holds_for():
    model = ORTModule(Linear())
    model(Y)
    torch.use_deterministic_algorithms(True)
    try:
        model(Y)
    finally:
        torch.use_deterministic_algorithms(False)
    model(Y)
    assert in_engine(model, 3)["exports"] == 2
