"""Col2Im adds columns as fold does, and Im2Col reads them as unfold does: the gradient of each other."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import OURS, C, Case, R, run_case
from test_rearrange import by_torch

FOLDS = [
    ((5, 6), (2, 3), {}),
    ((7, 5), (3, 2), {"strides": [2, 1], "pads": [1, 0, 1, 0]}),
    ((6, 6), (2, 2), {"dilations": [2, 3], "pads": [1, 2, 1, 2]}),
    ((4, 4), (2, 2), {"strides": [2, 2]}),
]


def columns(image, block, attrs, batch):
    options = {"kernel_size": block, "dilation": tuple(attrs.get("dilations", (1, 1))),
               "stride": tuple(attrs.get("strides", (1, 1))),
               "padding": tuple(attrs.get("pads", (0, 0))[:2])}
    windows = F.unfold(torch.zeros(1, 1, *image), **options).shape[2]
    fold = lambda x, *rest: F.fold(x, image, **options)  # noqa: E731
    yield Case("Col2Im", [R(batch, 3 * block[0] * block[1], windows), C(image), C(block)], attrs, torch=fold,
                reference=by_torch(fold), alloc=batch == 2, name=f"{image}-{block}-{attrs}-{batch}")
    unfold = lambda x: F.unfold(x, **options)  # noqa: E731
    yield Case("Im2Col", [R(2, 3, *image)], attrs | {"image_shape": image, "block_shape": block}, domain=OURS,
               torch=unfold, alloc=False, grad=False, name=f"{image}-{block}-{attrs}-{batch}")


COLUMNS = [case for fold in FOLDS for batch in (0, 2) for case in columns(*fold, batch)]
# Padding at one end, one and three dims, integers: differences, and the evaluator.
COLUMNS += [
    Case("Col2Im", [R(2, 6, 4), C([5]), C([3])], {"pads": [0, 1]}, alloc=False, name="one dim"),
    Case("Col2Im", [R(1, 8, 4), C([3, 3, 2]), C([2, 2, 2])], {}, alloc=False, name="three dims"),
    Case("Col2Im", [R(1, 4, 6, dtype=np.int64, low=-9, high=9), C([3, 4]), C([2, 2])], {}, alloc=False),
]


@pytest.mark.parametrize("case", COLUMNS, ids=str)
def test_columns(case):
    run_case(case)
