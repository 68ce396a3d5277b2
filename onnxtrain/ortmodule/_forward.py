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
from typing import Any

from onnxtrain import _report
from onnxtrain._export import exclusive


class Forward:
    """ORTModule.forward; its signature, on request, is that of the wrapped module's forward."""

    class Bound:
        __slots__ = ("__self__",)  # without a __dict__, of which functools.wraps would copy

        def __init__(self, model: Any) -> None:
            self.__self__ = model

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self) and other.__self__ is self.__self__

        def __hash__(self) -> int:
            return hash((Forward, id(getattr(self, "__self__", None))))  # Dynamo (2.15) asks before __init__()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__self__._call(args, kwargs)

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(self.__self__._module.forward)

        @property
        def __func__(self) -> Callable[..., Any]:
            """As a method has one: libraries wrap it and bind the result to the model again."""

            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
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

    def __init__(self) -> None:
        kinds = inspect.Parameter
        self.__signature__ = inspect.Signature([  # of the class's attribute, which no wrapped module belongs to
            kinds("self", kinds.POSITIONAL_OR_KEYWORD), kinds("args", kinds.VAR_POSITIONAL),
            kinds("kwargs", kinds.VAR_KEYWORD)])

    def __get__(self, model: Any, _owner: type) -> Any:
        return self if model is None else self.Bound(model)

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As ORTModule.forward(model, ...), which a subclass may call."""
        return model._call(args, kwargs)


def calls_forward_of(model: Any, value: Any) -> bool:
    """Whether a function is, wraps or closes over the wrapper's forward:
    on the module it would call itself for ever.
    """
    for _ in range(64):
        if isinstance(value, Forward.Bound) or getattr(value, "_of_ortmodule", False):
            return True
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                if isinstance(cell.cell_contents, Forward.Bound) and cell.cell_contents.__self__ is model:
                    return True
        value = getattr(value, "__wrapped__", getattr(value, "func", None))
    return False


_running = threading.local()  # .adopted: those whose function runs in this thread


class Adopted:
    """A forward that was set on the wrapper, and does not come to the wrapper's own, as the module's: it is exported.

    Where it calls the forward that it found on the wrapper, it gets the one that the module had.
    """

    def __init__(self, value: Any, model: Any) -> None:
        module = model._module
        if isinstance(value, types.MethodType) and value.__self__ is model:
            value = types.MethodType(value.__func__, module)
        self._function, self._before = value, module.forward
        functools.update_wrapper(self, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
    def put(cls, value: Any, model: Any) -> None:
        """Makes it the module's forward."""
        model._module.forward = cls(value, model)
        model.__dict__["_call"] = cls.calls(model)

    @staticmethod
    def calls(model: Any) -> Any:
        """ORTModule._call of a model whose module may have such a forward."""

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = model._module.__dict__.get("forward")
            if any([own is running for running in getattr(_running, "adopted", ())]):
                return own._before(*args, **kwargs)
            return type(model)._call(model, args, kwargs)

        return call


def watched(model: Any) -> Any:
    """Calls a model on which other code has set a forward: torch's call, and a look at whether it came to the
    engine, or to the fallback.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if exclusive.here():
            return model._call_impl(*args, **kwargs)
        counters, forward = model._counters, model.__dict__.get("forward")
        before = counters.engine_steps + counters.fallback_steps
        result = model._call_impl(*args, **kwargs)
        if forward is not None and counters.engine_steps + counters.fallback_steps == before:
            _past(model, forward)
        return result

    return call


def _past(model: Any, forward: Any) -> None:
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
