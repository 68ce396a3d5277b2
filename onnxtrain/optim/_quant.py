"""8-bit state on its way in and out of checkpoints; the step's loops have the same formulas (csrc/simd/optim)."""

from __future__ import annotations

import torch
from torch import Tensor

QUANT_BLOCK = 256  # elements that share a scale, in the order of memory


def _rows(values: Tensor) -> Tensor:
    """values: (n,) -> (blocks, QUANT_BLOCK), padded with zeros."""
    short = -values.numel() % QUANT_BLOCK
    return torch.nn.functional.pad(values, (0, short)).view(-1, QUANT_BLOCK)


def _flat(x: Tensor) -> Tensor:
    """A dense tensor as (n,) in the order of its memory."""
    return x.as_strided((x.numel(),), (1,))


def pack(value: Tensor, q: Tensor) -> Tensor:
    """Fills ``q`` (int8 or uint8, dense, value's shape) with the levels nearest to ``value``.

    Each block of 256 has the scale s of its largest magnitude. int8: ``s sign(q) (q / 127)^2``, nearest in the square
    root; uint8: ``s (q / 255)^4``, nearest in the fourth root, and a nonzero value never becomes zero.

    Returns:
        The scales, float32 of shape ``(ceil(n / 256),)``.
    """
    ordered = torch.empty_like(q, dtype=torch.float32, memory_format=torch.preserve_format).copy_(value)
    x = _rows(_flat(ordered))
    scale = x.abs().amax(dim=1)
    inverse = torch.where((scale > 0) & (scale <= 3e38), 1 / scale, torch.zeros_like(scale))
    y = x * inverse[:, None]
    if q.dtype == torch.int8:
        levels = torch.floor(y.abs().sqrt() * 127 + 0.5).clamp(max=127) * y.sign()
    else:
        levels = torch.floor(y.clamp(min=0).sqrt().sqrt() * 255 + 0.5).clamp(max=255)
        levels = torch.where((levels == 0) & (x > 0), torch.ones_like(levels), levels)
    _flat(q).copy_(levels.nan_to_num().flatten()[: q.numel()])
    return scale


def unpack(q: Tensor, scale: Tensor) -> Tensor:
    """The float32 values that ``q`` and its scales stand for, with q's shape and strides."""
    a = _rows(_flat(q).float()) / (127 if q.dtype == torch.int8 else 255)
    x = scale[:, None] * (a * a.abs() if q.dtype == torch.int8 else (a * a) * (a * a))
    value = torch.empty_like(q, dtype=torch.float32, memory_format=torch.preserve_format)
    _flat(value).copy_(x.flatten()[: q.numel()])
    return value
