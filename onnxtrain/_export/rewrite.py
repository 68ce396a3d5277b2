"""What torch.onnx gets wrong for training, put right while a graph is traced.

export.py enters Rewrite() around the call of the graph. It calls the functions of replacements.py and decompositions.py
in the place of torch's; what torch.onnx then writes is in translations.py and domain.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export import checks, replacements
from onnxtrain._export.complex_parts import set_item
from onnxtrain._export.decompositions import SPECIAL, taken_apart
from onnxtrain._export.derivatives import Differentiated
from onnxtrain._export.errors import Untraceable
from onnxtrain._export.fast_paths import FAST_PATHS
from onnxtrain._export.functionalization import Batched, Functionalized
from onnxtrain._export.instead import Functions, Instead, with_copies
from onnxtrain._export.lookups import INDEXED
from onnxtrain._export.replacements import PATCHES


def _torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    return replacements.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _torch_ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    name = ("none", "mean", "sum")[reduction]
    return replacements.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, name, zero_infinity)


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refuse(*_args, **_kwargs):
        raise Untraceable(f"The module calls {what} inside forward; a graph would lose it.")

    return refuse


_REPLACED: Functions = {
    **{getattr(F, name): function for name, function in PATCHES.items()},
    **SPECIAL,
    **FAST_PATHS,
    **{getattr(_torch.VF, name): taken_apart(name) for name in ("einsum", "tensordot")},
    torch.batch_norm: _torch_batch_norm,
    torch.ctc_loss: _torch_ctc_loss,
}
REWRITES: Functions = with_copies({
    **_REPLACED,
    **INDEXED,
    torch.Tensor.__setitem__: set_item,
    _torch.assert_async: lambda *_: None,  # a condition; see checks.py
    torch.Tensor.data.__get__: lambda x: x.detach(),  # type: ignore[attr-defined]  # .data is invisible to a trace
    torch.Tensor.register_hook: _refuse("Tensor.register_hook()"),
    torch.Tensor.retain_grad: _refuse("Tensor.retain_grad()"),
    torch.Tensor.grad.__get__: _refuse("the getter of Tensor.grad"),  # type: ignore[union-attr]
    torch.Tensor.backward: _refuse("Tensor.backward()"),
    torch.native_batch_norm: _refuse("torch.native_batch_norm()"),  # its statistics
    _torch.native_batch_norm_legit: _refuse(f"torch.{_torch.native_batch_norm_legit.__name__}()"),
})


class Rewrite(Instead):
    """Entered around the call of the graph, so that it sees each function of torch before torch.export does.

    Args:
        given: the arguments, parameters and buffers of the graph.
        checked: filled with conditions without which torch would raise; see checks.py.
        mode: that the graph is traced in; Differentiated, torch.autograd.grad() is its own.
    """

    def __init__(self, given: Sequence[object], checked: list[Tensor], mode: Functionalized | Batched) -> None:
        super().__init__(REWRITES)
        self._mode = mode
        self._checked = checked
        self._given = given
        self._leaves: list[Tensor] = []  # made without a gradient, of which one was asked for

    def _want_gradient(self, tensor: Tensor, requires_grad: bool = True) -> Tensor:
        """A tensor that is made in the graph and asks for a gradient of its own, as reentrant checkpoints do: no other
        code can see it where the tensor is no result.
        """
        if tensor.requires_grad != bool(requires_grad):
            if not requires_grad or any([tensor is given for given in self._given]):
                raise Untraceable(f"The module calls Tensor.requires_grad_({requires_grad}) inside forward on a "
                                  "tensor that forward did not create; a graph would lose it.")
            self._leaves.append(tensor)
            if isinstance(self._mode, Differentiated):
                self._mode.want_gradient(tensor)
        return tensor

    def refuse_visible(self, results: Iterable[object]) -> None:
        """Raises Untraceable where a result is a tensor that the graph has set requires_grad of: it is no leaf then."""
        if any([result is leaf for result in results for leaf in self._leaves]):
            raise Untraceable("The module returns, or keeps, a tensor whose requires_grad it has set; a graph would "
                              "lose that.")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.autograd.grad and isinstance(self._mode, Differentiated):
            return self._mode.grad(*args, **(kwargs or {}))
        if func in _FLAGS:
            return self._want_gradient(*args, **(kwargs or {}))
        if any([type(value) is torch.Generator for value in (*args, *(kwargs or {}).values())]):
            raise Untraceable(f"The module draws from its own torch.Generator, in {func.__name__}; a graph draws "
                              "from torch's default generator.")
        if (holds := checks.of_sizes(func, args, kwargs or {})) is not None:
            self._checked.append(holds)
        return super().__torch_function__(func, types, args, kwargs)


_FLAGS = frozenset((Tensor.requires_grad_, Tensor.requires_grad.__set__))  # type: ignore[attr-defined]
