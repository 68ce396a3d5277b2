"""What forward prints, logs and warns of, in a capture: said when the captured part has run, in order.

Dynamo can move such calls behind a graph. Here it does so where every value is known by then: a tensor that is printed
may be written before the part ends, and then the graph is cut, as it is by Dynamo itself.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from onnxtrain._export.state import settings, wrapped

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "warn": logging.WARNING,
           "error": logging.ERROR, "exception": logging.ERROR, "critical": logging.CRITICAL, "fatal": logging.CRITICAL}


@contextlib.contextmanager
def said_later() -> Iterator[None]:
    """While Dynamo captures."""
    from torch._dynamo import config

    moved = {*config.reorderable_logging_functions, print, warnings.warn}
    misc = "torch._dynamo.variables.misc:"
    with (settings(config, reorderable_logging_functions=moved),
          wrapped(f"{misc}DebuggingVariable.call_function", _says),
          wrapped(f"{misc}LoggingLoggerVariable.call_method", _logs)):
        yield


def _says(plain: Callable[..., Any]) -> Callable[..., Any]:
    """DebuggingVariable.call_function that cuts the graph for a tensor, and for arguments by name, which Dynamo drops.
    A warning's stacklevel is dropped: it has no meaning where the call is made.
    """
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        from torch._dynamo.variables import TensorVariable

        kwargs = {name: value for name, value in kwargs.items() if name != "stacklevel"}
        parts = [part for text in args for part in (
            text, *getattr(text, "sym_args", ()), *getattr(text, "sym_kwargs", {}).values())]
        if kwargs or any(isinstance(part, TensorVariable) for part in parts):
            args, kwargs = [self], {}  # not of a kind that Dynamo moves
        return plain(self, tx.output.root_tx, args, kwargs)  # Dynamo runs those of the outermost frame alone
    return call_function


def _logs(plain: Callable[..., Any]) -> Callable[..., Any]:
    """LoggingLoggerVariable.call_method that leaves out what the logger's level leaves out, and calls a method that
    logs each message once (``warning_once`` of transformers, by functools.lru_cache) while it captures.
    """
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        from torch._dynamo.source import AttrSource
        from torch._dynamo.variables import ConstantVariable
        from torch._dynamo.variables.misc import DebuggingVariable

        method: Any = getattr(self.value, name, None)
        quiet = name in _LEVELS and not self.value.isEnabledFor(_LEVELS[name])
        if not quiet and hasattr(method, "cache_info"):
            with contextlib.suppress(NotImplementedError):  # an argument that is no constant
                values = [value.as_python_constant() for value in args]
                method(*values, **{key: value.as_python_constant() for key, value in kwargs.items()})
                quiet = True
        if quiet:
            return ConstantVariable.create(None)
        if name in _LEVELS and self.source is not None:
            return DebuggingVariable(method, source=AttrSource(self.source, name)).call_function(tx, args, kwargs)
        return plain(self, tx, name, args, kwargs)
    return call_method
