"""Resize and Upsample against torch.nn.functional.interpolate; refusals."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, expect_error, run_case

from onnxtrain import _C, UnsupportedError


def by_torch(f):
    return lambda x, *rest: f(torch.from_numpy(x)).numpy()


def interpolate(size, mode, **options):
    return lambda x, *rest: F.interpolate(x, size=tuple(size), mode=mode, **options)


def sizes_case(shape, size, attrs, f, name="", **options):
    inputs = [R(*shape), None, None, C([*shape[:2], *size])]
    return Case("Resize", inputs, attrs, torch=f, reference=by_torch(f), name=name,
                **{"alloc": False, "tol": 1e-4, **options})


CASES = []
SHAPES = [((2, 3, 7), (11,)), ((2, 3, 7), (3,)), ((2, 3, 5, 6), (9, 4)), ((2, 2, 5, 6), (5, 12)),
          ((1, 2, 4, 5, 6), (7, 3, 6)), ((1, 2, 3, 4), (1, 1))]
LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}
for shape, size in SHAPES:
    name = f"{shape}-{size}"
    CASES += [
        sizes_case(shape, size, {"mode": "nearest", "coordinate_transformation_mode": "asymmetric",
                                 "nearest_mode": "floor"},
                   interpolate(size, "nearest"), f"nearest-{name}"),
        sizes_case(shape, size, {"mode": "nearest", "coordinate_transformation_mode": "half_pixel",
                                 "nearest_mode": "round_prefer_ceil"},
                   interpolate(size, "nearest-exact"), f"nearest-exact-{name}"),
        sizes_case(shape, size, {"mode": "linear"}, interpolate(size, LINEAR[len(shape)]), f"linear-{name}"),
        sizes_case(shape, size, {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
                   interpolate(size, LINEAR[len(shape)], align_corners=True), f"linear-corners-{name}"),
    ]
    if len(shape) == 4:
        CASES += [
            sizes_case(shape, size, {"mode": "cubic", "cubic_coeff_a": -0.75}, interpolate(size, "bicubic"),
                       f"cubic-{name}"),
            sizes_case(shape, size, {"mode": "cubic", "coordinate_transformation_mode": "align_corners"},
                       interpolate(size, "bicubic", align_corners=True), f"cubic-corners-{name}"),
            sizes_case(shape, size, {"mode": "linear", "antialias": 1, "exclude_outside": 1},
                       interpolate(size, "bilinear", antialias=True), f"linear-antialias-{name}"),
            # attributes are float32, and torch's -0.5 is exact
            sizes_case(shape, size, {"mode": "cubic", "antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5},
                       interpolate(size, "bicubic", antialias=True), f"cubic-antialias-{name}"),
        ]
CASES += [
    sizes_case((1, 2, 5, 6), (9, 4), {"mode": "linear"}, interpolate((9, 4), "bilinear"), "allocations", alloc=True),
    sizes_case((1, 2, 5, 6), (5, 6), {"mode": "cubic"}, lambda x, *rest: x * 1, "same size"),
    sizes_case((0, 2, 5, 6), (7, 6), {"mode": "linear"}, interpolate((7, 6), "bilinear"), "no images"),
    sizes_case((2, 8, 40, 50), (80, 100), {"mode": "linear"}, interpolate((80, 100), "bilinear"), "large", fd=False),
    Case("Resize", [R(1, 2, 4, 6), None, C([1, 1, 2, 0.5], np.float32)], {"mode": "linear"}, name="scales", alloc=False,
         torch=lambda x, *r: F.interpolate(x, scale_factor=(2, 0.5), mode="bilinear"), tol=1e-4),
    Case("Resize", [R(1, 1, 10), None, C([1, 1, 0.7], np.float32)],
         {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
         name="seven of ten cells", torch=lambda x, *r: F.interpolate(x, scale_factor=0.7, mode="nearest"), alloc=False,
         reference=by_torch(lambda x: F.interpolate(x, scale_factor=0.7, mode="nearest"))),
    Case("Resize", [R(1, 1, 9), None, C([1, 1, 1 / 3], np.float32)],
         {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, name="a third",
         torch=lambda x, *r: F.interpolate(x, scale_factor=1 / 3, mode="nearest"), alloc=False,
         reference=by_torch(lambda x: F.interpolate(x, scale_factor=1 / 3, mode="nearest"))),
    Case("Upsample", [R(1, 2, 3, 4), C([1, 1, 2, 3], np.float32)], {"mode": "nearest"}, opset=9, alloc=False,
         torch=lambda x, s: F.interpolate(x, scale_factor=(2, 3)),
         reference=by_torch(lambda x: F.interpolate(x, scale_factor=(2, 3)))),
    Case("Upsample", [R(1, 2, 3, 4)], {"mode": "nearest", "scales": [1.0, 1.0, 2.0, 1.0]}, opset=7, alloc=False,
         torch=lambda x: F.interpolate(x, scale_factor=(2, 1)),
         reference=by_torch(lambda x: F.interpolate(x, scale_factor=(2, 1)))),
    Case("Upsample", [R(1, 2, 3, 4)], {"mode": "nearest", "height_scale": 1.0, "width_scale": 3.0}, opset=1,
         alloc=False, torch=lambda x: F.interpolate(x, scale_factor=(1, 3)),
         reference=by_torch(lambda x: F.interpolate(x, scale_factor=(1, 3)))),
    Case("Resize", [R(1, 2, 3, 4), C([1, 1, 2, 2], np.float32)], {"mode": "nearest"}, opset=10, alloc=False,
         torch=lambda x, s: F.interpolate(x, scale_factor=2),
         reference=by_torch(lambda x: F.interpolate(x, scale_factor=2))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case):
    run_case(case)


def test_sizes_that_depend_on_data():
    f = lambda x, *rest: F.interpolate(x, scale_factor=(2, 0.5), mode="bilinear")  # noqa: E731
    for inputs in ([R(1, 2, 4, 6), None, V([1, 1, 2, 0.5], np.float32)],
                   [R(1, 2, 4, 6), None, None, V([1, 2, 8, 3], np.int64)]):
        run_case(Case("Resize", inputs, {"mode": "linear"}, torch=f, reference=by_torch(f), grad=[0], alloc=False,
                      tol=1e-4))


def test_other_dtypes():
    for dtype in (np.uint8, np.int64, np.bool_):
        f = lambda x, *rest: np.repeat(np.repeat(x, 2, 2), 3, 3)  # noqa: E731
        run_case(Case("Resize", [R(1, 2, 3, 4, dtype=dtype, low=0, high=2), None, C([1, 1, 2, 3], np.float32)],
                      {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, reference=f,
                      grad=False, alloc=False))


def test_refusals():
    x = R(1, 1, 4)
    expect_error(Case("Resize", [x], {}), ValueError, "neither scales nor sizes")
    expect_error(Case("Resize", [x, None, C([1, 1, 2], np.float32), C([1, 1, 8])], {}), ValueError,
                 "both scales and sizes")
    expect_error(Case("Resize", [x, None, C([2], np.float32)], {}), ValueError, "scales has 1 entries for 3 axes")
    expect_error(Case("Resize", [x, None, C([1, 1, 0], np.float32)], {}), ValueError, "the scale of axis 2 is 0")
    expect_error(Case("Resize", [x, None, C([1, 1, 2], np.float32)], {"mode": "area"}), ValueError, "mode is 'area'")
    expect_error(Case("Resize", [x, None, C([1, 1, 2], np.float32)], {"nearest_mode": "up"}), ValueError,
                 "nearest_mode is 'up'")
    expect_error(Case("Resize", [x, None, C([1, 1, 2], np.float32)], {"antialias": 1}), UnsupportedError,
                 "antialias with mode 'nearest'")
    expect_error(Case("Resize", [x, None, C([1, 1, 2], np.float32)], {"axes": [1, 1, -2]}), ValueError, "axis 1 twice")
    expect_error(Case("Resize", [x, None, None, C([1, 1, -1])], {}), ValueError, "the size of axis 2 is -1")
    expect_error(Case("Resize", [x, None, C([1, 1, 2], np.float32)],
                      {"coordinate_transformation_mode": "tf_crop_and_resize"}),
                 ValueError, "roi has 0 entries")
    expect_error(Case("Resize", [R(1, 1, 0), None, None, C([1, 1, 2])], {}), ValueError, "axis 2 of the input is empty")
    expect_error(Case("Upsample", [x, C([1, 1, 2], np.float32)], {}), ValueError, "Upsample is not in opset 20")
    expect_error(Case("Resize", [R(1, 1, 4, dtype=np.int64), None, C([1, 1, 2], np.float32)], {"mode": "linear"}),
                 UnsupportedError, "dtype")


@pytest.mark.parametrize("sizes", [[3, 1, 2, 0], [3, 1, 0, 2], [0, 1, 2, 3]], ids=str)
def test_nothing_is_left(sizes):
    """An axis that becomes empty, and others that are resized behind and in front of it: nothing is read or written."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="linear", antialias=1)], "g",
        [onnx.helper.make_tensor_value_info("x", 1, [3, 1, 4, 4])], [onnx.helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(np.array(sizes, dtype=np.int64), "sizes")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=9)
    x = torch.randn(3, 1, 4, 4)
    (y,), run = _C.Session(model.SerializeToString()).forward([x], b"\1")
    assert list(y.shape) == sizes
    if run is not None:
        (dx,) = run.backward([[x][i] for i in run.saved_inputs] + [y for _ in run.saved_outputs], [torch.empty(sizes)])
        assert torch.equal(dx, torch.zeros_like(x))
