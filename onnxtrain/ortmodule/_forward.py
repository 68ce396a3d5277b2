"""ORTModule.forward: a method that has the signature of the wrapped module's, and is found again in what others wrap
around it.

Also the forward that a library sets instead: it calls the engine, or becomes the module's forward, with one warning.

Used by _module.py; knows of the model that _call() runs it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from onnxtrain import _report
from onnxtrain._export import exclusive
from onnxtrain._torch import pytree
from onnxtrain.ortmodule._attributes import attributes, held_by
from onnxtrain.ortmodule._program import NODES

if TYPE_CHECKING:
    from onnxtrain.ortmodule._module import ORTModule

MAX_OBJECTS = 256  # that a forward which is set leads to; beyond that nothing more is looked into


class Forward:
    """ORTModule.forward; its signature, on request, is that of the wrapped module's forward."""

    class Bound:
        __slots__ = ("__self__",)  # without a __dict__, of which functools.wraps would copy
        __self__: ORTModule

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self) and other.__self__ is self.__self__

        def __hash__(self) -> int:
            return hash((Forward, id(getattr(self, "__self__", None))))  # Dynamo (2.15) asks before it has one

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__self__._call(args, kwargs)

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(self.__self__._module.forward)

        @property
        def __func__(self) -> Callable[..., object]:
            """As a method has one: libraries wrap it and bind the result to the model again."""

            def forward(self: ORTModule, *args: Any, **kwargs: Any) -> object:
                return self._call(args, kwargs)

            with contextlib.suppress(ValueError, TypeError):
                own = self.__signature__
                first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
                whole = own.replace(parameters=[first, *own.parameters.values()])
                forward.__signature__ = whole  # type: ignore[attr-defined]
            forward._of_ortmodule = True  # type: ignore[attr-defined]
            return forward

        @property
        def __code__(self) -> types.CodeType:
            return self.__self__._module.forward.__code__

        @property
        def __doc__(self) -> str | None:  # type: ignore[override]
            return self.__self__._module.forward.__doc__

        __name__ = "forward"

    def __init__(self, wrapped: Any = None) -> None:
        kinds = inspect.Parameter
        self.__signature__ = inspect.Signature([  # of the class's attribute, which no wrapped module belongs to
            kinds("self", kinds.POSITIONAL_OR_KEYWORD), kinds("args", kinds.VAR_POSITIONAL),
            kinds("kwargs", kinds.VAR_KEYWORD)])
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            self.__signature__ = inspect.signature(wrapped.forward)

    def __get__(self, model: ORTModule | None, owner: type) -> Any:
        if model is not None:
            bound = object.__new__(Forward.Bound)
            bound.__self__ = model
            return bound
        wrapped = getattr(owner, "_wrapped_class", None)
        return self if wrapped is None else Forward(wrapped)

    def __call__(self, model: ORTModule, *args: Any, **kwargs: Any) -> Any:
        """As ORTModule.forward(model, ...), which a subclass may call."""
        return model._call(args, kwargs)


def calls_forward_of(model: ORTModule, value: object) -> bool:
    """Whether what is set as forward leads to the wrapper's forward, by a closure, attributes or what it wraps:
    on the module it would call itself for ever.
    """
    seen: dict[int, object] = {}  # held, so that no other object gets an address
    pending = [value]
    while pending and len(seen) < MAX_OBJECTS:
        value = pending.pop()
        if id(value) in seen or seen and issubclass(type(value), torch.nn.Module):
            continue
        seen[id(value)] = value
        held = attributes(value)
        if type(value) is Forward.Bound and value.__self__ is model or held.get("_of_ortmodule") is True:
            return True
        pending += [part for _, part in held_by(value)]
        pending += held.values()
        if type(value) is types.FunctionType:
            pending.append(value.__closure__)
    return False


_running = threading.local()  # .adopted: those whose function runs in this thread


class Adopted:
    """A forward that was set on the wrapper, and does not come to the wrapper's own, as the module's: it is exported.

    Where it calls the forward that it found on the wrapper, it gets the one that the module had.
    """

    def __init__(self, value: Any, model: ORTModule) -> None:
        module = model._module
        if isinstance(value, types.MethodType) and value.__self__ is model:
            value = types.MethodType(value.__func__, module)
        self._function, self._before = value, module.forward
        functools.update_wrapper(self, value)

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        stack = _running.__dict__.setdefault("adopted", [])
        stack.append(self)
        try:
            return self._function(*args, **kwargs)
        finally:
            stack.pop()

    @property
    def __code__(self) -> types.CodeType:
        return self._function.__code__

    @classmethod
    def put(cls, value: Any, model: ORTModule) -> None:
        """Makes it the module's forward."""
        model._module.forward = cls(value, model)
        model.__dict__["_call"] = cls.calls(model)

    @staticmethod
    def calls(model: ORTModule) -> Callable[[tuple[object, ...], dict[str, object]], object]:
        """ORTModule._call of a model whose module may have such a forward."""

        def call(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            own = model._module.__dict__.get("forward")
            if any([own is running for running in getattr(_running, "adopted", ())]):
                return own._before(*args, **kwargs)
            return type(model)._call(model, args, kwargs)

        return call


def watched(model: ORTModule) -> Callable[..., object]:
    """Calls a model on which other code has set a forward: torch's call, and a look at whether it came to the
    engine, or to the fallback, or gives what it has kept of a call that did.
    """
    came = False

    def call(*args: Any, **kwargs: Any) -> object:
        nonlocal came
        if exclusive.here():
            return model._call_impl(*args, **kwargs)
        counters, forward = model._counters, model.__dict__.get("forward")
        before = counters.engine_steps + counters.fallback_steps
        result = model._call_impl(*args, **kwargs)
        came = came or counters.engine_steps + counters.fallback_steps > before
        if (forward is not None and counters.engine_steps + counters.fallback_steps == before
                and not (came and _is_kept(result))):
            _past(model, forward)
        return result

    return call


def _is_kept(result: object) -> bool:
    """Whether autograd's graph of a result leads to a run of the engine, or there is no graph."""
    pending = [leaf.grad_fn for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    seen: set[object] = set()
    while pending:
        node = pending.pop()
        if type(node) in NODES:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            pending += [before for before, _ in node.next_functions]
    return not seen


def _past(model: ORTModule, forward: Callable[..., object]) -> None:
    """A step that no one but this forward ran: counted, said, and the last of its kind."""
    _report.count(model._counters, fallback_steps=1)
    name = getattr(forward, "__qualname__", type(forward).__name__)
    text = f"the function {name} was set as forward of the ORTModule, and does not call its own forward"
    stays = model.__dict__.get("forward") is forward
    if stays:
        del model.__dict__["forward"], model.__dict__["_compiled_call_impl"]
        Adopted.put(forward, model)
    if text not in model._counters.reasons:
        model._note(text)
        model._debug.log(logging.WARNING, "ORTModule: %s: PyTorch ran this call, because %s%s",
                         type(model._module).__name__, text,
                         ". From now on ORTModule exports this function as the module's forward" if stays else "")
