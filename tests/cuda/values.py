"""Operators whose values decide about sizes and addresses, on a device: NonZero of several tiles, recurrent steps of
sequences that end early, TopK of ties, and what the message says where an index, a length or a label is out of range. programs.py
runs these.
"""

from __future__ import annotations

import onnx
import torch

from onnxtrain import _C

HEAD = '<ir_version: 10, opset_import: ["" : 18, "ai.onnxtrain" : 1]> '
INDEXED = "float[4, 3] x, int64[2, 3] i, float[2, 3] u"
CTC = "float[5, 2, 4] x, int64[2, 3] t, int64[2] f, int64[2] l"
X, LABELS, FRAMES, LENGTHS = torch.rand(5, 2, 4) - 2, [[1, 2, 3], [3, 1, 0]], [5, 4], [2, 1]
# Inputs, result, node, values out of range, and what the message says.
REFUSED = {
    "ScatterElements": (INDEXED, "float[4, 3] y", "y = ScatterElements(x, i, u)",
                        [torch.rand(4, 3), [[0, 1, 2], [3, 4, 0]], torch.rand(2, 3)], "index 4 at position 4"),
    "ScatterND": ("float[4, 3] x, int64[2, 1] i, float[2, 3] u", "float[4, 3] y", "y = ScatterND(x, i, u)",
                  [torch.rand(4, 3), [[0], [-5]], torch.rand(2, 3)], "index -5 at position 1"),
    "GatherND": ("float[4, 3] x, int64[2, 2] i", "float[2] y", "y = GatherND(x, i)",
                 [torch.rand(4, 3), [[3, 2], [0, 3]]], "index 3 at position 3"),
    "GatherElements": ("float[4, 3] x, int64[2, 3] i", "float[2, 3] y", "y = GatherElements(x, i)",
                       [torch.rand(4, 3), [[0, 1, 2], [3, 0, -5]]], "index -5 at position 5"),
    "GroupedMatMul": ("float[4, 3] x, float[2, 3, 2] w, int64[2] e", "float[4, 2] y",
                      "y = ai.onnxtrain.GroupedMatMul(x, w, e)",
                      [torch.rand(4, 3), torch.rand(2, 3, 2), [1, 5]], "index 5 at position 1"),
    "CTCLoss frames": (CTC, "float[2] y", "y = ai.onnxtrain.CTCLoss(x, t, f, l)", [X, LABELS, [5, 6], LENGTHS],
                       "length 6 of sample 1 is outside 0 to 5"),
    "CTCLoss length": (CTC, "float[2] y", "y = ai.onnxtrain.CTCLoss(x, t, f, l)", [X, LABELS, FRAMES, [-1, 1]],
                       "length -1 of sample 0 is outside 0 to 3"),
    "CTCLoss label": (CTC, "float[2] y", "y = ai.onnxtrain.CTCLoss(x, t, f, l)",
                      [X, [[1, 4, 3], [3, 1, 0]], FRAMES, LENGTHS],
                      "label 4 at position 1 is out of range for 4 classes"),
}


LSTM = HEAD + '''g (float[6, 3, 5] x, float[2, 28, 5] w, float[2, 28, 7] r, float[2, 56] b, int32[3] l)
    => (y, h, c) { y, h, c = LSTM <hidden_size = 7, direction = "bidirectional"> (x, w, r, b, l) }'''


def recurrent() -> tuple[bytes, list[torch.Tensor]]:
    tensors = [torch.randn(*shape) / 2 for shape in ((6, 3, 5), (2, 28, 5), (2, 28, 7), (2, 56))]
    return onnx.parser.parse_model(LSTM).SerializeToString(), [*tensors, torch.tensor([6, 2, 4], dtype=torch.int32)]


def model_of(inputs: str, result: str, nodes: str) -> bytes:
    return onnx.parser.parse_model(f"{HEAD} g ({inputs}) => ({result}) {{ {nodes} }}").SerializeToString()


def refused(device: str, place: str) -> None:
    """The error comes with the call, or on a GPU with the next one, which looks at the device; then the session goes
    on.
    """
    for name, (inputs, result, nodes, given, message) in REFUSED.items():
        session = _C.Session(model_of(inputs, result, nodes), 16, device)
        tensors = [torch.as_tensor(v).to(place) for v in given]
        fine = [t if t.is_floating_point() else torch.ones_like(t) for t in tensors]
        try:
            session.forward(tensors, bytes(len(tensors)))
            if place != "cpu":
                torch.cuda.synchronize()
                session.forward(fine, bytes(len(tensors)))
        except IndexError as error:
            assert message in str(error) and name.split()[0] in str(error), f"{name}: {error}"
        else:
            raise AssertionError(f"{name}: a value out of range passed")
        (y,), _ = session.forward(fine, bytes(len(tensors)))
        assert torch.isfinite(y).all(), name


def nonzero(device: str, place: str) -> set[str]:
    """A first program counts, and a second one has the coordinates of as many elements; of one tile and of more."""
    used: set[str] = set()
    _C.set_timing(True, True)
    for shape in ((3,), (70, 61), (2, 1024), (0, 5)):
        dims = ", ".join(map(str, shape))
        session = _C.Session(model_of(f"float[{dims}] x", "int64[d, n] y", "y = NonZero(x)"), 16, device)
        for share in (0.0, 0.3, 1.0):
            x = (torch.rand(shape) < share).float() * torch.where(torch.rand(shape) < 0.5, -1.5, float("nan"))
            (y,), _ = session.forward([x.to(place)], b"\0")
            assert torch.equal(y.cpu(), x.nonzero().T), f"{shape}, {share}"
        used |= {f"{operator}:{kernel}" for *_, steps in session.timings() for _, operator, kernel, *_ in steps}
    _C.set_timing(True)
    assert {"CountNonZero", "NonZeroOf"} <= {name.split(":")[0] for name in used}, used
    return used


KINDS = {torch.float32: "float", torch.float64: "double", torch.int32: "int32", torch.int64: "int64",
         torch.uint64: "uint64"}


def ties(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Few different numbers, the largest and the smallest, and for floats NaN, infinities and both zeros."""
    torch.manual_seed(len(shape))
    x = torch.randint(0, 40, shape) * (1 if dtype == torch.uint64 else 3) - (0 if dtype == torch.uint64 else 60)
    if not dtype.is_floating_point:
        limit = torch.iinfo(torch.int64 if dtype == torch.uint64 else dtype)
        x[torch.rand(shape) < 0.05] = limit.max
        x[torch.rand(shape) < 0.05] = limit.min
        return x.to(dtype) if dtype != torch.uint64 else x.view(torch.uint64)
    special = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    mixed = torch.where(torch.rand(shape) < 0.2, special[torch.randint(0, 6, shape)], x / 7)
    return mixed.to(dtype)


def selected(device: str, place: str) -> set[str]:
    """TopK by a search and by digits, of ties, as on the CPU: every position; or the values alone."""
    used: set[str] = set()
    for dtype, kind in KINDS.items():
        for shape, axis, k in (((3, 700), 1, 9), ((2, 700, 3), 1, 130), ((1, 65), -1, 65), ((2, 9), 1, 5),
                               ((300, 2), 0, 256)):
            x = ties(dtype, shape)
            for largest in (0, 1):
                for outputs in ("y, i", "y", ", i"):
                    dims = [k if d == axis % len(shape) else n for d, n in enumerate(shape)]
                    results = ", ".join(f"{kind if name == 'y' else 'int64'}{dims} {name}" for name in "yi"
                                        if name in outputs)
                    node = f"{outputs} = TopK <axis = {axis}, largest = {largest}> (x, k)"
                    model = model_of(f"{kind}{list(shape)} x", results, f"k = Constant <value_ints = [{k}]> () {node}")
                    want, _ = _C.Session(model, 16, "cpu").forward([x], b"\0")
                    session = _C.Session(model, 16, device)
                    got, _ = session.forward([x.to(place)], b"\0")
                    for a, b in zip(got, want, strict=True):
                        same = torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
                        assert same, (dtype, shape, k, largest, outputs)
                    used |= {f"{operator}:{kernel}" for _, operator, kernel, *_ in session.timeline()}
    return used
