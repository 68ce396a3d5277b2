"""RotaryEmbedding turns pairs of features by the angles of their positions."""

import numpy as np
import pytest
import torch
from harness import Case, R, V, expect_error, run_case
from test_attention import shaped


def rotate(heads=None, interleaved=0, turned=0):
    def run(x, cos, sin, ids=None):
        if ids is not None:
            cos, sin = cos[ids], sin[ids]
        packed = x.dim() == 3
        h = x.unflatten(2, (heads, -1)) if packed else x.transpose(1, 2)
        size = turned or h.shape[3]
        first, rest = h[..., :size], h[..., size:]
        a, b = (first[..., 0::2], first[..., 1::2]) if interleaved else first.chunk(2, -1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        pair = [cos * a - sin * b, sin * a + cos * b]
        joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        y = torch.cat([joined, rest], -1)
        return y.flatten(2) if packed else y.transpose(1, 2)

    return run


def rotary(name, x, *caches, **attrs):
    names = {"heads": "num_heads", "interleaved": "interleaved", "turned": "rotary_embedding_dim"}
    return Case("RotaryEmbedding", [R(*x), *caches], {names[k]: v for k, v in attrs.items()}, opset=23,
                torch=rotate(**attrs), name=name)


IDS = V([[2, 0, 1], [4, 4, 3]], np.int64)
CASES = [
    rotary("4d", (2, 2, 3, 4), R(2, 3, 2), R(2, 3, 2)),
    rotary("3d", (2, 3, 8), R(2, 3, 2), R(2, 3, 2), heads=2),
    rotary("interleaved", (2, 2, 3, 4), R(2, 3, 2), R(2, 3, 2), interleaved=1),
    rotary("ids", (2, 2, 3, 4), R(5, 2), R(5, 2), IDS),
    rotary("ids 3d interleaved part", (2, 3, 12), R(5, 2), R(5, 2), IDS, heads=2, interleaved=1, turned=4),
    rotary("part", (2, 2, 3, 6), R(2, 3, 1), R(2, 3, 1), turned=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


ERRORS = [
    (shaped("RotaryEmbedding", R(2, 3, 8), R(2, 3, 2), R(2, 3, 2)), ValueError, "num_heads"),
    (shaped("RotaryEmbedding", R(2, 2, 3, 4), R(2, 3, 1), R(2, 3, 1)), ValueError, "2 columns"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
