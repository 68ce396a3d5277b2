"""Operands and gradients of any strides give the numbers of contiguous ones."""

import pytest
import torch
from gradient_cases import (
    gradient_cases,
    sampled,
)
from harness import (
    _arrays,
    _expanded,
    _grad_inputs,
    _offset,
    _output_grads,
    _run_inputs,
    _tensor,
    _transposed,
    call,
    session_of,
)


@pytest.mark.parametrize("case", sampled(gradient_cases(), 200))
def test_strided_gradients(case):
    """Inputs and gradients of outputs transposed, at an offset, with gaps and of stride 0:
    the numbers of contiguous ones.
    """
    dtype = case.dtypes[-1]
    arrays = _arrays(case, dtype)
    run, inputs = _run_inputs(case, arrays), _grad_inputs(case, arrays)
    session, mask = session_of(case, arrays), bytes(i in inputs for i in run)
    outputs, _ = call(session, [_tensor(arrays[i]) for i in run], bytes(len(run)), None)
    grads = _output_grads(case, outputs)
    for how in (_transposed, _offset, _expanded):
        tensors = [how(_tensor(arrays[i])) if how is not _expanded else _tensor(arrays[i]) for i in run]
        strided = [None if g is None else how(g) for g in grads]
        _, want = call(session, [t.contiguous() for t in tensors], mask,
                       [None if g is None else g.contiguous() for g in strided])
        _, got = call(session, tensors, mask, strided)
        for i, g, w in zip(run, got, want):
            assert (g is None) == (w is None)
            assert g is None or torch.equal(g.nan_to_num(), w.nan_to_num()), f"{case} gradient of {i}, {how.__name__}"
