"""Flash attention of cuda/flash.cu, emulated, against torch's attention in float64.

    python tests/cuda/flash.py PLUGIN DEVICE

Prints one JSON object as cases.py does.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys

import torch
from torch import Tensor

NUMBER = {torch.float32: 1, torch.bool: 9, torch.float16: 10, torch.bfloat16: 16}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LIBRARY: ctypes.CDLL
PLACE = "cpu"


class Flash(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("batch", "heads", "kv_heads", "lq", "lk", "d")] + [
        ("dtype", ctypes.c_int32), ("causal", ctypes.c_int32), ("scale", ctypes.c_float), ("bias", ctypes.c_void_p),
        ("bias_dtype", ctypes.c_int32), ("bias_stride", ctypes.c_int64 * 4), ("drop", ctypes.c_float), ("stream", ctypes.c_uint64),
        ("seed", ctypes.c_void_p)]


def philox(key: int, stream: int, n: int) -> list[int]:
    """Words 0 to n - 1 of a stream: Philox4x32-10."""
    words: list[int] = []
    for index in range(-(-n // 4)):
        c = [index & 0xFFFFFFFF, index >> 32, stream & 0xFFFFFFFF, stream >> 32]
        k = [key & 0xFFFFFFFF, key >> 32]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        words += c
    return words[:n]


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: int, bias: Tensor | None, kept: Tensor) -> Tensor:
    """(batch, heads, lq, d) from float64 operands; keys are repeated for the heads that share them."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(k.shape[2] - q.shape[2] if causal == 2 else 0)
        scores = scores.masked_fill(~seen, float("-inf"))
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    return (scores.softmax(-1) * kept) @ v


def check(dtype: torch.dtype, batch: int, heads: int, kv_heads: int, lq: int, lk: int, d: int, causal: int = 0, bias: str = "",
          drop: float = 0.0) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(batch, h, n, d).to(PLACE, dtype) for h, n in ((heads, lq), (kv_heads, lk), (kv_heads, lk), (heads, lq)))
    added = None
    if bias == "bool":
        added = torch.rand(batch, 1, lq, lk).to(PLACE) > 0.3
        added[..., 0] = True
    if bias == "float":
        added = torch.randn(heads, lq, lk).to(PLACE)
    kept = torch.ones(batch, heads, lq, lk, dtype=torch.float64, device=PLACE)
    seed = torch.tensor([77], dtype=torch.int64, device=PLACE)
    if drop:
        words = torch.tensor(philox(77, 5, kept.numel()), device=PLACE).view(kept.shape)
        kept = (words >= int(drop * 2**32)).double() / (1 - drop)
    f = Flash(batch, heads, kv_heads, lq, lk, d, NUMBER[dtype], causal, d**-0.5, None, 0, (ctypes.c_int64 * 4)(), drop, 5, seed.data_ptr())
    if added is not None:
        wide = added.expand(batch, heads, lq, lk)
        f.bias, f.bias_dtype, f.bias_stride = added.data_ptr(), NUMBER[added.dtype], (ctypes.c_int64 * 4)(*wide.stride())
    out, lse, work = torch.empty_like(q), torch.empty(batch, heads, lq, device=PLACE), torch.empty(batch, heads, lq, device=PLACE)
    grads = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    at = lambda t: ctypes.c_void_p(t.data_ptr())  # noqa: E731
    assert LIBRARY.ont_launch_flash(ctypes.byref(f), at(q), at(k), at(v), at(out), at(lse), None) == 0
    assert LIBRARY.ont_launch_flash_grad(ctypes.byref(f), at(q), at(k), at(v), at(out), at(lse), at(dout), *map(at, grads), at(work), None) == 0
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want = reference(*exact, d**-0.5, causal, added, kept)
    want.backward(dout.double())
    for name, got, expected in zip(("out", "dq", "dk", "dv"), (out, *grads), (want, *(t.grad for t in exact))):
        error = (got.double() - expected.detach()).abs().max().item() / max(1.0, expected.abs().max().item())
        assert error < TOLERANCE[dtype], f"{name} of {dtype} {(batch, heads, kv_heads, lq, lk, d, causal, bias, drop)}: {error:.2e}"


CASES = [
    *[(dtype, 1, 2, 2, 10, 10, 16) for dtype in TOLERANCE],
    *[(torch.float32, 2, 2, 1, 9, 40, d, causal) for d, causal in itertools.product((8, 40, 128), (0, 1, 2))],
    (torch.float32, 1, 4, 2, 33, 70, 24, 2),
    (torch.float32, 2, 2, 2, 12, 35, 16, 0, "bool"),
    (torch.float32, 2, 2, 2, 12, 35, 16, 0, "float"),
    (torch.float32, 1, 2, 2, 12, 34, 16, 1, "float", 0.25),
    (torch.bfloat16, 1, 4, 2, 20, 20, 64, 1, "", 0.1),
    (torch.float32, 1, 1, 1, 1, 1, 1),
]


def main(plugin: str, device: str) -> None:
    global LIBRARY, PLACE
    LIBRARY = ctypes.CDLL(plugin)
    PLACE = "cuda" if device.startswith("cuda") else "cpu"
    report: dict = {"ran": [], "passed": 0, "failed": []}
    for case in CASES:
        print(case, file=sys.stderr, flush=True)
        try:
            check(*case)
            report["passed"] += 1
        except Exception as error:  # noqa: BLE001 - reported
            report["failed"].append((str(case), f"{type(error).__name__}: {error}"[:400]))
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
