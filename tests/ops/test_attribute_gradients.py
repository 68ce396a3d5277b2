"""Gradients under attribute values that no other case has, and the registry held against the cases.

Every differentiable operator of ai.onnx has a gradient case, and each of its attributes appears there with at least two
values, one of which may be its default.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_cases import descriptor, every_case
from harness import C, Case, R, _arrays, _grad_inputs, run_case
from test_recurrent import case as recurrent

from onnxtrain import _C

X = R(2, 3, 4, low=0.2, high=1.5)
IMAGE = R(1, 2, 6, 7, apart=0.05)


def by_torch(function):
    def reference(*arrays):
        result = function(*[torch.from_numpy(np.array(a)) for a in arrays if a is not None])
        return [t.numpy() for t in (result if isinstance(result, (tuple, list)) else (result,))]

    return reference


def made(op_type, inputs, attrs, function, opset=20, **more):
    """A case whose forward is torch's too: the reference evaluator does not know old opsets."""
    return Case(op_type, inputs, attrs, opset=opset, torch=function, reference=by_torch(function), alloc=False,
                kernels=False, **more)


def selu(x, alpha, gamma):
    return gamma * torch.where(x > 0, x, alpha * (x.exp() - 1))


REDUCE = {
    "ReduceSum": lambda x, d, k: x.sum(d, keepdim=k), "ReduceMean": lambda x, d, k: x.mean(d, keepdim=k),
    "ReduceMax": lambda x, d, k: x.amax(d, keepdim=k), "ReduceMin": lambda x, d, k: x.amin(d, keepdim=k),
    "ReduceProd": lambda x, d, k: x.prod(d, keepdim=k), "ReduceL1": lambda x, d, k: x.abs().sum(d, keepdim=k),
    "ReduceL2": lambda x, d, k: x.norm(dim=d, keepdim=k), "ReduceSumSquare": lambda x, d, k: (x * x).sum(d, keepdim=k),
    "ReduceLogSum": lambda x, d, k: x.sum(d, keepdim=k).log(),
    "ReduceLogSumExp": lambda x, d, k: x.logsumexp(d, keepdim=k),
}
CASES = [
    *(made(name, [X], {"axes": [1], "keepdims": k}, lambda x, f=f, k=k: f(x, 1, bool(k)), opset=11)
      for name, f in REDUCE.items() for k in (0, 1)),
    *(made(name, [X, C([], np.int64)], {"noop_with_empty_axes": 1}, lambda x, a, name=name: {
        "ReduceL1": torch.abs, "ReduceL2": torch.abs, "ReduceSumSquare": torch.square,
        "ReduceLogSum": torch.log}.get(name, torch.clone)(x), opset=18)
      for name in REDUCE),
    made("Selu", [R(3, 5)], {"alpha": 1.25, "gamma": 0.75}, lambda x: selu(x, 1.25, 0.75)),
    made("Selu", [R(3, 5)], {"alpha": 1.25, "gamma": 0.75}, lambda x: selu(x, 1.25, 0.75), opset=1, name="v1"),
    made("HardSigmoid", [R(3, 5)], {"alpha": 0.25}, lambda x: (0.25 * x + 0.5).clamp(0, 1), name="alpha"),
    made("HardSigmoid", [R(3, 5)], {"alpha": 0.25, "beta": 0.375}, lambda x: (0.25 * x + 0.375).clamp(0, 1), opset=1,
         name="v1"),
    made("Elu", [R(3, 5)], {"alpha": 0.5}, lambda x: F.elu(x, 0.5), opset=1, name="v1"),
    made("LeakyRelu", [R(3, 5)], {"alpha": 0.25}, lambda x: F.leaky_relu(x, 0.25), opset=1, name="v1"),
    made("Clip", [R(3, 5)], {"max": 0.5}, lambda x: x.clamp(max=0.5), opset=1, name="v1 above"),
    made("Clip", [R(3, 5)], {"min": -0.5}, lambda x: x.clamp(min=-0.5), opset=1, name="v1 below"),
    made("Gemm", [R(2, 3), R(3, 4), R(2, 4)], {"alpha": 0.5, "beta": 0.25}, lambda a, b, c: 0.5 * (a @ b) + 0.25 * c,
         opset=6, name="v6"),
    made("Swish", [R(3, 5)], {"alpha": 1.5}, lambda x: x * torch.sigmoid(1.5 * x), opset=24),
    made("SwiGLU", [R(3, 4), R(3, 4)], {}, lambda a, b: F.silu(a) * b, opset=28),
    made("Shrink", [R(4, 5)], {}, lambda x: F.hardshrink(x, 0.5)),
    made("Reshape", [X], {"shape": [4, -1]}, lambda x: x.reshape(4, -1), opset=1),
    made("Slice", [X], {"axes": [2, 0], "starts": [1, 0], "ends": [-1, 1]}, lambda x: x[:1, :, 1:-1], opset=9),
    made("Pad", [R(2, 3)], {"paddings": [1, 0, 2, 1]}, lambda x: F.pad(x, (0, 1, 1, 2)), opset=1),
    made("TopK", [R(3, 7)], {"k": 2}, lambda x: x.topk(2), opset=1, n_outputs=2, name="v1"),
    made("TopK", [R(3, 7), C([4])], {"sorted": 0}, lambda x, k: x.topk(4)[0], name="any order is this one"),
    made("Scatter", [R(3, 4), C([[1, 0], [3, 2], [0, 1]]), R(3, 2)], {"axis": 1}, lambda x, i, u: x.scatter(1, i, u),
         opset=9),
    made("Upsample", [IMAGE, C([1, 1, 2, 2], np.float32)], {"mode": "linear"}, lambda x, s: upsample(x), opset=9,
         tol64=1e-9),
    made("Resize", [IMAGE, None, None, C([9, 4])], {"mode": "linear", "axes": [2, 3]},
         lambda x, s: F.interpolate(x, (9, 4), mode="bilinear"), tol=1e-4),
    made("Resize", [IMAGE, None, None, C([9, 9])],
         {"mode": "nearest", "axes": [2, 3], "keep_aspect_ratio_policy": "not_larger",
          "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
         lambda x, s: F.interpolate(x, (8, 9), mode="nearest")),
    made("Resize", [IMAGE, C([0, 0, 0, 0, 1, 1, 1, 1], np.float32), None, C([1, 2, 6, 7])],
         {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 1.5},
         lambda x, r, s: x.clone()),
    made("Conv", [R(1, 2, 6), R(3, 2, 3)], {"kernel_shape": [3], "pads": [1, 1]},
         lambda x, w: F.conv1d(x, w, padding=1)),
    made("ConvTranspose", [R(1, 2, 6), R(2, 3, 3)], {"kernel_shape": [3], "strides": [2]},
         lambda x, w: F.conv_transpose1d(x, w, stride=2)),
    made("MaxUnpool", [R(1, 1, 2, 2), C([[[[1, 3], [0, 2]]]])],
         {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]},
         lambda x, i: torch.zeros(1, 1, 4, dtype=x.dtype).scatter(2, i.flatten(2), x.flatten(2)).reshape(1, 1, 2, 2),
         opset=22),
    made("GroupNormalization", [R(2, 4, 3), R(4), R(4)], {"num_groups": 2}, lambda x, s, b: F.group_norm(x, 2, s, b),
         opset=21, name="epsilon", tol=1e-4),
    made("InstanceNormalization", [R(2, 4, 5), R(4), R(4)], {}, lambda x, s, b: F.instance_norm(x, weight=s, bias=b),
         name="epsilon", tol=1e-4),
    recurrent("RNN", "B", activations=["LeakyRelu"], activation_alpha=[0.25], name="alpha"),
    recurrent("RNN", "B", activations=["Affine"], activation_alpha=[0.25], activation_beta=[0.125], hidden=3,
              name="beta"),
    recurrent("GRU", "B", clip=0.25, hidden=3),
    recurrent("LSTM", "B", "h0", clip=0.25, input_forget=1, hidden=3, name="both"),
]


def upsample(x):
    """Linear by two with asymmetric coordinates: every other entry, and means between; the last one repeats."""
    for d in (2, 3):
        after = torch.cat([x.narrow(d, 1, x.shape[d] - 1), x.narrow(d, x.shape[d] - 1, 1)], d)
        x = torch.stack([x, (x + after) / 2], d + 1).flatten(d, d + 1)
    return x


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


# ---- the registry against the cases ----

# Gradients of these have test functions of their own.
ELSEWHERE = {
    "AffineGrid": "ops/test_grid_sample.py", "Col2Im": "ops/test_col2im.py", "Dropout": "ops/test_dropout.py",
    "If": "control/test_control.py", "Loop": "control/test_control.py",
    "Scan": "control/test_control.py",
    **dict.fromkeys((
        "SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceAt", "SequenceLength",
        "SplitToSequence", "ConcatFromSequence", "SequenceMap", "Optional", "OptionalHasElement",
        "OptionalGetElement"), "control/test_sequence.py"),
}
# Built from others, of which nothing differentiable is left: outputs are integers or bools, or inputs are.
NOTHING_FLOWS = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "Unique",
                 "Hardmax", "And", "Or", "Xor", "Equal", "Greater", "Less", "Ceil", "Floor", "RNN-1", "LSTM-1",
                 "GRU-1", "Cast-1"}
# RNN, LSTM and GRU before opset 7 only drop output_sequence; Cast before 6 only reads its type from a string.
# Attributes that change no number: hints, bookkeeping, and dtypes of what is computed with in between.
NEUTRAL = {"consumed_inputs", "rng_stream", "rng_salt", "seed", "saved_bytes", "saves_statistics", "stash_type",
           "softmax_precision", "storage_order", "saturate", "round_mode", "chunk_size", "is_test",
           "output_dtype", "kernel_shape"}


def differentiable():
    return [op for op in _C.operators() if op["domain"] == "" and not op["no_grad"]
            and not {op["name"], f"{op['name']}-{op['since']}"} & NOTHING_FLOWS]


def seen():
    """Attribute values by descriptor, over all cases with a gradient."""
    found: dict = {}
    for _, case in every_case():
        if _grad_inputs(case, _arrays(case, case.dtypes[-1])):
            found.setdefault(descriptor(case), []).append({name: str(value) for name, value in case.attrs.items()})
    return found


def test_every_differentiable_operator_has_a_gradient_case():
    have = seen()
    missing = [f"{op['name']} since {op['since']}" for op in differentiable() if ("", op["name"], op["since"]) not
               in have and op["name"] not in ELSEWHERE]
    assert not missing, f"no gradient case: {missing}"


def test_every_attribute_has_two_values():
    have = seen()
    poor = {}
    for op in differentiable():
        cases = have.get(("", op["name"], op["since"]), [])
        for name in (entry.split(":")[0] for entry in op["attributes"].split()):
            if name not in NEUTRAL and op["name"] not in ELSEWHERE and len({c.get(name, "default") for c in cases}) < 2:
                poor[f"{op['name']}-{op['since']}.{name}"] = {c.get(name, "default") for c in cases}
    assert not poor, f"(attribute: the only value in a gradient case) {poor}"


def test_what_is_elsewhere_is_there():
    root = Path(__file__).resolve().parents[1]
    for name, file in ELSEWHERE.items():
        text = (root / file).read_text()
        assert name in text and "grad" in text, f"{file} has nothing on {name}"
    names = {op["name"] for op in _C.operators()}
    assert {n.split("-")[0] for n in NOTHING_FLOWS} | set(ELSEWHERE) <= names
