"""Results of operations that a capture has met before: they are what torch makes, and nothing else is taken for one."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule, _repeats


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        h = self.norm(x)
        h = self.down(F.gelu(self.up(h)))
        with torch.no_grad():
            scale = self.norm(x).abs().amax(-1, keepdim=True)  # as above, but without a gradient
        return x + h / (1 + scale)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layers[0].up(x)
        return self.layers[0].up(x), y


def formulas(values):
    return [value.node.expr.expand() if isinstance(value, torch.SymInt) else value for value in values]


def described(tensor):
    return (type(tensor), formulas(tensor.shape), formulas(tensor.stride()), formulas([tensor.storage_offset()]),
            formulas([tensor.untyped_storage().nbytes()]), tensor.dtype, tensor.device, tensor.requires_grad,
            tensor.is_leaf)


@pytest.fixture
def repeated(monkeypatch):
    """The names of the operations whose results were made from what was noted; each is compared with torch's."""
    found = []
    plain_remembering = _repeats._remembering

    def remembering(plain):
        ran = []

        def noting(*args):
            ran.append(True)
            return plain(*args)

        ours = plain_remembering(noting)

        def both(tracer, node, args, kwargs, nnmodule):
            ran.clear()
            result = ours(tracer, node, args, kwargs, nnmodule)
            if not ran:
                assert described(result) == described(plain(tracer, node, args, kwargs, nnmodule)), node
                found.append(str(getattr(node.target, "__name__", node.target)))
            return result

        return both

    monkeypatch.setattr(_repeats, "_remembering", remembering)
    return found


def test_results_are_those_of_torch_in_each_mode(repeated):
    torch.manual_seed(0)
    model = Model().double()
    eager, ours = copy.deepcopy(model), ORTModule(model)
    for size in (5, 7):
        x = torch.randn(2, size, 8, dtype=torch.float64)
        for want, got in zip(eager(x), ours(x), strict=True):
            assert want.dtype == got.dtype and want.requires_grad == got.requires_grad
            torch.testing.assert_close(got, want, rtol=1e-10 if want.dtype == torch.float64 else 2e-2, atol=1e-10
                                       if want.dtype == torch.float64 else 2e-2)
        eager(x)[0].square().sum().backward()
        ours(x)[0].square().sum().backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name].grad, parameter.grad, rtol=1e-10, atol=1e-10)
    assert {"linear", "layer_norm", "gelu"} <= set(repeated)
    assert onnxtrain.stats(ours)["fallback_steps"] == 0


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        for _ in range(3):
            h = self.norm(x)  # changes its buffers
            h = h.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)
            x = F.relu(h + 1, inplace=True).mul_(0.5)
        a, b = x.split(2, 1)
        return a * b, (x > 0.1).nonzero().sum() + (x > 0.1).nonzero().sum()


def test_changes_in_place_views_and_sizes_by_contents_run_each_time(repeated):
    torch.manual_seed(0)
    model = InPlace().double()
    eager, ours = copy.deepcopy(model), ORTModule(model)
    x = torch.randn(6, 4, dtype=torch.float64)
    for want, got in zip(eager(x), ours(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.norm.running_var, eager.norm.running_var)
    assert not {"view", "transpose", "mul_", "split", "nonzero"} & set(repeated)


class Decides(nn.Module):
    """Draws on both sides of a cut, from which on Dynamo captures with tensors of another mode."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        drawn = torch.rand(4) + torch.rand(4)
        if x.sum() > 1000:
            drawn = drawn * 2
        return self.fc(x) * drawn + torch.rand(4)


def test_a_capture_that_begins_again_takes_nothing_of_the_one_before(repeated):
    for _ in range(2):
        torch.manual_seed(0)
        model = Decides().double()
        eager, ours, x = copy.deepcopy(model), ORTModule(model), torch.randn(3, 4, dtype=torch.float64)
        torch.manual_seed(1)
        want = eager(x)
        torch.manual_seed(1)
        torch.testing.assert_close(ours(x), want, rtol=1e-6, atol=1e-6)
    assert not [reason for reason in onnxtrain.stats(ours)["graph_breaks"] if "Dynamo could not trace" in reason]


class Tag(torch.Tensor):
    pass


def test_no_key_stands_for_subclasses_and_real_tensors():
    for value in (torch.ones(2), torch.ones(2).as_subclass(Tag), object(), {}):
        with pytest.raises(_repeats.Unknown):
            _repeats._described(value, [])
    assert _repeats._described(1, []) != _repeats._described(True, []) != _repeats._described(1.0, [])
