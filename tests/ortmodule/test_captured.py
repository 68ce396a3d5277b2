"""ORTModule on Dynamo, against eager: what Python reads and changes around the tensors, what
is said of it, and what the module keeps of it."""

import collections
import copy
import functools
import random
import sys
import types

import numpy
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import RECENT, X, Y, both, equal, in_engine, module, step, three
from torch.autograd import Variable

import onnxtrain
from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
HELPER = types.SimpleNamespace(scale=2.0)


def counts(model):
    found = onnxtrain.stats(model)
    return found["engine_steps"], found["fallback_steps"], found["exports"]


def test_a_training_follows_eager():
    def use(m):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        losses = []
        for rows in (4, 4, 6, 5):
            optimizer.zero_grad()
            loss = F.mse_loss(m(torch.linspace(-1, 1, 4 * rows).reshape(rows, 4)), torch.ones(rows, 2))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, [b.clone() for b in m.buffers()]

    model = both(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), use)
    assert counts(model) == (4, 0, 1)  # the second capture, with a symbolic number of rows, is an equal graph


def test_modes():
    def use(m):
        with torch.no_grad():
            first = m(X)
        m.eval()
        second = step(X)(m)
        m.train()
        return first, second, step(X)(m)[0].shape

    in_engine(both(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), use), 3)


CHANGES = {
    "nested config": (lambda m, x: m.fc(x) * m.config.a.b["c"][0],
                      {"config": lambda: types.SimpleNamespace(a=types.SimpleNamespace(b={"c": [2.0]}))},
                      lambda m: m.config.a.b["c"].__setitem__(0, 5.0)),
    "partial": (lambda m, x: m.act(m.fc(x)), {"act": lambda: functools.partial(F.leaky_relu, negative_slope=0.1)},
                lambda m: setattr(m, "act", functools.partial(F.leaky_relu, negative_slope=0.9))),
    "global": (lambda m, x: m.fc(x) * HELPER.scale, {}, lambda m: setattr(HELPER, "scale", HELPER.scale + 1)),
    "submodule": (lambda m, x: m.fc(x), {}, lambda m: setattr(m, "fc", nn.Linear(4, 4).requires_grad_(False))),
    "parameter": (lambda m, x: m.fc(x), {}, lambda m: setattr(m.fc, "weight", nn.Parameter(torch.ones(4, 4)))),
    "frozen": (lambda m, x: m.fc(x), {}, lambda m: m.fc.weight.requires_grad_(False)),
    "hook": (lambda m, x: m.fc(x), {}, lambda m: m.fc.register_forward_hook(lambda _m, _i, out: out * 3)),
    "forward": (lambda m, x: m.fc(x), {}, lambda m: setattr(m.fc, "forward", lambda x: x * 7)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_forward_reads_is_guarded(name):
    forward, parts, change = CHANGES[name]
    scale = HELPER.scale

    def use(m):
        HELPER.scale = scale
        torch.manual_seed(3)
        return three(change)(m)

    in_engine(both(module(forward, **parts), use), 3)


def test_a_tie_that_is_undone():
    def make():
        m = module(lambda m, x: m.head(x), head=lambda: nn.Linear(4, 4))()
        m.head.weight = m.fc.weight
        return m

    def change(m):
        m.fc.weight = nn.Parameter(torch.zeros(4, 4))

    in_engine(both(make, three(change)), 3)


def test_what_forward_changes_is_replayed():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.meter, self.seen = nn.Linear(4, 4), types.SimpleNamespace(calls=0), []

        def forward(self, x):
            self.meter.calls += 1
            self.seen.append(x.shape[0])
            return self.fc(x)

    def use(m):
        return three()(m), m.meter.calls, list(m.seen)

    in_engine(both(Counting, use), 3)


def test_one_tensor_twice_and_then_two():
    forward = module(lambda m, x, y: m.fc(x) * y)
    in_engine(both(forward, lambda m: (step(X, X)(m)[0], step(X, Y)(m)[0])), 2)


def test_batches_that_are_views_of_one_tensor_share_an_export():
    rows = torch.linspace(-1, 1, 80).reshape(20, 4)
    model = both(module(lambda m, x, y: m.fc(x) * y),
                 lambda m: [step(rows[i:i + 4], rows[i + 1:i + 5])(m) for i in (0, 4, 8, 12)])
    assert in_engine(model, 4)["exports"] == 1


def test_two_python_modules_of_one_name():
    """The one that stands in sys.modules is read, as after `del sys.modules[name]` and another import."""
    source = """
import torch
seen = []
class Seeing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
    def forward(self, x):
        return note(self.fc(x))
def note(h):
    seen.append(1)
    return h * number
"""
    for number in (2.0, 3.0):
        sys.modules["replaced"] = python = types.ModuleType("replaced")
        python.number = number
        exec(source, vars(python))
        in_engine(both(python.Seeing, lambda m: [m(X), m(X)]), 2)
        assert len(python.seen) == 4
    del sys.modules["replaced"]


def test_a_branch_on_a_value_is_two_graphs_in_the_engine():
    model = both(module(lambda m, x: m.fc(x) if x.sum() > 0 else m.fc(-x)), lambda m: [m(X), m(-X), m(X)])
    in_engine(model, 3)
    cuts = onnxtrain.stats(model)["graph_breaks"]
    assert any("branch" in text for text in cuts) and set(cuts) <= set(onnxtrain.stats()["graph_breaks"])
    assert "Dynamo cuts the graph, and Python runs in between: " in onnxtrain.explain(model)


@pytest.mark.parametrize("number", [lambda x: x.sum().item() > 0, lambda x: int(x.sum()) > 0,
                                    lambda x: len(range(int(x.sum().clamp(0))))], ids=["item", "int", "range"])
def test_a_branch_on_a_number_is_named(number):
    model = both(module(lambda m, x: m.fc(x) if number(x) else m.fc(-x)), lambda m: [m(X), m(3 + X), m(X)])
    in_engine(model, 3)
    cuts = onnxtrain.stats(model)["graph_breaks"]
    assert len(cuts) == 1 or not RECENT
    assert cuts[-1].startswith(f"Python branches on a number that a tensor held, in {__file__}, line ")


class Masked(nn.Module):
    """A layer of torch's under a mask, whose values that would look at."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, 0.0), 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x, nn.Transformer.generate_square_subsequent_mask(x.shape[0]))


def test_a_mask_of_a_transformer_cuts_no_graph():
    model = both(Masked, lambda m: step(torch.rand(5, 3, 4))(m))
    in_engine(model, 1)
    assert onnxtrain.stats(model)["graph_breaks"] == []


def cut(value):
    torch._dynamo.graph_break()
    return value


BROKEN = (f"Call to `torch._dynamo.graph_break()`, in {__file__}, line {cut.__code__.co_firstlineno + 1} "
          "(torch._dynamo.graph_break())")


@pytest.mark.parametrize("forward", [
    lambda m, x: cut(2 * x.shape[0] + 1) * m.fc(x), lambda m, x: cut(torch.ones(x.shape[0]) * 2).sum() + m.fc(x),
    lambda m, x: cut(torch.full((4,), 0.5)) + m.fc(x), lambda m, x: x @ cut(m.fc.weight * 2),
], ids=["a number", "a tensor of this size", "a constant", "a parameter"])
def test_graphs_that_no_argument_enters(forward):
    model = both(module(forward), lambda m: [step(x)(m) for x in (X, torch.ones(5, 4), torch.ones(7, 4), X)])
    in_engine(model, 4)
    assert onnxtrain.stats(model)["graph_breaks"] == [BROKEN]


def place_in_row(row, rows):
    order = numpy.random.permutation(numpy.arange(rows))
    if row == rows - 1:
        order = order[::-1]
    if row == rows - 2:
        order = order + 0
    return order[0]


def places_in_rows(count):
    numpy.random.seed(0)
    rows = numpy.array([count]) // 1
    return torch.tensor([int(place_in_row(row, rows[0])) for row in range(count)])


def test_loops_over_numpys_arrays_are_left_to_python():
    model = both(module(lambda m, x: m.fc(x)[places_in_rows(len(x))] * 2), step(torch.randn(6, 4)))
    assert in_engine(model, 1)["exports"] <= 2


def test_a_graph_that_only_copies_strides_away_is_no_fallback():
    model = both(module(lambda m, x: cut(m.fc(cut(x.t()).contiguous())).t().reshape(-1)), step(torch.randn(4, 4)))
    in_engine(model, 1)


def test_a_number_of_another_module_is_no_change_of_this_ones():
    for scale in (2.0, 3.0, 4.0):
        model = both(module(lambda m, x: m.fc(x) * m.scale, scale=lambda scale=scale: scale), step(X))
        ((_, (program,)),) = model._all_programs()
        assert [source.kind for source in program.exported.inputs].count("user") == 1  # no number beside x


def test_numpys_random_numbers_are_its_own():
    def forward(m, x):
        h = m.fc(x) * float(numpy.random.rand())
        numpy.random.seed(7)
        return h + torch.from_numpy(numpy.random.randn(4)).float() * numpy.random.normal()

    def use(m):
        numpy.random.seed(5)
        return [step(X)(m), step(Y)(m), torch.rand(2), float(numpy.random.rand())]

    in_engine(both(module(forward), use), 2)


@pytest.mark.parametrize("number", [
    lambda m, h: h.sum().item(), lambda m, h: h.double().sum().item(), lambda m, h: m.fc.weight[0].tolist()[1],
    lambda m, h: cut(h.double().sum()).item(),
], ids=["item", "of float64", "tolist", "behind a cut"])
def test_no_gradient_goes_through_a_number(number):
    def forward(m, x):
        h = m.fc(x)
        return h * number(m, h)

    in_engine(both(module(forward), lambda m: [step(x)(m) for x in (X, Y)], 1e-4), 2)


@torch.compiler.disable
def doubled(x):
    x.mul_(2)


@pytest.mark.parametrize("view", [torch.Tensor.detach, torch.Tensor.t, lambda x: x.view(-1, 4)[1:], lambda x: x.data],
                         ids=["detach", "t", "two views", "data"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_graph_of_views_leaves_them_views(view, mode):
    def forward(m, x):
        doubled(view(x))
        return m.fc(x)

    def use(m):
        with mode():
            given = [X.detach().clone() for _ in range(2)]
            return [m(x) for x in given], given

    in_engine(both(module(forward), use), 2)


NOTHING = {
    "an argument": lambda m, x: x, "a view": lambda m, x: x.t()[1:], "a parameter": lambda m, x: m.fc.weight,
    "views": lambda m, x: {"a": x[:2], "b": [m.fc.weight.t(), x.detach()]}, "a size": lambda m, x: (len(x), x.shape[1]),
    "Python": lambda m, x: m.seen.append(len(x)) or {"seen": len(m.seen)},
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", NOTHING)
def test_a_module_that_computes_nothing(name, mode, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")

    def use(m):
        results = []
        for rows in (3, 3, 4, 5):
            given = torch.arange(4.0 * rows).reshape(rows, 4)
            with mode():
                given = (given * 1).requires_grad_() if mode is torch.enable_grad else given.clone()
                out = m(given)
            roots = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad
                     and mode is torch.enable_grad]
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
            shared = [t.untyped_storage()._cdata in (given.untyped_storage()._cdata, m.fc.weight.untyped_storage()._cdata)
                      for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            results.append((out, given.grad, shared, out is given))
        return results, list(m.seen)

    in_engine(both(module(NOTHING[name], seen=list), use), 4)


def test_python_that_dynamo_leaves_out_is_not_taken_for_nothing():
    def forward(m, x):
        for _ in range(2):
            torch._dynamo.graph_break()
        return x.t() if m.view else m.fc(x)

    model = ORTModule(module(forward, view=lambda: True)())
    for m in (True, False, True, False):
        model.view = m
        torch.testing.assert_close(model(X), model.module(X))
    assert counts(model) == (0, 4, 0) and onnxtrain.stats(model)["reasons"]


class DroppedAgain(torch.autograd.Function):
    """Keeps no result: backward draws the same mask again, as reversible layers do."""

    @staticmethod
    def forward(ctx, x):
        ctx.state = torch.get_rng_state()
        return F.dropout(x, 0.5)

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            return F.dropout(grad, 0.5)


def test_a_mask_that_is_drawn_again_is_the_same():
    model = ORTModule(module(lambda m, x: DroppedAgain.apply(x + m.fc.bias))())
    for _ in range(3):
        x = torch.ones(64, 4, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)
    assert "seeds torch's random generator" in onnxtrain.stats(model)["reasons"][0]


def seeded(x):
    torch.manual_seed(3)
    return x + torch.rand(4)


def test_cuts_are_those_of_the_module_that_has_them():
    plain, seeding, cutting = (ORTModule(module(forward)()) for forward in (
        lambda m, x: m.fc(x), lambda m, x: seeded(m.fc(x)), lambda m, x: cut(m.fc(x)) * 2))
    for model in (plain, seeding, cutting):
        model(X)
    plain(X[0])  # captured again, after the others
    in_engine(plain, 2)
    assert onnxtrain.stats(plain)["graph_breaks"] == []
    assert onnxtrain.stats(cutting)["graph_breaks"] == [BROKEN]
    assert counts(seeding)[:2] == (0, 1)
    outer = ORTModule(module(lambda m, x: m.part(m.fc(x)), part=lambda: ORTModule(module(
        lambda m, x: cut(m.fc(x)) * 2)()))())
    outer(X)
    assert onnxtrain.stats(outer.part)["graph_breaks"] == [BROKEN]
    assert BROKEN not in onnxtrain.stats(outer)["graph_breaks"]


def test_a_second_gradient():
    def use(m):
        x = X.detach().clone().requires_grad_(True)
        (grad,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return grad.detach()

    in_engine(both(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), use))


def _forbidden(*_args):
    raise NotImplementedError("not for others")


FORBIDDING = {"__len__": _forbidden, "__iter__": _forbidden, "__eq__": _forbidden, "__bool__": _forbidden,
              "__format__": _forbidden, "__str__": _forbidden, "__repr__": _forbidden, "keys": _forbidden,
              "items": _forbidden, "values": _forbidden, "__hash__": object.__hash__}
FOREIGN = {kind.__name__: type("Foreign", (kind,), FORBIDDING)
           for kind in (tuple, list, dict, set, frozenset, str, collections.deque, object)}
FOREIGN["a class of its own"] = type("Foreign", (), {"__class__": property(_forbidden), **FORBIDDING})
FOREIGN["attributes of its own"] = type("Foreign", (), {"__dict__": property(_forbidden), **FORBIDDING})


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_attributes_are_left_alone(name):
    def make():
        m = module(lambda m, x: m.fc(x))()
        for place in (m, m.fc):
            place.kept = {"one": FOREIGN[name](), "two": [FOREIGN[name]()]}
            if name == "object":
                place.kept[FOREIGN[name]()] = 1
        return m

    torch.manual_seed(0)
    eager = module(lambda m, x: m.fc(x))()
    torch.manual_seed(0)
    model = ORTModule(make())
    equal([step(x)(model)[0] for x in (X, Y)], [step(x)(eager)[0] for x in (X, Y)])
    in_engine(model, 2)


def test_what_dynamo_misreads_runs_in_pytorch(monkeypatch):
    make = module(lambda m, x: m.fc(x) * m.rng.random(), rng=lambda: random.Random(3))
    model = both(make, three())
    assert counts(model) == (0, 3, 0)
    assert "random.Random 'rng'" in onnxtrain.stats(model)["reasons"][0]
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException, match="Dynamo does not follow"):
        ORTModule(make())(X)


def test_a_capture_that_fails_runs_in_pytorch():
    model = both(module(lambda m, x: m.fc(x) if torch.allclose(x, x + 0) else x), three())
    assert counts(model)[0] + counts(model)[1] == 3


def test_errors_are_eagers():
    def use(m):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            m(torch.ones(2, 3))
        return step(X)(m)

    assert counts(both(module(lambda m, x: m.fc(x)), use))[0] == 1


def test_arguments_that_are_wrong_for_a_while():
    """They are captured twice, run in PyTorch until forward takes them, and are captured then."""
    def forward(m, x):
        if len(x) in m.refused:
            raise ValueError("not yet")
        return m.fc(x)

    model = ORTModule(module(forward, refused=lambda: [3])())
    captures = []
    for _ in range(6):
        torch.testing.assert_close(model(X[:2]), model.module(X[:2]))
        before = torch._dynamo.utils.counters["frames"]["total"]
        with pytest.raises(ValueError, match="not yet"):
            model(X)
        captures.append(torch._dynamo.utils.counters["frames"]["total"] - before)
    assert all(captures[:2]) and not any(captures[2:]) and (captures[0] == captures[1] or not RECENT)
    assert counts(model) == (6, 6, 1)
    model.refused.clear()
    for _ in range(3):
        torch.testing.assert_close(model(X), model.module(X))
    assert counts(model) == (8, 7, 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_wrong_argument_and_a_nested_tensor():
    model = ORTModule(module(lambda m, x: m.fc(x))())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 3))
        nested = torch.nested.nested_tensor([Y, Y[:2]])
        equal(model(nested).to_padded_tensor(0), model.module(nested).to_padded_tensor(0))


def test_the_module_and_a_copy_of_it_are_whole():
    model = ORTModule(module(lambda m, x: m.fc(x))())
    before = dict(model.module.__dict__)
    step(X)(model)
    assert model.module.__dict__ == before and type(model.module.fc.weight) is nn.Parameter
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(X), model(X))
    in_engine(other)


def test_names_are_the_users():
    model = ORTModule(module(lambda m, first, *, second: m.fc(first) * second)())
    model(X, second=Y)
    (model_info,) = [model._torch_module._execution_manager(True)._graph_transition_manager._exported_model_info]
    assert model_info.onnx_graph_input_names == ["first", "second"]
    names = {i.name for i in model_info.exported_model.graph.input}
    assert {"fc.weight", "fc.bias"} <= names


def test_parts_may_have_any_name():
    names = ("text", "held", "again", "hold", "of", "weights", "dynamic", "own_modules", "computes", "graph", "user")
    parts = {name: lambda: nn.Linear(4, 4) for name in names}
    model = both(module(lambda m, x: sum(getattr(m, name)(x) for name in names), **parts), step(X))
    assert in_engine(model, 1)["exports"] == 1


def test_the_second_process_loads_its_graphs(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        results.append(model(X))
    torch.testing.assert_close(*results)
    assert counts(model)[2] == 0 and onnxtrain.stats(model)["cached_exports"] == 1
    other = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    torch.testing.assert_close(other(X), other.module(X))


def test_a_parameter_changed_in_forward_runs_in_pytorch():
    """An export would differentiate the clamp, which the first batch does not show."""
    def forward(m, x):
        with torch.no_grad():
            m.fc.weight.clamp_(-1, 1)
        return m.fc(x)

    def use(m):
        results = [step(X)(m)[0]]
        with torch.no_grad():
            m.fc.weight.mul_(9)
        return [*results, step(X)(m)[0]]

    assert counts(both(module(forward), use))[:2] == (0, 2)


def test_a_hook_of_every_module_from_the_first_call_on():
    with torch.nn.modules.module.register_module_forward_hook(lambda _m, _i, out: out * 2):
        model = ORTModule(module(lambda m, x: m.fc(x))())
        model(X)
    assert counts(model)[:2] == (0, 1)
    torch.testing.assert_close(model(X), model.module(X))


def test_a_hook_that_counts_is_captured():
    seen = []

    def make():
        m = module(lambda m, x: m.fc(x))()
        m.fc.register_forward_hook(lambda _m, _i, out: seen.append(len(out)) or out * 3)
        return m

    in_engine(both(make, three()), 3)
    assert seen == [3] * 6  # eager's three calls and ours


SLICES = {"a slice": lambda b: b[:, 1:], "first rows": lambda b: b[:, :5], "transposed": lambda b: b[:, 1:].transpose(1, 2),
          "expanded": lambda b: b[:, :1].expand(-1, 5, 5)}
SLICED = {
    "read": lambda self, x, y: (self.fc(x) + y,),
    "asked": lambda self, x, y: (self.fc(x) + (y if y.is_contiguous() else y * 2),),
    "results that are views": lambda self, x, y: (self.fc(x), y[:, 1:], y.transpose(0, 1)),
    "changed": lambda self, x, y: (self.fc(x) + y.mul_(2),),
    "strides read": lambda self, x, y: (self.fc(x) * y.stride(0), y.as_strided((2, 2), (6, 1), 1)),
}


@pytest.mark.parametrize("use, kind", [(use, kind) for use in SLICED for kind in SLICES
                                       if kind != "expanded" or use in ("read", "asked")])
def test_arguments_that_are_slices(use, kind):
    """Strides are Dynamo's to guard: no export depends on them, unless the module computes with them."""
    torch.manual_seed(0)
    plain = type("Sliced", (nn.Module,), {"forward": SLICED[use]})()
    plain.fc = nn.Linear(5, 5)
    wrapped = ORTModule(copy.deepcopy(plain))
    for rows in (3, 4):
        whole, x, seen = torch.randn(rows, 6, 5), torch.randn(rows, 5, 5), []
        for model in (plain, wrapped):
            base = whole.clone().requires_grad_()
            own = base * 1
            results = model(x, SLICES[kind](own))
            results[0].sum().backward()
            with torch.no_grad():
                for view in results[1:]:
                    view.add_(1)
            seen.append([*results, own, base.grad, *[p.grad for p in model.parameters()]])
        torch.testing.assert_close(seen[1], seen[0])
    assert onnxtrain.stats(wrapped)["fallback_steps"] == 0 or use == "strides read"


class Converts(nn.Linear):
    def forward(self, x):
        return super().forward(torch.from_numpy(x)).tanh()


def test_an_array_of_numpy_as_an_argument_does_what_eager_does():
    array = X.detach().numpy()
    plain = ORTModule(nn.Linear(4, 4))
    for _ in range(3):
        with pytest.raises(TypeError, match="argument 'input' .* must be Tensor, not numpy.ndarray"):
            plain(array)
    plain(X)
    assert counts(plain)[0] == 1
    converts = ORTModule(Converts(4, 4))
    for _ in range(2):
        torch.testing.assert_close(converts(array), converts.module(array))
    in_engine(converts, 2)


@pytest.mark.parametrize("made", [
    lambda x: torch.FloatTensor([[2, 3.5, 1, 0]]) * x, lambda x: torch.Tensor([1, 2, 3, 4]) * x,
    lambda x: torch.FloatTensor(x.size(0), 4).fill_(2) + x, lambda x: torch.DoubleTensor(x.size()).zero_().float() + x,
    lambda x: x[torch.LongTensor(range(2))], lambda x: x * torch.LongTensor([x.size(0)]),
    lambda x: x.masked_fill(torch.BoolTensor([True, False, True, False]), 0.0),
    lambda x: torch.cat([torch.FloatTensor(), x.flatten()]), lambda x: Variable(torch.zeros(x.size(0), 4)) + x,
    lambda x: Variable(x) * x, lambda x: x * 2 if isinstance(x, Variable) else x,
    lambda x: x * 2 if isinstance(x, (int, Variable)) else x, lambda x: torch.range(0, 3) * x,
    lambda x: x[:round(x.size(0) / 3)] * round(x.size(0) * 0.4),
], ids=["entries", "default", "sizes", "a size", "range", "of a size", "bool", "empty", "Variable", "detached", "isinstance",
        "isinstance of two", "torch.range", "round"])
def test_what_scripts_of_before_torch_tensor_call(made):
    def use(m):
        return [step(torch.linspace(-1, 1, 4 * rows).reshape(rows, 4))(m) for rows in (4, 6, 5)]

    in_engine(both(module(lambda m, x: made(m.fc(x))), use), 3)
