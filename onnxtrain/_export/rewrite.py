"""What torch.onnx gets wrong for training, put right while the user's forward is traced.

export.py enters patched() around an export and Rewrite() around the user's forward. Rewrite replaces single torch
functions by those of replacements.py; what both exporters then write is in translations.py and domain.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from onnxtrain._export import checks, replacements, values, whole_numbers
from onnxtrain._export.agreement import agreeing
from onnxtrain._export.errors import Untraceable
from onnxtrain._export.exclusive import only_here
from onnxtrain._export.flags import Flags
from onnxtrain._export.function_apply import CustomFunctions, applied, inlined_checkpoint
from onnxtrain._export.lookups import INDEXED
from onnxtrain._export.replacements import PATCHES
from onnxtrain._export.special import SPECIAL, taken_apart
from onnxtrain._export.state import replaced


def _torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    return replacements.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _torch_ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    name = ("none", "mean", "sum")[reduction]
    return replacements.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, name, zero_infinity)


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*_args, **_kwargs):
        raise Untraceable(f"The module calls {what} inside forward; a graph would lose it.")

    return refuse


_REPLACED: dict[Any, Callable[..., Any]] = {
    **{getattr(F, name): function for name, function in PATCHES.items()},
    **SPECIAL,
    torch.batch_norm: _torch_batch_norm,
    torch.ctc_loss: _torch_ctc_loss,
}
_REWRITES: dict[Any, Callable[..., Any]] = {
    **{theirs: agreeing(theirs, ours) for theirs, ours in _REPLACED.items()},
    **INDEXED,
    torch.Tensor.data.__get__: lambda x: x.detach(),  # type: ignore[attr-defined]  # .data is invisible to a trace
    torch.Tensor.register_hook: _refuse("Tensor.register_hook()"),
    torch.Tensor.retain_grad: _refuse("Tensor.retain_grad()"),
    torch.Tensor.grad.__get__: _refuse("the getter of Tensor.grad"),  # type: ignore[union-attr]
    torch.Tensor.backward: _refuse("Tensor.backward()"),
    torch.autograd.grad: _refuse("torch.autograd.grad()"),
    torch.native_batch_norm: _refuse("torch.native_batch_norm()"),  # its statistics
    torch._native_batch_norm_legit: _refuse("torch._native_batch_norm_legit()"),
}


class Rewrite(TorchFunctionMode):
    """Entered around the user's forward, so that it sees each call before the exporter does.

    It catches names that users imported from torch.nn.functional; what torch's own Python calls from there (multi-head
    attention, say) it does not see, since a mode is off while one of its calls runs: patched() replaces those.

    Args:
        barriers: make every result that forward computes without grad mode a gradient barrier. The default exporter
            marks such regions in its graph; the TorchScript exporter has no trace of them, nor of detach().
        checked: filled with (condition, its value) where forward would raise if it had the other one; see checks.py.
        None:
            such a condition is a branch on a value like others.
        flags: which tensors require a gradient.
        watched: values.watching() notes what forward enters.
    """

    def __init__(self, barriers: bool, flags: Flags, checked: list[tuple[Tensor, bool]] | None = None,
                 watched: bool = False) -> None:
        super().__init__()
        self._watched = watched
        self._barriers = barriers
        self._flags = flags
        self._checked = checked
        self._values = _FrozenValues() if barriers else None
        self.unread: str | None = None  # what failed to read a tensor's contents; forward may have caught the exception

    def is_number(self, leaf: Any) -> bool:
        """Whether a TorchScript trace has made a tensor of what is a size, or computed from sizes."""
        return self._values is not None and self._values.is_number(leaf)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        rewrite = self._flags.HANDLERS.get(func)
        if rewrite is not None:
            return rewrite(self._flags, *args, **(kwargs or {}))
        if self._flags.frozen:
            barrier = torch.ops.onnxtrain.stop_gradient if self._barriers else torch.detach
            args, kwargs = self._flags.stopped((args, kwargs), barrier)
        if any([type(value) is torch.Generator for value in (*args, *(kwargs or {}).values())]):
            raise Untraceable(f"The module draws from its own torch.Generator, in {func.__name__}; a graph draws "
                              "from torch's.")
        rewrite = _REWRITES.get(func)
        if func is Tensor.__bool__ and self._checked is not None and args[0].numel() == 1:
            answer = checks.answer(sys._getframe(1))
            if answer is not None:
                self._checked.append((args[0].detach().reshape(()) != 0, answer))
                return answer
        if self._values is not None:
            self._values.before(func, args, kwargs)
        elif func in _READERS:
            try:
                return func(*args, **(kwargs or {}))
            except Exception:  # the class that torch raises of an unknown number is another one in each version
                self.unread = func.__name__
                if func is Tensor.__int__:
                    whole_numbers.note(sys._getframe(1))
                raise
        if self._checked is not None and not torch.compiler.is_dynamo_compiling():
            holds = checks.of_sizes(func, args, kwargs or {})
            if holds is not None:
                self._checked.append((holds, True))
        call = rewrite or func
        if self._watched and not torch.compiler.is_dynamo_compiling():
            result = values.unwatched(call, *args, **(kwargs or {}))
        else:
            result = call(*args, **(kwargs or {}))
        if self._values is not None:
            self._values.after(func, args, kwargs, result)
        if self._barriers and (func in _DETACHING or not torch.is_grad_enabled()):
            result = tree_map_only(Tensor, lambda x: _barrier(x, args), result)
        if (not torch.compiler.is_dynamo_compiling() and isinstance(result, Tensor)
            and not any(result is a for a in args)):
            self._flags.made(result)  # dynamo traces the branches of torch.cond, this function included
        return result


_READERS = frozenset(
    getattr(Tensor, name) for name in
    ("__bool__", "__int__", "__float__", "__complex__", "__index__", "item", "tolist", "numpy", "__array__",
     "__contains__") if hasattr(Tensor, name)
)


class _FrozenValues:
    """Stops a TorchScript trace where Python reads the contents of a tensor, which would be frozen into the graph.

    Sizes are tensors in such a trace; those, and what forward makes of them and of constants alone, may be read. Not
    data-dependent sizes, as of `x[mask]`: neither they, nor the number of parts of such a tensor.
    """

    _SIZES = frozenset((Tensor.shape.__get__,  # type: ignore[attr-defined]
                        Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndim.__get__,  # type: ignore[attr-defined]
                        Tensor.__len__, torch.numel))
    _RANKS = frozenset((Tensor.dim, Tensor.ndim.__get__))  # type: ignore[attr-defined]
    _RANDOM = ("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential", "geometric", "poisson", "cauchy",
               "dropout")

    _COUNTED = ("nonzero", "argwhere", "unique", "_unique2", "unique_consecutive", "unique_dim", "masked_select",
                "bincount", "repeat_interleave", "nms")  # their sizes are data-dependent
    _PARTS = frozenset(getattr(owner, name) for owner in (torch, Tensor) for name in
                       ("unbind", "split", "chunk", "tensor_split", "split_with_sizes")
                       if hasattr(owner, name)) | {Tensor.__iter__, Tensor.__reversed__}
    # Of what may give a tensor without elements to TorchScript's exporter: no Reshape is written for these.
    _NOT_RESHAPED = frozenset((
        "linear", "cat", "to", "detach", "clone", "contiguous", "requires_grad_", "transpose", "permute", "unsqueeze",
        "relu", "gelu", "silu", "tanh", "sigmoid", "dropout", "add", "sub", "mul", "div", "neg", "matmul", "float",
        "zeros", "empty", "tensor", "new_empty", "new_zeros", "zeros_like", "empty_like"))
    _WRITING = frozenset((Tensor.__format__, Tensor.__repr__))

    _TENSORS = ("tensor", "as_tensor", "scalar_tensor", "clone", "to", "long", "int", "float", "detach")  # of a number

    def __init__(self) -> None:
        self._free = WeakIdKeyDictionary()
        # Sizes, and what arithmetic makes of them: Python's integers outside of a trace.
        self._numbers = WeakIdKeyDictionary()
        # Tensors with a data-dependent size: the dims that may have it; None: any dim may.
        self._loose = WeakIdKeyDictionary()

    def is_number(self, leaf: Any) -> bool:
        """Whether outside of a trace this tensor would be a number."""
        return isinstance(leaf, Tensor) and leaf in self._numbers

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is None:
            return
        reads = func in _READERS or func in self._WRITING and x in self._numbers
        if reads and x not in self._free or self._falls_apart(func, x, args, kwargs or {}):
            raise Untraceable("Python code branches on, or reads, the value of a tensor; TorchScript would freeze it.")

    def _falls_apart(self, func: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the number of parts, or len(), is data-dependent."""
        if x not in self._loose or func is not Tensor.__len__ and func not in self._PARTS:
            return False
        place = 1 if "unbind" in func.__name__ else 2
        dim = kwargs.get("dim", args[place] if len(args) > place and func in self._PARTS else 0)
        dims = self._loose[x]
        return dims is None or not isinstance(dim, int) or dim % max(x.dim(), 1) in dims

    def _loosens(self, func: Any, name: str, args: tuple[Any, ...], given: list[Tensor], result: Any) -> Any:
        """The dims of the result with a data-dependent size; () for none, None if any dim may have one."""
        numbers = [t for t in given if t in self._numbers and t not in self._free]
        if numbers and not isinstance(result, torch.Size) and any(t.dim() for t in tree_leaves(result)
                                                                 if isinstance(t, Tensor)):
            return None
        if not all(t in self._free for t in given):
            repeated = name == "repeat_interleave" and len(given) == 1 and isinstance(args[1], int)
            if name in self._COUNTED and not repeated:
                return (0,)
            if func in (torch.where, Tensor.where) and len(given) == 1:
                return (0,)
            if func is Tensor.__getitem__:
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                masks = [isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) and i not in self._free
                         for i in index]
                if any(masks):
                    return (0,) if masks == [True] else None
        found = [(t, self._loose[t]) for t in given if t in self._loose]
        if not found:
            return ()
        shapes = {t.shape for t, _ in found} | ({result.shape} if isinstance(result, Tensor) else {None})
        if len(shapes) > 1 or any(dims is None for _, dims in found):
            return None
        return tuple({dim for _, dims in found for dim in dims})

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        if func in self._SIZES:
            free, dims = func in self._RANKS or not any(t in self._loose for t in given), ()
        else:
            free = not any(word in name for word in self._RANDOM) and all(t in self._free for t in given)
            dims = self._loosens(func, name, args, given, result)
        changed = given[:1] if name.endswith("_") or name == "__setitem__" else []
        number = func in self._SIZES or given and name not in self._TENSORS and all(t in self._numbers for t in given)
        made = [leaf for leaf in (result if isinstance(result, torch.Size) else tree_leaves(result))
                if isinstance(leaf, Tensor)]
        if name not in self._NOT_RESHAPED and func not in self._SIZES and _any_empty(made):
            raise Untraceable("TorchScript's exporter cannot reshape a tensor without elements.")
        for tensor in (*made, *changed):
            if dims != () and tensor.dim():
                self._loose[tensor] = dims
            if number and tensor.dim() == 0:
                self._numbers[tensor] = True
            if free:
                self._free[tensor] = True
            else:
                self._free.pop(tensor, None)


def _any_empty(tensors: list[Tensor]) -> bool:
    """Whether one has no elements, unseen by the trace. The exporter's inference of shapes would divide by zero."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return any([tensor.numel() == 0 for tensor in tensors])
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


_DETACHING = {torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]


def _barrier(result: Tensor, args: tuple[Any, ...]) -> Tensor:
    """In-place operations and properties give back an argument or the property; those stay themselves."""
    if not result.is_floating_point() or any(result is argument for argument in args):
        return result
    return torch.ops.onnxtrain.stop_gradient(result)


# --- what has to hold for the whole export ----------------------------------------------------------------------------


@contextlib.contextmanager
def patched(module: torch.nn.Module, notes: list[str], custom: CustomFunctions) -> Iterator[None]:
    """Patches of torch for the length of an export; enter it inside unchanged()."""
    transformer = torch.nn.modules.transformer
    detect = transformer._detect_is_causal_mask
    for child in module.modules():
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm) and child.momentum is None:
            child.momentum = replacements.CumulativeMomentum(child)

    def hinted(mask, is_causal=None, size=None):
        # It would compare a mask's values. Without a hint the mask is applied as it stands, which is never wrong.
        return False if is_causal is None else detect(mask, is_causal, size)

    generator = "_checkpoint_without_reentrant_generator"
    checkpoint = getattr(torch.utils.checkpoint, generator)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        for name in ("einsum", "tensordot", "chain_matmul"):  # which torch's own Python calls
            theirs = getattr(torch._VF, name)
            stack.enter_context(replaced(torch._VF, name, only_here(taken_apart(name), theirs)))
        for name, function in PATCHES.items():
            theirs = getattr(F, name)
            stack.enter_context(replaced(F, name, only_here(agreeing(theirs, function), theirs)))
        stack.enter_context(replaced(transformer, "_detect_is_causal_mask", only_here(hinted, detect)))
        stack.enter_context(applied(notes, custom))
        stack.enter_context(
            replaced(torch.utils.checkpoint, generator, only_here(inlined_checkpoint(notes), checkpoint))
        )
        stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
        torch.backends.mha.set_fastpath_enabled(False)  # its fused operators have no translation and no gradient
        yield
