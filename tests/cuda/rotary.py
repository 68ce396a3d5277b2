"""Rotary embeddings of 16 bits on a device against torch in float64: alone, and in front of attention whose queries
share keys; for programs.py.
"""

from __future__ import annotations

import torch
from rows import NAMES, ULPS, kernels, place, session_of, shifted

CODES = {torch.float16: 10, torch.bfloat16: 16}
# As autocast leaves it: products and halves in 16 bits, angles and sums in float32. {v}: the operand.
ROTATED = """{v}a, {v}b = Split <axis = 3, num_outputs = 2> ({v})  {v}n = Neg({v}b)
    {v}t = Concat <axis = 3> ({v}n, {v}a)  {v}u = Cast <to = 1> ({v}t)  {v}w = Cast <to = 1> ({v})
    {v}p = Mul({v}w, c)  {v}r = Mul({v}u, s)  {v}y = Add({v}p, {v}r)
    {v}m = Transpose <perm = [0, 2, 1, 3]> ({v}y)"""
# {v}, for each of `times` queries.
REPEATED = """{v}e = Unsqueeze({v}m, two)  {v}wide = Constant <value_ints = [2, {heads}, {times}, {rows}, {n}]> ()
    {v}x = Expand({v}e, {v}wide)"""


def double_rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def step(text: str, tensors: list[torch.Tensor], dy: torch.Tensor, mask: bytes, offset: int,
         device: str) -> tuple[list[torch.Tensor | None], set[str], str]:
    """The result and the gradients, the kernels, and the program."""
    session = session_of(text, device)
    given = [shifted(t, offset, device) for t in tensors]
    (y,), run = session.forward(given, mask)
    saved = [given[i] for i in run.saved_inputs] + [[y][i] for i in run.saved_outputs]
    grads = [g for g in run.backward(saved, [dy.to(place(device))]) if g is not None]
    return [y.cpu(), *(g.cpu() for g in grads)], kernels(session), session.text("program")


def check_rotation(dtype: torch.dtype, n: int, offset: int, mask: bytes, device: str) -> set[str]:
    torch.manual_seed(n)
    form = {"v": "x", "heads": 4, "times": 3, "rows": 5, "n": n}
    text = f"""g ({NAMES[dtype]}[2, 5, 4, {n}] x, float[5, 1, {n}] c, float[1, {n}] s) => (y) {{
        two = Constant <value_ints = [2]> ()  {ROTATED.format(**form)}  {REPEATED.format(**form)}
        y = Cast <to = {CODES[dtype]}> (xx) }}"""
    tensors = [torch.randn(2, 5, 4, n).to(dtype), torch.randn(5, 1, n), torch.randn(1, n)]
    dy = torch.randn(2, 4, 3, 5, n).to(dtype)
    got, used, program = step(text, tensors, dy, mask, offset, device)
    assert sum("Rotate " in line and NAMES[dtype] in line for line in program.splitlines()) == 2, program
    assert mask[1] or "Cast" not in program, program

    leaves = [t.double().requires_grad_() for t in tensors]
    y = double_rotated(*leaves)
    y.backward(dy.double().sum(2).transpose(1, 2))
    want = [y.detach().transpose(1, 2)[:, :, None].expand(-1, -1, 3, -1, -1),
            *(leaf.grad for leaf, wants in zip(leaves, mask, strict=True) if wants)]
    x, c, s = (leaf.detach().abs() for leaf in leaves)
    summed = dy.double().sum(2).transpose(1, 2).abs()  # which is rounded once more on its way
    turned = torch.cat(x.chunk(2, -1)[::-1], -1)
    bounds = [torch.zeros(()), summed * c + torch.cat((summed * s).chunk(2, -1)[::-1], -1),
              (summed * x).sum(0).sum(1, keepdim=True), (summed * turned).sum((0, 2)).sum(0, keepdim=True)]
    for k, (one, right, bound) in enumerate(zip(got, want, bounds, strict=False)):
        far = (one.double() - right).abs() - 1.01 * ULPS[dtype] * (right.abs() + bound) - 1e-5
        assert far.max() <= 0, (dtype, n, offset, k, far.max().item())
    return used


def rotations(device: str) -> set[str]:
    """With halves that accesses of 16 bytes fit and do not fit, and at an address that they do not fit."""
    used: set[str] = set()
    for dtype in CODES:
        for n, offset in ((32, 0), (32, 1), (12, 0)):
            for mask in (b"\1\1\1", b"\1\0\0"):
                used |= check_rotation(dtype, n, offset, mask, device)
    return used


def attention(device: str) -> set[str]:
    """Queries and keys are read where Rotate has written them, keys once for all queries that share them."""
    used: set[str] = set()
    rows, heads, times, n = 21, 2, 3, 32
    q, k, v = ({"v": name, "heads": heads, "times": times, "rows": rows, "n": n} for name in "qkv")
    for dtype in CODES:
        name, to = NAMES[dtype], f"<to = {CODES[dtype]}>"
        text = f"""g ({name}[2, {rows}, 6, {n}] q, {name}[2, {rows}, 2, {n}] k, {name}[2, {rows}, 2, {n}] v,
              float[{rows}, 1, {n}] c, float[{rows}, 1, {n}] s) => (y) {{
            two = Constant <value_ints = [2]> ()  all = Constant <value_ints = [2, 6, {rows}, {n}]> ()
            {ROTATED.format(**q)}  {ROTATED.format(**k)}  {REPEATED.format(**k)}  kl = Reshape(kx, all)
            vm = Transpose <perm = [0, 2, 1, 3]> (v)  {REPEATED.format(**v)}  vl = Reshape(vx, all)
            qh = Cast {to} (qm)  kh = Cast {to} (kl)  columns = Transpose <perm = [0, 1, 3, 2]> (kh)
            z = MatMul(qh, columns)  p = Softmax <axis = -1> (z)  o = MatMul(p, vl)
            y = Transpose <perm = [0, 2, 1, 3]> (o) }}"""
        torch.manual_seed(0)
        tensors = [torch.randn(2, rows, h, n).div(2).to(dtype) for h in (6, 2, 2)]
        angles = torch.rand(rows, 1, n).mul(6)
        tensors += [angles.cos(), angles.sin()]
        dy = torch.randn(2, rows, 6, n).to(dtype)
        got, ran, program = step(text, tensors, dy, b"\1\1\1\0\0", 0, device)
        assert {op.split(":")[0] for op in ran} == {"Rotate", "FusedAttention", "FusedAttentionGrad"}, program
        used |= ran
        leaves = [t.double().requires_grad_() for t in tensors[:3]]
        turned = [double_rotated(leaf, *(t.double() for t in tensors[3:])) for leaf in leaves[:2]]
        y = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (*turned, leaves[2])), scale=1.0, enable_gqa=True).transpose(1, 2)
        y.backward(dy.double())
        tol = 4e-2 if dtype == torch.bfloat16 else 6e-3  # as tests/cuda/sdpa.py has it
        for what, one, right in zip(("y", "dq", "dk", "dv"), got, [y.detach(), *(t.grad for t in leaves)], strict=True):
            error = (one.double() - right).abs().max() / max(1.0, right.abs().max())
            assert error < tol, (dtype, what, error)
    return used
