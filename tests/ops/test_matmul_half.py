"""Products of bfloat16 are summed in float32 and rounded once."""

import pytest
import torch
from test_gemm_native import FLAGS, SHAPES, exact, has_native_bfloat16, operands, product, tiled  # noqa: F401


@pytest.mark.parametrize("shape", [*SHAPES, (601, 15001, 7)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("trans_a, trans_b", FLAGS)
def test_bfloat16(shape, trans_a, trans_b):
    """Sums are float32, and rounded once."""
    if not has_native_bfloat16():
        pytest.skip("no such instructions")
    a, b, row = (t.bfloat16() for t in operands(*shape, trans_a, trans_b))
    want = exact(a, b, trans_a, trans_b)
    attrs = {"transA": int(trans_a), "transB": int(trans_b)}
    bound = 2e-6 + 6e-8 * shape[2]
    for got, expected in ((product(a, b, to=1, **attrs), want), (product(a, b, row, to=1, **attrs), want + row),
                          (product(a, b, alpha=0.5, to=1, **attrs), 0.5 * want)):
        assert got.dtype == torch.float32 and (got - expected).abs().max() < bound
    for got, expected in ((product(a, b, **attrs), want), (product(a, b, row, **attrs), want + row)):
        assert got.dtype == torch.bfloat16
        assert ((got - expected).abs() <= 2 ** -8 * expected.abs() + bound).all()
