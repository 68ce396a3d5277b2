"""The fused operators that torch.nn's attention layers call in evaluation without gradients, taken apart.

torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer take this path by themselves. Masks are boolean: where
one is not zero, a pair is left out. Used by rewrite.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export.errors import Untraceable
from onnxtrain._export.replacements import layer_norm, scaled_dot_product_attention


def _heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, E) to (B, heads, L, E / heads)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _left_out(mask: Tensor, mask_type: int | None) -> Tensor:
    """Type 0 is of pairs (L, S), 1 of keys (B, S), 2 of both (B, heads, L, S)."""
    mask = mask.to(torch.bool)
    return mask[:, None, None, :] if mask_type == 1 else mask


def native_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """PyTorch's: query, key, value (B, L, E); the results, and the weights if needed."""
    if any(x.is_nested for x in (query, key, value)):
        raise Untraceable("The module's attention takes nested tensors.")
    if query is key and key is value:
        parts = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        parts = tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), qkv_weight.chunk(3),
                                                           qkv_bias.chunk(3), strict=True))
    q, k, v = (_heads(x, num_head) for x in parts)
    weights = None
    if mask is None and not need_weights:
        y = scaled_dot_product_attention(q, k, v)
    else:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(_left_out(mask, mask_type), -math.inf)
        weights = torch.softmax(scores, -1)
        y = weights @ v
    y = F.linear(y.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if weights is None or not need_weights:
        return y, None
    return y, weights.mean(1) if average_attn_weights else weights


def transformer_encoder_layer_fwd(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:
    """PyTorch's: src (B, L, E) to the same shape."""
    def attention(x: Tensor) -> Tensor:
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias,
                                           mask, False, True, mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    first = (embed_dim,), norm_weight_1, norm_bias_1, eps
    second = (embed_dim,), norm_weight_2, norm_bias_2, eps
    if norm_first:
        src = src + attention(layer_norm(src, *first))
        return src + feed_forward(layer_norm(src, *second))
    src = layer_norm(src + attention(src), *first)
    return layer_norm(src + feed_forward(src), *second)


FAST_PATHS: dict[object, Callable[..., object]] = {
    _torch.native_multi_head_attention: native_multi_head_attention,
    _torch.transformer_encoder_layer_fwd: transformer_encoder_layer_fwd,
}
