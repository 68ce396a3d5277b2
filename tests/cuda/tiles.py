"""Attention with padding on a device: tiles of scores that the mask hides are not computed, and the results are those
of all tiles, to the bit.

    python tests/cuda/tiles.py PLUGIN DEVICE [part/parts]

A hidden score of -inf, or of the type's smallest number, lets tiles be left out. One of NEAR gives a probability of 0
just as well, but is not known to: every tile is computed. Prints what checks.py says. Tiles are counted by the
emulation alone.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import NamedTuple

import test_fuse_attention as graphs
import torch
from checks import every_nth, replayed, run_checks

from onnxtrain import _C

PLUGIN, DEVICE = "", "cpu"
NAMES = ("y", "dq", "dk", "dv")
NEAR = {torch.float16: -60000.0}  # else -0.9e30


class Case(NamedTuple):
    dtype: torch.dtype
    size: int
    mask: str  # "added" or "where"; for all queries, or "rows": of their own, causal too
    lengths: tuple[int, int]  # of real keys in each sequence; < 0: at its end
    rows: int = 150
    columns: int = 150
    heads: int = 2
    kv: int = 2
    fill: float = -torch.inf
    more: str = ""  # "causal", "drop", "bias": its gradient

    @property
    def name(self) -> str:
        return " ".join(map(str, (self.dtype, self.size, self.mask, self.lengths, self.rows, self.columns, self.heads,
                                  self.kv, self.fill, self.more)))


HALF, FLOAT, DOUBLE, BRAIN = torch.float16, torch.float32, torch.float64, torch.bfloat16
SMALLEST = torch.finfo(torch.float32).min
CASES = [
    *[Case(dtype, size, mask, (150, 40)) for dtype, size in ((FLOAT, 16), (BRAIN, 64), (HALF, 128))
      for mask in ("added", "where", "added rows", "where rows")],
    *[Case(dtype, size, mask, (-100, 33), fill=-1e38) for dtype, size in ((FLOAT, 8), (BRAIN, 16), (BRAIN, 128))
      for mask in ("added", "added rows", "where")],
    Case(HALF, 12, "where", (32, 96)),
    Case(FLOAT, 160, "added", (64, 65), rows=40), Case(BRAIN, 64, "added", (70, 7), rows=1),
    Case(FLOAT, 8, "added", (0, 50), fill=SMALLEST), Case(BRAIN, 64, "where", (0, 50), fill=-1e38),
    *[Case(dtype, 64, "added", (-60, 90), fill=-1e38, more="causal") for dtype in (FLOAT, BRAIN)],
    *[Case(dtype, 64, mask, (40, 101), heads=4, kv=2, more="drop") for dtype in (FLOAT, BRAIN)
      for mask in ("added", "where rows")],
    Case(BRAIN, 64, "added", (64, 150), columns=152, rows=70, more="drop causal"),
    *[Case(dtype, 64, "added", (64, 100), rows=40, fill=-1e38, more="bias") for dtype in (FLOAT, BRAIN)],
]
# Nothing is looked for: a mask of its own for each head, one tile of keys, numbers that may be scores, and float64.
DENSE = [Case(FLOAT, 8, "added rows", (40, 90), heads=1, kv=1), Case(BRAIN, 64, "added", (8, 20), columns=32),
         Case(FLOAT, 8, "where", (40, 90), fill=-1e9), Case(DOUBLE, 8, "added", (40, 90))]


def hidden(case: Case) -> torch.Tensor:
    """(batch, 1, rows or 1, columns), of the operand."""
    columns = torch.arange(case.columns)
    keys = torch.stack([columns >= case.columns + n if n < 0 else columns < n for n in case.lengths])
    if "rows" not in case.mask:
        return ~keys[:, None, None]
    return ~(keys[:, None, None] & torch.ones(case.rows, case.columns, dtype=torch.bool).tril(case.columns - case.rows))


def operands(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(case.rows * 1000 + case.columns)
    return [torch.randn(2, h, n, case.size).to(case.dtype) for h, n in
            ((case.heads, case.rows), (case.kv, case.columns), (case.kv, case.columns))]


def built(case: Case, fill: float) -> tuple[bytes, list[torch.Tensor]]:
    m = graphs.Model(case.dtype)
    q, k, v = (m.input(t) for t in operands(case))
    if case.kv != case.heads:
        k, v = (m("Reshape", m("Expand", m("Unsqueeze", t, m.ints(2)), m.ints(2, case.kv, case.heads // case.kv,
                                                                              case.columns, case.size)),
                  m.ints(2, case.heads, case.columns, case.size)) for t in (k, v))
    number = lambda x: m("Cast", m.constant(x, torch.float32), to=graphs.TYPES[case.dtype])  # noqa: E731
    s = m("Mul", m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2])), number(case.size**-0.5))
    if "added" in case.mask:
        s = m("Add", s, m.input(torch.zeros(1).masked_fill(hidden(case), fill)))
    if "causal" in case.more:
        seen = torch.ones(case.rows, case.columns, dtype=torch.bool).tril(case.columns - case.rows)
        s = m("Where", m.constant(seen, torch.bool), s, number(float("-inf")))
    if "where" in case.mask:
        s = m("Where", m.input(hidden(case)), number(fill), s)
    p = m("Softmax", s, axis=-1)
    if "drop" in case.more:
        p = m("Dropout", p, m.constant(0.3, torch.float32), m.constant(True, torch.bool))
    return m.bytes(m("MatMul", p, v)), m.tensors


class Step:
    """A session of a case, and a call of it."""

    def __init__(self, case: Case, fill: float) -> None:
        data, self.tensors = built(case, fill)
        self.session, self.case = _C.Session(data, 16, DEVICE), case
        self.wants = bytes(3 * [True] + ["bias" in case.more] * (len(self.tensors) - 3))
        self.dy: torch.Tensor | None = None

    def __call__(self) -> list[torch.Tensor]:
        place = DEVICE if DEVICE.startswith("cuda") else "cpu"
        given = [t.to(place) for t in self.tensors]
        outputs, run = self.session.forward(given, self.wants, 11)
        saved = [given[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
        torch.manual_seed(5)
        dy = torch.randn(outputs[0].shape).to(outputs[0]) if self.dy is None else self.dy.to(place)
        grads = run.backward(saved, [dy])
        return [t.cpu() for t in (*outputs, *grads) if t is not None]

    def ran(self) -> set[str]:
        return {f"{op}:{kernel}" for _, op, kernel, *_ in self.session.timeline() if op.startswith("FusedAttention")}


def tiles() -> int:
    return 0 if DEVICE.startswith("cuda") else ctypes.CDLL(PLUGIN).ont_emulate_tiles()


# ---- what should be computed ----

def visible_tiles(case: Case) -> torch.Tensor:
    """(batch, heads, tiles of 64 queries, tiles of 32 keys), as flash.h describes it."""
    seen = ~hidden(case).expand(2, 1, case.rows, case.columns)
    if "causal" in case.more:
        seen = seen & torch.ones(case.rows, case.columns, dtype=torch.bool).tril(case.columns - case.rows)
    found = torch.zeros(2, -(-case.rows // 64), -(-case.columns // 32), dtype=torch.bool)
    for b in range(2):
        for i in range(found.shape[1]):
            part = seen[b, 0, i * 64:i * 64 + 64]
            for j in range(found.shape[2]):
                found[b, i, j] = bool(part[:, j * 32:j * 32 + 32].any()) or not part.any(1).all()
    return found[:, None].expand(-1, case.heads, -1, -1)


def kernels_of(case: Case) -> list[tuple[int, int]]:
    """Queries and keys of a tile, forward, of dQ and of dK and dV."""
    if case.dtype in (FLOAT, DOUBLE) or case.size % 8:
        return [(32, 32)] * 3
    return [(128, 32), (64, 64), (64, 64)] if case.size <= 64 else [(64, 64), (64, 32), (32, 64)]


def expected(case: Case, found: torch.Tensor | None) -> list[int]:
    """Tiles that each kernel computes; None: all that a causal mask shows."""
    counts = []
    for what, (m, n) in enumerate(kernels_of(case)):
        total = 0
        all_keys = what == 1 and "bias" in case.more
        for i in range(0, case.rows, m):
            for j in range(0, case.columns, n):
                last, offset = min(i + m, case.rows) - 1, case.columns - case.rows
                if "causal" in case.more and not all_keys and (
                        j > last + offset if what < 2 else i < max(0, j - offset) // m * m):
                    continue
                part = None if found is None or all_keys else found[:, :, i // 64:-(-(i + m) // 64),
                                                                    j // 32:-(-(j + n) // 32)]
                total += 2 * case.heads if part is None else int(part.flatten(2).any(2).sum())
        counts.append(total)
    return counts


# ---- checks ----

def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for name, a, b in zip((*NAMES, "dmask"), got, want, strict=False):
        assert torch.equal(a.isnan(), b.isnan()), f"{name}: NaN elsewhere"
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{name}: {(a - b).abs().max()}"


def eager(case: Case) -> list[torch.Tensor]:
    """In float64."""
    q, k, v = (t.double().requires_grad_() for t in operands(case))
    keys, values = (t.repeat_interleave(case.heads // case.kv, 1) for t in (k, v))
    s, off = q @ keys.mT * case.size**-0.5, hidden(case)
    s = s.masked_fill(off, case.fill) if "where" in case.mask else s + s.new_zeros(1).masked_fill(off, case.fill)
    y = s.softmax(-1) @ values
    torch.manual_seed(5)
    y.backward(torch.randn(y.shape).to(case.dtype).double())
    return [y.detach(), q.grad, k.grad, v.grad]


def counted(step: Step, want: list[int]) -> list[torch.Tensor]:
    before = tiles()
    results = step()
    if not DEVICE.startswith("cuda"):
        assert tiles() - before == sum(want), f"{tiles() - before} tiles, expected {want}"
    return results


def hidden_tiles_are_left_out(case: Case) -> set[str]:
    step, near = Step(case, case.fill), Step(case, NEAR.get(case.dtype, -0.9e30))
    found, all_tiles = expected(case, visible_tiles(case)), expected(case, None)
    assert sum(found) < sum(all_tiles)
    got = counted(step, found)
    same(got, counted(near, all_tiles))
    if not case.more:
        for name, a, b in zip(NAMES, got, eager(case), strict=True):
            tol = {HALF: 1e-2, BRAIN: 6e-2}.get(case.dtype, 1e-5)
            assert (a.double() - b).abs().max() < tol * max(1.0, b.abs().max().item()), name
    for b, n in enumerate(case.lengths):  # of keys that no query sees
        off = slice(0, case.columns + n) if n < 0 else slice(n, case.columns)
        if n and "causal" not in case.more and "rows" not in case.mask:
            assert not any(t[b, :, off].any() for t in got[2:4])
    return step.ran()


def all_tiles_are_computed(case: Case) -> set[str]:
    step = Step(case, case.fill)
    counted(step, expected(case, None))
    return step.ran()


SMALL = [Case(FLOAT, 8, "added", (100, 20), rows=40, columns=100), Case(BRAIN, 64, "where", (100, 20), 40, 100),
         Case(FLOAT, 8, "where rows", (100, 20), rows=100, columns=100)]


def what_is_not_finite_reaches_the_result(case: Case, operand: int, value: float) -> set[str]:
    """A hidden key or value: 0 times it is NaN, as in eager; and so is what a query or its gradient gives to it."""
    steps = [Step(case, case.fill), Step(case, NEAR.get(case.dtype, -0.9e30))]
    found = []
    for step in steps:
        if operand == 3:
            torch.manual_seed(6)
            step.dy = torch.randn(2, case.heads, case.rows, case.size).to(case.dtype)
            step.dy[1, 0, 3, 2] = value
        else:
            step.tensors[operand][1, 0, 3 if operand == 0 else 60, 2] = value
        found.append(step())
    same(*found)
    assert any(not t[1, 0].isfinite().all() for t in found[0])
    assert all(t[0].isfinite().all() for t in found[0])
    return steps[0].ran()


def graphs_read_the_mask_at_each_step(case: Case) -> set[str]:
    """Recorded steps with other lengths leave out other tiles."""
    step = Step(case, case.fill)
    replayed(step.session, step)
    for lengths in ((30, 90), (64, 10)):
        other = case._replace(lengths=lengths)
        step.tensors[3].copy_(built(other, other.fill)[1][3])
        _C.set_timing(False)
        same(counted(step, expected(other, visible_tiles(other))), Step(other, other.fill)())
        _C.set_timing(True)
    return step.ran()


def named(check, *arguments):
    """The check of a case, with a name."""
    def call() -> set[str]:
        return check(*arguments)

    call.__name__ = " ".join([check.__name__, *(a.name if isinstance(a, Case) else str(a) for a in arguments)])
    return functools.wraps(call)(call)


def main(plugin: str, device: str, part: str = "0/1") -> None:
    global PLUGIN, DEVICE
    PLUGIN, DEVICE = plugin, device
    _C.open_plugin(plugin or None)
    _C.set_timing(True)
    checks = [*[named(hidden_tiles_are_left_out, case) for case in CASES],
              *[named(all_tiles_are_computed, case) for case in DENSE],
              *[named(what_is_not_finite_reaches_the_result, case, operand, value) for case in SMALL
                for operand, value in ((0, torch.nan), (1, torch.nan), (2, torch.nan), (2, torch.inf), (3, torch.nan))],
              *[named(graphs_read_the_mask_at_each_step, case) for case in SMALL]]
    run_checks(every_nth(checks, part))


if __name__ == "__main__":
    main(*sys.argv[1:])
