"""A wrapper is an instance of the wrapped module's class, and of ORTModule: what libraries ask by isinstance(), by
signatures and on the class."""

import abc
import copy
import functools
import inspect
import pickle
import typing

import pytest
import torch
import torch.nn as nn
from agree import X, Y, both, equal, in_engine, step

from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
T = typing.TypeVar("T")


class Counting(type):
    """A metaclass and a base that count the classes of the user's."""

    made: typing.ClassVar[list] = []

    def __new__(cls, name, bases, body):
        return super().__new__(cls, name, bases, body)


class Base(nn.Module):
    """What a library asks for: priors by isinstance(), in a walk."""

    subclasses: typing.ClassVar[list] = []

    def __init_subclass__(cls, **settings):
        super().__init_subclass__(**settings)
        Base.subclasses.append(cls)

    def __init__(self):
        super().__init__()
        self.fc, self.priors, self._scale = nn.Linear(4, 4), [], 1.0

    def forward(self, x):
        return torch.tanh(self.fc(x))

    def penalty(self):
        own = sum(prior() for prior in self.priors) * torch.ones(())
        return own + sum(child.penalty() for child in self.children() if isinstance(child, Base))

    @functools.cached_property
    def width(self):
        return self.fc.in_features

    @property
    def scale(self):
        return self._scale

    @scale.setter
    def scale(self, value):
        self._scale = value


class Kernel(Base):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.ones(4))
        self.priors.append(lambda: self.raw.square().sum())

    def forward(self, x):
        return super().forward(x) * self.raw * self.scale


class Abstract(Base, abc.ABC):
    @abc.abstractmethod
    def forward(self, x):
        """As it says."""


class Concrete(Abstract):
    def forward(self, x):
        return self.fc(x)


class Generic(nn.Module, typing.Generic[T]):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: T) -> T:
        return self.fc(x)


class Metaclass(Base, metaclass=Counting):
    pass


class Slots(nn.Module):
    __slots__ = ("kept",)

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)

    def named(self):
        return super()._get_name()


class Final(Base):
    def __init_subclass__(cls, **settings):
        raise TypeError("final")


class Called(Base):
    """Its own __call__, __new__, __eq__ and __getattr__."""

    def __new__(cls, *args):
        made = super().__new__(cls)
        made.__dict__["calls"] = 0
        return made

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x) * 2

    def __eq__(self, other):
        raise NotImplementedError

    __hash__ = nn.Module.__hash__

    def __getattr__(self, name):
        return 7 if name == "seven" else super().__getattr__(name)


KINDS = (Base, Kernel, Concrete, Generic, Metaclass, Final, Called)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrapper_is_an_instance(kind):
    before = list(Base.subclasses)
    model = both(kind, lambda m: [step(x)(m)[0] for x in (X, Y)])
    in_engine(model, 2)
    assert isinstance(model, kind) and isinstance(model, ORTModule) and issubclass(type(model), kind)
    assert isinstance(model.__class__, type) and type(model).__name__ == "ORTModule"
    assert Base.subclasses == before
    assert type(ORTModule(kind())) is type(model)
    for again in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))) if kind is not Kernel else ():
        assert isinstance(again, kind) and isinstance(again, ORTModule) and again is not model
        equal(again(X), model(X))


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Linear(4, 3)),
                                  lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0),
                                  lambda: torch.fx.symbolic_trace(Base())], ids=["Linear", "Sequential", "layer", "fx"])
def test_so_it_is_of_torchs_classes(make):
    model = both(make, lambda m: step(X)(m)[0])
    in_engine(model)
    assert isinstance(model, type(model.module)) and isinstance(model, ORTModule)


def test_what_no_class_can_be_made_of():
    for make in (Slots, lambda: torch.jit.script(nn.Linear(4, 4))):
        module = make()
        model = ORTModule(module)
        assert isinstance(model, ORTModule) and not isinstance(model, type(module))
        equal(model(X), module(X))
    assert ORTModule(Slots()).named() == "Slots"


def test_a_walk_of_a_library_finds_it():
    class Model(Base):
        def __init__(self, wrap):
            super().__init__()
            self.kernel = wrap(Kernel())

        def forward(self, x):
            return self.kernel(x)

    def run(wrap):
        torch.manual_seed(0)
        model = Model(wrap)
        (model(X).square().mean() + 0.1 * model.penalty()).backward()
        return model, [p.grad for p in model.kernel.parameters()]

    ours, eager = run(ORTModule), run(lambda m: m)
    equal(ours[1], eager[1])
    in_engine(ours[0].kernel)


def test_properties_and_attributes_are_the_modules():
    model = ORTModule(Kernel())
    first = model(X)
    model.scale = 3.0
    assert model.scale == 3.0 == model.module.scale and "_scale" not in model.__dict__
    equal(model(X), first * 3)
    assert model.width == 4 and "width" in model.module.__dict__ and "width" not in model.__dict__
    model.module.fc = nn.Linear(4, 4)
    assert type(model).penalty is Kernel.penalty and type(model).scale is Kernel.scale
    assert "penalty" in dir(model) and not hasattr(model, "missing")
    with pytest.raises(AttributeError, match="missing"):
        _ = model.missing


def test_own_call_and_own_names_run_once():
    model, module = ORTModule(Called()), Called()
    module.load_state_dict(model.state_dict())
    equal(model(X), module(X))
    assert model.calls == module.calls == 1 and model.seven == 7
    assert model in [model] and len({model, model}) == 1


class Layer(nn.Linear):
    """train() has another meaning, and calls forward."""

    def train(self, positive, negative=None):
        """Steps, or the mode."""
        if isinstance(positive, bool):
            return super().train(positive)
        return self(positive).sum() - self(negative).sum()


def test_train_with_another_signature():
    torch.manual_seed(0)
    module = Layer(4, 3)
    model = ORTModule(copy.deepcopy(module))
    equal(model.train(X, X + 1), module.train(X, X + 1))
    assert in_engine(model)["engine_steps"] == 2
    assert inspect.signature(model.train) == inspect.signature(module.train)
    assert model.train(False) is model and not model.training and not model.module.training
    assert nn.Sequential(model).train()[0].training and model.module.training
    assert model.eval() is model and not model.training and not model.module.training


def test_the_mode_is_one():
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    model.training = False
    assert not model.module.training
    nn.Module.train(model)
    assert model.module.training and model.module[1].training
    nn.Module.eval(model)
    equal(model(X), model(X))


class Moving(Base):
    """Overrides what moves a module."""

    def to(self, *args, **kwargs):
        self.moved = (args, kwargs)
        return super().to(*args, **kwargs)

    def half(self):
        raise ValueError("never")

    def register_forward_hook(self, hook):
        raise ValueError("nor on the wrapper")


def test_overridden_methods_of_torchs():
    model = ORTModule(Moving())
    assert model.to(torch.float64) is model and model.module.moved == ((torch.float64,), {})
    assert model.fc.weight.dtype == torch.float64
    with pytest.raises(ValueError, match="never"):
        model.half()
    seen = []
    nn.Module.register_forward_hook(model, lambda _m, _i, out: seen.append(out))
    model(X.double())
    assert len(seen) == 1


def test_signatures():
    model = ORTModule(Kernel())
    assert inspect.signature(model.forward) == inspect.signature(model.module.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(Kernel.forward)
    assert inspect.signature(model.penalty) == inspect.signature(model.module.penalty)
    assert type(model).forward(model, X).shape == X.shape
