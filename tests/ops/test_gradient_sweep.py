"""Every gradient case once more: empty, of rank 0, broadcast, one value as two inputs, gradients from strided memory,
subsets.

Expected are torch's outputs and gradients in float64, to 1e-11 (or the case's own tolerance). A run takes a sample by
ONNXTRAIN_TEST_SEED, which stands in each test's name; ONNXTRAIN_SLOW=1 takes all.
"""

import itertools
import random

import numpy as np
import onnx
import pytest
from gradient_cases import (
    REFUSALS,
    SEED,
    check,
    emptied,
    empty,
    every_case,
    gradient_cases,
    repeated,
    sampled,
    scalar,
    with_arrays,
)
from harness import (
    _arrays,
    _grad_inputs,
    _output_grads,
    _run_inputs,
    _tensor,
    _tol,
    _torch_grads,
    _torch_outputs,
    assert_close,
    call,
    model_of,
    session_of,
)

from onnxtrain import _C

CASES = list(gradient_cases())


@pytest.mark.parametrize("case", sampled(CASES, 160))
def test_empty(case):
    for variant in empty(case):
        check(variant)


@pytest.mark.parametrize("case", sampled(CASES, 200))
def test_scalar(case):
    for variant in scalar(case):
        check(variant)


def shared_session(case, arrays, i: int, j: int) -> _C.Session:
    """The model of the case with input i read in place of input j, which is gone."""
    model = onnx.load_model_from_string(model_of(case, arrays))
    node, names = model.graph.node[0], [v.name for v in model.graph.input]
    node.input[j] = node.input[i]
    del model.graph.input[names.index(f"x{j}")]
    return _C.Session(model.SerializeToString())


@pytest.mark.parametrize("case",
                         sampled([c for c in CASES if len(_grad_inputs(c[1], _arrays(c[1], c[1].dtypes[-1]))) > 1],
                                 120))
def test_repeated(case):
    """One graph input read twice, and one tensor bound to two graph inputs."""
    dtype = case.dtypes[-1]
    for variant, i, j in repeated(case):
        arrays = _arrays(variant, dtype)
        inputs = _grad_inputs(variant, arrays)
        if i not in inputs or j not in inputs:
            continue
        run = _run_inputs(variant, arrays)
        tensors = {k: _tensor(arrays[k]) for k in run}
        try:
            outputs, _ = call(session_of(variant, arrays), list(tensors.values()), bytes(len(run)), None)
        except (ValueError, IndexError):
            assert case.inputs[i].shape != case.inputs[j].shape, f"{variant}: shapes fit, and it is refused"
            continue
        expected = _torch_outputs(variant, [None if a is None else _tensor(a) for a in arrays])
        if any(o.shape != e.shape for o, e in zip(outputs, expected)):
            assert case.inputs[i].shape != case.inputs[j].shape, f"{variant}: shapes differ from torch's"
            continue  # the case's function holds numbers of the shape that it was written for
        grads = _output_grads(variant, outputs)
        wanted = _torch_grads(variant, arrays, inputs, grads)
        tensors[j] = tensors[i]
        _, apart = call(session_of(variant, arrays), list(tensors.values()), bytes(k in inputs for k in run), grads)
        for k, got in zip(run, apart):
            if k in inputs:
                assert_close(np.zeros_like(arrays[k]) if got is None else got.numpy(),
                             wanted[k].astype(arrays[k].dtype), f"{variant} gradient of {k}", _tol(variant, dtype))
        left = [k for k in run if k != j]
        _, merged = call(shared_session(variant, arrays, i, j), [tensors[k] for k in left],
                         bytes(k in inputs for k in left), grads)
        both = merged[left.index(i)]
        assert_close(np.zeros_like(arrays[i]) if both is None else both.numpy(),
                     (wanted[i] + wanted[j]).astype(arrays[i].dtype), f"{variant} gradient of both",
                     _tol(variant, dtype))


@pytest.mark.parametrize("case",
                         sampled([c for c in CASES if len(_grad_inputs(c[1], _arrays(c[1], c[1].dtypes[-1]))) > 3], 60))
def test_subsets(case):
    """Gradients of any few of many inputs are those of all of them."""
    dtype = case.dtypes[-1]
    arrays = _arrays(case, dtype)
    run, inputs = _run_inputs(case, arrays), _grad_inputs(case, arrays)
    tensors = [_tensor(arrays[i]) for i in run]
    session = session_of(case, arrays)
    outputs, _ = call(session, tensors, bytes(len(run)), None)
    grads = _output_grads(case, outputs)
    _, want = call(session, tensors, bytes(i in inputs for i in run), grads)
    subsets = [s for n in range(2, len(inputs)) for s in itertools.combinations(inputs, n)]
    for subset in random.Random(SEED).sample(subsets, min(8, len(subsets))):
        _, got = call(session, tensors, bytes(i in subset for i in run), grads)
        for i, g, w in zip(run, got, want):
            assert (g is None) == (i not in subset or w is None), f"{case}: gradient of {i}, asked for {subset}"
            assert (g is None or np.allclose(g, w, rtol=1e-12, atol=1e-12,
                                             equal_nan=True)), f"{case}: gradient of {i} of {subset}"


@pytest.mark.parametrize("case", sampled(every_case(), 300))
def test_nothing_empty_breaks(case):
    """Any input of any dtype with a dim of 0, or of rank 0, whether that makes sense or not: it runs,
    or the message says why not.
    """
    arrays = _arrays(case, case.dtypes[-1])
    axes = [(i, k) for i, a in enumerate(arrays) if isinstance(a, np.ndarray) for k in range(a.ndim)]
    variants = [with_arrays(case,
                            emptied(arrays, {at, *((i, k) for i, k in axes if all_
                                                   and arrays[i].shape[k] == arrays[at[0]].shape[at[1]])}), "empty")
                for at in axes for all_ in (False, True)]
    variants += [with_arrays(case, [a.reshape(-1)[0].reshape(()) if i == k else a for k, a in enumerate(arrays)],
                             "scalar")
                 for i, given in enumerate(arrays) if isinstance(given, np.ndarray) and given.size]
    for variant in variants:
        arrays = _arrays(variant, variant.dtypes[-1])
        run, inputs = _run_inputs(variant, arrays), _grad_inputs(variant, arrays)
        tensors = [_tensor(arrays[i]) for i in run]
        live = _C.live_blocks()
        try:
            session = session_of(variant, arrays)
            outputs, _ = call(session, tensors, bytes(len(run)), None)
            call(session, tensors, bytes(i in inputs for i in run), _output_grads(variant, outputs))
        except (ValueError, IndexError, TypeError, _C.UnsupportedError) as error:
            assert "'node" in str(error) or "input" in str(error), f"{variant}: {error}"
        session = outputs = None
        assert _C.live_blocks() == live, f"{variant}: {_C.live_blocks() - live} blocks leaked"


def test_a_refusal_is_not_any_error():
    """Patterns are narrow: other messages of the engine do not pass for a refusal of a shape."""
    assert not any(p.search(m) for p in REFUSALS for m in (
        "Add 'node': no kernel for int4", "gradient of Gather 'node': the operator has no gradient",
        "Conv 'node': pads has 3 entries"))
    assert with_arrays(CASES[0][1], _arrays(CASES[0][1], np.float64), "same").name.endswith("same")
