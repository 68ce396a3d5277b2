"""Every allocation of a training step fails once: load, inference, differentiation, planning, forward and backward.

The model is an MLP with layer normalisation and a softmax cross-entropy, on a batch that is symbolic in the file.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import call
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import _C

MOST = 20000
NAMES = ["x", "labels", "w1", "b1", "gamma", "beta", "w2", "b2"]
SHAPES: dict[str, list] = {"x": ["n", 6], "labels": ["n"], "w1": [8, 6], "b1": [8], "gamma": [8], "beta": [8],
                           "w2": [8, 4], "b2": [4]}


def model() -> bytes:
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], transB=1),
        helper.make_node("LayerNormalization", ["h", "gamma", "beta"], ["l"], axis=-1),
        helper.make_node("Relu", ["l"], ["r"]),
        helper.make_node("Shape", ["r"], ["shape"]),  # a shape that is computed, and folded away
        helper.make_node("Reshape", ["r", "shape"], ["s"]),
        helper.make_node("Dropout", ["s", "ratio", "training"], ["d"]),
        helper.make_node("MatMul", ["d", "w2"], ["m"]),
        helper.make_node("Add", ["m", "b2"], ["logits"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64 if name == "labels" else TensorProto.FLOAT,
                                            SHAPES[name])
              for name in NAMES]
    outputs = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
               helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 4])]
    constants = [numpy_helper.from_array(np.array(0.0, np.float32), "ratio"),
                 numpy_helper.from_array(np.array(True), "training")]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


MODEL = model()
MASK = bytes(name != "labels" for name in NAMES)


def tensors(batch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    made = [torch.randn([batch if d == "n" else d for d in SHAPES[name]], generator=generator) for name in NAMES]
    made[1] = torch.arange(batch) % 4
    made[2] = made[2].t().contiguous().t()  # strided: it is copied at the start
    return made


def step(session: _C.Session, batch: int) -> list[torch.Tensor]:
    given = tensors(batch)
    outputs, grads = call(session, given, MASK, [torch.tensor(1.0), torch.full((batch, 4), 0.1)], seed=1)
    return [*outputs, *(g for g in grads if g is not None)]


def expected(batch: int) -> list[torch.Tensor]:
    given = tensors(batch)
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given]
    x, labels, w1, b1, gamma, beta, w2, b2 = leaves
    logits = torch.relu(F.layer_norm(F.linear(x, w1, b1), [8], gamma, beta)) @ w2 + b2
    loss = F.cross_entropy(logits, labels)
    (loss + 0.1 * logits.sum()).backward()
    return [loss.detach(), logits.detach(), *(t.grad for t in leaves if t.is_floating_point())]


def check(results: list[torch.Tensor], batch: int) -> None:
    for got, want in zip(results, expected(batch), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def sweep(task: Callable[[], list[torch.Tensor]], recover: Callable[[], None], stride: int = 1) -> int:
    """Fails allocation 0, stride, 2 * stride ... of `task` until it passes; `recover` must always work.
    How many failed.
    """
    failures = 0
    for countdown in range(0, MOST, stride):
        _C.fail_allocation_after(countdown)
        try:
            results = task()
        except MemoryError:
            results = None
        finally:
            fired = _C.fail_allocation_after(-1)
        assert (results is None) == fired, f"allocation {countdown} failed unnoticed, or nothing failed"
        recover()
        if results is not None:
            return failures
        failures += 1
    raise AssertionError(f"more than {MOST} allocations")


@pytest.fixture(autouse=True)
def leaves_nothing():
    step(_C.Session(MODEL), 3)  # what is allocated once a process is
    while gc.collect():  # models of other files, which the first pass may leave to a second one
        pass
    before = _C.live_blocks()
    yield
    gc.collect()
    assert _C.live_blocks() == before, f"{_C.live_blocks() - before} blocks leaked"


def test_the_model_is_right():
    session = _C.Session(MODEL)
    for batch in (3, 5, 3):
        check(step(session, batch), batch)


def test_from_bytes_to_gradients():
    """One step from nothing. Nothing may be left of one that failed."""
    before = _C.live_blocks()

    def nothing_left() -> None:
        assert _C.live_blocks() == before, f"{_C.live_blocks() - before} blocks leaked"

    def task() -> list[torch.Tensor]:
        results = step(_C.Session(MODEL), 3)
        check(results, 3)
        return []

    assert sweep(task, nothing_left) > 100


def test_load_alone():
    before = _C.live_blocks()

    def nothing_left() -> None:
        assert _C.live_blocks() == before

    def task() -> list[torch.Tensor]:
        session = _C.Session(MODEL)
        assert session.inputs and session.outputs and session.random
        session.text()
        return []

    assert sweep(task, nothing_left) > 30


def test_a_run_whose_inputs_could_not_be_held():
    """What it held before, it holds still."""
    session, given = _C.Session(MODEL), tensors(3)
    outputs, run = session.forward(given, MASK, seed=1)
    for held in (None, given):
        _C.fail_allocation_after(0)
        try:
            with pytest.raises(MemoryError):
                run.saved(given, outputs, "call")
        finally:
            _C.fail_allocation_after(-1)
        assert (run.inputs is None) == (held is None) and run.call == (held and "call")
        if held:
            assert run.changed() == []
        saved = run.saved(given, outputs, "call")
    run.backward(saved, [torch.tensor(1.0), None])


def test_a_session_survives_its_failures():
    """A second size of the batch is built, on a session that keeps working on the first, and then on both."""
    sessions = [_C.Session(MODEL)]
    step(sessions[0], 3)
    built = sessions[0].stats()["programs_built"]

    def task() -> list[torch.Tensor]:
        return step(sessions[0], 5)

    def recover() -> None:
        check(step(sessions[0], 3), 3)
        if sessions[0].stats()["programs_built"] > built:  # failed after its program was kept: the next begins anew
            check(step(sessions[0], 5), 5)
            sessions[0] = _C.Session(MODEL)
            step(sessions[0], 3)

    assert sweep(task, recover) > 50


def test_forward_and_backward_of_a_program_that_is_built():
    session = _C.Session(MODEL)
    step(session, 3)
    kept: list = []  # outputs that are alive keep their blocks from the pool, so that new ones are allocated

    def task() -> list[torch.Tensor]:
        kept.append(step(session, 3))
        return kept[-1]

    def recover() -> None:
        check(step(session, 3), 3)

    assert sweep(task, recover) > 0
    check(kept[0], 3)


def test_a_backward_that_failed_gives_its_memory_back():
    session = _C.Session(MODEL)
    given, grads = tensors(3), [torch.tensor(1.0), torch.full((3, 4), 0.1)]
    step(session, 3)
    held: list = []

    def task() -> list[torch.Tensor]:
        _C.fail_allocation_after(-1)
        outputs, run = session.forward(given, MASK, 1)
        held.append((outputs, run))
        saved = [given[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
        _C.fail_allocation_after(len(held) - 1)
        return [g for g in run.backward(saved, grads) if g is not None]

    def recover() -> None:
        check(step(session, 3), 3)

    assert sweep(task, recover) > 0
