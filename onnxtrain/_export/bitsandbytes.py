"""bitsandbytes' products with weights of 4-bit codes: MatMulBnb4 nodes in an export, bitsandbytes' own elsewhere.

Dynamo goes through bitsandbytes' autograd.Function and leaves gemm_4bit, one operator of its library, in a graph.
dynamo.py asks here what stands in its place while the graph is traced. Nothing here imports bitsandbytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain._torch import OpOverload
from onnxtrain.utils.torch_io_helper import pytorch_type_to_onnx_dtype

_FUNCTION = "bitsandbytes.autograd._functions.MatMul4Bit"
_TYPES = {"fp4": 0, "nf4": 1}
_SCALES_BLOCK = 256  # of scales that are codes themselves


def _is_call(node: torch.fx.Node, name: str) -> bool:
    return isinstance(node.target, OpOverload) and str(node.target) == f"bitsandbytes.{name}.default"


def is_product(node: torch.fx.Node) -> bool:
    """Whether a node multiplies by 4-bit codes in a form that the engine has: on the CPU, codes stored as bytes, rows
    of whole blocks. Of other rows bitsandbytes 0.50 takes wrong scales on the CPU, which are not to be computed here.
    """
    if not _is_call(node, "gemm_4bit") or len(node.args) != 6:
        return False
    args: tuple[Any, ...] = node.args
    a, b = (getattr(operand, "meta", {}).get("example_value") for operand in args[:2])
    shape, block_size, quant_type = args[2], args[4], args[5]
    return (isinstance(a, Tensor) and isinstance(b, Tensor) and a.device.type == "cpu" and b.dtype is torch.uint8
            and shape[1] % block_size == 0 and quant_type in _TYPES)


def in_graph(function: str, run: torch.fx.GraphModule,
             differentiate: torch.fx.GraphModule) -> Callable[..., object] | None:
    """What computes the results of an autograd.Function's forward during an export.

    Args:
        function: the full name of the class.
        run: Dynamo's graph of its forward: the results, and what backward wants. Its gemm_4bit(), the one below,
            gets to know backward's dtype.
        differentiate: Dynamo's graph of its backward.

    Returns:
        None for a function that is not bitsandbytes', and for a product that the engine does not have.
    """
    if function != _FUNCTION:
        return None
    results: Any = next(node for node in run.graph.nodes if node.op == "output").args[0]
    # Beside arithmetic on sizes the product alone: another call may be of a mode without gradients.
    calls = [node for node in run.graph.nodes if node.op == "call_function"
             and getattr(node.target, "__module__", "") != operator.eq.__module__]
    dequantized = [node.args for node in differentiate.graph.nodes if _is_call(node, "dequantize_4bit")]
    if len(calls) != 1 or calls[0].target is not gemm_4bit or list(results[0]) != calls or len(dequantized) > 1:
        return None
    calls[0].kwargs = {**calls[0].kwargs, "backward_dtype": dequantized[0][5] if dequantized else None}
    run.recompile()
    return lambda *args: run(*args)[0]


def gemm_4bit(a: Tensor, b: Tensor, shape: Sequence[int], absmax: Tensor, block_size: int, quant_type: str,
              bias: Tensor | None = None, absmax_8bit: Tensor | None = None, absmax_code: Tensor | None = None,
              absmax_offset: Tensor | None = None, backward_dtype: torch.dtype | None = None) -> Tensor:
    """bitsandbytes' gemm_4bit; a trace gets operators that have a translation.

    Args:
        a: (..., K) of float32, float16 or bfloat16.
        b: uint8, two codes of the weight a byte.
        shape: N and K of the weight.
        absmax: float32, a scale for each block of weights, or for each 256 of `absmax_8bit`.
        absmax_8bit: uint8, places in `absmax_code`, for each block of weights.
        backward_dtype: to which backward rounds the weight; None: it needs none.
    """
    if not torch.compiler.is_exporting():
        return torch.ops.bitsandbytes.gemm_4bit.default(a, b, shape, absmax, block_size, quant_type, bias, absmax_8bit,
                                                        absmax_code, absmax_offset)
    if absmax_8bit is not None and absmax_code is not None and absmax_offset is not None:
        scales = absmax.unsqueeze(1).expand(-1, _SCALES_BLOCK).reshape(-1)[:absmax_8bit.shape[0]]
        absmax = absmax_code.index_select(0, absmax_8bit.long()) * scales + absmax_offset
    rounded = 0  # torch rounds the weight to the dtype of the gradient in any case
    if backward_dtype is not None and torch.finfo(backward_dtype).eps > torch.finfo(a.dtype).eps:
        rounded = pytorch_type_to_onnx_dtype(backward_dtype)
    y = torch.ops.onnxtrain.matmul_bnb4(a, b.reshape(-1), absmax, *shape, block_size, _TYPES[quant_type], rounded)
    return y if bias is None else y + bias
