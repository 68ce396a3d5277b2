"""What forward prints, logs and warns of, in a capture: said when the captured part has run, in order.

Dynamo can move such calls behind a graph. Here it does so with the values of the moment: of a small tensor a copy is
kept, and for a large one the graph is cut.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from onnxtrain import _torch
from onnxtrain._export.state import replaced, settings, wrapped

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "warn": logging.WARNING,
           "error": logging.ERROR, "exception": logging.ERROR, "critical": logging.CRITICAL, "fatal": logging.CRITICAL}
MOST_KEPT = 1000  # entries of a tensor that is printed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what Dynamo itself says of what it leaves to Python, which ORTModule names; TORCH_LOGS brings it back."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    warnings.filterwarnings("ignore", "Dynamo (does not know how to|cannot) trace")
    own = warnings.filters[0]
    try:
        with contextlib.ExitStack() as loggers:
            for name in ("convert_frame", "fake_tensor"):
                logger = logging.getLogger(_torch.TABLE[name].dotted())
                loggers.enter_context(replaced(logger, "isEnabledFor", _is_critical))
            yield
    finally:
        with contextlib.suppress(ValueError):  # a script may have put back its own filters
            warnings.filters.remove(own)  # type: ignore[attr-defined]


def _is_critical(level: int) -> bool:
    return level >= logging.CRITICAL


@contextlib.contextmanager
def said_later() -> Iterator[None]:
    """While Dynamo captures."""
    moved = {*_torch.dynamo_config.reorderable_logging_functions, print, warnings.warn}
    with (settings(_torch.dynamo_config, reorderable_logging_functions=moved),
          wrapped("call", _says),
          wrapped("call_of_logger", _logs)):
        yield


def _say(tx: _torch.Translator, function: Any, args: _torch.Values, kwargs: _torch.Named) -> _torch.Value:
    """A call of print() and the like that says what values are at its time. It cuts the graph where that is not known
    without keeping a large tensor, and for arguments by name, which Dynamo drops. A warning's stacklevel is dropped:
    it has no meaning where the call is made.
    """
    now = [_now(tx, value, function.value is print) for value in args]
    if any(each is None for each in now) or kwargs.keys() - {"stacklevel"}:
        now = [function]  # not of a kind that Dynamo moves
    return function.call_function(tx.output.root_tx, now, {})  # Dynamo runs those of the outermost frame alone


def _says(plain: Callable[..., None]) -> Callable[..., None]:
    """Dynamo's reading of a call in Python."""
    def call_function(self: _torch.Translator, fn: _torch.Value, args: _torch.Values, kwargs: _torch.Named) -> None:
        if isinstance(fn, _torch.DebuggingVariable):
            self.push(_say(self, fn, args, kwargs))
        else:
            plain(self, fn, args, kwargs)
    return call_function


def _now(tx: _torch.Translator, value: _torch.Value, is_printed: bool) -> _torch.Value | None:
    """What stands for an argument's value at this time in a later call; None where nothing does.

    is_printed: the call shows the text of each argument, whatever it is.
    """
    value = value.realize() if isinstance(value, _torch.LazyVariableTracker) else value
    if isinstance(value, _torch.TensorVariable):
        entries = value.as_proxy().node.meta["example_value"].numel()
        return value.call_method(tx, "clone", [], {}) if isinstance(entries, int) and entries <= MOST_KEPT else None
    if is_printed and isinstance(value, _torch.SymNodeVariable):
        return _torch.StringFormatVariable("{}", [value], {})
    if is_printed and isinstance(value, _torch.SizeVariable):
        return _torch.StringFormatVariable(f"torch.Size([{', '.join(['{}'] * len(value.items))}])", value.items, {})
    if isinstance(value, _torch.StringFormatVariable):
        parts = [_now(tx, part, False) for part in value.sym_args]
        named = {name: _now(tx, part, False) for name, part in value.sym_kwargs.items()}
        known = all(part is not None for part in (*parts, *named.values()))
        return _torch.StringFormatVariable(value.format_string, parts, named) if known else None
    return value


def _logs(plain: Callable[..., object]) -> Callable[..., object]:
    """LoggingLoggerVariable.call_method that leaves out what the logger's level leaves out, and calls a method that
    logs each message once (``warning_once`` of transformers, by functools.lru_cache) while it captures.
    """
    def call_method(self: Any, tx: _torch.Translator, name: str, args: _torch.Values, kwargs: _torch.Named) -> object:
        method: Any = getattr(self.value, name, None)
        quiet = name in _LEVELS and not self.value.isEnabledFor(_LEVELS[name])
        if not quiet and hasattr(method, "cache_info"):
            with contextlib.suppress(NotImplementedError):  # an argument that is no constant
                values = [value.as_python_constant() for value in args]
                method(*values, **{key: value.as_python_constant() for key, value in kwargs.items()})
                quiet = True
        if quiet:
            return _torch.ConstantVariable.create(None)
        if name in _LEVELS and self.source is not None:
            return _say(tx, _torch.DebuggingVariable(method, source=_torch.AttrSource(self.source, name)), args, kwargs)
        return plain(self, tx, name, args, kwargs)
    return call_method
