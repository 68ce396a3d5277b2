"""Conv and ConvTranspose over a sampled grid of every attribute: 1 to 3 dims, groups, dilations, strides, uneven and
automatic padding.

ONNXTRAIN_TEST_SEED fixes the sample and is in each case's name. test_conv_onednn.py has bfloat16; float16
goes through the widening pass.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from harness import Case, R, call, run_case
from seeds import fixed_seed

SEED = fixed_seed()
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def pads_of(case, spatial):
    """Beginnings and ends, from the attribute or the rule of auto_pad."""
    rank, auto = len(spatial), case.get("auto_pad", "NOTSET")
    if auto == "VALID":
        return [0] * rank, [0] * rank
    if auto == "NOTSET":
        pads = case.get("pads", [0] * 2 * rank)
        return pads[:rank], pads[rank:]
    begin, end = [], []
    for d in range(rank):
        extent = (case["kernel"][d] - 1) * case["dilations"][d] + 1
        outputs = -(-spatial[d] // case["strides"][d])
        total = max((outputs - 1) * case["strides"][d] + extent - spatial[d], 0)
        small, large = total // 2, total - total // 2
        begin.append(small if auto == "SAME_UPPER" else large)
        end.append(large if auto == "SAME_UPPER" else small)
    return begin, end


def by_torch(case):
    def f(x, w, bias=None):
        begin, end = pads_of(case, x.shape[2:])
        around = [v for b, e in zip(reversed(begin), reversed(end)) for v in (b, e)]
        return CONV[x.dim() - 2](F.pad(x, around), w, bias, case["strides"], 0, case["dilations"], case["group"])
    return f


def sampled(count):
    rng = random.Random(SEED)
    made = 0
    while made < count:
        rank = rng.choice((1, 2, 2, 3))
        group = rng.choice((1, 1, 2, 3))
        c_in, c_out = group * rng.choice((1, 2)), group * rng.choice((1, 2, 3))
        case = {"kernel": [rng.choice((1, 2, 3)) for _ in range(rank)],
                "strides": [rng.choice((1, 1, 2, 3)) for _ in range(rank)],
                "dilations": [rng.choice((1, 1, 2)) for _ in range(rank)], "group": group}
        spatial = [rng.randint(2, 6 if rank < 3 else 4) for _ in range(rank)]
        kind = rng.choice(("none", "pads", "pads", "SAME_UPPER", "SAME_LOWER", "VALID"))
        if kind == "pads":
            case["pads"] = [rng.randint(0, 2) for _ in range(2 * rank)]
        elif kind != "none":
            case["auto_pad"] = kind
        begin, end = pads_of(case, spatial)
        if any(s + b + e < (k - 1) * d + 1 for s, b, e, k, d in zip(spatial, begin, end, case["kernel"],
                                                                    case["dilations"])):
            continue
        inputs = [R(rng.choice((1, 2)), c_in, *spatial), R(c_out, c_in // group, *case["kernel"])]
        inputs += [R(c_out)] if rng.random() < 0.5 else []
        attrs = {k: v for k, v in case.items() if k != "kernel"}
        if rng.random() < 0.3:
            attrs["kernel_shape"] = case["kernel"]
        f = by_torch(case)
        made += 1
        yield Case("Conv", inputs, attrs, torch=f, alloc=False, tol=1e-4, tol64=1e-10,
                   name=f"seed{SEED}-{made}-{inputs[0].shape}-{case}",
                   reference=lambda *a, f=f: f(*map(torch.from_numpy, a)).numpy())


SAMPLED = list(sampled(80))


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_conv(case):
    run_case(case)


def sampled_transposed(count):
    rng = random.Random(SEED + 1)
    for k in range(count):
        rank = rng.choice((1, 2, 2, 3))
        group = rng.choice((1, 1, 2, 3))
        c_in, c_out = group * rng.choice((1, 2)), rng.choice((1, 2))
        kernel = [rng.choice((1, 2, 3)) for _ in range(rank)]
        strides = [rng.choice((1, 2, 3)) for _ in range(rank)]
        dilations = [rng.choice((1, 1, 2)) for _ in range(rank)]
        spatial = [rng.randint(2, 4) for _ in range(rank)]
        extra = [rng.randint(0, max(s, d) - 1) for s, d in zip(strides, dilations)]
        pads = [[rng.randint(0, min(2, (n - 1) * d)) for n, d in zip(kernel, dilations)] for _ in range(2)]
        full = [(s - 1) * t + (n - 1) * d + 1 for s, t, n, d in zip(spatial, strides, kernel, dilations)]
        if any(n - b - e < 1 for n, b, e in zip(full, *pads)):
            pads = [[0] * rank] * 2
        inputs = [R(rng.choice((1, 2)), c_in, *spatial), R(c_in, c_out, *kernel)]
        inputs += [R(c_out * group)] if rng.random() < 0.5 else []

        def f(x, w, bias=None, strides=strides, dilations=dilations, group=group, extra=extra, pads=pads, full=full):
            y = TRANSPOSED[x.dim() - 2](x, w, None, strides, 0, 0, group, dilations)
            y = F.pad(y, [v for e in reversed(extra) for v in (0, e)])  # cells that no window reaches, before the bias
            for d, (n, b, e, more) in enumerate(zip(full, *pads, extra)):
                y = y.narrow(d + 2, b, n + more - b - e)
            return y if bias is None else y + bias.reshape(-1, *[1] * (x.dim() - 2))

        attrs = {"strides": strides, "dilations": dilations, "group": group, "output_padding": extra,
                 "pads": pads[0] + pads[1]}
        yield Case("ConvTranspose", inputs, attrs, torch=f, alloc=False, tol=1e-4, tol64=1e-10,
                   name=f"seed{SEED}-{k}-{inputs[0].shape}-{kernel}-{attrs}",
                   reference=lambda *a, f=f: f(*map(torch.from_numpy, a)).numpy())


SAMPLED_TRANSPOSED = list(sampled_transposed(50))


@pytest.mark.parametrize("case", SAMPLED_TRANSPOSED, ids=str)
def test_conv_transpose(case):
    run_case(case)


HALVES = [torch.float16, torch.bfloat16]
OPERATORS = [
    ("Conv", [(2, 4, 6, 5), (6, 2, 3, 3), (6,)], {"group": 2, "pads": [1, 0, 1, 2], "strides": [2, 1]},
     lambda x, w, b: F.conv2d(F.pad(x, (0, 2, 1, 1)), w, b, (2, 1), groups=2)),
    ("Conv", [(2, 2, 9), (3, 2, 4), (3,)], {"dilations": [2]}, lambda x, w, b: F.conv1d(x, w, b, dilation=2)),
    ("ConvTranspose", [(2, 4, 3, 3), (4, 3, 3, 3), (3,)], {"strides": [2, 2], "pads": [1, 1, 1, 1]},
     lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1)),
    ("MaxPool", [(2, 3, 6, 6)], {"kernel_shape": [2, 2], "strides": [2, 2]}, lambda x: F.max_pool2d(x, 2)),
    ("AveragePool", [(2, 3, 6, 6)], {"kernel_shape": [3, 3]}, lambda x: F.avg_pool2d(x, 3, 1)),
    ("GlobalAveragePool", [(2, 3, 6, 6)], {}, lambda x: x.mean((2, 3), keepdim=True)),
    ("GroupNormalization", [(2, 4, 6), (4,), (4,)], {"num_groups": 2}, lambda x, s, b: F.group_norm(x, 2, s, b)),
    ("InstanceNormalization", [(2, 4, 6), (4,), (4,)], {}, lambda x, s, b: F.instance_norm(x, weight=s, bias=b)),
    ("LRN", [(2, 4, 6)], {"size": 3},
     lambda x: x / (1 + 1e-4 / 3 * F.pad(x.square(), (0, 0, 1, 1)).unfold(1, 3, 1).sum(-1)) ** 0.75),
    ("GridSample", [(2, 3, 4, 5), (2, 3, 2, 2)], {}, lambda x, g: F.grid_sample(x, g, align_corners=False)),
    ("DepthToSpace", [(1, 4, 2, 3)], {"blocksize": 2, "mode": "CRD"}, lambda x: F.pixel_shuffle(x, 2)),
]


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("op, shapes, attrs, f", OPERATORS, ids=[f"{o[0]}-{i}" for i, o in enumerate(OPERATORS)])
def test_halves(op, shapes, attrs, f, dtype):
    """Results and gradients are those of float64 arithmetic on the rounded inputs, rounded once more,
    give or take a unit.
    """
    generator = torch.Generator().manual_seed(3)
    tensors = [(torch.rand(*shape, generator=generator) * 2 - 1).to(dtype) for shape in shapes]
    session = half_session(op, shapes, attrs, dtype)
    leaves = [t.double().requires_grad_() for t in tensors]
    want = f(*leaves)
    upstream = (torch.rand(want.shape, generator=generator) * 2 - 1).to(dtype)
    wanted = torch.autograd.grad(want, leaves, upstream.double())
    outputs, grads = call(session, tensors, b"\1" * len(shapes), [upstream])
    unit = torch.finfo(dtype).eps
    for got, expected in [(outputs[0], want), *zip(grads, wanted)]:
        assert got.dtype == dtype and got.shape == expected.shape
        error = (got.double() - expected).abs().max().item()
        assert error <= 2 * unit * max(expected.abs().max().item(), 1.0), error


def half_session(op, shapes, attrs, dtype):
    from onnx import TensorProto, ValueInfoProto, helper

    from onnxtrain import _C
    number = TensorProto.FLOAT16 if dtype == torch.float16 else TensorProto.BFLOAT16
    names = [f"x{i}" for i in range(len(shapes))]
    node = helper.make_node(op, names, ["y"], **attrs)
    inputs = [helper.make_tensor_value_info(n, number, s) for n, s in zip(names, shapes)]
    graph = helper.make_graph([node], "half", inputs, [ValueInfoProto(name="y")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)],
                                        ir_version=10).SerializeToString())
