"""Reductions and normalizations on a device against torch in float64, 16-bit floats included; for programs.py."""

from __future__ import annotations

import onnx
import torch

from onnxtrain import _C

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}
ULPS = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2e-6, torch.float64: 1e-13}


def place(device: str) -> str:
    return device if device.startswith("cuda") else "cpu"


def session_of(text: str, device: str) -> _C.Session:
    header = '<ir_version: 10, opset_import: ["" : 18, "ai.onnxtrain" : 1]>\n'
    return _C.Session(onnx.parser.parse_model(header + text).SerializeToString(), 16, device)


def kernels(session: _C.Session) -> set[str]:
    return {f"{operator}:{kernel}" for _, operator, kernel, *_ in session.timeline()}


def shifted(x: torch.Tensor, offset: int, device: str) -> torch.Tensor:
    """x on the device, `offset` elements behind an aligned address."""
    flat = torch.zeros(x.numel() + offset, dtype=x.dtype, device=place(device))
    flat[offset:] = x.flatten().to(flat.device)
    return flat[offset:].view(x.shape)


def assert_near(got: torch.Tensor, want: torch.Tensor, ulp: float, scale: torch.Tensor | float, what: object) -> None:
    """got is `want`, rounded once, of terms that add up to `scale` in float32 or float64."""
    exact = 1e-15 if got.dtype == torch.float64 else 3e-7
    far = (got.cpu().double() - want).abs() - 1.01 * ulp * want.abs() - exact * scale
    assert far.max() <= 0, (what, far.max().item())


# Shape, axes, offset in elements: columns in one part and in several, in chunks of 16 bytes and in single elements, few
# and many, of several matrices; rows that are short, long, or one that is reduced in parts; neither.
SUMS = (((1500, 24), 0, 0), ((2100, 8), 0, 0), ((2100, 8), 0, 1), ((700, 33), 0, 0), ((40, 264), 0, 0), ((2, 300, 16), 1, 0),
        ((9000, 2), 0, 0), ((5, 48), 1, 0), ((5, 1001), 1, 0), ((1, 9000), 1, 0), ((2, 8200), 1, 3), ((4, 6, 8), (0, 2), 0))


def sums(device: str) -> set[str]:
    """Sums, means and maxima in all floats: 16-bit ones are added in float32, and twice the same bits come out."""
    used: set[str] = set()
    for dtype, name in NAMES.items():
        for op, of in (("ReduceSum", torch.sum), ("ReduceMean", torch.mean), ("ReduceMax", torch.amax)):
            for shape, axis, offset in SUMS:
                axes = axis if isinstance(axis, tuple) else (axis,)
                torch.manual_seed(1)
                x = (torch.randn(shape) + 0.25).to(dtype)
                values = ", ".join(map(str, axes))
                session = session_of(f"""g ({name}[{", ".join(map(str, x.shape))}] x) => (y) {{
                    axes = Constant <value = int64[{len(axes)}] {{{values}}}> ()
                    y = {op} <keepdims = 0> (x, axes)
                }}""", device)
                given = [shifted(x, offset, device)]
                got, again = (session.forward(given, b"\0")[0][0].cpu() for _ in range(2))
                what = (op, dtype, shape, axis, offset)
                assert got.dtype == dtype and torch.equal(got, again), what
                scale = x.double().abs().sum(axes) / (1 if op == "ReduceSum" else x.numel() / got.numel())
                assert_near(got, of(x.double(), axes), 0 if op == "ReduceMax" else ULPS[dtype], scale, what)
                used |= kernels(session)
    return used
