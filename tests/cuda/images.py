"""Convolution, pooling and batch normalization of images on a device against the CPU; programs.py runs these."""

from __future__ import annotations

import itertools

import onnx
import torch
from compare import agree, place, step

from onnxtrain import _C

VISION = """<ir_version: 10, opset_import: ["" : 17, "ai.onnxtrain" : 1]>
    g (TYPE[2, 3, 9, 8] x, TYPE[4, 3, 3, 3] w, TYPE[4] b, float[4] s, float[4] t, float[4] m, float[4] v) => (TYPE[2, 4, 1, 1] z, float[4] nm, float[4] nv, TYPE[2, 3, 5, 4] k, TYPE[2, 4, 2, 3] q) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
        n, nm, nv = BatchNormalization <training_mode = 1> (c, s, t, m, v)
        r = Sigmoid(n)
        a = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (r)
        k = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x)
        z = GlobalAveragePool(a)
        sizes = Constant <value_ints = [2, 3]> ()
        q = ai.onnxtrain.AdaptiveAveragePool(r, sizes)
    }"""


def vision(device: str) -> set[str]:
    """A convolutional network in all float dtypes: statistics of 16-bit images are float32,
    and nothing is widened on the way.
    """
    used: set[str] = set()
    for dtype, name, tol in ((torch.float32, "float", 2e-5), (torch.float16, "float16", 1e-2),
                             (torch.bfloat16, "bfloat16", 6e-2)):
        torch.manual_seed(0)
        text = onnx.parser.parse_model(VISION.replace("TYPE", name)).SerializeToString()
        images = [torch.randn(2, 3, 9, 8), torch.randn(4, 3, 3, 3) / 5, torch.randn(4)]
        tensors = [t.to(dtype) for t in images] + [torch.rand(4) + 0.5, torch.randn(4), torch.randn(4),
                                                   torch.rand(4) + 0.5]
        model = _C.Session(text, 16, device)
        mask = bytes([1, 1, 1, 1, 1, 0, 0])
        used |= agree(device, text, tensors, tol, mask=mask)
        model.forward([t.to(place(device)) for t in tensors], mask)
        assert not [kernel for _, kernel, backward in model.kernels() if "cast" in kernel and not backward]
    return used


def vision_in_planes(device: str) -> set[str]:
    """The same where 16-bit images keep their order, as where cuDNN has no plan."""
    _C.disable_passes(["channels_last"])
    try:
        used = vision(device)
    finally:
        _C.disable_passes([])
    assert not any("graph" in kernel for kernel in used), used
    return used


NORMS_OF_IMAGES = """<ir_version: 10, opset_import: ["" : 17]>
    g (TYPE[DIMS] x, TYPE[DIMS] r, WIDE[C] s, WIDE[C] t, WIDE[C] m, WIDE[C] v) => (TYPE[DIMS] y, TYPE[DIMS] z, TYPE[DIMS] w) {
        a = BatchNormalization <training_mode = MODE> (x, s, t, m, v)
        b = Add(a, r)  y = Relu(b)
        c = BatchNormalization <training_mode = MODE> (r, s, t, m, v)
        z = Relu(c)
        d = BatchNormalization <training_mode = MODE> (y, s, t, m, v)
        w = Add(d, z)
    }"""


def norms_of_images(device: str) -> set[str]:
    """Batch normalization with what is behind it: a residual and a Relu, a Relu, a residual. In 16 bits, a few sums
    are on the other side of 0 than on the CPU, which rounds each operator: the norms of all differences are compared.
    """
    used: set[str] = set()
    types = ((torch.float32, "float", "float", 1e-6), (torch.float64, "double", "double", 1e-14),
             (torch.float16, "float16", "float", 5e-2), (torch.bfloat16, "bfloat16", "float", 5e-2))
    sizes = ((6, 5, 7, 4), (33, 24), (70, 40), (5, 3, 1, 1), (4, 16, 9))
    for dims, training, (dtype, name, wide, tol) in itertools.product(sizes, (1, 0), types):
        torch.manual_seed(len(dims) + training)
        text = NORMS_OF_IMAGES.replace("TYPE", name).replace("WIDE", wide).replace("MODE", str(training))
        text = text.replace("DIMS", ", ".join(map(str, dims))).replace("[C]", f"[{dims[1]}]")
        model, mask = onnx.parser.parse_model(text).SerializeToString(), bytes([1, 1, 1, 1, 0, 0])
        channels = [torch.rand(dims[1]) + 0.5, torch.randn(dims[1]), torch.randn(dims[1]), torch.rand(dims[1]) + 0.5]
        tensors = [*(torch.randn(dims).to(dtype) for _ in range(2)),
                   *(c.to(torch.float64 if wide == "double" else torch.float32) for c in channels)]
        want, got = step(model, tensors, "cpu", 3, mask), step(model, tensors, device, 3, mask)
        for k, (a, b) in enumerate(zip([*want[0], *want[1]], [*got[0], *got[1]], strict=True)):
            assert (a is None) == (b is None)
            if a is not None:
                error = (a.double() - b.double()).norm().item() / max(1.0, a.double().norm().item())
                assert error < tol, f"{dims}, {name}, training {training}, tensor {k}: {error:.2e}"
        assert {"FusedBatchNorm:cuda_batchnorm", "BatchNormGrad:cuda_batchnorm_grad"} <= got[2], got[2]
        assert not {"Relu:cuda_elementwise", "ReluGrad:cuda_elementwise"} & got[2], got[2]
        used |= got[2]
    return used


GROUPS = """<ir_version: 10, opset_import: ["" : 21]> g (TYPE[DIMS] x, TYPE[6] s, TYPE[6] t) => (TYPE[DIMS] y, TYPE[DIMS] z) {
    y = GroupNormalization <num_groups = 3> (x, s, t)  z = InstanceNormalization(x, t, s) }"""


def norms_of_groups(device: str) -> set[str]:
    """Norms of groups read and write 16 bits, in accesses of 16 bytes where these fit a channel, and one by one."""
    used: set[str] = set()
    for name, dtype, tol in (("float", torch.float32, 2e-5), ("double", torch.float64, 1e-11),
                             ("float16", torch.float16, 4e-3), ("bfloat16", torch.bfloat16, 3e-2)):
        for dims in ((2, 6, 8, 9), (3, 6, 5, 7), (2, 6, 3, 200), (2, 6, 1)):
            torch.manual_seed(0)
            text = onnx.parser.parse_model(GROUPS.replace("TYPE", name).replace("DIMS", ", ".join(map(str, dims))))
            tensors = [t.to(dtype) for t in (torch.randn(dims) + 3, torch.randn(6), torch.randn(6))]
            session = _C.Session(text.SerializeToString(), 16, device)
            used |= agree(device, text.SerializeToString(), tensors, tol)
            session.forward([t.to(place(device)) for t in tensors], b"\1\1\1")
            casts = [kernel for op, kernel, backward in session.kernels() if op == "Cast" and not backward]
            assert len(casts) <= 4, casts  # of scales and biases
    return used
