"""What a user passes in, gets back and finds on a module: the same code on eager PyTorch and on ORTModule,
results compared.
"""

import copy
import dataclasses
import inspect
import io
import logging
import pickle
import re
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import Linear, X, Y, both, equal, in_engine, module, step
from torch.utils import _pytree as pytree

import onnxtrain
from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException

# --- outputs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    extra: dict
    name: str = "result"
    count: int = dataclasses.field(default=3, init=False)

    def __post_init__(self):
        self.made = self.name + "!"


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: torch.Tensor
    b: torch.Tensor | None = None


class Bag:
    def __init__(self, items):
        self.items = items


pytree.register_pytree_node(Bag, lambda bag: (bag.items, None), lambda items, _: Bag(list(items)))


class Record(OrderedDict):
    """As transformers' outputs were before they registered themselves."""

    def __getattr__(self, name):
        return self[name]


Pair = namedtuple("Pair", "first second")

OUTPUTS = {
    "an input": lambda m, x, y: x,
    "an input twice": lambda m, x, y: (x, x, m.fc(x)),
    "an input without gradient": lambda m, x, y: (y, m.fc(x)),
    "a view of an input": lambda m, x, y: (x.view(-1), x[0], x.t(), m.fc(x)),
    "views of a result": lambda m, x, y: (lambda h: (h, h.view(-1), h[0], h.t(), h[:, 1:3]))(m.fc(x)),
    "a result twice": lambda m, x, y: (lambda h: (h, h))(m.fc(x)),
    "a parameter": lambda m, x, y: (m.fc.weight, m.fc(x)),
    "integers": lambda m, x, y: ((m.fc(x) > 0).long(), m.fc(x)),
    "booleans": lambda m, x, y: (m.fc(x) > 0, m.fc(x)),
    "only integers": lambda m, x, y: (m.fc(x) * 10).int(),
    "detached": lambda m, x, y: (m.fc(x).detach(), m.fc(x)),
    "a scalar": lambda m, x, y: m.fc(x).mean(),
    "primitives": lambda m, x, y: (m.fc(x), 1, 2.5, "name", True, None),
    "list and dict": lambda m, x, y: [m.fc(x), {"a": x + y, "b": [y * 2, None]}],
    "ordered dict": lambda m, x, y: OrderedDict(b=m.fc(x), a=y + 1),
    "named tuple": lambda m, x, y: Pair(m.fc(x), Pair(x * y, None)),
    "size": lambda m, x, y: (m.fc(x), x.shape[0]),
    "numbers made of sizes": lambda m, x, y: {"n": x.size(1) * 2 + len(x), "t": torch.tensor(x.shape[0]), "y": m.fc(x),
                                              "s": y.numel()},
    "nothing": lambda m, x, y: (None, m.fc(x), {"none": None}),
    "an empty container": lambda m, x, y: (m.fc(x), [], {}),
    "complete nesting": lambda m, x, y: Pair({"fc": m.fc(x), "bag": [Pair(y + 1, None), {"deep": (x * y, 3)}]},
                                             Bag([x - y])),
    "registered": lambda m, x, y: Bag([m.fc(x), y]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name):
    in_engine(both(module(lambda self, x, y: OUTPUTS[name](self, x, y)), step(X, Y)))


def test_dataclass_outputs_are_rebuilt_as_they_were():
    made = module(lambda self, x, y: Result(self.fc(x), {"frozen": Frozen(x * y)}, "named"))
    model = both(made, lambda m: pytree.tree_leaves((m(X, Y).value, m(X, Y).extra["frozen"].a)))
    result = model(X, Y)
    assert type(result) is Result and (result.name, result.count, result.made) == ("named", 3, "named!")
    assert type(result.extra["frozen"]) is Frozen and result.extra["frozen"].b is None
    in_engine(model)


def test_registered_containers_and_subclasses_of_dict():
    model = both(module(lambda self, x, y: (Bag([self.fc(x), y]), Record(loss=self.fc(x).sum()))),
                 lambda m: (m(X, Y)[0].items, m(X, Y)[1].loss))
    assert type(model(X, Y)[1]) is Record
    in_engine(model)


# --- inputs -----------------------------------------------------------------------------------------------------------

INPUTS = {
    "keywords in another order": (lambda self, x, y: self.fc(x) * y, (), {"y": Y, "x": X}),
    "defaults": (lambda self, x, y=None, scale=2.0: self.fc(x) * scale + (0 if y is None else y), (X,), {}),
    "a default overridden": (lambda self, x, y=None, scale=2.0: self.fc(x) * scale, (X,), {"scale": 3.0}),
    "var positional": (lambda self, *xs: sum(self.fc(x) for x in xs), (X, Y, X), {}),
    "var keyword": (lambda self, x, **more: self.fc(x) + more["a"] * more["b"], (X,), {"b": Y, "a": X}),
    "keyword only": (lambda self, x, *, y: self.fc(x) - y, (X,), {"y": Y}),
    "nested": (lambda self, d: self.fc(d["a"][0]) + d["b"]["c"], ({"a": [X, None], "b": {"c": Y}},), {}),
    "named tuple": (lambda self, p: self.fc(p.first) + p.second, (Pair(X, Y),), {}),
    "dataclass": (lambda self, r: self.fc(r.value) + r.extra["y"], (Result(X, {"y": Y}),), {}),
    "frozen dataclass": (lambda self, r: self.fc(r.a) if r.b is None else r.b, (Frozen(X),), {}),
    "registered": (lambda self, bag: self.fc(bag.items[0]) + bag.items[1], (Bag([X, Y]),), {}),
    "subclass of dict": (lambda self, r: self.fc(r.x) + r["y"], (Record(x=X, y=Y),), {}),
    "str": (lambda self, x, how: self.fc(x) if how == "linear" else x, (X, "linear"), {}),
    "int and float": (lambda self, x, k, f: self.fc(x) * k + f, (X, 3, 0.5), {}),
    "same tensor twice": (lambda self, x, y: self.fc(x) * y, (X, X), {}),
    "strided": (lambda self, x: self.fc(x), (Y.t().contiguous().t(),), {}),
    "expanded": (lambda self, x: self.fc(x), (Y[:1].expand(5, 4),), {}),
    "offset": (lambda self, x: self.fc(x), (Y.reshape(-1)[4:].view(2, 4),), {}),
    "zero rows": (lambda self, x: self.fc(x), (Y[:0],), {}),
    "0-d": (lambda self, x, s: self.fc(x) * s, (X, torch.tensor(2.0, requires_grad=True)), {}),
    "unused": (lambda self, x, y: self.fc(x), (X, Y.clone().requires_grad_(True)), {}),
}


def test_one_tensor_twice_and_then_two():
    def use(model):
        x, y, w = X.detach().clone().requires_grad_(), Y.detach().clone().requires_grad_(), model.fc.weight
        results = [model(x, x, w), model(x, y, w), model(y, x, w.detach() * 2)]
        sum(r.square().sum() for r in results).backward()
        return [r.detach() for r in results], x.grad, y.grad
    in_engine(both(module(lambda self, x, y, w: self.fc(x) - 2 * y + x @ w.t()), use))


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name):
    forward, args, kwargs = INPUTS[name]
    model = both(module(forward), step(*args, **kwargs))
    in_engine(model)


def test_values_are_constants_of_their_own_graph():
    def forward(self, x, k, how="add", flag=False):
        return (self.fc(x) + k if how == "add" else self.fc(x) * k) * (2 if flag else 1)

    calls = [(1, "add", False), (2, "add", False), (2, "mul", False), (2, "mul", True), (1, "add", False),
             (2.0, "mul", True)]
    model = both(module(forward), lambda m: [m(X, *call) for call in calls])
    assert in_engine(model)["engine_steps"] == len(calls)


# --- the module's state -----------------------------------------------------------------------------------------------


def test_data_replaced_and_parameters_reassigned():
    def use(m):
        results = [m(X)]
        m.fc.weight.data = torch.full((4, 4), 0.25)
        results.append(m(X))
        m.fc.weight.data.mul_(2)
        results.append(m(X))
        m.fc.bias = nn.Parameter(torch.ones(4))
        results.append(m(X))
        m.fc = nn.Linear(4, 2)
        with torch.no_grad():
            m.fc.weight.fill_(0.5), m.fc.bias.zero_()
        results.append(m(X))
        results[-1].sum().backward()
        return results

    in_engine(both(module(lambda self, x: self.fc(x)), use), 5)


def test_requires_grad_toggled_and_added():
    def use(m):
        grads = []
        for frozen in ((), ("weight",), ("weight", "bias"), ("bias",), ()):
            for name in ("weight", "bias"):
                getattr(m.fc, name).requires_grad_(name not in frozen)
            m.zero_grad()
            out = m(Y)
            grads.append(out.requires_grad)
            if out.requires_grad:
                out.square().sum().backward()
            grads += [None if p.grad is None else p.grad.clone() for p in m.fc.parameters()]
        return grads

    in_engine(both(module(lambda self, x: self.fc(x)), use), 5)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(F.relu(self.one(x)))


def test_shared_parameters_add_their_gradients():
    in_engine(both(Shared, step(X)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dtype_changes_and_back(dtype):
    def use(m):
        first = m(X)
        m.to(dtype)
        second = m(X.detach().to(dtype))
        m.float()
        third = m(X)
        third.sum().backward()
        return first, second, third

    in_engine(both(module(lambda self, x: self.fc(x).tanh()), use), 3)


def test_state_dict_both_ways_also_inside_a_larger_model():
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert not wrapped.load_state_dict(plain.state_dict()).missing_keys
    torch.testing.assert_close(wrapped(Y), plain(Y))
    plain.load_state_dict(wrapped.state_dict())
    outer, outer_plain = nn.ModuleDict({"a": wrapped}), nn.ModuleDict({"a": plain})
    assert list(outer.state_dict()) == list(outer_plain.state_dict())
    with torch.no_grad():
        plain[0].weight.fill_(0.5)
    outer.load_state_dict(outer_plain.state_dict())
    torch.testing.assert_close(wrapped(Y), plain(Y))
    with pytest.raises(RuntimeError, match="a.0.weight"):
        outer.load_state_dict({})
    assert [n for n, _ in outer.named_parameters()] == [n for n, _ in outer_plain.named_parameters()]
    assert [n for n, _ in outer.named_buffers()] == [n for n, _ in outer_plain.named_buffers()]
    outer.eval()
    assert not plain.eval().training and not wrapped.module[1].training
    torch.testing.assert_close(wrapped(Y), plain(Y))
    outer.double()
    assert wrapped(Y.double()).dtype == torch.float64


def test_torch_save_of_the_wrapped_module(tmp_path):
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    want = model(Y)
    torch.save(model, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    assert isinstance(loaded, ORTModule) and len(loaded) == 2
    equal(loaded(Y), want)
    equal(pickle.loads(pickle.dumps(model))(Y), want)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.module[0].weight.zero_()
    equal(model(Y), want)
    assert not torch.equal(twin(Y), want)
    torch.save(model.state_dict(), tmp_path / "s.pt")
    model.load_state_dict(torch.load(tmp_path / "s.pt"))
    equal(model(Y), want)


class Custom(nn.Module):
    """Attributes and methods of the user's own."""

    kind = "custom"

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x):
        return self.fc(x) * self.scale

    def predict(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return (self(x) > 0).long()

    @property
    def width(self):
        return self.fc.in_features

    @staticmethod
    def twice(x):
        return 2 * x

    @classmethod
    def make(cls):
        return cls()


class Derived(Custom):
    def predict(self, x):
        return super().predict(x) + 1


def test_custom_methods_run_through_the_wrapper():
    model = ORTModule(Custom())
    assert model.predict(Y).dtype == torch.int64 and model.module.calls == 1
    assert in_engine(model)["engine_steps"] == 1
    assert (model.kind, model.width, model.twice(3)) == ("custom", 4, 6) and type(model.make()) is Custom
    model.scale = 3.0
    torch.testing.assert_close(model(Y), model.module.fc(Y) * 3)
    model.fresh = nn.Linear(2, 2)
    assert model.module.fresh is model.fresh and "fresh.weight" in dict(model.named_parameters())
    del model.fresh
    assert not hasattr(model, "fresh") and not hasattr(model.module, "fresh")
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    assert {"predict", "fc", "scale"} <= set(dir(model))
    torch.testing.assert_close(ORTModule(Derived()).predict(Y).shape, torch.Size([3, 4]))


def test_names_that_collide_are_said(caplog):
    class Colliding(Custom):
        def __init__(self):
            super().__init__()
            self._torch_module = 3

        def load_state_dict(self, *args, **kwargs):
            return "own"

    with caplog.at_level(logging.WARNING, "onnxtrain"):
        ORTModule(Custom())
        assert "collides" not in caplog.text
        model = ORTModule(Colliding())
    said = [r.getMessage() for r in caplog.records]
    assert "_torch_module collides" in said[0] and "load_state_dict collides" in said[1] and len(said) == 2
    assert model.load_state_dict({}) == "own" and model.module._torch_module == 3


def test_own_names_stay_on_the_wrapper():
    model = ORTModule(Custom())
    replaced = lambda x: "replaced"  # noqa: E731
    model.predict, model._torch_module = replaced, True
    assert model.predict is replaced and model.module.predict(Y).dtype == torch.int64
    assert model._torch_module is True and not hasattr(model.module, "_torch_module")
    assert inspect.signature(model.forward) == inspect.signature(model.module.forward)


def test_what_cannot_be_wrapped(monkeypatch):
    with pytest.raises(TypeError, match="torch.nn.Module"):
        ORTModule(lambda x: x)
    inner = nn.DataParallel(nn.Linear(2, 2))
    model, x = ORTModule(inner), torch.ones(1, 2)
    assert torch.equal(model(x), inner(x))
    counts = onnxtrain.stats(model)
    assert ((counts["engine_steps"], counts["fallback_steps"]) == (0, 1) and "DistributedDataParallel"
            in counts["reasons"][0])
    model._fallback.policy = model._fallback.policy  # a script that sets it does not bring the engine back
    assert model._fallback.forced
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException, match="not compatible with torch.nn.DataParallel"):
        ORTModule(inner)
    with pytest.raises(ORTModuleTorchModelException, match="adding modules"):
        ORTModule(nn.Linear(2, 2)).add_module("more", nn.Linear(2, 2))


def test_errors_of_the_call_are_the_modules_own():
    model = ORTModule(Custom())
    for args in ((), (Y, Y)):
        with pytest.raises(TypeError, match="forward"):
            model(*args)
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 7))
    equal(model(Y), model.module(Y))


def test_print_and_len_of_children():
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert "Linear(in_features=4" in repr(model) and len(list(model.children())) == 2
    assert [n for n, _ in model.named_modules()] == ["", "0", "1"]
    buffer = io.StringIO()
    print(model, file=buffer)
    assert buffer.getvalue().startswith("ORTModule(")


# --- what Python looks up on the class
# ----------------------------------------------------------------------------------


def test_a_wrapped_container_is_one():
    def use(model):
        results = [model(X), model(X)]
        model[1] = nn.Tanh()
        results += [model(X), model(X)]
        getattr(model, "module", model).append(nn.Linear(3, 2))
        results += [model(X), model(X)]
        del model[1]
        results.append(model(X))
        return results, len(model), [type(layer).__name__
                                     for layer in model], model[0].weight in set(model.parameters())

    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    model = both(lambda: made, use)
    in_engine(model, 7)
    assert isinstance(model, ORTModule) and bool(model) and model[-1] is made[-1] and model[0] in list(model)
    assert [len(model[:1]), len(list(reversed([*model])))] == [1, 2]
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied, ORTModule) and len(copied) == 2
        torch.testing.assert_close(copied(X), model(X))


class Table(nn.ModuleDict):
    def forward(self, x):
        return sum(layer(x) for layer in self.values())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.left = True


def test_containers_by_name_and_contexts():
    model = ORTModule(Table({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}))
    assert "a" in model and "c" not in model and list(model) == ["a", "b"] and model["b"] is model.module["b"]
    with model as entered:
        assert entered is model
        torch.testing.assert_close(model(X), model.module(X))
    assert model.left
    in_engine(model)


def test_a_module_that_is_no_container_stays_none():
    model = ORTModule(nn.Linear(4, 3))
    assert bool(model) and not hasattr(model, "__len__") and not hasattr(model, "__iter__")
    with pytest.raises(TypeError, match="subscriptable"):
        model[0]
    with pytest.raises(TypeError):
        len(model)


class Sub(ORTModule):
    def extra(self):
        return len(self)


def test_a_subclass_of_the_wrapper_around_a_container():
    model = Sub(nn.Sequential(nn.Linear(4, 3)))
    assert isinstance(model, Sub) and model.extra() == 1
    assert type(pickle.loads(pickle.dumps(model))).__name__ == "Sub"


# --- tensors and calls that no graph stands for
# -------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """Results of operators are Tagged as well."""


def test_subclasses_of_tensor_run_in_pytorch():
    model = both(Linear, lambda m: (type(m(Y.as_subclass(Tagged))).__name__, m(nn.Parameter(Y.clone()))))
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (1, 1) and "subclass of Tensor" in counts["reasons"][0]


def test_kinds_of_tensors_after_one_another():
    def use(m):
        nested = m(torch.nested.nested_tensor([Y, Y[:2]])).to_padded_tensor(0)
        return m(Y), m(torch.complex(Y, Y).conj().imag), nested, m(Y.to_sparse()), m(Y)

    counts = onnxtrain.stats(both(Linear, use))
    assert (counts["engine_steps"], counts["fallback_steps"]) == (3, 2) and re.search("(?i)nested ?tensor", counts["reasons"][0])


def test_traces_and_modes_of_the_dispatcher_see_every_operator():
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    def use(m):
        with FlopCounterMode(display=False) as counted:
            first = m(Y)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(m(forward_ad.make_dual(Y, Y))).tangent
        exported = torch.export.export(m, (Y,), strict=False).module()
        traced = torch.jit.trace(m, (Y,), check_trace=False)
        return tangent, first, counted.get_total_flops(), make_fx(m)(Y)(Y), exported(Y), traced(Y), m(Y)

    model = both(Linear, use)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 1 and counts["reasons"][0].endswith("must see every operator")
