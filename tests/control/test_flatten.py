"""Sequences and optionals that are a graph's outputs are given out, and taken in, as Python's lists and None."""

from __future__ import annotations

import numpy as np
import pytest
from common import model_of
from containers import ContainersBackend
from test_sequence import arrays, randn


def test_inputs_and_outputs():
    rep = ContainersBackend.prepare(model_of("""g (seq(double[n]) s, optional(double[n]) o, optional(seq(double[n])) p, double[n] x) =>
        (seq(double[n]) longer, bool has, bool has_list, double[n] sum) {
        longer = SequenceInsert(s, x)
        has = OptionalHasElement(o)
        has_list = OptionalHasElement(p)
        sum = If(has_list) <then_branch = yes () => (r) { q = OptionalGetElement(p)  r = ConcatFromSequence<axis = 0>(q) },
                            else_branch = no () => (r) { r = Neg(x) }>
    }"""))
    a, b, x = arrays(randn(3), randn(3, seed=1), randn(3, seed=2))
    longer, has, has_list, total = rep.run([[a, b], None, [a, b, x], x])
    assert isinstance(longer, list) and len(longer) == 3 and np.array_equal(longer[2], x)
    assert not has and has_list and np.array_equal(total, np.concatenate([a, b, x]))
    longer, has, has_list, total = rep.run({"s": [], "o": a, "p": None, "x": x})
    assert len(longer) == 1 and has and not has_list and np.array_equal(total, -x)
    for wrong, match in (([a, None, None, x], "'s' holds a sequence"),
                         ([None, None, None, x], "'s' is a sequence, None"),
                         ([[a], [a], None, x], "'o' holds a tensor"), ([[a], None, None, [x]], "'x' is a tensor")):
        with pytest.raises(TypeError, match=match):
            rep.run(wrong)
