"""Which tensors require a gradient, and whether gradients are on, while forward is traced: who asks, and who changes
it.

Rewrite hands the calls on Tensor.requires_grad here; export.py reads afterwards whether forward asked, which makes the
graph true for these flags alone.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from onnxtrain._export.errors import Untraceable
from onnxtrain._export.exclusive import here
from onnxtrain._export.state import replaced

# Descriptors; torch's stubs have the types of their values.
_REQUIRES_GRAD: Any = Tensor.requires_grad
_IS_LEAF: Any = Tensor.is_leaf
_GRAD_FN: Any = Tensor.grad_fn


class Flags:
    """Tensor.requires_grad while forward is traced: who asks for it, and who changes it.

    A graph is true for the flags that it was traced with where forward asks for one. A parameter that forward freezes
    is a constant from there on; where it is still frozen at the end, each step has to freeze it again (`changed`).

    Args:
        parameters: of the module as it is traced, by name.
    """

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._names = WeakIdKeyDictionary()
        for name, parameter in parameters.items():
            self._names[parameter] = name
        self._now = WeakIdKeyDictionary()
        self._made = WeakIdKeyDictionary()  # True where forward asked for a gradient of what it made
        self.consulted = False
        self.frozen = False

    def get(self, tensor: Tensor) -> bool:
        self.consulted = True
        return self._now.get(tensor, tensor.requires_grad)

    def change(self, tensor: Tensor, requires_grad: bool = True) -> Tensor:
        before, requires_grad = self.get(tensor), bool(requires_grad)
        if before == requires_grad:
            return tensor
        if requires_grad and tensor in self._made:
            self._made[tensor] = True
            return tensor
        if tensor not in self._names or requires_grad and not tensor.requires_grad:
            raise Untraceable(f"The module calls Tensor.requires_grad_({requires_grad}) inside forward on what is no "
                              "parameter of the module, or was frozen before; a graph would lose it.")
        self._now[tensor] = requires_grad
        self.frozen = True
        return tensor

    def ask(self, tensor: Tensor, getter: Any) -> Any:
        self.consulted = True
        return getter(tensor)

    def made(self, tensor: Tensor) -> None:
        """forward made it."""
        self._made.setdefault(tensor, False)

    def refuse_visible(self, results: Iterable[Any]) -> None:
        """If forward made a tensor and drops it (as reentrant checkpoints do), no code can see its gradient.

        What leaves forward must not be one: in a graph it is no leaf.

        Raises:
            Untraceable: one of `results` is.
        """
        if any(isinstance(result, Tensor) and self._made.get(result) for result in results):
            raise Untraceable("The module returns, or keeps, a tensor that it has set requires_grad of; a graph would "
                              "lose it.")

    def stopped(self, values: Any, barrier: Callable[[Tensor], Tensor]) -> Any:
        """Parameters that are frozen now, behind a barrier."""
        return tree_map_only(Tensor, lambda x: barrier(x) if self._now.get(x, True) is False else x, values)

    @property
    def changed(self) -> tuple[tuple[str, bool], ...]:
        """Parameters whose flag is another than before."""
        return tuple(sorted((self._names[t], flag) for t, flag in self._now.items() if flag != t.requires_grad))

    HANDLERS: ClassVar[dict[Any, Callable[..., Any]]] = {
        _REQUIRES_GRAD.__get__: get, _REQUIRES_GRAD.__set__: change, Tensor.requires_grad_: change,
        _IS_LEAF.__get__: lambda self, tensor: self.ask(tensor, _IS_LEAF.__get__),
        _GRAD_FN.__get__: lambda self, tensor: self.ask(tensor, _GRAD_FN.__get__),
    }


@contextlib.contextmanager
def noting_modes(flags: Flags, module: torch.nn.Module) -> Iterator[None]:
    """Sees the user's code ask whether gradients are on, also by a name that it imported; what torch's own asks is of
    no
    concern."""
    functions = [value for kind in {kind for child in module.modules() for kind in type(child).__mro__}
                 if kind.__module__.split(".")[0] != "torch" for value in vars(kind).values()
                 if isinstance(value, types.FunctionType)]
    known = list({id(function.__globals__): function.__globals__ for function in functions}.values())

    def noted(original: Callable[[], bool]) -> Callable[[], bool]:
        def ask() -> bool:
            asking = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
            if asking not in ("torch", "onnxtrain") and here():
                flags.consulted = True
            return original()

        return ask

    with contextlib.ExitStack() as stack:
        for name in ("is_grad_enabled", "is_inference_mode_enabled"):
            original = getattr(torch, name)
            ours = noted(original)
            stack.enter_context(replaced(torch, name, ours))
            for names in known:
                for imported in [key for key, value in names.items() if value is original]:
                    names[imported] = ours
                    stack.callback(names.__setitem__, imported, original)
        yield
