"""Uses that meet each other seldom: what PyTorch gives for them, results and gradients, is what ORTModule gives."""

import copy
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import Linear, X, Y, both, in_engine, module
from torch.nn.utils import parametrizations

import onnxtrain
from onnxtrain.ortmodule import ORTModule

AFTER = {
    "linear": lambda h: h, "exp": lambda h: h.exp(), "softmax": lambda h: h.softmax(-1), "relu": lambda h: h.relu(),
    "tanh": lambda h: h.tanh(), "sigmoid": lambda h: h.sigmoid(), "gelu": F.gelu,
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("name", AFTER)
def test_a_result_changed_in_place_is_an_error_where_it_is_one_in_pytorch(name, view):
    def use(model):
        x = X.detach().clone().requires_grad_(True)
        out = model(x)
        try:
            (out.view(-1)[:3] if view else out).mul_(2)
            out.sum().backward()
        except RuntimeError as error:
            assert "inplace" in str(error)
            return "refused"
        return x.grad

    in_engine(both(module(lambda self, x: AFTER[name](self.fc(x))), use))


def test_a_result_that_is_an_argument_or_a_parameter_is_that_object():
    def use(model):
        given = torch.ones(3, 4)
        first, weight, again, _ = model(given)
        with torch.no_grad():
            first.add_(1)
        return given.clone(), first is given, again[0] is given, weight is model.fc.weight

    in_engine(both(module(lambda self, x: (x, self.fc.weight, [x], self.fc(x))), use))
    in_engine(both(module(lambda self, x, y: y if x.size(0) > 1 else x), lambda m: m(X, Y) is Y))


def test_buffers_replaced_in_every_way():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("kept", torch.ones(4))
            self.register_buffer("none", None)
            self.register_buffer("light", torch.full((4,), 2.0), persistent=False)

        def forward(self, x):
            return self.fc(x) + self.kept * self.light + (0 if self.none is None else self.none)

    def use(m):
        results = [m(X)]
        m.kept = torch.zeros(4)
        results.append(m(X))
        m.none = torch.full((4,), 5.0)
        results.append(m(X))
        m.none = None
        results.append(m(X))
        m.light.mul_(3)
        m.kept.data = torch.ones(4) * 7
        return [*results, m(X)]

    in_engine(both(Buffers, use), 5)


def test_a_copy_made_between_steps_trains_on():
    def use(m):
        losses = []
        for model in (m, copy.deepcopy(m), m):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(Y).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return losses

    in_engine(both(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), use), 4)


@pytest.mark.parametrize("make", [
    lambda: parametrizations.weight_norm(nn.Linear(4, 4)), lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
], ids=["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(make):
    def use(m):
        results = [m(X) for _ in range(3)]
        results[-1].sum().backward()
        m.eval()
        return [*results, m(X)]

    in_engine(both(make, use, 1e-4), 4)


def test_batch_normalisation_without_statistics():
    def use(m):
        results = [m(X) for _ in range(3)]
        results[-1].sum().backward()
        m.eval()
        return [*results, m(X), *(b.clone() for b in m.buffers())]

    in_engine(both(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)), use), 4)


def test_ways_of_asking_for_gradients():
    def use(m):
        out = m(X)
        found = torch.autograd.grad(out.sum(), [m.weight, X], allow_unused=True)
        m(X).sum().backward(inputs=[m.weight])
        own = nn.Parameter(torch.ones(3, 4))
        with torch.autograd.set_detect_anomaly(True):
            m(own).sum().backward()
        return found, own.grad

    in_engine(both(Linear, use), 3)


def test_saved_tensors_through_hooks_and_on_another_thread():
    def use(m):
        with torch.autograd.graph.save_on_cpu():
            first = m(X)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            second = m(X)
        errors = []

        def work():
            try:
                (first + second).sum().backward()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors
        return first

    in_engine(both(module(lambda self, x: self.fc(x).exp()), use), 2)


def test_hooks_of_parameters():
    def use(m):
        seen = []
        hooks = [m.fc.weight.register_hook(lambda g: g * 2),
                 m.fc.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))]
        m(X).sum().backward()
        for hook in hooks:
            hook.remove()
        return seen

    in_engine(both(module(lambda self, x: self.fc(x)), use))


def test_autocast_inside_out():
    def use(m):
        kinds = [m(Y).dtype]
        with torch.autocast("cpu", torch.bfloat16):
            kinds.append(m(Y).dtype)
            with torch.autocast("cpu", enabled=False):
                kinds.append(m(Y).dtype)
        with torch.autocast("cpu", torch.float16):
            kinds.append(m(Y).dtype)
        return [*kinds, m(Y).dtype]

    def switched_off(self, x):
        h = self.fc(x)
        with torch.autocast("cpu", enabled=False):
            return h, F.linear(h.float(), self.fc.weight)

    in_engine(both(Linear, use), 5)

    def within(m):
        with torch.autocast("cpu", torch.bfloat16):
            return [out.dtype for out in m(Y)]

    in_engine(both(module(switched_off), within))


def test_under_torch_compile():
    """What is around it is compiled; it is left as it is."""
    model = ORTModule(Linear())
    outer = torch.compile(nn.Sequential(model, nn.ReLU()), backend="eager")
    for _ in range(2):
        out = outer(X)
        out.sum().backward()
    torch.testing.assert_close(out, model.module(X).relu())
    in_engine(model, 2)
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_TORCH_MODEL"])
def test_lazy_modules_run_in_the_engine_once_they_have_their_shapes(policy, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)

    def use(model):
        return [model(X) for _ in range(3)]

    torch.manual_seed(0)
    eager = use(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU()))
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU()))
    for a, b in zip(use(model), eager):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert tuple(model.module[0].weight.shape) == (3, 4)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["reasons"]) == (2, 1, [])


def test_a_wrong_dtype_is_pytorchs_own_error():
    def use(m):
        results = [m(X)]
        m.weight.data = m.weight.data.double()
        with pytest.raises(RuntimeError, match="dtype"):
            m(X)
        m.bias.data = m.bias.data.double()
        return [*results, m(X.detach().double())]

    both(Linear, use)
