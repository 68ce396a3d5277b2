"""A run is made by forward alone, ends once, and outlives neither its arguments nor what it holds."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from test_session import W, X, session  # noqa: F401

from onnxtrain import _C


def test_arguments_that_do_not_fit_leave_a_run_open(session):
    outputs, run = session.forward([X, W], b"\1\1")
    saved = [(X, W)[i] for i in run.saved_inputs]
    grad = torch.ones(2, 3)
    for wrong, error, text in [(([], [grad]), ValueError, "0 saved tensors, expected 2"),
                               ((saved, []), ValueError, "0 gradients, expected 1"),
                               ((saved[::-1], [grad]), ValueError, "came back with another dtype or shape"),
                               ((saved, [None, None]), ValueError, "2 gradients"),
                               ((saved, ["grad"]), TypeError, "gradient of output 0")]:
        with pytest.raises(error, match=text):
            run.backward(*wrong)
    dx, dw = run.backward(saved, [grad])
    assert dx.tolist() == [[2.0] * 3] * 2 and dw.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="already called"):
        run.backward(saved, [grad])


def test_gradient_of_another_shape_ends_the_run(session):
    _, run = session.forward([X, W], b"\1\1")
    with pytest.raises(ValueError, match=r"gradient is float\[3, 2\], expected float\[2, 3\]"):
        run.backward([(X, W)[i] for i in run.saved_inputs], [torch.ones(3, 2)])


def test_a_run_is_only_made_by_forward_and_released_once_or_twice(session):
    with pytest.raises(TypeError):
        _C.Run()
    _, run = session.forward([X, W], b"\1\1")
    run.release()
    run.release()
    with pytest.raises(RuntimeError, match="released"):
        run.backward([], [])


def test_a_tensor_that_releases_the_run_while_it_is_read(session):
    """Arguments may be subclasses with methods of their own."""
    class Treacherous(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), kwargs=None):
            run.release()
            return super().__torch_function__(function, types, arguments, kwargs or {})

    _, run = session.forward([X, W], b"\1\1")
    saved = [(X, W)[i] for i in run.saved_inputs]
    grad = torch.ones(3, 2).t().as_subclass(Treacherous)
    assert run.backward(saved, [grad])[0].tolist() == [[2.0] * 3] * 2


def test_a_run_that_is_held_by_what_it_holds(session):
    """The collector ends it, as it ends a graph that is made for its own gradient and then forgotten."""
    class Call:
        pass

    before = _C.live_blocks()
    call = Call()
    outputs, call.run = session.forward([X, W], b"\1\1")
    call.run.saved([X, W], outputs, call)
    alive = weakref.ref(call)
    del call, outputs
    gc.collect()
    assert alive() is None
    again = session.forward([X, W], b"\1\1")  # takes the idle run
    del again
    assert _C.live_blocks() <= before + 40, "the run was not given back"


def test_a_run_that_is_repeated_while_its_backward_runs(session):
    """As another thread may do that sees the run over: its repetition stays open for a backward of its own."""
    _, run = session.forward([X, W], b"\1\2")  # the gradient of w goes to a receiver
    saved = run.saved([X, W], [None], "call")
    received, grad = torch.zeros(3), torch.ones(2, 3)
    for _ in range(3):
        run.deliver(saved, [grad], [(1, received, False)], lambda input: run.again())
        assert not run.over and received.tolist() == [2.0] * 3
    run.deliver(saved, [grad], [(1, received, False)])
    assert run.over
