"""Copies between layouts, and indices of tensors that have many dims, on a device against the CPU; for programs.py."""

from __future__ import annotations

import onnx
import torch
from compare import agree, operators, place

from onnxtrain import _C


def copies(device: str) -> set[str]:
    """Copies between layouts of every size of element: with units of 16 bytes, with narrower ones where dims or
    distances are odd, through tiles where another dim is contiguous, and back to front.
    """
    used: set[str] = set()
    for name, dtype in (("bool", torch.bool), ("bfloat16", torch.bfloat16), ("float", torch.float32),
                        ("int64", torch.int64)):
        for shape in ([2, 9, 3, 16], [1, 8, 10, 6], [3, 1, 5, 7], [8, 33, 1, 40], [1, 70, 1, 130]):
            text = """<ir_version: 10, opset_import: ["" : 18]> g (TYPE[SHAPE] x) => (a, b, c, d, e, f, h, i) {
                a = Transpose <perm = [0, 2, 1, 3]> (x)  b = Transpose <perm = [3, 1, 0, 2]> (x)
                c = Transpose <perm = [0, 1, 3, 2]> (x)  one = Constant <value_ints = [1]> ()
                end = Constant <value_ints = [1000]> ()  three = Constant <value_ints = [3]> ()
                d = Slice(x, one, end, three)  least = Constant <value_ints = [-1000]> ()
                last = Constant <value_ints = [-1]> ()  e = Slice(x, last, least, three, last)
                f = Concat <axis = 3> (x, d, x)  h = Concat <axis = 1> (x, x)
                wide = Constant <value_ints = [4, 1, 1, 1, 1]> ()  i = Expand(x, wide)
            }""".replace("TYPE", name).replace("SHAPE", ", ".join(map(str, shape)))
            model = onnx.parser.parse_model(text).SerializeToString()
            x = (torch.randn(shape) * 9).to(dtype)
            both = [_C.Session(model, 16, d) for d in ("cpu", device)]
            want, got = (s.forward([x.to(place(d))], b"\0")[0]
                         for s, d in zip(both, ("cpu", device), strict=True))
            for k, (a, b) in enumerate(zip(want, got, strict=True)):
                assert torch.equal(a, b.cpu()), (name, shape, k)
            used |= {f"{operator}:{kernel}" for operator, kernel in operators(both[1])}
    return used


def indices(device: str) -> set[str]:
    """Dims that no neighbour joins: eight of them, some of 1; broadcasts; back to front; distances above 2^31."""
    used: set[str] = set()
    apart = """<ir_version: 10, opset_import: ["" : 18]> g (TYPE[2, 1, 3, 2, 1, 2, 5, 3] x, TYPE[2, 4, 1, 5, 1] y) => (a, b, c, d, e) {
        a = Add(x, y)  axes = Constant <value_ints = [1, 3, 6]> ()  b = ReduceMax(a, axes)  c = ReduceL2(a, axes)
        most = Constant <value_ints = [100, 100, 100]> ()  least = Constant <value_ints = [-100, -100, -100]> ()
        back = Constant <value_ints = [-1, -2, -1]> ()  d = Slice(a, most, least, axes, back)
        e = Transpose <perm = [6, 4, 0, 7, 2, 1, 5, 3]> (a) }"""
    for name, dtype in (("float", torch.float32), ("double", torch.float64)):
        torch.manual_seed(0)
        used |= agree(device, onnx.parser.parse_model(apart.replace("TYPE", name)).SerializeToString(),
                      [torch.randn(2, 1, 3, 2, 1, 2, 5, 3).to(dtype), torch.randn(2, 4, 1, 5, 1).to(dtype)])
    tiled = """<ir_version: 10, opset_import: ["" : 18]> g (TYPE[2, 70, 3, 1, 2, 2, 2, 34] x) => (y, z) {
        y = Transpose <perm = [5, 0, 3, 7, 4, 2, 6, 1]> (x)  z = Transpose <perm = [7, 2, 6, 4, 5, 3, 0, 1]> (x) }"""
    for name, dtype in (("uint8", torch.uint8), ("bfloat16", torch.bfloat16), ("double", torch.float64)):
        x = (torch.randn(2, 70, 3, 1, 2, 2, 2, 34) * 9).abs().to(dtype)
        session = _C.Session(onnx.parser.parse_model(tiled.replace("TYPE", name)).SerializeToString(), 16, device)
        for y, order in zip(session.forward([x.to(place(device))], b"\0")[0],
                            ((5, 0, 3, 7, 4, 2, 6, 1), (7, 2, 6, 4, 5, 3, 0, 1)), strict=True):
            assert torch.equal(y.cpu(), x.permute(order)), (name, order)
        used |= {f"{operator}:{kernel}" for operator, kernel in operators(session)}
    far = """<ir_version: 10, opset_import: ["" : 18]> g (uint8[2147483650] x) => (y) {
        one = Constant <value_ints = [1]> ()  end = Constant <value_ints = [3000000000]> ()
        zero = Constant <value_ints = [0]> ()  step = Constant <value_ints = [2147483648]> ()
        y = Slice(x, one, end, zero, step) }"""
    x = torch.zeros(2**31 + 2, dtype=torch.uint8)
    x[0], x[1], x[2**31 + 1] = 5, 7, 9
    session = _C.Session(onnx.parser.parse_model(far).SerializeToString(), 16, device)
    assert session.forward([x.to(place(device))], b"\0")[0][0].tolist() == [7, 9]
    return used | {f"{operator}:{kernel}" for operator, kernel in operators(session)}
