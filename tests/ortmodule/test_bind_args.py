"""signature() and gather() of the core take no two kinds of call for one, and take the tensors that are there now."""

import copy

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

KINDS = [torch.zeros(3), torch.zeros(2, 3), torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64),
         torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.complex64), torch.zeros((), dtype=torch.bfloat16),
         torch.zeros(3, device="meta")]


class Tagged(torch.Tensor):
    pass


def test_signatures_tell_dtypes_ranks_devices_and_counts_apart():
    alone = [_C.signature((x,)) for x in KINDS]
    assert None not in alone and len(set(alone)) == len(KINDS)
    assert len({_C.signature(tuple(KINDS[:n])) for n in range(len(KINDS))}) == len(KINDS)
    assert _C.signature((KINDS[0], KINDS[1])) != _C.signature((KINDS[1], KINDS[0]))


def test_signatures_do_not_depend_on_sizes_strides_or_gradients():
    a = torch.zeros(4, 5)
    leaf = a.clone().requires_grad_()
    for b in (torch.zeros(1, 0), a.t()[1:], leaf, torch.empty(0, 2), leaf * 2, nn.Parameter(a)):
        assert _C.signature((a,)) == _C.signature((b,))


@pytest.mark.parametrize("other", [
    None, 3, "x", [torch.zeros(2)], torch.zeros(2).as_subclass(Tagged),
    torch.zeros(2, 2).to_sparse(), torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)], ids=lambda x: type(x).__name__)
def test_anything_but_plain_tensors_has_none(other):
    assert _C.signature((torch.zeros(2), other)) is None


def test_a_signature_is_of_a_tuple():
    with pytest.raises(TypeError, match="tuple"):
        _C.signature([torch.zeros(2)])


def test_gather_takes_what_is_there_now():
    held = {"a": nn.Parameter(torch.ones(2)), "b": torch.ones(3)}
    sources = [(held, "a"), (None, 1), (held, "b"), (None, 0)]
    leaves = [torch.zeros(1), torch.zeros(1, requires_grad=True)]
    tensors, mask = _C.gather(sources, leaves, True)
    assert [t is u for t, u in zip(tensors, (held["a"], leaves[1], held["b"], leaves[0]))] == [True] * 4
    assert mask == b"\1\1\0\0" and _C.gather(sources, leaves, False) == (tensors, bytes(4))
    held["a"] = held["a"].detach().clone()
    tensors, mask = _C.gather(sources, leaves, True)
    assert tensors[0] is held["a"] and mask == b"\0\1\0\0"


@pytest.mark.parametrize("sources, leaves, error", [
    ([({}, "gone")], [], KeyError), ([({"a": None}, "a")], [], AttributeError),
    ([(None, 2)], [torch.zeros(1)], IndexError),
    ([(None, "x")], [torch.zeros(1)], TypeError), ([3], [], TypeError), ([()], [], TypeError),
    ([([], "a")], [], TypeError)], ids=str)
def test_gather_says_what_is_missing(sources, leaves, error):
    with pytest.raises(error):
        _C.gather(sources, leaves, True)


def test_gather_of_a_list_that_is_made_shorter():
    sources = [(None, 0)] * 3

    class Shortens(torch.Tensor):
        @property
        def requires_grad(self):
            del sources[1:]
            return False

    with pytest.raises(IndexError):
        _C.gather(sources, [torch.zeros(2).as_subclass(Shortens)], True)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, -2.0, 3.0]))

    def forward(self, x, y=None):
        x = torch.nn.functional.linear(x, self.w[None].to(x.dtype)) if torch.is_autocast_enabled("cpu") else x * self.w
        return x if y is None else x + y


def test_calls_that_differ_in_one_thing_run_as_eager_would():
    """In turns, so that what is remembered of one is there when the next comes."""
    eager = Sum()
    model = ORTModule(copy.deepcopy(eager))
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    calls = [((x,), {}), ((x, y), {}), ((x,), {"y": y}), ((x.double(),), {}), ((x[0],), {}), ((x, y.double()), {}),
             ((nn.Parameter(x), y), {}), ((x.as_subclass(Tagged),), {}), ((x, 2.0), {}),
             ((x.t().contiguous().t(),), {})]
    exports = []
    for _ in range(3):
        for args, kwargs in calls:
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    a, b = eager(*args, **kwargs), model(*args, **kwargs)
                torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6, check_stride=False)
                assert a.requires_grad == b.requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == eager(x).dtype
        model.eval(), model(x), model.train()
        exports.append(onnxtrain.stats(model)["exports"])
    counts = onnxtrain.stats(model)
    assert exports == exports[:1] * 3 and counts["engine_steps"] == 60 and counts["fallback_steps"] == 6, counts


def test_replacing_a_parameter_is_seen_in_a_call_that_is_known():
    model = ORTModule(Sum())
    x = torch.randn(2, 3)
    model(x), model(x)
    model._module.w = nn.Parameter(torch.tensor([0.5, 0.25, 2.0]))
    out = model(x)
    out.sum().backward()
    torch.testing.assert_close(out, x * model._module.w)
    torch.testing.assert_close(model._module.w.grad, x.sum(0))
    model._module.w.requires_grad_(False)
    assert not model(x).requires_grad
