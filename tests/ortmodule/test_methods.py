"""A method that is replaced in its class after a step is the one that the next step runs."""

import functools

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._methods import Methods

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def twice(function):
    @functools.wraps(function)
    def wrapped(self, x):
        return 2 * function(self, x)
    return wrapped


def classes():
    """Made anew, since a test changes them: a base, a helper, a part, a whole."""
    class Base(nn.Module):
        def scaled(self, x):
            return x * 2

    class Helper:
        @staticmethod
        def shifted(x):
            return x + 1

    class Part(Base):
        def __init__(self):
            super().__init__()
            self.linear, self.helper = nn.Linear(4, 4), Helper()

        @property
        def bias(self):
            return 0.5

        @twice
        def forward(self, x):
            return self.helper.shifted(self.scaled(self.linear(x))) + self.bias

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.cuts = Part(), False

        def forward(self, x):
            if self.cuts:
                torch._dynamo.graph_break()
            return self.part(x)

        def unused(self, x):
            return x

    return Base, Helper, Part, Whole


CHANGES = {
    "of a base class": lambda b, h, p, w: setattr(b, "scaled", lambda self, x: x * 3),
    "of a helper's class": lambda b, h, p, w: setattr(h, "shifted", staticmethod(lambda x: x - 1)),
    "a property": lambda b, h, p, w: setattr(p, "bias", property(lambda self: -0.5)),
    "forward": lambda b, h, p, w: setattr(p, "forward", lambda self, x: self.linear(x)),
    "code": lambda b, h, p, w: setattr(b.scaled, "__code__", (lambda self, x: x * 5).__code__),
    "code of what a decorator wraps": lambda b, h, p, w: setattr(
        p.forward.__wrapped__, "__code__", (lambda self, x: self.linear(x)).__code__),
    "added where a base class has it": lambda b, h, p, w: setattr(p, "scaled", lambda self, x: x * 7),
    "removed": lambda b, h, p, w: (setattr(p, "scaled", lambda self, x: x), delattr(p, "scaled"),
                                   setattr(b, "scaled", lambda self, x: x)),
}


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_the_new_method_runs(change, cuts):
    torch.manual_seed(0)
    found = classes()
    plain = found[3]()
    plain.cuts = cuts
    model, x = ORTModule(plain), torch.randn(3, 4)
    for step in range(4):
        if step == 2:
            CHANGES[change](*found)
        torch.testing.assert_close(model(x), plain(x))
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_what_forward_does_not_call_captures_nothing_again():
    whole = classes()[3]
    model = ORTModule(whole())
    x = torch.randn(3, 4)
    model(x)
    whole.unused = lambda self, x: 2 * x
    whole.more = lambda self, x: x
    model(x)
    counts = onnxtrain.stats(model)
    assert counts["exports"] == 1 and not Methods(model._module).changed()
