"""Coordinates, filters and edges of Resize are those of the specification, for attributes of all kinds."""

import random

import numpy as np
import pytest
import torch.nn.functional as F
from harness import C, Case, R, run_case
from seeds import fixed_seed
from test_resize import by_torch

SEED = fixed_seed()
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
               "tf_crop_and_resize")


def sampled(count):
    """Attributes, axes, sizes and scales of all kinds; gradients by differences."""
    rng = random.Random(SEED)
    for k in range(count):
        rank = rng.choice((1, 2, 3))
        mode = rng.choice(("nearest", "linear", "cubic"))
        attrs = {"mode": mode, "coordinate_transformation_mode": rng.choice(COORDINATES)}
        if mode == "nearest":
            attrs["nearest_mode"] = rng.choice(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"))
        elif rng.random() < 0.4:
            attrs["antialias"] = 1
        if mode == "cubic":
            attrs["cubic_coeff_a"] = rng.choice((-0.75, -0.5))
        if mode != "nearest" and attrs["coordinate_transformation_mode"] != "tf_crop_and_resize":
            attrs["exclude_outside"] = rng.randint(0, 1)
        # more than one cell, so that the two readings of an output of one cell (0 and -0.5) stay out of this
        shape = [rng.randint(3, 5) for _ in range(rank)]
        axes = rng.sample(range(rank), rng.randint(1, rank))
        if len(axes) < rank:
            axes = sorted(axes)
            attrs["axes"] = axes  # the reference evaluator cannot count from the end
        else:
            axes = list(range(rank))
        roi = None
        if attrs["coordinate_transformation_mode"] == "tf_crop_and_resize":
            start = [rng.choice((-0.25, 0.0, 0.25)) for _ in axes]
            roi = C(start + [s + rng.choice((0.5, 1.0)) for s in start], np.float32)
            attrs["extrapolation_value"] = 2.5
        if roi is None and rng.random() < 0.4:
            scales = [rng.choice((0.75, 1.0, 1.5, 2.25)) for _ in axes]
            if attrs["coordinate_transformation_mode"] == "half_pixel_symmetric":
                # No output on a cell: the evaluator takes a coordinate that is rounded up for the next one.
                scales = [rng.choice((0.7, 1.3, 2.2)) for _ in axes]
                scales = [s if int(shape[a] * s) % 2 == 0 else 2.0 for a, s in zip(axes, scales)]
            inputs = [R(*shape), None, C(scales, np.float32)]
        else:
            inputs = [R(*shape), roi, None, C([rng.randint(2, 7) for _ in axes])]
            if attrs["coordinate_transformation_mode"] in ("half_pixel", "pytorch_half_pixel", "asymmetric"):
                attrs["keep_aspect_ratio_policy"] = rng.choice(("stretch", "not_larger", "not_smaller"))
        attrs.pop("axes", None) if len(axes) == rank else None
        yield Case("Resize", inputs, attrs, opset=19, name=f"seed{SEED}-{k}-{shape}-{attrs}", alloc=False, tol=2e-4,
                   tol64=1e-5)


SAMPLED = list(sampled(90))


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sampled(case):
    run_case(case)


def test_axes_from_the_end():
    run_case(Case("Resize", [R(2, 4, 3), None, None, C([6, 5])], {"mode": "linear", "axes": [-1, 1]},
                  name="axes from the end", alloc=False, opset=19,
                  reference=by_torch(lambda x: F.interpolate(x[:, None], size=(5, 6), mode="bilinear")[:, 0]),
                  torch=lambda x, s: F.interpolate(x[:, None], size=(5, 6), mode="bilinear")[:, 0]))


def test_old_resize_rounds_by_direction():
    """Opset 10 said nothing: as its implementations do, up where it shrinks and down where it grows."""
    run_case(Case("Resize", [R(1, 1, 5, 4), C([1, 1, 0.5, 2], np.float32)], {"mode": "nearest"}, opset=10, alloc=False,
                  reference=lambda x, s: np.repeat(x[:, :, [0, 2]], 2, 3)))
    run_case(Case("Resize", [R(1, 1, 7), C([1, 1, 0.6], np.float32)], {"mode": "nearest"}, opset=10, alloc=False,
                  reference=lambda x, s: x[:, :, [0, 2, 4, 5]]))
