"""Captures without imports and work that they do not need: parts of PyTorch's compiler, its minifier, distributed
tensors, words for logs that are off; and without the garbage collector.

Dynamo imports these modules, of which some take longer than the capture of a small model and stay in memory, to compare
a value with one of theirs or to be ready for a failure. Each function here answers as Dynamo's own does; torch (2.13)
has no setting for any of it, and another torch without such a function is left as it is. Used by _captured.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from onnxtrain import _torch
from onnxtrain._export.state import wrapped


@contextlib.contextmanager
def backend_as_it_is() -> Iterator[None]:
    """While a function is made that captures: its backend is called directly, where no programs were asked for that
    repeat its failures.
    """
    with wrapped("get_compiler_fn",
                 lambda plain: plain if _torch.dynamo_config.repro_after is not None else lambda backend: backend):
        yield


def _in_functorch(plain: Callable[..., object]) -> Callable[..., object]:
    """InstructionTranslator._throw_if_in_functorch, which looks up a backend where no transform is active, too."""
    def throw(self: object) -> None:
        if _torch.peek_interpreter_stack() is not None:
            plain(self)

    return throw


def _files(plain: Callable[[], set[str]]) -> Callable[[], set[str]]:
    """symbolic_shapes.uninteresting_files, which imports the modules that no message about a size should name; what
    this process has not imported is in no message.
    """
    @functools.cache
    def uninteresting() -> set[str]:
        if _torch.TABLE["export_trace"].dotted() in sys.modules:
            return plain()
        named = {sys.modules[name].__file__ for name in _UNINTERESTING if name in sys.modules}
        operators = {module.__file__ for name, module in [*sys.modules.items()]
                     if name.startswith(f"{_torch.TABLE['higher_order_ops'].dotted()}.")}
        return {file for file in named | operators if file is not None} | _torch.guards.uninteresting_files()

    return uninteresting


def _side_effects(plain: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """OutputGraph.get_replayed_side_effect_source_refs, which imports a class of torch.export's to leave it out."""
    def refs(self: Any, *, populate_export_metadata: bool = False) -> list[str]:
        if populate_export_metadata or _torch.TABLE["export_trace"].dotted() in sys.modules:
            return plain(self, populate_export_metadata=populate_export_metadata)
        changed = [variable for variable in self.side_effects._get_modified_vars() if isinstance(
            getattr(variable, "mutation_type", None), (_torch.AttributeMutationExisting, _torch.ValueMutationExisting))]
        return [_torch.get_source_debug_name(variable.source) for variable in changed]

    return refs


def _funcname(plain: Callable[[str, int], str | None]) -> Callable[[str, int], str | None]:
    """symbolic_convert.get_funcname, which splits whole source files into tokens to name a line's function in logs."""
    def get_funcname(file: str, line: int) -> str | None:
        logs = _torch.symbolic_convert.trace_call_log, _torch.symbolic_convert.trace_source_log
        return plain(file, line) if any(log.isEnabledFor(logging.DEBUG) for log in logs) else None

    return get_funcname


_UNINTERESTING = (
    "torch", "torch.fx.experimental.recording", "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes", "torch.fx.interpreter", *[_torch.TABLE[short].dotted() for short in (
        "compiler_switches", "custom_ops", "fake_impl", "fake_tensor", "frames", "logging_internals", "meta_utils",
        "sizevars", "structured_logs", "symbolic_trace")])


_INSTEAD: dict[str, Callable[[Any], Callable[..., object]]] = {
    "throw_if_in_functorch": _in_functorch,
    "uninteresting_files": _files,
    "uninteresting_files_of_graphs": _files,
    "side_effect_sources": _side_effects,
    "get_funcname": _funcname,
}


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """While Dynamo captures."""
    with contextlib.ExitStack() as stack:
        for name, ours in _INSTEAD.items():
            stack.enter_context(wrapped(name, ours))
        yield


class _Collector:
    """Garbage is not collected while threads capture: a capture makes millions of objects, and few are garbage."""

    def __init__(self) -> None:
        self._lock, self._paused, self._enable = threading.Lock(), 0, False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            self._paused += 1
            if self._paused == 1:
                self._enable = gc.isenabled()
                gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                if not self._paused and self._enable:
                    self._resume()

    @staticmethod
    def _resume() -> None:
        """With everything that there is in the oldest generation: the collector would look at all of it at once, which
        takes a third of a small model's capture, and find little after Dynamo's own collection.
        """
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()

    def _after_fork(self) -> None:
        """The threads that capture are not in the child, but for one that forked, which goes on without a pause."""
        self._lock = threading.Lock()
        if self._paused and self._enable:
            self._enable = False
            gc.enable()


collector = _Collector()
