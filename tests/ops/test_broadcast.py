"""Gradients of operands that broadcast, in every combination of shapes, are those of torch."""

import random

import numpy as np
import pytest
from gradient_cases import (
    BROADCAST,
    SEED,
    SLOW,
    broadcast,
    check,
    gradient_cases,
    one_of_each,
    sampled,
)


@pytest.mark.parametrize("case",
                         sampled(one_of_each([c for c in gradient_cases() if c[1].op_type in BROADCAST and c[1].opset >= 7 and all(
s is not None and np.prod(s.shape, dtype=int) for s in c[1].inputs)]), 12))
def test_broadcast(case):
    variants = list(broadcast(case))
    for variant in variants if SLOW else random.Random(SEED).sample(variants, min(60, len(variants))):
        check(variant)
