"""What _repeats.py notes of a capture's operations, kept on disk for the captures of later processes.

An entry is found by all that its result follows from: the operation, its arguments as formulas of sizes, torch's modes,
and what the capture knows of sizes at that time: their values in this call, their ranges, the conditions so far. The
conditions that the operation added are decided again, and must leave the same knowledge behind; else torch runs the
operation. The files are JSON with the hash of the content in their names, in a folder that is the user's own. A formula
is admitted by the names of its operators, and nothing is imported or run. Used by _captured.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy import functions

from onnxtrain import _C
from onnxtrain._export import cache, files
from onnxtrain.ortmodule._repeats import Result, Unknown

_log = logging.getLogger("onnxtrain")
FORMAT = 1
MAX_ENTRIES = 1024  # of a module
MAX_BYTES = 1 << 24  # of all modules in the folder
_FILES = "results-*.json"
_OPERATORS: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (
    sympy.Add, sympy.Mul, sympy.Pow, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or,
    sympy.Not, functions.FloorDiv, functions.CleanDiv, functions.Mod, functions.PythonMod, functions.ModularIndexing,
    functions.Max, functions.Min)}
_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, str, type(None))


def of(module: torch.nn.Module, folder: str) -> Kept | None:
    """What is kept for modules of this structure; None where nothing can be kept."""
    if not folder or not files.usable(folder):
        return None
    from torch._functorch import config as functorch
    from torch.fx.experimental import _config as shapes

    try:
        rows = [(name, type(child).__module__, type(child).__qualname__) for name, child in module.named_modules()]
        parts = (FORMAT, torch.__version__, _C.__version__, sys.version, cache.versions(),
                 torch.backends.cpu.get_cpu_capability(), sorted(torch.cpu.get_capabilities().items()),
                 shapes.get_hash(), functorch.get_hash(),  # type: ignore[attr-defined]
                 rows, cache.structure(module))
    except (OSError, TypeError, RuntimeError, AttributeError):  # a parameter without a shape, or another torch
        return None
    return Kept(folder, f"results-{hashlib.sha256(repr(parts).encode()).hexdigest()[:40]}")


class Kept(contextlib.AbstractContextManager["Kept"]):
    """Entries of the modules of one structure. At its end they are written, if there are new ones."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name, self._is_new = folder, name, False
        self._entries = _read(folder, name)
        self._formulas: dict[sympy.Basic, Any] = {}
        self._stamp: tuple[int, list[Any]] = (0, [])  # what the state was made of; held, so that no other has an id
        self._state = ""

    def __exit__(self, *_: object) -> None:
        if self._is_new:
            _write(self._folder, self._name, dict([*self._entries.items()][-MAX_ENTRIES:]))

    def name(self, key: Any, mode: FakeTensorMode) -> str | None:
        """Of an operation, whose key _repeats.py made, in what is known now. None where no text stands for it."""
        try:
            whole = self._known(mode), self._spoken(key, mode)
        except Unknown:
            return None
        return hashlib.sha256(repr(whole).encode()).hexdigest()[:40]

    def find(self, name: str, mode: FakeTensorMode) -> Result | None:
        """What a process before noted, once its conditions hold here."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        try:
            env: Any = mode.shape_env
            shape, stride, dtype, device, requires_grad, in_a_row, conditions, after = entry
            for condition, oblivious in conditions:
                if not env.evaluate_expr(self._built(condition, env), size_oblivious=bool(oblivious)):
                    return None
            if self._known(mode) != after:
                return None
            return Result(mode, self._sizes(shape, env), self._sizes(stride, env), _dtype(dtype),
                          torch.device(device), bool(requires_grad), bool(in_a_row))
        except Exception as error:  # whatever it holds, torch runs the operation then
            _log.debug("ORTModule ignores a kept result: %s: %s", type(error).__name__, error)
            return None

    def note(self, name: str, result: Result, conditions: Sequence[Any]) -> None:
        """Keeps a result, with the conditions that the operation added."""
        with contextlib.suppress(Unknown):
            added = [(self._formula(guard.expr), guard.size_oblivious) for guard in conditions]
            sizes = [[self._size(size) for size in part] for part in (result.shape, result.stride)]
            self._entries[name] = [*sizes, str(result.dtype), str(result.device), result.requires_grad,
                                   result.in_a_row, added, self._known(result.mode)]
            self._is_new = True

    # --- as text ---

    def _known(self, mode: FakeTensorMode) -> str:
        """A digest of all that the capture knows of sizes."""
        env: Any = mode.shape_env
        if env is None:
            return ""
        stamp = len(env.guards), [env, *env.var_to_range.values(), *env.replacements.values()]
        if stamp[0] != self._stamp[0] or [*map(id, stamp[1])] != [*map(id, self._stamp[1])]:
            if env.num_deferred_runtime_asserts or env.frozen:
                raise Unknown
            self._stamp, self._state = stamp, hashlib.sha256(repr(self._facts(env)).encode()).hexdigest()[:40]
        return self._state

    def _facts(self, env: Any) -> Any:
        symbols = [(symbol.name, symbol.is_integer, symbol.is_positive, symbol.is_nonnegative, str(bounds.lower),
                    str(bounds.upper), str(env.backed_var_to_val.get(symbol)))
                   for symbol, bounds in env.var_to_range.items()]
        replaced = [(symbol.name, self._formula(formula)) for symbol, formula in env.replacements.items()]
        conditions = dict.fromkeys((repr(self._formula(guard.expr)), guard.size_oblivious) for guard in env.guards)
        divisible = sorted(repr(self._formula(formula)) for formula in env.divisible)
        return repr(env.settings), sorted(symbols), sorted(replaced, key=repr), [*conditions], divisible

    def _spoken(self, part: Any, mode: FakeTensorMode) -> Any:
        kind = type(part)
        if kind in _PLAIN:
            return kind.__name__, repr(part)
        if kind is tuple:
            return [self._spoken(item, mode) for item in part]
        if kind is type:
            return "type", part.__module__, part.__qualname__
        if kind in _TEXT:
            if kind is torch.device and part.type != "cpu":  # of others the driver and the hardware decide as well
                raise Unknown
            return str(part)
        if isinstance(part, sympy.Basic):
            return "formula", self._formula(part)
        if part is mode or part is mode.shape_env:
            return "mode" if part is mode else "sizes"
        return _function(part)

    def _formula(self, formula: Any) -> Any:
        """A formula as data: a number, a symbol's name, or a list of an operator and what it is applied to."""
        found = self._formulas.get(formula)
        if found is None:
            if isinstance(formula, sympy.Integer):
                found = int(formula)
            elif isinstance(formula, sympy.Symbol):
                found = formula.name
            elif formula is sympy.true or formula is sympy.false:
                found = bool(formula)
            elif _OPERATORS.get(type(formula).__name__) is type(formula):
                found = [type(formula).__name__, *[self._formula(part) for part in formula.args]]
            else:
                raise Unknown
            self._formulas[formula] = found
        return found

    def _built(self, data: Any, env: Any) -> Any:
        """The formula again, in the very form that it had."""
        if isinstance(data, bool):
            return sympy.true if data else sympy.false
        if isinstance(data, int):
            return sympy.Integer(data)
        if isinstance(data, str):
            return {symbol.name: symbol for symbol in env.var_to_range}[data]
        formula = _OPERATORS[data[0]](*[self._built(part, env) for part in data[1:]])
        if self._formula(formula) != data:
            raise Unknown
        return formula

    def _size(self, size: Any) -> Any:
        if type(size) is int:
            return size
        found = self._formula(size.node.expr)
        if isinstance(found, int):  # a number that torch takes for a formula
            raise Unknown
        return found

    def _sizes(self, data: Sequence[Any], env: Any) -> tuple[Any, ...]:
        return tuple([size if isinstance(size, int) else env.create_symintnode(self._built(size, env), hint=None)
                      for size in data])


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r} is no dtype")
    return found


def _function(target: Any) -> Any:
    """A function of torch's or of Python's operators, by the name that leads to it."""
    kind, module = type(target), str(getattr(target, "__module__", None) or "")
    name = str(getattr(target, "__qualname__", ""))
    if kind is types.BuiltinFunctionType:
        module = module or ("torch" if getattr(torch, name.split(".")[-1], None) is target else "")
        if module.split(".")[0] in ("torch", "_operator", "math"):
            return "builtin", module, name
    elif kind is types.FunctionType and module.split(".")[0] == "torch" and not target.__closure__:
        if getattr(sys.modules.get(module), name, None) is target:
            return "function", module, name
    elif kind is torch._ops.OpOverload and str(target).startswith(("aten.", "prims.")):
        return "operator", str(target)
    raise Unknown


# --- files ------------------------------------------------------------------------------------------------------------

def _read(folder: str, name: str) -> dict[str, Any]:
    for path in files.newest(Path(folder), f"{name}-*.json")[:1]:
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            try:
                text = files.content(path, MAX_BYTES)
                if not path.stem.endswith(f"-{hashlib.sha256(text).hexdigest()}"):
                    raise ValueError("the content of the file does not match its name")
                entries = json.loads(text)
                if not isinstance(entries, dict):
                    raise ValueError("it is no table")
                files.used(path)
                return entries
            except FileNotFoundError:
                raise
            except (OSError, ValueError, RecursionError) as error:
                _log.warning("ORTModule ignores %s, which it cannot read: %s", path, error)
    return {}


def _write(folder: str, name: str, entries: dict[str, Any]) -> None:
    try:
        text = json.dumps(entries).encode()
        with files.replacing(Path(folder) / f"{name}-{hashlib.sha256(text).hexdigest()}.json") as file:
            file.write(text)
        files.evict(Path(folder), f"{name}-*.json", count=1)
        files.evict(Path(folder), _FILES, size=MAX_BYTES)
    except OSError as error:
        _log.log(files.level(folder), "ORTModule cannot keep results in %s: %s", folder, error)
