"""Parts of tensors: slices that are written, turned rows, places in sorted rows.

translations.py adds this table to its own. torch.onnx writes a slice row by row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import onnx
import torch

Table = dict[Any, Callable[..., Any]]
aten = torch.ops.aten


def parts(op: Any) -> Table:
    """The translations, for operators of one opset."""

    def ints(*values):
        return op.Constant(value_ints=list(values))

    def slice_scatter(self, src, dim=0, start=None, end=None, step=1):
        """What is before the slice, the slice, and what is behind it."""
        start, end = 0 if start is None else start, sys.maxsize if end is None else end
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end and step == 1):
            from onnxscript.function_libs.torch_lib.ops import core

            return core.aten_slice_scatter(self, src, dim, start, end, step)
        axis = ints(dim)
        before = [op.Slice(self, ints(0), ints(start), axis)] if start else []
        behind = [op.Slice(self, ints(end), ints(sys.maxsize), axis)] if end < sys.maxsize else []
        source = src if src.dtype == self.dtype else op.CastLike(src, self)
        if not before and not behind:
            never = op.Constant(value=onnx.helper.make_tensor("never", onnx.TensorProto.BOOL, [], [False]))
            return op.Where(never, self, source)  # self has a gradient of zeros
        return op.Concat(*before, source, *behind, axis=dim)

    return {aten.slice_scatter.default: slice_scatter}
