"""Calls of torch.autograd.Function between segments of the engine give and get the gradients of eager."""

import pytest
import torch
from test_autograd_functions import Wrong, both, linear_with

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Split(torch.autograd.Function):
    """Several outputs, one of which has no gradient; inputs of which only some want one."""

    needed = []

    @staticmethod
    def forward(ctx, x, y, how):
        ctx.how = how
        ctx.save_for_backward(x, y)
        order = (x > y).long()
        ctx.mark_non_differentiable(order)
        return x * y, x - y, order, "note"

    @staticmethod
    def backward(ctx, product, difference, order, note):
        assert note is None and order is not None and not order.any()
        Split.needed.append(tuple(ctx.needs_input_grad))
        x, y = ctx.saved_tensors
        return product * y * 3 + difference, product * x * 5 if ctx.needs_input_grad[1] else None, None


class Lazy(torch.autograd.Function):
    """Gradients that nobody gave stay None; new style, with setup_context."""

    @staticmethod
    def forward(x, pair):
        return x * 2 + pair["bias"], x * pair["scale"]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.scale = inputs[1]["scale"]

    @staticmethod
    def backward(ctx, a, b):
        assert a is None or b is None
        return (a * 7 if b is None else b * ctx.scale * 11), None


class Told(torch.autograd.Function):
    """Backward tells a gradient that nobody gave from zeros."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return a * (2 if b is None else 5)


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Wrong.apply(x, 3.0) + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 4


def test_several_outputs_and_inputs_that_want_no_gradient():
    Split.needed.clear()

    def forward(m, x):
        product, difference, order, note = Split.apply(m.one(x), m.two(x).detach(), "how")
        assert note == "note"
        return product + difference * order

    both(forward, exports=3)  # if Dynamo cuts the graph at it
    assert set(Split.needed) == {(True, False, False)}


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_that_nobody_gave_stay_none(which):
    both(lambda m, x: m.two(Lazy.apply(m.one(x), {"bias": 1.5, "scale": 2})[which]), exports=3)


def test_a_gradient_that_nobody_gave_is_none():
    model = ORTModule(linear_with(Told))
    model.zero_grad()
    model(torch.ones(3, 4))[0].sum().backward()
    torch.testing.assert_close(model.module.fc.bias.grad, torch.full((4,), 6.0))
    assert onnxtrain.stats(model)["engine_steps"] == 1


def test_nested_functions_and_functions_in_a_row():
    both(lambda m, x: m.two(Nested.apply(Wrong.apply(m.one(Wrong.apply(x))))))


def test_one_call_used_on_both_sides_of_another():
    def forward(m, x):
        early = m.one(x)
        late = Wrong.apply(early)
        return m.two(late + early) * early + late.mean()

    both(forward)
