"""Reductions, normalizations, losses and gates on a device against torch in float64, 16-bit floats included; for
programs.py.
"""

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
SUMS = (((1500, 24), 0, 0), ((2100, 8), 0, 0), ((2100, 8), 0, 1), ((700, 33), 0, 0), ((40, 264), 0, 0),
        ((2, 300, 16), 1, 0), ((9000, 2), 0, 0), ((5, 48), 1, 0), ((5, 1001), 1, 0), ((1, 9000), 1, 0),
        ((2, 8200), 1, 3), ((4, 6, 8), (0, 2), 0))


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


# A residual is added before the norm and its gradient behind; the norm's result goes on in H, or in both types.
LAYER_NORM = "y = LayerNormalization <axis = -1> (s, w, b)"
RMS_NORM = """two = Constant <value = X {2}> ()  eps = Constant <value = X {1e-5}> ()
    last = Constant <value = int64[1] {-1}> ()
    p = Pow(s, two)  m = ReduceMean <keepdims = 1> (p, last)  t = Add(m, eps)  q = Sqrt(t)  i = Reciprocal(q)
    u = Mul(s, i)  y0 = Mul(w, u)  y = Add(y0, b)"""
NORMS = {
    "pre": """g (X[r, n] x, H[r, n] a, X[n] w, X[n] b) => (H[r, n] z, X[r, n] s) {
        c = Cast <to = XCODE> (a)  s = Add(x, c)  NORM  z = Cast <to = HCODE> (y) }""",
    "post": """g (X[r, n] x, H[r, n] a, X[n] w, X[n] b) => (H[r, n] z, X[r, n] y) {
        c = Cast <to = XCODE> (a)  s = Add(c, x)  NORM  z = Cast <to = HCODE> (y) }""",
    "alone": """g (H[r, n] x, H[r, n] a, X[n] w, X[n] b) => (H[r, n] z) {
        h = Add(x, a)  s = Cast <to = XCODE> (h)  NORM  z = Cast <to = HCODE> (y) }""",
}
# Rows and columns: in chunks, one or two for a thread, for one row of a block or several; in single elements.
NORM_SIZES = [(1, 8), (37, 24), (5, 33), (70, 512), (9, 840), (3, 1032)]
LARGE_NORMS = [(4099, 768), (700, 3072), (513, 4096), (300, 8192), (9, 8200)]


def layer_norm(s: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(s, s.shape[-1:], w, b, 1e-5)


def rms_norm(s: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return w * (s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-5)) + b


def check_norm(form: str, norm: str, wide: torch.dtype, half: torch.dtype, shape: tuple[int, int], offset: int,
               device: str) -> set[str]:
    """One step against float64 torch, with the roundings that the program names."""
    text = NORMS[form].replace("NORM", LAYER_NORM if norm == "layer" else RMS_NORM)
    code = {torch.float32: "1", torch.float64: "11", torch.float16: "10", torch.bfloat16: "16"}
    for name, of in (("XCODE", code[wide]), ("HCODE", code[half]), ("X[", NAMES[wide] + "["), ("H[", NAMES[half] + "["),
                     ("X {", NAMES[wide] + " {"), ("[r, n]", f"[{shape[0]}, {shape[1]}]"), ("[n]", f"[{shape[1]}]")):
        text = text.replace(name, of)
    torch.manual_seed(shape[1])
    x = torch.randn(shape).mul(2).add(0.5).to(half if form == "alone" else wide)
    a, w, b = torch.randn(shape).to(half), torch.randn(shape[1]).to(wide), torch.randn(shape[1]).to(wide)
    session = session_of(text, device)
    tensors = [shifted(x, offset, device), shifted(a, offset, device), w.to(place(device)), b.to(place(device))]
    outputs, run = session.forward(tensors, b"\1\1\1\1")
    given = [torch.randn(o.shape).to(o.dtype) for o in outputs]
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    got = [*outputs, *run.backward(saved, [g.to(place(device)) for g in given])]

    # The sum, as it was rounded, is a leaf; what the program rounds behind it is within one rounding.
    s = (x + a).double() if form == "alone" else (x.to(wide) + a.to(wide)).double()
    leaves = [t.double().requires_grad_() for t in (s, w, b)]
    y = (layer_norm if norm == "layer" else rms_norm)(*leaves)
    second = leaves[0] if form == "pre" else y
    torch.autograd.backward([y, second][:len(given)], [g.double() for g in given])
    ds, dw, db = (t.grad for t in leaves)
    want = [y.detach(), second.detach()][:len(given)] + [ds, ds, dw, db]
    terms = sum(g.double().abs() for g in given) * leaves[1].detach().abs()
    row = terms.mean(-1, keepdim=True) / s.std(-1, keepdim=True, unbiased=False)
    columns = (sum(g.double().abs() for g in given) * 4).sum(0)
    scales = [4.0, 4.0][:len(given)] + [8 * row, 8 * row, columns, columns]
    for k, (one, right, scale) in enumerate(zip(got, want, scales, strict=True)):
        assert_near(one, right, ULPS[one.dtype], scale, (form, norm, wide, half, shape, offset, k))
    text = session.text("program")
    assert "FusedNorm " in text and "FusedNormGrad " in text and (norm == "rms") == ("rms = 1" in text), text
    if half != wide and (norm, form) == ("layer", "pre"):  # no Cast is left, and no Add
        assert not kernels(session) - {"FusedNorm:cuda_fused_norm", "FusedNormGrad:cuda_fused_norm_grad"}, text
    return kernels(session)


def apart(device: str) -> set[str]:
    """LayerNormalization as a node of its own, as it is without the pass."""
    used: set[str] = set()
    _C.disable_passes(["fuse_norm"])
    for shape in ((7, 24), (5, 33)):
        session = session_of(f"g (float[{shape[0]}, {shape[1]}] s, float[{shape[1]}] w, float[{shape[1]}] b) => (y) "
                             f"{{ {LAYER_NORM} }}", device)
        torch.manual_seed(0)
        leaves = [torch.randn(s).requires_grad_() for s in (shape, shape[1:], shape[1:])]
        tensors = [t.detach().to(place(device)) for t in leaves]
        (y,), run = session.forward(tensors, b"\1\1\1")
        dy = torch.randn(shape)
        saved = [tensors[i] for i in run.saved_inputs] + [[y][i] for i in run.saved_outputs]
        got = [y, *run.backward(saved, [dy.to(y.device)])]
        used |= kernels(session)
        want = layer_norm(*leaves)
        want.backward(dy)
        for one, right in zip(got, [want.detach(), *(t.grad for t in leaves)], strict=True):
            torch.testing.assert_close(one.cpu(), right, rtol=1e-5, atol=1e-5)
    _C.disable_passes([])
    assert used == {"LayerNormalization:cuda_norm", "LayerNormGrad:cuda_norm_grad"}, used
    return used


def norms(device: str) -> set[str]:
    used = apart(device)
    sizes = NORM_SIZES + (LARGE_NORMS if device.startswith("cuda") else [])
    for form in NORMS:
        for norm in ("layer", "rms"):
            for wide, half in ((torch.float32, torch.bfloat16), (torch.float32, torch.float16),
                               (torch.float32, torch.float32), (torch.float64, torch.float64)):
                for shape in sizes:
                    used |= check_norm(form, norm, wide, half, shape, 0, device)
                used |= check_norm(form, norm, wide, half, (5, 16), 1, device)
    return used


HEAD = """g (TYPE[16, 2048] x, TYPE[8197, 2048] w, int64[16] labels, float[8197] v) => (OUTPUTS) {
    z = Gemm <transB = 1> (x, w)
    wide = Cast <to = 1> (z)
    y = SoftmaxCrossEntropyLoss <ignore_index = -1, reduction = "REDUCTION"> (wide, labels, v) }"""


def step_of_head(name: str, outputs: str, reduction: str, tensors: list[torch.Tensor],
                 device: str) -> tuple[list[torch.Tensor], _C.Session]:
    """The loss, and the gradients of x and w."""
    text = HEAD.replace("TYPE", name).replace("OUTPUTS", outputs).replace("REDUCTION", reduction)
    session = session_of(text, device)
    results, run = session.forward(tensors, b"\1\1\0\0")
    saved = [tensors[i] for i in run.saved_inputs] + [results[i] for i in run.saved_outputs]
    given = [torch.full(results[0].shape, 0.75, device=place(device)), None][:len(results)]
    return [results[0].cpu(), *(g.cpu() for g in run.backward(saved, given)[:2])], session


def heads(device: str) -> set[str]:
    """An odd number of classes: the columns that align them are no classes, for labels either. Where the scores are a
    result as well, they are cut out of the aligned ones.
    """
    used: set[str] = set()
    for dtype, reduction in ((torch.bfloat16, "mean"), (torch.float16, "sum")):
        torch.manual_seed(0)
        x, w = torch.randn(16, 2048).to(dtype), torch.randn(8197, 2048).div(40).to(dtype)
        labels, v = torch.randint(0, 8197, (16,)), torch.rand(8197) + 0.1
        labels[3], labels[5] = -1, 8196
        tensors = [t.to(place(device)) for t in (x, w, labels, v)]
        got, session = step_of_head(NAMES[dtype], "float y", reduction, tensors, device)
        cut, other = step_of_head(NAMES[dtype], f"float y, {NAMES[dtype]} z", reduction, tensors, device)
        leaves = [t.double().requires_grad_() for t in (x, w)]
        scores = leaves[0] @ leaves[1].T
        want = torch.nn.functional.cross_entropy(scores, labels, v.double(), ignore_index=-1, reduction=reduction)
        want.backward(torch.full(want.shape, 0.75, dtype=torch.double))
        for a, b, right in zip(got, cut, [want.detach(), *(t.grad for t in leaves)], strict=True):
            limit = 4 * ULPS[dtype] * right.abs().max()
            assert (a.double() - right).abs().max() < limit and (a.double() - b.double()).abs().max() < limit / 4
        assert "classes = 8197" in session.text("program") and "PutSlice" not in session.text("program")
        assert "classes = 8197" not in other.text("program") and "PutSlice" in other.text("program")
        used |= kernels(session)
        tensors[2][7] = 8198  # a column, and no class
        try:
            step_of_head(NAMES[dtype], "float y", reduction, tensors, device)
            session.forward(tensors, bytes(4))
            raise AssertionError("a label out of range is no error")
        except IndexError as error:
            assert "8198" in str(error) and "8197" in str(error), error
    return used


GATED = """g (TYPE[1024, 64] x, float[64, 640] a, TYPE[64, 640] b) => (z) {
    h = Cast <to = CODE> (a)  u = MatMul(x, h)  v = MatMul(x, b)  s = Sigmoid(u)  t = Mul(u, s)  z = Mul(t, v) }"""


def step_of_gate(name: str, tensors: list[torch.Tensor], dz: torch.Tensor,
                 device: str) -> tuple[list[torch.Tensor], _C.Session]:
    session = session_of(GATED.replace("TYPE", name).replace("CODE", {"float16": "10", "bfloat16": "16"}[name]), device)
    (z,), run = session.forward(tensors, b"\1\1\1")
    saved = [tensors[i] for i in run.saved_inputs] + [[z][i] for i in run.saved_outputs]
    return [t.cpu() for t in (z, *run.backward(saved, [dz]))], session


def gates(device: str) -> set[str]:
    """What a gate computes in float32 is computed again for its gradient: with the same bits, and in less memory. The
    gradient of a float32 weight is a product's float32 result, without a Cast.
    """
    used: set[str] = set()
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        leaves = [torch.randn(shape).div(scale).to(dtype) for shape, scale in (((1024, 64), 1), ((64, 640), 8),
                                                                               ((64, 640), 8))]
        leaves[1] = leaves[1].float()
        tensors, dz = [t.to(place(device)) for t in leaves], torch.randn(1024, 640).to(dtype).to(place(device))
        got, session = step_of_gate(NAMES[dtype], tensors, dz, device)
        _C.disable_passes(["recompute"])
        kept, other = step_of_gate(NAMES[dtype], tensors, dz, device)
        _C.disable_passes([])
        assert all(torch.equal(a, b) for a, b in zip(got, kept, strict=True))
        before, after = other.stats(), session.stats()
        assert not before["recomputed_nodes"] and after["recomputed_nodes"]
        assert before["kept_bytes"] - after["kept_bytes"] >= 3 * 1024 * 640 * 4, (before, after)
        backward = session.text("program").split("# backward")[1]
        assert " = Cast <" not in backward and " float[1024,640]" not in backward, backward
        used |= kernels(session)
        wide = [t.double().requires_grad_() for t in leaves]
        u, v = wide[0] @ wide[1], wide[0] @ wide[2]
        z = u * u.sigmoid() * v
        z.backward(dz.cpu().double())
        for one, right in zip(got, [z.detach(), *(t.grad for t in wide)], strict=True):
            assert one.dtype == leaves[0].dtype or right is wide[1].grad
            assert (one.double() - right).abs().max() < 8 * ULPS[dtype] * right.abs().max()
    return used
