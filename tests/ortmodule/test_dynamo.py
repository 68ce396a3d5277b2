"""torch.compile with the engine as its backend, against eager: results, gradients, state; what Python changes between
steps; sizes, numbers and graph breaks; what is refused."""

import copy
import functools
import logging
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import RECENT, equal
from torch.utils import checkpoint

import onnxtrain
from onnxtrain import dynamo

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def counts():
    stats = onnxtrain.stats()
    return {name: stats[name] for name in ("engine_steps", "fallback_steps", "exports")}


def both(module, use, engine_steps, fallback_steps=0, exports=None, **options):
    """use(model) on eager and on the compiled copy: results, gradients, buffers agree; the engine took these steps."""
    eager, compiled = module, torch.compile(copy.deepcopy(module), backend=dynamo.backend, **options)
    torch.manual_seed(1)
    want = use(eager)
    before = counts()
    torch.manual_seed(1)
    got = use(compiled)
    taken = {name: value - before[name] for name, value in counts().items()}
    equal(got, want)
    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(eager.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5, msg=name)
    steps = taken["engine_steps"], taken["fallback_steps"]
    assert steps == (engine_steps, fallback_steps), onnxtrain.stats()["reasons"]
    if exports is not None:
        assert taken["exports"] == exports
    return compiled


def trained(*batches):
    def use(model):
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses
    return use


class Made(nn.Module):
    def __init__(self, forward, **attributes):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self._made = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self._made(self, *args)


X = torch.arange(12.0).reshape(3, 4) / 10
Y = 0.3 - X


@pytest.mark.parametrize("options", [dict(), dict(fullgraph=True), dict(dynamic=True), dict(mode="reduce-overhead")],
                         ids=str)
def test_training_steps(options):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    both(module, trained(*torch.randn(3, 2, 3, 6, 6)), engine_steps=3, exports=1, **options)


def test_a_transformer_layer_with_dropout_follows_the_seed():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    compiled = torch.compile(layer, backend=dynamo.backend, fullgraph=True)
    x = torch.randn(2, 5, 8)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(compiled(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    layer.eval()
    equal(compiled(x), layer(x))


def test_other_batch_sizes_are_two_exports_at_most():
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    both(module, trained(*[torch.randn(n, 4) for n in (3, 5, 7, 9, 2)]), engine_steps=5, exports=2)


def test_sizes_and_changing_numbers_are_no_exports():
    def forward(self, x, scale):
        h = self.fc(x) * scale
        return h.sum(), x.shape[0] * 2 + 1, x.numel() > 8, h.reshape(-1)

    def use(model):
        out = [model(torch.ones(n, 4), n / 3) for n in range(2, 8)]
        sum(o[0] for o in out).backward()
        return [o[1:3] for o in out], [o[0].detach() for o in out]
    both(Made(forward), use, engine_steps=6, exports=2)


def test_a_graph_break_leaves_two_graphs_in_the_engine():
    def forward(self, x):
        h = self.fc(x)
        torch._dynamo.graph_break()
        return self.fc(h.relu())
    both(Made(forward), trained(X, Y), engine_steps=4)


def test_a_branch_on_a_value_takes_both_ways():
    def forward(self, x):
        h = self.fc(x)
        return h * 2 if h.sum() > 0 else h - 1
    both(Made(forward), trained(X, -9 * X, X), engine_steps=6)


class Box:
    value = 2.0


def changed(change):
    def use(model):
        first = model(X).detach()
        change(getattr(model, "_orig_mod", model))
        return first, model(X).detach()
    return use


@pytest.mark.parametrize("forward, attributes, change", [
    (lambda self, x: self.act(self.fc(x)), dict(act=functools.partial(F.leaky_relu, negative_slope=0.1)),
     lambda m: setattr(m, "act", functools.partial(F.leaky_relu, negative_slope=0.9))),
    (lambda self, x: self.fc(x) * self.cfg["a"]["b"]["c"]["d"], dict(cfg={"a": {"b": {"c": {"d": 2.0}}}}),
     lambda m: m.cfg["a"]["b"]["c"].update(d=5.0)),
    (lambda self, x: self.fc(x) * self.box.value, dict(box=Box()), lambda m: setattr(m.box, "value", 5.0)),
    (lambda self, x: self.fc(x) * self.table[0], dict(table=[2.0] * 1025), lambda m: m.table.__setitem__(0, 5.0)),
], ids=["partial", "nested dict", "object", "long list"])
def test_state_that_forward_reads_is_watched(forward, attributes, change):
    both(Made(forward, **attributes), changed(change), engine_steps=2)


def test_one_tensor_passed_twice_and_then_two():
    def use(model):
        return model(X, X), model(X, Y)
    both(Made(lambda self, x, y: self.fc(x) - 2 * y), use, engine_steps=2)


def test_arguments_changed_in_place_and_sharing_memory():
    def forward(self, x, y):
        x.add_(1)
        return self.fc(x) + y

    def use(model):
        x, base = X.clone(), X.clone()
        return model(x, Y).detach(), x, model(base, base.view(3, 4)).detach(), base
    both(Made(forward), use, engine_steps=1, fallback_steps=1)


def test_gradients_enabled_under_no_grad_are_had(caplog):
    def forward(self, x):
        with torch.enable_grad():
            return self.fc(x)

    def use(model):
        with torch.no_grad():
            out = model(X)
        out.sum().backward()
        return out
    with caplog.at_level(logging.WARNING):
        both(Made(forward), use, engine_steps=0, fallback_steps=1)
    assert "enables gradients" in caplog.text


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, scale):
        y, positive = a.exp(), a > 0
        ctx.save_for_backward(y, b)
        ctx.scale, ctx.rows = scale, a.shape[0]
        ctx.mark_non_differentiable(positive)
        return y * b, positive

    @staticmethod
    def backward(ctx, grad, _):
        y, b = ctx.saved_tensors
        return grad * y * b * ctx.scale * ctx.rows, grad * y, None  # another slope than autograd's


def plain(f, *args):
    return f(*args)


@pytest.mark.parametrize("inside", [plain,
                                    lambda f, *args: checkpoint.checkpoint(f, *args, use_reentrant=False)],
                         ids=["plain", "in a checkpoint"])
def test_an_autograd_function_keeps_its_backward(inside):
    def forward(self, x):
        h = self.fc(x)
        y, positive = inside(lambda a, b: Doubled.apply(a, b, self.scale), h, x + 1)
        return y * 3 + h, positive

    def use(model):
        out = []
        for n in (3, 5, 7, 9):
            model.scale = 1.0 + n
            out.append(model(torch.ones(n, 4) / n))
        sum(y.square().sum() for y, _ in out).backward()
        return [[y.detach(), positive] for y, positive in out]
    alone = inside is plain or RECENT
    both(Made(forward), use, engine_steps=4 if alone else 1, fallback_steps=0 if alone else 3)


def test_a_checkpoint_is_part_of_the_graph():
    def forward(self, x):
        return checkpoint.checkpoint(lambda t: self.fc(t).tanh(), self.fc(x), use_reentrant=False)
    both(Made(forward), trained(X, Y), engine_steps=2, exports=1)


def test_autocast_inside_and_left_as_it_was_where_an_export_fails():
    def forward(self, x):
        h = self.fc(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.fc(h)
            if not self.good:
                with torch.no_grad():
                    self.fc.weight.clamp_(-1, 1)
                h = self.fc(h)
        return h.to(x.dtype) * 2

    def use(model):
        out = model(X)
        assert out.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0
        return (out.detach() * 8).round() / 8
    both(Made(forward, good=True), use, engine_steps=1)
    both(Made(forward, good=False), use, engine_steps=0, fallback_steps=1)


def test_a_region_without_gradient_within_autocast():
    def forward(self, x):
        h = self.fc(x)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            scale = h.square().mean(0)
            with torch.enable_grad():
                more = self.fc.weight.exp().sum(0)
            doubled = more * 2
        with torch.autocast("cpu", torch.bfloat16):
            h = h * scale
            with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=False):
                scale = h.exp()
            return h * scale + more + doubled
    both(Made(forward), trained(X, Y), engine_steps=2)


@pytest.mark.parametrize("cast", [
    lambda h: h.float(), lambda h: h.to("cpu").type_as(h).contiguous(), lambda h: h.flatten().reshape(3, 4),
    torch.as_tensor, lambda h: h.ravel().ravel().view(3, 4).expand(3, 4),
    lambda h: h.type(torch.float32).real.positive(), lambda h: F.dropout(F.dropout(h, 0.5, False), 0.0),
    lambda h: torch.broadcast_tensors(h, h * 2)[0], lambda h: F.dropout(h, 0.5, False).float(),
], ids=["float", "to", "flatten", "as_tensor", "ravel", "type", "dropout", "broadcast_tensors", "dropout and float"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_call_that_does_nothing_under_no_grad_leaves_the_gradient_of_its_argument(cast, autocast):
    def forward(self, x):
        h = self.fc(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            same = cast(h)
            scale = same.exp() * cast(self.fc.bias.reshape(1, 4).expand(3, 4)) + cast(self.fc.weight.float()[:3])
        return h * scale, same * 2

    def use(model):
        results = model(X)
        results[0].sum().backward()
        return [result.detach() for result in results]
    both(Made(forward), use, engine_steps=1)


@pytest.mark.parametrize("name", ["whole", "view", "seen through a view"])
def test_what_is_written_under_no_grad_into_a_tensor_from_before(name):
    def forward(self, x):
        h, new = self.fc(x), torch.zeros(4, 4)
        flat = new.view(16) if name == "seen through a view" else None
        with torch.no_grad():
            if name == "view":
                torch.exp(h, out=new[1:])
            else:
                torch.mm(h.T, h, out=new)
        return h * (new if flat is None else flat.view(4, 4))[:3]
    both(Made(forward), trained(X, Y), engine_steps=2)


def test_a_region_without_gradient_in_a_checkpoint_within_autocast():
    def part(h):
        with torch.no_grad():
            scale = h.square().mean(0)
        return h * scale

    def forward(self, x):
        h = self.fc(x)
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint.checkpoint(part, h, use_reentrant=False)
    both(Made(forward), trained(X, Y), engine_steps=2)


@pytest.mark.parametrize("draw", [
    lambda h: h * torch.rand(4) + torch.randn_like(h), lambda h: h + torch.randint(3, (h.shape[0], 1)),
    lambda h: h * torch.bernoulli(torch.full((4,), 0.5)) + torch.empty_like(h).uniform_(),
    lambda h: h[torch.randperm(3)] + torch.normal(h.detach(), 1.0) + torch.randint_like(h, 5),
    lambda h: F.dropout(h, 0.0) + F.dropout(h, 1.0) * torch.arange(4),
], ids=["rand", "randint", "bernoulli", "others", "dropout of nothing and of all"])
def test_a_seed_draws_what_eager_draws(draw):
    def use(model):
        out = model(X)
        out.sum().backward()
        return out.detach(), torch.rand(3)
    both(Made(lambda self, x: draw(self.fc(x)).sin()), use, engine_steps=1)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_hook_of_all_modules_is_not_run_for_a_graph():
    called = []
    compiled = torch.compile(Made(lambda self, x: self.fc(x)), backend=dynamo.backend)
    before = counts()
    with nn.modules.module.register_module_forward_hook(lambda part, args, out: called.append(type(part)) or out * 2):
        got = compiled(X)
    assert not {torch.fx.GraphModule, onnxtrain.ortmodule.ORTModule}.intersection(called)
    torch.testing.assert_close(got, compiled._orig_mod.fc(X) * 2 ** len(called))
    assert counts()["engine_steps"] == before["engine_steps"] and counts()["fallback_steps"] > before["fallback_steps"]


def test_the_data_of_a_tensor_is_no_constant():
    def forward(self, x):
        h = self.fc(x)
        t = h.detach().clone()
        t.data = t.data * 2
        return h + t
    both(Made(forward), lambda model: [model(X), model(Y), model(X * 2)], engine_steps=6)


def test_torch_func_inside_is_pytorchs(caplog):
    def forward(self, x):
        h = self.fc(x)
        return h + torch.func.grad(lambda t: t.sin().sum())(h)
    with caplog.at_level(logging.WARNING):
        both(Made(forward), lambda model: [model(X), model(Y)], engine_steps=0, fallback_steps=2)
    assert "torch.func" in caplog.text


def test_a_function_mode_is_asked_once():
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.relu else out

    def use(model):
        out = [model(X)]
        with Twice():
            out += [model(X), model(Y)]
        return [*out, model(Y)]
    both(Made(lambda self, x: torch.relu(self.fc(x))), use, engine_steps=2, fallback_steps=2)


def test_numbers_that_are_drawn_before_a_dropout_are_eagers():
    def forward(self, x):
        h = self.fc(x) * torch.bernoulli(torch.full((4,), 0.5))
        return h, F.dropout(torch.ones(64, 64), 0.5).max()
    both(Made(forward), lambda model: model(X), engine_steps=1)


def test_gradients_of_arguments_and_no_grad():
    def use(model):
        x = X.clone().requires_grad_()
        model(x).sum().backward()
        with torch.no_grad():
            quiet = model(x)
        return x.grad, quiet
    both(Made(lambda self, x: self.fc(x).sin()), use, engine_steps=2)


def test_a_result_that_is_not_known_runs_in_pytorch_and_is_counted(caplog):
    graph = torch.fx.symbolic_trace(lambda x: (x.relu(),))  # without Dynamo's example values
    before = counts()
    with caplog.at_level(logging.WARNING):
        run = dynamo.backend(graph, [X])
    torch.testing.assert_close(run(Y), (Y.relu(),))
    after = counts()
    assert {name: after[name] - before[name] for name in after} == dict(engine_steps=0, fallback_steps=1, exports=0)
    assert "PyTorch runs a graph" in caplog.text


@pytest.mark.parametrize("options, error", [(dict(mode="quick"), ValueError), (dict(options={"a": 1}), TypeError)])
def test_what_there_is_not_is_refused(options, error):
    graph = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(error, match="onnxtrain"):
        dynamo.backend(graph, [X], **options)


def test_the_entry_point_names_the_backend():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    module, name = project["project"]["entry-points"]["torch_dynamo_backends"]["onnxtrain"].split(":")
    assert getattr(__import__(module, fromlist=[name]), name) is dynamo.backend
