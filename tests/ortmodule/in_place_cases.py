"""The cases of in_place.py: what is written, whose memory it is, which view of it, in which mode, and what reads it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

PLACES = ("made", "argument", "leaf", "buffer", "attribute", "frozen", "parameter")
MODES = ("plain", "no_grad", "view in no_grad", "autocast", "evaluated")
READS = ("all", "returned", "base", "result", "alias", "twice", "none")
STEEP = ("tan",)  # a last digit of float32 near a pole is a first one two calls later
OWN_NUMBERS = {"nn.functional.dropout"}  # its mask is the engine's own


@dataclasses.dataclass
class Case:
    """One write. `tensors` are its operands and the memory it writes: name, where it lies, contents."""

    name: str
    lines: list[str]  # of its function, whose parameters are `self` and the operands
    results: list[str]
    tensors: list[tuple[str, str, Tensor]]
    evaluated: bool = False
    autocast: bool = False
    lower: bool = False  # whether some of it is computed in 16 bits
    steps: int = 2


# How a view is made of a base, and the base of which this view has the contents of a value.
def _framed(value: Tensor) -> Tensor | None:
    return torch.cat([value[:1], value, value[:1]]) if value.dim() and value.numel() else None


def _stepped(value: Tensor) -> Tensor | None:
    return value.repeat_interleave(2, -1) if value.dim() and value.numel() else None


def _stacked(value: Tensor) -> Tensor:
    return torch.stack([value, value])


def _transposed(value: Tensor) -> Tensor | None:
    return value.transpose(0, -1).contiguous() if value.dim() > 1 else None


def _flat(value: Tensor) -> Tensor | None:
    flat = value.reshape(-1)
    return torch.cat([flat[:1], flat, flat[:1]]) if value.numel() else None


def _on_diagonal(value: Tensor) -> Tensor | None:
    return torch.diag_embed(value) if value.dim() and value.numel() else None


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor | None], Callable[[str, torch.Size], str]]] = {
    "whole": (lambda value: value, lambda base, shape: base),
    "slice": (_framed, lambda base, shape: f"{base}[1:-1]"),
    "step": (_stepped, lambda base, shape: f"{base}[..., ::2]"),
    "select": (_stacked, lambda base, shape: f"{base}[1]"),
    "transpose": (_transposed, lambda base, shape: f"{base}.transpose(0, -1)"),
    "view": (lambda value: value.reshape(-1), lambda base, shape: f"{base}.view({tuple(shape)})"),
    "as_strided": (_flat, lambda base, shape: f"{base}.as_strided({tuple(shape)}, {_strides(shape)}, 1)"),
    "as_strided of a view": (_flat, lambda base, shape: f"{base}[1:].as_strided({tuple(shape)}, {_strides(shape)}, 1)"),
    "diagonal": (_on_diagonal, lambda base, shape: f"{base}.diagonal(0, -2, -1)"),
    "unsqueeze": (lambda value: value, lambda base, shape: f"{base}.unsqueeze(0)[0]"),
    "view of a view": (_stacked, lambda base, shape: f"{base}.unbind(0)[1]"),
    "data": (lambda value: value, lambda base, shape: f"{base}.data"),
    "detach": (lambda value: value, lambda base, shape: f"{base}.detach()"),
    "slice of data": (_framed, lambda base, shape: f"{base}.data[1:-1]"),
}
VIEWS["view of a view"] = (lambda value: None if _framed(value) is None else _stacked(_framed(value)),
                           lambda base, shape: f"{base}[1][1:-1]")


def case(name: str, write: str, value: Tensor, operands: dict[str, Tensor], place: str, view: str, mode: str,
         read: str) -> Case | None:
    """A write (text: {v} the view, operands by name) in one combination; None where there is no such base."""
    contents = VIEWS[view][0](value)
    if contents is None or mode == "autocast" and not any(t.is_floating_point() for t in operands.values()):
        return None
    tensors, lines = [], []
    for key, operand in operands.items():
        tensors.append((key, "leaf", operand))
    wants = contents.is_floating_point()
    if place == "made":
        tensors.append(("x", "leaf", contents.clone().requires_grad_(wants)))
        lines.append("b = x * 1" if wants else "b = x.clone()")
    elif place == "argument":
        tensors.append(("b", "argument", contents.clone().requires_grad_(wants)))
    else:
        tensors.append(("b", place, contents.clone()))
    if read in ("all", "alias", "twice"):
        lines += ["p = b * 3", "alias = b.view(b.shape)"]
    making, made = f"v = {VIEWS[view][1]('b', value.shape)}", f"r = {write.format(v='v')}"
    if mode == "no_grad":
        lines += [making, "with torch.no_grad():", f"    {made}"]
    elif mode == "view in no_grad":
        lines += ["with torch.no_grad():", f"    {making}", f"    {made}"]
    elif mode == "autocast":
        lines += [f"{key} = lowered({key})" for key, operand in operands.items() if operand.is_floating_point()]
        lines += [making, made]
    else:
        lines += [making, made]
    if read == "twice":
        lines += ["q = b * 2", made]
    results = {"all": ["p", "alias + 0", "r + 0", "v + 0", "b + 0"], "returned": ["v", "b"], "base": ["b * 2"],
               "result": ["r * 2"], "alias": ["alias * 2"], "twice": ["p", "q", "v * 3", "alias * 2"],
               "none": [f"{next(iter(operands))} * 2" if operands else "b.new_ones(2) * 3"]}[read]
    lower = mode == "autocast" or any(t.dtype == torch.bfloat16 for _, _, t in tensors)
    return Case(f"{name} | {place} | {view} | {mode} | {read}", lines, results, tensors, mode == "evaluated",
                mode == "autocast", lower)


# ---- their tables ----

SHAPE = (3, 4)


def _random(*shape: int, seed: int = 0, wants: bool = False) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_(wants)


def _core() -> Iterator[tuple[str, str, Tensor, dict[str, Tensor]]]:
    value = _random(*SHAPE, seed=1)
    same, row = {"o": _random(*SHAPE, seed=2, wants=True)}, {"o": _random(4, seed=3, wants=True)}
    wide = {"o": _random(*SHAPE, seed=4).double().requires_grad_()}
    whole = {"o": torch.arange(12).reshape(SHAPE)}
    counts = torch.arange(12).reshape(SHAPE) - 5
    mask = {"o": torch.arange(12).reshape(SHAPE) % 3 == 0}
    yield "copy_ same", "{v}.copy_(o)", value, same
    yield "copy_ broadcast", "{v}.copy_(o)", value, row
    yield "copy_ cast", "{v}.copy_(o)", value, wide
    yield "copy_ of integers", "{v}.copy_(o)", value, whole
    yield "copy_ to integers", "{v}.copy_(o)", counts, same
    yield "copy_ broadcast and cast", "{v}.copy_(o)", value, {"o": _random(4, seed=3).double().requires_grad_()}
    yield "copy_ of one number", "{v}.copy_(o)", value, {"o": torch.tensor(1.5)}
    yield "mul_ same", "{v}.mul_(o)", value, same
    yield "mul_ broadcast", "{v}.mul_(o)", value, row
    yield "add_ cast", "{v}.add_(o)", value, wide
    yield "add_ number", "{v}.add_(0.5)", value, {}
    yield "add_ integers", "{v}.add_(2)", counts, {}
    yield "fill_ tensor", "{v}.fill_(o)", value, {"o": torch.tensor(0.7, requires_grad=True)}
    yield "zero_", "{v}.zero_()", value, {}
    yield "masked_fill_", "{v}.masked_fill_(o, 2.0)", value, mask
    yield "clamp_", "{v}.clamp_(-0.5, 0.5)", value, {}
    yield "lerp_", "{v}.lerp_(o, 0.1)", value, same
    yield "detach_ after", "{v}.mul_(o).detach_()", value, same


def core() -> list[Case]:
    """A few operators in combinations of memory, view and mode: each of a third, which is another one of each operator."""
    found, reads = [], itertools.cycle(READS)
    for turn, (name, write, value, operands) in enumerate(_core()):
        every = list(itertools.product(PLACES, VIEWS, MODES))
        for place, view, mode in every[turn % 3::3]:
            found.append(case(name, write, value, operands, place, view, mode, next(reads)))
    return [each for each in found if each is not None]


def _literal(value: Any, operands: dict[str, Tensor], constants: dict[str, Any]) -> str:
    """The text of an argument; tensors become operands."""
    if isinstance(value, Tensor):
        key = f"o{len(operands)}"
        operands[key] = value
        return key
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_literal(item, operands, constants) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
    if isinstance(value, (bool, int, str, torch.dtype)) or value is None or isinstance(value, float) and (
            math.isfinite(value)):
        return repr(value)
    raise TypeError(type(value).__name__)


FUNCTIONS: dict[str, Any] = {}  # in-place functions that are no methods


def _of_opinfo(op: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[str, str, Tensor, dict[str, Tensor]]]:
    """Samples of one operator as rows of a table."""
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    rows = []
    for sample in samples:
        if not isinstance(sample.input, Tensor) or sample.input.numel() > 600:
            continue
        operands: dict[str, Tensor] = {}
        try:
            given = [_literal(item, operands, {}) for item in sample.args]
            given += [f"{key}={_literal(item, operands, {})}" for key, item in sample.kwargs.items()]
        except TypeError:
            continue
        method = getattr(op.inplace_variant, "__name__", "")
        if method.endswith("_") and hasattr(Tensor, method):
            write = f"{{v}}.{method}({', '.join(given)})"
        else:
            key = f"in_place_{op.name.replace('.', '_')}_{op.variant_test_name}"
            FUNCTIONS[key] = op.inplace_variant
            write = f"{key}({', '.join(['{v}', *given])})"
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                op.inplace_variant(sample.input.clone(), *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001  such an input is of the function that returns a new tensor
            continue
        rows.append((f"{name} {str(dtype)[6:]}", write, sample.input, operands))
    step = max(1, len(rows) // count)
    yield from rows[::step][:count]


def _cast_operands(operands: dict[str, Tensor], dtype: torch.dtype | None, wants: bool) -> dict[str, Tensor]:
    made = {}
    for key, operand in operands.items():
        operand = operand.detach().clone()
        if dtype is not None and operand.is_floating_point():
            operand = (operand * 2).to(dtype)
        made[key] = operand.requires_grad_(wants and operand.is_floating_point())
    return made


def opinfo(samples: int = 3) -> list[Case]:
    """Every in-place operator of OpInfo, each on every kind of view and of memory; what else varies takes turns."""
    from torch.testing._internal import common_methods_invocations

    common_methods_invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    found: list[Case | None] = []
    modes, reads = itertools.cycle((*MODES[:4], "plain", "plain", "evaluated")), itertools.cycle(READS)
    operators = [op for op in common_methods_invocations.op_db
                 if op.inplace_variant is not None and op.name not in OWN_NUMBERS]
    for turn, op in enumerate(operators):
        rows: list[Any] = []
        for dtype in (torch.float32, torch.int64, torch.float64, torch.bool):
            if op.name in STEEP and dtype == torch.float32:
                continue
            if dtype in op.dtypes and (dtype != torch.float64 or turn % 4 == 0 or op.name in STEEP):
                rows += _of_opinfo(op, dtype, samples if dtype == torch.float32 or not rows else 1)
        if not rows:
            continue
        casts = itertools.cycle((None, None, torch.float64, None, torch.bfloat16, None, torch.int64))
        plans = [("made", view) for view in VIEWS]
        plans += [(PLACES[1 + (i + turn) % (len(PLACES) - 1)], view) for i, view in enumerate(VIEWS)]
        plans += [(place, "whole") for place in PLACES[1:]]
        for i, (place, view) in enumerate(plans):
            name, write, value, operands = rows[(i + turn) % len(rows)]
            cast, mode, read = next(casts), next(modes), next(reads)
            changed = _cast_operands(operands, cast, (i + turn) % 3 != 0)
            label = name if cast is None or not operands else f"{name} with {str(cast)[6:]}"
            found.append(case(label, write, value.detach(), changed, place, view, mode, read))
    return [each for each in found if each is not None]


# Statements about `b`, of shape (4, 6): `o` is as large, `row` (6,), `column` (4, 1), `d` of float64, `i` indices of
# rows, `m` a mask, `n` whole numbers, `z` one number. Of the buffers of the module `self.t` is one.
STATEMENTS: dict[str, str] = {
    "index, number": "b[1] = 2.0",
    "index, row": "b[1] = row",
    "index, one": "b[-1, 2] = z",
    "index, cast": "b[2] = d[0]",
    "index, whole numbers": "b[2] = n[0]",
    "index, slice": "b[1:3] = o[1:3]",
    "index, slice broadcast": "b[:, 1:3] = column",
    "index, step": "b[::2, 1::2] = o[::2, 1::2]",
    "index, Ellipsis": "b[...] = o",
    "index, Ellipsis broadcast": "b[..., 1:] = row[1:]",
    "index, all broadcast": "b[:] = row",
    "index, None": "b[None, 1] = row",
    "index, mask number": "b[m] = 0.5",
    "index, mask of itself": "b[b > 0] = -1.0",
    "index, mask values": "b[m] = o[m]",
    "index, mask one value": "b[m] = z",
    "index, mask of rows": "b[m[:, 0]] = row",
    "index, mask and slice": "b[:, m[0]] = 0.25",
    "index, tensor": "b[i] = o[i]",
    "index, tensor number": "b[i] = 1.5",
    "index, tensor broadcast": "b[i] = row",
    "index, tensor cast": "b[i] = d[i]",
    "index, tensor second": "b[:, i] = o[:, i]",
    "index, two tensors": "b[i, i + 1] = z",
    "index, tensor and slice": "b[i, 1:3] = o[i, 1:3]",
    "index, list": "b[[0, 2]] = o[:2]",
    "index, tensor of one": "b[i[0]] = row",
    "index, +=": "b[i] += row",
    "index, slice *=": "b[1:3] *= o[1:3]",
    "index, mask -=": "b[m] -= 1",
    "index, view then index": "b.t()[1] = 3.0",
    "index, index then index": "b[1][2] = z",
    "index, index then slice": "b[1][2:4] = row[2:4]",
    "index, view as vector": "b.view(-1)[5:9] = o.reshape(-1)[5:9]",
    "index_put_ accumulate": "b.index_put_((i,), o[i], accumulate=True)",
    "index_put_ accumulate twice": "b.index_put_((torch.cat([i, i]),), row, accumulate=True)",
    "copy_ overlapping": "b[1:].copy_(b[:-1].clone())",
    "copy_ of itself transposed": "b[:, :4].copy_(b[:, :4].t().clone())",
    "copy_ of a view": "b.copy_(o.t().contiguous().t())",
    "copy_ of column": "b.copy_(column)",
    "copy_ to a row of itself": "b[0].copy_(b[1])",
    "copy_ number row": "b[0].copy_(z)",
    "+=": "b += o",
    "+= broadcast": "b += row",
    "*= number": "b *= 0.5",
    "-= cast": "b -= d",
    "/=": "b /= o.exp()",
    "**=": "b **= 2",
    "//=": "b //= 2",
    "%=": "b %= 2",
    "augmented view": "c = b[1]; c += row",
    "augmented transposed": "c = b.t(); c *= column.t()",
    "detach_": "c = b * 2; c.detach_(); b = b + c",
    "detach_ of itself": "b = b * 2; b.detach_(); b = b + o",
    "detach_ of a copy": "c = b.clone(); c.detach_(); c.mul_(2); b = b * c",
    "requires_grad_ of a copy": "c = b.detach().clone().requires_grad_(); b = b * c",
    "set data": "c = b * 1; c.data = o.detach() * 2; b = c * b",
    "set data of itself": "b.data = o.detach() * 2",
    "data +=": "b.data += 1",
    "data [] =": "b.data[1] = 3.0",
    "data copy_ broadcast": "b.data.copy_(row.detach())",
    "detach() [] =": "b.detach()[1] = 3.0",
    "detach().mul_": "b.detach().mul_(2)",
    "set_": "c = b.detach().clone(); c.set_(o.detach()); b = b * c",
    "swap of names": "c = o.clone(); b, c = c, b; c = c * 2; b = b + c",
    "swap of contents": "c = b[0].clone(); b[0] = b[1]; b[1] = c",
    "swap_tensors": "c = b.detach().clone(); e = o.detach().clone(); torch.utils.swap_tensors(c, e); b = b * c",
    "resize_ of a copy": "c = b.detach().clone(); c.resize_(2, 3); b = b[:2, :3] * c",
    "resize_ larger": "c = b.detach().clone(); c.resize_(30); b = b.sum() * c[:24]",
    "resize_ same": "c = b.detach().clone(); c.resize_(4, 6); b = b * c",
    "unsqueeze_": "c = b * 2; c.unsqueeze_(0); b = c[0] * b",
    "squeeze_": "c = (b * 2)[None]; c.squeeze_(0); b = c * b",
    "t_": "c = b * 2; c.t_(); b = c.t() * b",
    "transpose_": "c = b * 2; c.transpose_(0, 1); c.mul_(column.t()); b = c.t() * b",
    "swapaxes_": "c = b * 2; c.swapaxes_(0, 1); b = c.t() * b",
    "swapdims_": "c = b * 2; c.swapdims_(0, 1); b = c.t() * b",
    "movedim view": "b.movedim(0, 1).mul_(column.t())",
    "as_strided_": "c = b * 2; c.as_strided_((2, 3), (6, 1), 1); c.mul_(3); b = b[:2, :3] + c",
    "as_strided read": "b = b.as_strided((2, 3), (1, 6), 1) * 2",
    "as_strided of a transpose": "b = b.t().as_strided((2, 3), (1, 6), 1) * 2",
    "as_strided of a slice": "b = b[1:].as_strided((2, 3), (6, 1), 1) * 2",
    "as_strided overlapping read": "b = b.as_strided((3, 3), (1, 1), 0) * o[:3, :3]",
    "as_strided written": "b.as_strided((2, 3), (6, 1), 7).mul_(2)",
    "as_strided of a slice written": "b[1:].as_strided((2, 3), (6, 1)).add_(row[:3])",
    "as_strided of a step": "b = b[:, ::2].as_strided((4, 2), (6, 2)) * 2",
    "unfold written": "b.unfold(0, 2, 2).mul_(2)",
    "expand read after": "c = row.expand(4, 6); b += c",
    "split written": "c = b.split(2)[1]; c.mul_(2)",
    "chunk read after": "c = b.chunk(2)[0]; b.mul_(o); b = b[:2] + c",
    "narrow": "b.narrow(0, 1, 2).zero_()",
    "diagonal": "b.diagonal().copy_(row[:4])",
    "fill_diagonal_": "b.fill_diagonal_(2.0)",
    "flatten": "b.flatten().mul_(2)",
    "ravel": "b.ravel()[3:5] = z",
    "reshape": "b.reshape(6, 4)[0] = 4.0",
    "reshape that copies": "b.t().reshape(-1)[0] = 4.0",
    "contiguous that copies": "b.t().contiguous().zero_()",
    "contiguous that does not": "b.contiguous()[0] = 1.0",
    "to that does not": "b.to(torch.float32)[0] = 1.0",
    "to that copies": "b.to(torch.float64)[0] = 1.0",
    "clone": "b.clone().zero_()",
    "view dtype": "b.detach().view(torch.int32)[0, 0] = 0",
    "real": "b.real[0] = 1.0",
    "where then write": "c = torch.where(m, b, o); c.mul_(2); b = b + c",
    "out add": "torch.add(b, o, out=b.detach())",
    "out of a new tensor": "c = torch.empty(4, 6); torch.mul(b.detach(), 2, out=c); b = b + c",
    "out of a view": "c = torch.zeros(8, 6); torch.mul(b.detach(), 2, out=c[2:6]); b = b + c[2:6] * c[3]",
    "out cast": "c = torch.zeros(4, 6, dtype=torch.float64); torch.add(b.detach(), 2, out=c); b = b * c",
    "out cat": "c = torch.zeros(8, 6); torch.cat([b.detach(), b.detach()], out=c); b = b + c[4:]",
    "out of itself": "torch.add(b.detach(), 1, out=b.detach())",
    "out matmul": "c = torch.empty(4, 4); torch.matmul(b.detach(), b.detach().t(), out=c); b = c @ b",
    "out buffer": "torch.mul(b.detach(), 2, out=self.t); b = b + self.t",
    "out sum": "c = torch.zeros(6); torch.sum(b.detach(), 0, out=c); b = b + c",
    "attribute +=": "self.t += b.detach(); b = b * self.t",
    "attribute *= broadcast": "self.t *= row.detach(); b = b + self.t",
    "attribute [] =": "self.t[1] = b[0].detach(); b = b + self.t",
    "attribute replaced": "self.t = self.t * 0.5 + b.detach(); b = b + self.t",
    "attribute copy_ broadcast": "self.t.copy_(b.detach().mean(0)); b = b + self.t",
    "attribute copy_ cast": "self.t.copy_(d.detach()); b = b + self.t",
    "attribute data": "self.t.data = b.detach() * 2; b = b + self.t",
    "attribute data.copy_": "self.t.data.copy_(b.mean(0)); b = b + self.t",
    "attribute view": "self.t.view(-1)[2:5] += 1; b = b + self.t",
    "attribute average": "self.t.mul_(0.9).add_(b.detach(), alpha=0.1); b = b - self.t",
    "attribute lerp_": "self.t.lerp_(b.detach().mean(0), 0.1); b = b - self.t",
    "attribute read before": "c = self.t * 1; self.t += 1; b = b + c * self.t",
    "attribute saved": "c = self.t.clone(); b = b * c; self.t.add_(1)",
    "queue": "self.t[:2] = self.t[2:].clone(); self.t[2:] = b[:2].detach(); b = b @ self.t.t()",
    "counter": "self.t[0, 0] += 1; b = b / self.t[0, 0]",
    "centers under autocast":
        "with torch.autocast('cpu'): c = (b @ b.t()).detach()\nself.t.copy_(c.float().mean(0, keepdim=True)[:, :1]); "
        "b = b - self.t",
    "buffer under autocast": "with torch.autocast('cpu'): self.t.mul_(0.9).add_((b @ b.t() @ b).detach(), alpha=0.1)\n"
                             "b = b - self.t",
    "foreach_add_": "c = [b * 1, o * 1]; torch._foreach_add_(c, 1.0); b = c[0] * c[1]",
    "foreach_mul_": "c = [b * 1, o * 1]; torch._foreach_mul_(c, c[::-1]); b = c[0] + c[1]",
    "foreach_copy_": "c = [b * 1, o * 1]; torch._foreach_copy_(c, [o, b]); b = c[0] * c[1]",
    "relu inplace": "b = F.relu(b, inplace=True) + b",
    "leaky_relu inplace": "F.leaky_relu(b, 0.1, inplace=True)",
    "dropout inplace": "F.dropout(b, 1.0, True, inplace=True)",
    "hardtanh inplace": "F.hardtanh(b, -1, 1, inplace=True)",
    "threshold inplace": "F.threshold(b, 0.1, 20, inplace=True)",
    "normalize out": "b = F.normalize(b.detach(), out=torch.empty(4, 6)) * b",
    "init": "with torch.no_grad(): nn.init.constant_(self.t, 0.5)\nb = b * self.t",
    "init random": "c = torch.empty(4, 6); nn.init.normal_(c); b = b * c",
    "normal_ of a view": "c = torch.zeros(4, 6); c[1:3].normal_(); b = b * c",
    "normal_ of a transpose": "c = torch.zeros(6, 4).t(); c.normal_(); b = b * c",
    "uniform_ of columns": "c = torch.zeros(4, 6); c[:, 1:3].uniform_(); b = b * c",
    "bernoulli_": "c = torch.zeros(4, 6); c.bernoulli_(0.5); b = b * c",
    "bernoulli_ tensor": "c = torch.zeros(4, 6); c.bernoulli_(torch.sigmoid(o.detach())); b = b * c",
    "random_": "c = torch.zeros(4, 6); c.random_(0, 5); b = b * c",
    "exponential_ of itself": "b.exponential_()",
    "map over rows": "for k in range(4): b[k] = b[k] * k",
    "loop of states": "c = torch.zeros(4, 6)\nfor k in range(4): c[k] = b[k] + (c[k - 1] if k else 0)\nb = c * o",
    "loop in place": "for k in range(1, 4): b[k] += b[k - 1]",
    "stack of writes": "c = torch.zeros(2, 4, 6); c[0] = b; c[1] = o; b = c.prod(0)",
    "new_zeros written": "c = b.new_zeros(4, 6); c[i] = o[i]; b = b + c",
    "full written": "c = torch.full((4, 6), float('-inf')); c[m] = 0; b = (b + c).softmax(-1)",
    "causal mask": "c = torch.full((4, 4), float('-inf')).triu_(1); b = (b @ b.t() + c).softmax(-1) @ b",
    "scatter_ one hot": "c = torch.zeros(4, 6).scatter_(1, i[:, None].expand(3, 1), 1.0); b = b + c",
    "scatter_add_": "c = torch.zeros(4, 6).scatter_add_(0, i[:, None].expand(3, 6), o[:3]); b = b + c",
    "index_add_": "b.index_add_(0, i, o[i])",
    "index_copy_": "b.index_copy_(0, i, o[i])",
    "index_fill_": "b.index_fill_(1, i, 0.5)",
    "masked_scatter_": "b.masked_scatter_(m, o)",
    "put_": "b.put_(i, row[:3])",
    "tril_": "b.tril_()",
    "cumsum_": "b.cumsum_(0)",
    "addmm_": "b.addmm_(o @ o.t(), o)",
    "addcmul_": "b.addcmul_(o, row, value=0.5)",
    "sub_ alpha": "b.sub_(o, alpha=2)",
    "div_ floor": "b.div_(2, rounding_mode='floor')",
    "renorm_": "b.renorm_(2, 0, 1.0)",
    "logical_not_": "c = b.detach() > 0; c.logical_not_(); b = b * c",
    "bitwise &=": "c = b.detach() > 0; c &= m; b = b * c",
    "bitwise |= rows": "c = b.detach() > 0; c |= m[0]; b = b * c",
    "whole numbers +=": "c = n + 0; c += 1; c[0] = 7; b = b * c",
    "whole numbers copy_ of floats": "c = n + 0; c.copy_(o * 3); b = b * c",
    "booleans copy_ of floats": "c = m.clone(); c.copy_(n - 3); b = b * c",
    "half copy_": "c = torch.zeros(4, 6, dtype=torch.bfloat16); c.copy_(b); b = b + c.float()",
    "double copy_": "c = torch.zeros(4, 6, dtype=torch.float64); c.copy_(b); b = b + c.float()",
    "zeros copy_ broadcast": "c = torch.zeros(2, 4, 6); c.copy_(b); b = c.sum(0) * o",
    "zeros copy_ column": "c = torch.zeros(4, 6); c.copy_(b[:, :1]); b = b * c",
    "empty_like copy_": "c = torch.empty_like(b); c.copy_(b * 2); b = b * c",
    "copy of the copy": "c = torch.zeros(4, 6); e = c.copy_(b); e.mul_(2); b = c + e",
    "copy_ a, b swapped": "c = b.clone(); b.copy_(o * 2); b = b * c",
    "zero_ then +=": "c = o * 1; c.zero_(); c += b; b = c * o",
    "no_grad write of a copy": "c = b.clone()\nwith torch.no_grad(): c[0] = 0.0\nb = c * o",
    "no_grad mul_ of a copy": "c = b.clone()\nwith torch.no_grad(): c.mul_(2)\nb = c * o",
    "no_grad copy_ broadcast": "c = b.clone()\nwith torch.no_grad(): c.copy_(row)\nb = c * o",
    "no_grad zeros written": "c = torch.zeros(4, 6)\nwith torch.no_grad(): c[1] = b[0]\nb = c * b",
    "write then no_grad read": "b[0] = row\nwith torch.no_grad(): c = b * 2\nb = b + c",
    "inference of a copy": "with torch.inference_mode(): c = b * 2; c.mul_(3); c = c.sum().item()\nb = b * 2",
    "enable_grad write": "with torch.no_grad():\n    c = torch.zeros(4, 6)\n    with torch.enable_grad(): c[0] = row\n"
                         "b = b + c",
    "autocast write": "c = torch.zeros(4, 4)\nwith torch.autocast('cpu'): c.copy_(b @ b.t())\nb = c @ b",
    "autocast +=": "c = torch.zeros(4, 4)\nwith torch.autocast('cpu'): c += b @ b.t()\nb = c @ b",
    "autocast [] =": "c = torch.zeros(2, 4, 4)\nwith torch.autocast('cpu'): c[1] = b @ b.t()\nb = c[1] @ b",
    "autocast mul_": "with torch.autocast('cpu'): c = b @ b.t(); c.mul_(o[:, :4])\nb = c.float() @ b",
    "function of a slice": "def double(part): part.mul_(2)\ndouble(b[1:3])",
    "returned view": "c = b[1:]; b[2] = row; b = (b, c)",
    "view kept by the module": "c = self.t[1:3]; c += 1; self.t[2] += 2; b = b + self.t * c.sum()",
}
OPERANDS = {"o": _random(4, 6, seed=2, wants=True), "row": _random(6, seed=3, wants=True),
            "column": _random(4, 1, seed=4, wants=True), "d": _random(4, 6, seed=5).double().requires_grad_(),
            "i": torch.tensor([2, 0, 3]), "m": torch.arange(24).reshape(4, 6) % 3 == 0,
            "n": torch.arange(24).reshape(4, 6) % 7, "z": torch.tensor(0.7, requires_grad=True)}


def statements() -> list[Case]:
    """Each statement on a temporary, on an argument and on a piece of state; under no_grad as well."""
    found = []
    for turn, ((name, text), place) in enumerate(itertools.product(STATEMENTS.items(), PLACES)):
        value = _random(4, 6, seed=turn % 5)
        body, mode = text.replace("self.t", "t").split("\n"), MODES[(0, 0, 0, 1, 4)[turn % 5]]
        tensors = [(key, "leaf", operand) for key, operand in OPERANDS.items()
                   if any(f"{key}" in _words(line) for line in body)]
        if "self.t" in text:
            tensors.append(("t", "attribute" if turn % 2 else "buffer", _random(4, 6, seed=7)))
        lines = []
        if place == "made":
            tensors.append(("x", "leaf", value.requires_grad_()))
            lines.append("b = x * 1")
        else:
            tensors.append(("b", place, value.requires_grad_(place == "argument")))
        lines.append("first = b")
        lines += ["with torch.no_grad():", *("    " + line for line in body)] if mode == "no_grad" else body
        results = ["b", "first * 2"] if turn % 3 else ["b * 2"] if turn % 2 else ["first * 1"]
        found.append(Case(f"{name} | {place} | {mode}", lines, results, tensors, mode == "evaluated",
                          lower="autocast" in text or "bfloat16" in text))
    return found


def _words(line: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in line).split())


KINDS: dict[str, Callable[[], list[Case]]] = {"core": core, "opinfo": opinfo, "statements": statements}
