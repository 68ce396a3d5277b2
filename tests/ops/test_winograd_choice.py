"""Winograd's algorithm is used where it is worth it, always for the same shapes, and not where it is disabled."""

import os
import subprocess
import sys

import pytest
import torch
from test_winograd import PARTS, chosen, data, only, reset, session, step  # noqa: F401

from onnxtrain import _C


@pytest.mark.parametrize(("c", "k", "depth"), [(20, 64, 4), (64, 24, 4), (64, 64, 1)])
def test_volumes_that_are_left_to_others(c, k, depth):
    """Blocks of sixteen channels in more than one slice; two of three slices of the filter outside."""
    x, w = torch.randn(2, c, depth, 6, 6), torch.randn(k, c, 3, 3, 3)
    s = session(x, w, [1] * 6, bias=False)
    step(s, [x, w], torch.randn(2, k, depth, 6, 6))
    assert not any("winograd" in kernel for _, kernel, _ in s.kernels())


def large():
    pads = [1, 1, 1, 1]
    return (*data(4, 64, 64, 32, 32, pads), pads)


def test_disabled_by_name():
    x, w, b, dy, pads = large()
    _C.disable_passes(["cse", "winograd"])
    s = session(x, w, pads)
    step(s, [x, w, b], dy)
    assert chosen(s) == sorted(f"{part}_f32_onednn" for part in PARTS)
    _C.disable_passes(["winograds"])
    s = session(x, w, pads)
    only("f32_winograd")
    step(s, [x, w, b], dy)
    assert chosen(s) == sorted(f"{part}_f32_winograd" for part in PARTS)


def test_disabled_by_environment():
    code = """
import test_winograd_choice as t
x, w, b, dy, pads = t.large()
s = t.session(x, w, pads)
t.step(s, [x, w, b], dy)
assert t.chosen(s) == sorted(f"{part}_f32_onednn" for part in t.PARTS), t.chosen(s)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "ONNXTRAIN_DISABLE": "winograd"})


def test_a_shape_has_one_choice():
    """Measured once: every program of one shape has the same kernels, those of another batch too."""
    found = set()
    for images in (4, 4, 7, 4):
        x, w, b, dy = data(images, 64, 64, 32, 32, [1, 1, 1, 1])
        s = session(x, w, [1, 1, 1, 1])
        step(s, [x, w, b], dy)
        found.add(tuple(chosen(s)))
    assert len(found) == 1


@pytest.mark.parametrize("shapes, pads, attributes", [
    (((1, 16, 9, 9), (16, 16, 3, 3)), [1, 1, 1, 1], {"strides": [2, 2]}),
    (((1, 16, 9, 9), (16, 16, 3, 3)), [1, 1, 1, 1], {"dilations": [1, 2]}),
    (((1, 16, 9, 9), (16, 8, 3, 3)), [1, 1, 1, 1], {"group": 2}),
    (((1, 16, 9, 9), (16, 16, 3, 3)), [3, 1, 1, 1], {}),
    (((1, 16, 9, 9), (16, 16, 3, 2)), [1, 1, 1, 1], {}),
    (((1, 16, 9), (16, 16, 3)), [1, 1], {}),
    (((0, 16, 9, 9), (16, 16, 3, 3)), [1, 1, 1, 1], {}),
], ids=["stride", "dilation", "groups", "padding", "kernel", "1-d", "empty"])
def test_what_is_declined(shapes, pads, attributes):
    x, w = (torch.randn(s) for s in shapes)
    s = session(x, w, pads, bias=False, **attributes)
    s.forward([x, w], b"\0\0")
    assert all("winograd" not in k for k in chosen(s))
    only("f32_winograd")
    with pytest.raises(_C.UnsupportedError, match="f32_winograd: "):
        session(x, w, pads, bias=False, **attributes).forward([x, w], b"\0\0")
