"""Convolutions with a filter of one cell in bfloat16, by products of the native GEMM: strides, images side by side,
sums over images, threads."""

import pytest
import test_conv_onednn as direct
import torch

CASES = [  # as in test_conv_onednn
    ((1, 64, 7, 7), (48, 64, 1, 1), 1, 1, 0, False),
    ((3, 64, 15, 17), (48, 64, 1, 1), 1, 1, 0, False),  # images are summed
    ((4, 256, 5, 5), (128, 256, 1, 1), 1, 1, 0, False),  # side by side
    ((13, 33, 9, 7), (17, 33, 1, 1), 1, 1, 0, False),  # a thread has images of its own
    ((3, 64, 15, 17), (48, 64, 1, 1), 2, 1, 0, False),
    ((4, 256, 11, 13), (128, 256, 1, 1), 3, 1, 0, False),
    ((5, 128, 9, 9), (256, 128, 1, 1), 2, 1, 0, False),
    ((1, 40, 8, 8), (40, 40, 1, 1), 2, 1, 0, False),
    ((4, 33, 51), (17, 33, 1), 2, 1, 0, False),
    ((2, 16, 7, 8, 9), (24, 16, 1, 1, 1), 2, 1, 0, False),
    ((2, 900, 6, 6), (30, 900, 1, 1), 1, 1, 0, False),  # several blocks of k
]


@pytest.fixture(autouse=True)
def reset():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case):
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        kernels, results = direct.check(case)
        found.append(results)
        if direct.MULTIPLIES and not direct.HAS_TILES:
            assert kernels == direct.parts("bf16_pointwise"), kernels
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other)), "results depend on the number of threads"


@pytest.mark.parametrize("case", [((2, 15, 9, 9), (32, 15, 1, 1), 1, 1, 0, False),
                                  ((2, 32, 9, 9), (32, 32, 1, 1), 1, 1, 1, False),
                                  ((2, 32, 9, 9), (32, 32, 1, 1), 1, 1, 0, True)], ids=["channels", "padding", "bias"])
def test_others(case):
    kernels, _ = direct.check(case)
    assert "conv_bf16_pointwise" not in kernels
