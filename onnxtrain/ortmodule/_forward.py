"""ORTModule.forward: a method that has the signature of the wrapped module's, and is found again in what others wrap
around it.

Used by _module.py; knows of the model that _call() runs it.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from typing import Any


class Forward:
    """ORTModule.forward, with the signature of the wrapped module's where somebody asks for it."""

    class Bound:
        __slots__ = ("__self__",)  # without a __dict__, of which functools.wraps would copy

        def __init__(self, model: Any) -> None:
            self.__self__ = model

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self) and other.__self__ is self.__self__

        def __hash__(self) -> int:
            return hash((Forward, id(self.__self__)))

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__self__._call(args, kwargs)

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(self.__self__._module.forward)

        @property
        def __func__(self) -> types.FunctionType:
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
