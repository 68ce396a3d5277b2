"""An allocation of the engine that fails is an error that torch, Python and accelerate know, and the next step works."""

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

X = torch.randn(64, 32)


def failing(work):
    """The error of work() where its first allocation in the engine fails."""
    _C.fail_allocation_after(0)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="The engine is out of memory. It could not allocate .*"
                                                         "ORTMODULE_MEMORY_OPT_LEVEL=1 or 2, needs less") as found:
            work()
    finally:
        _C.fail_allocation_after(-1)
    assert isinstance(found.value, MemoryError) and len(found.value.args) == 1
    return found.value


@pytest.fixture
def made():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    return ORTModule(module)


def holds(model, exports=1):
    """A step is eager's, in the engine, by the export that there was."""
    model.zero_grad()
    model(X).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.module(X).square().sum().backward()
    for grad, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-4)
    counts = onnxtrain.stats(model)
    assert (counts["exports"], counts["reasons"]) == (exports, [])


def test_forward(made):
    holds(made)
    failing(lambda: made(X[:7]))
    holds(made)


def test_backward(made):
    holds(made)
    loss = made(X).square().sum()
    failing(loss.backward)
    holds(made)


def test_a_first_step_does_not_go_to_pytorch(made, monkeypatch):
    """Its export is kept for the next batch."""
    real = _C.Session

    def session(*args, **kwargs):
        result = real(*args, **kwargs)
        _C.fail_allocation_after(0)
        return result

    monkeypatch.setattr("onnxtrain.ortmodule._program._C.Session", session)
    with pytest.raises(torch.OutOfMemoryError):
        made(X)
    _C.fail_allocation_after(-1)
    monkeypatch.setattr("onnxtrain.ortmodule._program._C.Session", real)
    holds(made)


def test_accelerate_knows_it(made):
    memory = pytest.importorskip("accelerate.utils.memory")
    sizes = []

    @memory.find_executable_batch_size(starting_batch_size=64)
    def train(batch_size):
        sizes.append(batch_size)
        _C.fail_allocation_after(0 if batch_size > 16 else -1)
        try:
            made(X[:batch_size]).sum().backward()
        finally:
            _C.fail_allocation_after(-1)
        return batch_size

    holds(made)
    best = train()
    assert best <= 16 < sizes[0] and len(sizes) > 1
