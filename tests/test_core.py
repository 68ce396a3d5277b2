"""The core's own types, used wrongly: every misuse is an exception that says what was expected,
and none harms the process.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import _C

FLOAT = TensorProto.FLOAT


def model(nodes: list, inputs: dict[str, list], outputs: list[str], **constants: np.ndarray) -> bytes:
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info(n, FLOAT, s) for n, s in inputs.items()],
                              [helper.make_tensor_value_info(n, FLOAT, None) for n in outputs],
                              [numpy_helper.from_array(value, name) for name, value in constants.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


@pytest.fixture
def session() -> _C.Session:
    return _C.Session(model([helper.make_node("Mul", ["x", "w"], ["y"])], {"x": ["n", 3], "w": [3]}, ["y"]))


X, W = torch.ones(2, 3), torch.full((3,), 2.0)


@pytest.mark.parametrize("use", [lambda s: s.inputs, lambda s: s.outputs, lambda s: s.random, lambda s: s.text(),
                                 lambda s: s.stats(), lambda s: s.save(), lambda s: s.save("post_processed"),
                                 lambda s: s.subgraphs(), lambda s: s.graphs(), lambda s: s.timings(),
                                 lambda s: s.plan([[2, 3], [3]], b"\0\0"),
                                 lambda s: s.kernels(), lambda s: s.timeline(), lambda s: s.forward([X, W], b"\0\0")])
def test_session_that_was_never_initialised(use):
    with pytest.raises(RuntimeError, match="never initialised"):
        use(_C.Session.__new__(_C.Session))
    broken = _C.Session.__new__(_C.Session)
    with pytest.raises(ValueError, match="model"):
        broken.__init__(b"nonsense")
    with pytest.raises(RuntimeError, match="never initialised"):
        use(broken)


@pytest.mark.parametrize("use", [lambda u: u.step([], [], {}, None, (-1.0, 0.0, 0), 1.0, 0),
                                 lambda u: u.backward(None, [], [], [], [], {}, None, 0, [], bytearray())])
def test_updater_that_was_never_initialised(use):
    broken = _C.Updater.__new__(_C.Updater)
    with pytest.raises(ValueError, match="no update rule 'nonsense'"):
        broken.__init__("nonsense", "Nonsense")
    for updater in (_C.Updater.__new__(_C.Updater), broken):
        with pytest.raises(RuntimeError, match="never initialised"):
            use(updater)
    with pytest.raises(RuntimeError, match="already called"):
        broken.__init__("sgd", "SGD")


def test_session_is_initialised_once(session):
    with pytest.raises(RuntimeError, match="once"):
        session.__init__(b"")
    assert session.forward([X, W], b"\0\0")[0][0].tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("arguments, error, text", [
    (("model",), TypeError, "bytes"), ((b"", -1), ValueError, "programs is -1"),
    ((b"", 0), ValueError, "programs is 0"),
    ((b"", 2**40), OverflowError, "int"), ((), TypeError, "model"), ((b"x", 1, 2), TypeError, "Session"),
])
def test_arguments_of_session(arguments, error, text):
    with pytest.raises(error, match=text):
        _C.Session(*arguments)


@pytest.mark.parametrize("arguments, error, text", [
    (([X], b"\0\0"), ValueError, "1 tensors, expected 2"), (([X, W, W], b"\0\0"), ValueError, "3 tensors, expected 2"),
    (([X, W], b"\0"), ValueError, "grad_mask has 1 bytes, expected 2"),
    ((X.int(), b"\0\0"), TypeError, "input 'x': dtype is int32, the graph has float"),
    (([X, None], b"\0\0"), TypeError, "input 1: a torch.Tensor"),
    (([X, W.numpy()], b"\0\0"), TypeError, "input 1: a torch.Tensor"),
    (([X, W.double()], b"\0\0"), TypeError, "input 'w': dtype is double, the graph has float"),
    (([X, W[:2]], b"\0\0"), ValueError, r"input 'w': shape is \[2\], the graph has \[3\]"),
    (([X[0], W], b"\0\0"), ValueError, r"input 'x': shape is \[3\], the graph has \[\?, 3\]"),
    (([X.reshape(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3), W], b"\0\0"), Exception, "input 'x': rank 13, at most 12"),
    (([X.to_sparse(), W], b"\0\0"), TypeError, "input 0: a dense tensor"),
    (([X, W.to("meta")], b"\0\0"), TypeError, "input 1: a dense tensor"),
    ((5, b"\0\0"), TypeError, "iterable"),
])
def test_arguments_of_forward(session, arguments, error, text):
    with pytest.raises(error, match=text):
        session.forward(*arguments)
    assert session.forward([X, W], b"\0\0")[0][0].tolist() == [[2.0] * 3] * 2


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


@pytest.mark.parametrize("count", [1 << 58, (1 << 60) - 16, (1 << 60) - 1])
def test_results_that_have_no_addresses(count):
    """Each has a size that is allowed; together they would wrap around."""
    names = [f"v{i}" for i in range(64)]
    nodes = [helper.make_node("Expand", ["x", "shape"], ["e"])]
    nodes += [helper.make_node("Softplus", [a], [b]) for a, b in zip(["e", *names], names)]
    nodes += [helper.make_node("Sum", names, ["s"]), helper.make_node("ReduceMax", ["s"], ["y"], keepdims=0)]
    session = _C.Session(model(nodes, {"x": [1]}, ["y"], shape=np.array([count], np.int64)))
    with pytest.raises(MemoryError, match="out of memory"):
        session.forward([torch.ones(1)], b"\0")
    assert session.stats()["slab_bytes"] >= 0


def test_an_empty_tensor_that_decides_about_the_program():
    """Known and empty is not the same as not known: the search for its content ends."""
    graph = helper.make_graph([helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)], "g",
                              [helper.make_tensor_value_info("x", FLOAT, [2, 3]),
                               helper.make_tensor_value_info("axes", TensorProto.INT64, ["n"])],
                              [helper.make_tensor_value_info("y", FLOAT, None)])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)],
                                           ir_version=10).SerializeToString())
    for axes, expected in (([], 6.0), ([0], [2.0] * 3), ([1], [3.0] * 2), ([], 6.0)):
        outputs, _ = session.forward([X, torch.tensor(axes, dtype=torch.int64)], b"\0\0")
        assert outputs[0].tolist() == expected


@pytest.mark.parametrize("describe", [
    lambda s, shapes: s.kernels(), lambda s, shapes: [entry[:3] for entry in s.timeline()],
    lambda s, shapes: s.plan(shapes, b"\0")["steps"]], ids=["kernels", "timeline", "plan"])
def test_a_program_that_is_evicted_while_it_is_described(describe):
    """The collector runs finalizers between two items of a list."""
    names = [f"v{i}" for i in range(64)]
    nodes = [helper.make_node("Softplus" if i % 2 else "CumSum", [a] if i % 2 else [a, "axis"], [b], name=f"node{i}")
             for i, (a, b) in enumerate(zip(["x", *names], names))]
    session = _C.Session(model(nodes, {"x": ["n"]}, [names[-1]], axis=np.array(0)), 1)

    def evict(phase, info):
        for n in (5, 6, 7):
            session.forward([torch.ones(n)], b"\0")

    session.forward([torch.ones(4)], b"\0")
    want = describe(session, [[4]])
    before = gc.get_threshold()
    gc.callbacks.append(evict)
    gc.set_threshold(10)
    try:
        found = describe(session, [[4]])
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(evict)
    assert found == want and len(found) > 30
