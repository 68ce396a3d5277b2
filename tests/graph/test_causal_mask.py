"""A causal mask is known by its elements, or by the nodes that make it, and no other mask is taken for one."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
from test_fuse_attention import Model, as_it_was, compare, plain_attention  # noqa: F401


@pytest.mark.parametrize("diagonal", [0, 2, -1, -2])
@pytest.mark.parametrize("form", ["added", "least", "where", "where not"])
@pytest.mark.parametrize("sizes", [(6, 6), (4, 9), (9, 4)])
def test_constant_causal_masks_are_known(diagonal, form, sizes):
    S, T = sizes
    seen = torch.ones(S, T, dtype=torch.bool).tril(diagonal)
    lowest = {"added": -math.inf, "least": float(np.finfo(np.float64).min)}.get(form)
    m = Model()
    q, k, v = m.random(2, 3, S, 4), m.random(2, 3, T, 4), m.random(2, 3, T, 4)
    options = {}
    if lowest:
        options["mask"] = m.constant(torch.zeros(S, T, dtype=torch.float64).masked_fill(~seen, lowest))
    else:
        options["where"] = m.constant(seen, torch.bool) if form == "where" else "!" + m.constant(~seen, torch.bool)
    y = plain_attention(m, q, k, v, **options)
    text = compare(m, y)
    assert ("causal = 1" in text) == (diagonal >= 0)  # else there are rows without any column


def test_constant_masks_that_are_not_causal_stay():
    for change in ((0, 3), (5, 1)):
        mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf)
        mask[change] = 0 if math.isinf(mask[change]) else -math.inf
        m = Model()
        q, k, v = (m.random(2, 3, 6, 4) for _ in range(3))
        y = plain_attention(m, q, k, v, mask=m.constant(mask))
        assert "causal" not in compare(m, y, every_subset=False)


def ones(m: Model, S: int, T: int, dtype: torch.dtype = torch.bool) -> str:
    return m("Expand", m.constant(1, dtype), m.ints(S, T))


def compared(m: Model, op: str, S: int, T: int, diagonal: int = 0, rows_first: bool = False) -> str:
    """Numbers of columns against those of rows plus the diagonal."""
    columns, rows = m.constant(torch.arange(T), torch.int64), m.constant(torch.arange(S)[:, None] + diagonal, torch.int64)
    return m(op, rows, columns) if rows_first else m(op, columns, rows)


def lower(m: Model, S: int, T: int, k: int) -> str:
    return m("Trilu", ones(m, S, T), m.constant(k, torch.int64), upper=0)


def added(m: Model, seen: str, S: int, T: int) -> str:
    zeros = m("Expand", m.constant(0.0), m.ints(S, T))
    return m("Where", m("Not", seen), m.constant(-math.inf), zeros)


# How a mask of S x T is made, the diagonal of what it lets through, whether it is added, and whether that is causal.
LARGE_MASKS = {
    "torch's": (lambda m, S, T: added(m, lower(m, S, T, 0), S, T), 0, True, True),
    "torch's, later columns": (lambda m, S, T: added(m, lower(m, S, T, 3), S, T), 3, True, True),
    "torch's, an empty row": (lambda m, S, T: added(m, lower(m, S, T, -1), S, T), -1, True, False),
    "triu of -inf": (lambda m, S, T: m("Trilu", m("Expand", m.constant(-math.inf), m.ints(S, T)), m.ints(1)), 0, True, True),
    "triu with its diagonal": (lambda m, S, T: m("Trilu", m("Expand", m.constant(-math.inf), m.ints(S, T)), m.ints(0)), -1, True, False),
    "times -1e9": (lambda m, S, T: m("Mul", m("Sub", m.constant(1.0), m("Trilu", ones(m, S, T, torch.float64), m.ints(0), upper=0)),
                                     m.constant(-2e9)), 0, True, True),
    "times -1": (lambda m, S, T: m("Mul", m("Sub", m.constant(1.0), m("Trilu", ones(m, S, T, torch.float64), m.ints(0), upper=0)),
                                   m.constant(-1.0)), None, True, False),
    "two diagonals": (lambda m, S, T: m("And", lower(m, S, T, 2), lower(m, S, T, 1)), 1, False, False),
    "all of it and a part": (lambda m, S, T: m("And", ones(m, S, T), m("Or", lower(m, S, T, 2), lower(m, S, T, 2))), 2, False, True),
    "as numbers": (lambda m, S, T: m("Cast", m("Cast", lower(m, S, T, 4), to=onnx.TensorProto.DOUBLE), to=onnx.TensorProto.BOOL), 4, False, True),
    "under another shape": (lambda m, S, T: m("Unsqueeze", lower(m, S, T, 0), m.ints(0, 1)), 0, False, True),
    "all": (lambda m, S, T: ones(m, S, T), 10000, False, True),
    "none at the right": (lambda m, S, T: compared(m, "Less", S, T), -1, False, False),
    "Less": (lambda m, S, T: compared(m, "Less", S, T, 3), 2, False, True),
    "LessOrEqual": (lambda m, S, T: compared(m, "LessOrEqual", S, T), 0, False, True),
    "Greater, rows first": (lambda m, S, T: compared(m, "Greater", S, T, 5, True), 4, False, True),
    "GreaterOrEqual, rows first": (lambda m, S, T: compared(m, "GreaterOrEqual", S, T, 0, True), 0, False, True),
    "not Greater": (lambda m, S, T: m("Not", compared(m, "Greater", S, T, 1)), 1, False, True),
    "not GreaterOrEqual": (lambda m, S, T: m("Not", compared(m, "GreaterOrEqual", S, T, 1)), 0, False, True),
    "not LessOrEqual, rows first": (lambda m, S, T: m("Not", compared(m, "LessOrEqual", S, T, 2, True)), 1, False, True),
    "not Less, rows first": (lambda m, S, T: m("Not", compared(m, "Less", S, T, 2, True)), 2, False, True),
    "a ramp of two": (lambda m, S, T: m("Less", m.constant(torch.arange(T), torch.int64), m.constant(2 * torch.arange(S)[:, None] + 1, torch.int64)),
                      None, False, False),
    "the other side": (lambda m, S, T: compared(m, "GreaterOrEqual", S, T), None, False, False),
}


@pytest.mark.parametrize("sizes", [(1030, 1025), (1025, 1030)])
@pytest.mark.parametrize("name", LARGE_MASKS)
def test_large_masks_are_known_by_what_makes_them(name, sizes):
    """They are too large to be folded to constants."""
    S, T = sizes
    make, diagonal, is_added, causal = LARGE_MASKS[name]
    m = Model()
    q, k, v = m.random(1, 1, S, 2), m.random(1, 1, T, 2), m.random(1, 1, T, 2)
    mask = make(m, S, T)
    y = plain_attention(m, q, k, v, **{"mask" if is_added else "where": mask})
    text = compare(m, y, every_subset=False)
    assert ("causal = 1" in text) == causal
    assert not causal or f"causal_offset = {min(diagonal, T - 1)}" in text
