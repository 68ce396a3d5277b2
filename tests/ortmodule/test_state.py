"""Whatever changes on the wrapped module itself is seen at the next step:
no graph is used that is no longer its own.
"""

import copy
import types

import pytest
import torch
import torch.nn as nn
from agree import X

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Config:
    def __init__(self):
        self.scale = 2.0
        self.nested = {"powers": [1, 2], "names": {"a"}}


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.flag = 0

    def forward(self, x):
        return self.fc(x) + self.flag


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = Child()
        self.act = nn.Tanh()
        self.config = Config()
        self.layers = [1.0, 2.0]
        self.unread = 0
        self.mask = torch.ones(4)
        self.scales = [torch.full((4,), 2.0)]

    def forward(self, x):
        y = self.act(self.child(x)) * self.mask * self.scales[0]
        for factor in self.layers:
            y = y + factor * self.config.scale
        for power in self.config.nested["powers"]:
            y = y + x**power
        return y * len(self.config.nested["names"])


def _unfreeze_other(m):
    m.child.fc.weight.requires_grad_(False)


CHANGES = {
    "attribute of a submodule": lambda m: setattr(m.child, "flag", 3),
    "attribute of a config object": lambda m: setattr(m.config, "scale", -1.0),
    "item of a list": lambda m: m.layers.append(5.0),
    "list within a dict of an object": lambda m: m.config.nested["powers"].__setitem__(0, 3),
    "set within a dict of an object": lambda m: m.config.nested["names"].add("b"),
    "tensor attribute replaced": lambda m: setattr(m, "mask", torch.zeros(4)),
    "tensor attribute in place": lambda m: m.mask.mul_(3),
    "tensor in a list in place": lambda m: m.scales[0].add_(1),
    "tensor in a list replaced": lambda m: m.scales.__setitem__(0, torch.ones(4)),
    "submodule replaced": lambda m: setattr(m, "act", nn.ReLU()),
    "nested submodule replaced": lambda m: setattr(m.child, "fc", nn.Linear(4, 4, bias=False)),
    "parameter replaced": lambda m: setattr(m.child.fc, "weight", nn.Parameter(torch.ones(4, 4))),
    "parameter's data replaced": lambda m: setattr(m.child.fc.weight, "data", torch.ones(4, 4)),
    "parameter removed": lambda m: setattr(m.child.fc, "bias", None),
    "parameter frozen": _unfreeze_other,
    "forward replaced": lambda m: setattr(m.child, "forward", types.MethodType(lambda s, x: s.fc(x) * 9, m.child)),
    "hook added": lambda m: m.child.register_forward_hook(lambda mod, args, out: out * 7),
    "pre-hook added": lambda m: m.child.register_forward_pre_hook(lambda mod, args: (args[0] * 7,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    torch.manual_seed(0)
    module = Stateful()
    eager, model, x = copy.deepcopy(module), ORTModule(module), torch.randn(3, 4)
    torch.testing.assert_close(model(x), eager(x))
    for m in (eager, module):
        torch.manual_seed(1)
        CHANGES[name](m)
    for _ in range(2):
        eager.zero_grad(), module.zero_grad()
        ours, expected = model(x), eager(x)
        torch.testing.assert_close(ours, expected)
        ours.sum().backward(), expected.sum().backward()
        for (key, p), q in zip(eager.named_parameters(), module.parameters()):
            assert (p.grad is None) == (q.grad is None), key
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, msg=key)
    if "hook" not in name:
        assert onnxtrain.stats(model)["engine_steps"] == 3, onnxtrain.stats(model)


def test_what_forward_does_not_read_exports_nothing():
    model, x = ORTModule(Stateful()), torch.randn(3, 4)
    for i in range(4):
        model.module.unread = i
        model.module.child.anything = [i]
        model(x)
    assert onnxtrain.stats(model)["exports"] == 1


def test_an_equal_value_exports_nothing_and_an_old_one_is_remembered():
    module = Stateful()
    model, x = ORTModule(module), torch.randn(3, 4)
    model(x)
    module.layers, module.config.scale = [1.0, 2.0], float("2.0")
    model(x)
    assert onnxtrain.stats(model)["exports"] == 1
    for flag in (3, 0, 3, 0):
        module.child.flag = flag
        torch.testing.assert_close(model(x), module(x))
    assert onnxtrain.stats(model)["exports"] == 2


def test_mode_of_a_submodule_alone():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.BatchNorm1d(50))
    model, x = ORTModule(module), torch.randn(8, 4)
    module[2].eval()
    assert model(x).ne(module[2](torch.zeros(1, 50))).any()
    module[1].eval()
    torch.testing.assert_close(model(x), module(x))
    module[2].train()
    eager = copy.deepcopy(module)
    torch.testing.assert_close(model(x), eager(x))
    torch.testing.assert_close(module[2].running_mean, eager[2].running_mean)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_tied_parameters_untied_and_tied():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    module[2].weight = module[0].weight
    model, x = ORTModule(module), torch.randn(3, 4)
    torch.testing.assert_close(model(x), module(x))
    module[2].weight = nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(model(x), module(x))
    module[0].weight = module[2].weight
    eager = copy.deepcopy(module)
    model(x).square().sum().backward(), eager(x).square().sum().backward()
    torch.testing.assert_close(module[0].weight.grad, eager[0].weight.grad)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_weights_of_another_shape_or_dtype():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    model, ids = ORTModule(module), torch.randint(0, 5, (3,))
    model(ids)
    module[1].weight, module[1].bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))
    torch.testing.assert_close(model(ids), module(ids))
    module.double()
    torch.testing.assert_close(model(ids), module(ids))
    module[0].weight.data = torch.randn(9, 4, dtype=torch.float64)
    torch.testing.assert_close(model(ids + 4), module(ids + 4))
    assert onnxtrain.stats(model)["fallback_steps"] == 0


class Hidden(nn.Module):
    """Keeps a state and a by-product on itself."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.h = torch.zeros(2, 4)

    def forward(self, x):
        self.h = torch.tanh(self.fc(x) + self.h)
        self.loss = self.h.square().mean()
        self.size = x.size(0)
        return self.h * 2


def test_attributes_set_in_forward_are_set_with_their_gradients():
    torch.manual_seed(0)
    module = Hidden()
    eager, model = copy.deepcopy(module), ORTModule(module)
    for step in range(4):
        x = torch.randn(2, 4)
        eager.zero_grad(), module.zero_grad()
        ours, expected = model(x), eager(x)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(module.h, eager.h)
        (ours.sum() + module.loss).backward(), (expected.sum() + eager.loss).backward()
        torch.testing.assert_close(module.fc.weight.grad, eager.fc.weight.grad)
        assert module.size == 2
        module.h, eager.h = module.h.detach(), eager.h.detach()
        if step == 2:
            module.h, eager.h = torch.ones(2, 4), torch.ones(2, 4)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 4 and counts["exports"] == 1


class Kept(nn.Module):
    """A mean and a direction of the weight, which are kept under no_grad() and within autocast."""

    def __init__(self):
        super().__init__()
        self.fc, self.last = nn.Linear(4, 4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        h = self.fc(x)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.25)
            return self.last(h - self.mean).float()


def test_buffers_that_are_kept_without_a_gradient_stay_so():
    torch.manual_seed(0)
    eager = Kept()
    ours = copy.deepcopy(eager)
    buffers, model = dict(ours.named_buffers()), ORTModule(ours)
    for _ in range(3):
        x = torch.randn(5, 4)
        for each in (eager, model):
            each(x).square().sum().backward()
    with torch.inference_mode():
        eager(x), model(x)
    assert onnxtrain.stats(model)["engine_steps"] == 4
    assert all(buffer is buffers[name] for name, buffer in ours.named_buffers())
    for name, buffer in buffers.items():
        assert not buffer.requires_grad and not buffer.is_inference(), name
        torch.testing.assert_close(buffer, eager.get_buffer(name), rtol=1e-5, atol=1e-5)
    for (name, weight), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, weight.grad, rtol=0.03, atol=0.03 * float(weight.grad.abs().max()),
                                   msg=lambda text, n=name: f"{n}: {text}")


def test_a_weight_that_is_read_under_no_grad_alone_is_not_in_the_graph():
    """Neither has it a gradient, nor are its hooks called, as in eager."""
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                scale = self.scale * 2
            return self.fc(x) * scale

    module, seen = Scaled(), []
    for weight in (module.fc.weight, module.scale):
        weight.register_post_accumulate_grad_hook(seen.append)
    model = ORTModule(module)
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
    assert [id(weight) for weight in seen] == [id(module.fc.weight)] * 2 and module.scale.grad is None
    module.fc.requires_grad_(False)
    assert not model(torch.randn(3, 4)).requires_grad
    assert onnxtrain.stats(model)["engine_steps"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("norm, shape", [(nn.BatchNorm2d, (4, 3, 6, 5)), (nn.BatchNorm1d, (9, 3)),
                                         (nn.InstanceNorm2d, (4, 3, 6, 5))], ids=lambda v: getattr(v, "__name__", ""))
def test_running_statistics_are_not_rounded_to_the_inputs_dtype(norm, shape, dtype):
    """As autocast has it: 16-bit images, float32 statistics."""
    torch.manual_seed(0)
    options = {"affine": True, "track_running_stats": True}
    eager = norm(3, **options).to(torch.float64 if dtype == torch.float64 else torch.float32)
    module = copy.deepcopy(eager)
    model = ORTModule(module)
    for _ in range(2):
        x = (torch.randn(shape) + 3).to(dtype)
        for run in (eager, model):
            run(x.clone().requires_grad_()).float().sum().backward()
    assert not onnxtrain.stats(model)["fallback_steps"]
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(module, name), getattr(eager, name), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("norm, shape", [(nn.BatchNorm1d, (3,)), (nn.BatchNorm2d, (3, 6, 5)),
                                         (nn.BatchNorm3d, (3, 2, 6, 5))], ids=lambda v: getattr(v, "__name__", ""))
def test_running_statistics_of_no_rows_stay(norm, shape):
    torch.manual_seed(0)
    eager = norm(3)
    module = copy.deepcopy(eager)
    model = ORTModule(module)
    for rows in (4, 7, 0, 5, 0):
        x = torch.randn(rows, *shape)
        for run in (eager, model):
            run(x.clone().requires_grad_()).sum().backward()
        for (name, want), got in zip(eager.named_buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=f"{name} after {rows} rows")
    assert onnxtrain.stats(model)["engine_steps"] == 5


def test_running_statistics_of_what_a_mask_selects():
    class Selected(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x[x[:, 0] > 0])

    eager = Selected()
    module = copy.deepcopy(eager)
    model = ORTModule(module)
    for signs in ([1, 1, -1, 1], [-1] * 5, [1, -1, 1, 1, 1]):
        x = torch.randn(len(signs), 3).abs() * torch.tensor(signs).unsqueeze(1)
        for run in (eager, model):
            run(x.clone().requires_grad_()).sum().backward()
        for (name, want), got in zip(eager.named_buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=f"{name} of {signs}")
    assert onnxtrain.stats(model)["engine_steps"] == 3


class Momentum(nn.Module):
    """A frozen copy follows a trained layer inside forward, as MoCo's key encoder does."""

    def __init__(self, update):
        super().__init__()
        self.query, self.key, self.update = nn.Linear(4, 4), nn.Linear(4, 4), update
        self.key.requires_grad_(False)
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters()):
                self.update(q, k)
        self.center.data = self.center.data * 0.9 + x.mean(0) * 0.1
        return (self.query(x) - self.key(x)).square().mean() + self.center.sum()


def assigned(q, k):
    k.data = k.data * 0.9 + q.data * 0.1


@pytest.mark.parametrize("update", [assigned, lambda q, k: k.mul_(0.9).add_(q, alpha=0.1),
                                    lambda q, k: k.data.lerp_(q.data, 0.1), lambda q, k: k.copy_(q)])
def test_frozen_parameters_that_forward_changes(update):
    torch.manual_seed(0)
    eager = Momentum(update)
    ours = ORTModule(copy.deepcopy(eager))
    held = [*ours.key.parameters()]
    for module in (eager, ours):
        torch.manual_seed(1)
        for _ in range(3):
            loss = module(torch.randn(3, 4))
            loss.backward()
            with torch.no_grad():
                for p in module.query.parameters():
                    p.sub_(p.grad, alpha=0.1)
    for a, b in zip(ours._module.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    assert all(p is q for p, q in zip(ours.key.parameters(), held))
    counts = onnxtrain.stats(ours)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (3, 0), counts["reasons"]


def test_data_of_another_shape_runs_in_pytorch():
    class Shrinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("held", torch.zeros(4))

        def forward(self, x):
            self.held.data = x[0, :2] * 2
            return self.fc(x) + self.held.sum()

    eager = Shrinking()
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x), eager(x))
    torch.testing.assert_close(ours.held, eager.held)


def test_a_sample_of_a_distribution_under_no_grad_is_the_engines():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            chosen = torch.distributions.Categorical(logits=self.fc(x))
            action = chosen.sample()
            return action, chosen.log_prob(action), chosen.entropy()

    eager = Policy()
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            results = []
            for module in (eager, ours):
                torch.manual_seed(0)
                results.append(module(x))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)
            assert a.requires_grad == b.requires_grad
    assert onnxtrain.stats(ours)["fallback_steps"] == 0, onnxtrain.stats(ours)["reasons"]


class WritesFrozen(nn.Module):
    """An operator whose export is compared with one run of eager PyTorch."""

    def __init__(self):
        super().__init__()
        self.fc, self.held = nn.Linear(4, 4), nn.Parameter(torch.randn(6) * 5, requires_grad=False)

    def forward(self, x):
        return self.fc(x).sum() + torch.nn.functional.rrelu_(self.held.data, training=True).sum()


def test_a_comparison_writes_no_frozen_parameter():
    plain = WritesFrozen()
    model = ORTModule(copy.deepcopy(plain))
    for step in range(3):
        torch.manual_seed(step)
        want = plain(X)
        torch.manual_seed(step)
        torch.testing.assert_close(model(X), want)
        torch.testing.assert_close(model.held, plain.held)
