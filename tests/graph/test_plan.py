"""Session.plan() describes the program that a step of these shapes runs, and needs none of its tensors."""

import pytest
from test_recompute import network, run

from onnxtrain import _C


def test_the_plan_is_that_of_the_step():
    model, tensors = network(64, 128, layers=2)
    shapes, mask = [list(t.shape) for t in tensors], b"\1" * len(tensors)
    session = _C.Session(model)
    plan = session.plan(shapes, mask)
    stats = run(model, tensors)[0].stats()
    assert plan["slab_bytes"] == stats["slab_bytes"] >= plan["lower_bound"] > 0
    assert 0 < plan["forward_steps"] < len(plan["steps"])
    assert plan["gradient_bytes"] == sum(t.nbytes for t in tensors)
    with pytest.raises(ValueError, match="negative size"):
        session.plan([[-1] * t.dim() for t in tensors], mask)
