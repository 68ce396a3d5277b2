"""What a trace read outside of the module: which code ran, and the globals, closures and class attributes it looked at.

An export on disk (cache.py) is another process's as well, whose flags, environment and packages may be others. So
watching() notes the code that forward enters; written() says of each piece where it is found by name, of what file it
is, and what the values are that it names; differs() asks the same of this process. Values are compared by digests.
torch, NumPy, Python's library and this package count by their versions. Nothing here imports, or calls, what a file
names.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.util
import logging
import os
import pathlib
import re
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export.errors import NotKept

MAX_VALUES = 50_000  # of one export: beyond that it is not kept
MAX_DEPTH = 200
_BY_VERSION = {"torch", "functorch", "onnxtrain", "numpy", "builtins", "onnx", "onnxscript", "onnx_ir", "sympy"}
_ABSENT = "not there"


@dataclasses.dataclass
class Entered:
    """Code that ran while forward was traced, each with its globals; what it asked of the environment."""

    codes: dict[tuple[int, int], tuple[types.CodeType, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    environment: set[str] = dataclasses.field(default_factory=set)
    unseen: str | None = None  # why not all of it is here


@contextlib.contextmanager
def watching(entered: Entered | None) -> Iterator[None]:
    """Notes what this thread enters; None: nothing."""
    if entered is None:
        yield
        return
    if sys.getprofile() is not None:
        entered.unseen = "a profiler runs, beside which the code that forward enters cannot be seen"
        yield
        return
    codes, thread, environ = entered.codes, threading.get_ident(), type(os.environ)
    look_up = environ.__getitem__

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            code, names = frame.f_code, frame.f_globals
            codes.setdefault((id(code), id(names)), (code, names))

    def ask(self: Any, key: str) -> str:
        if threading.get_ident() == thread and _asked_by_user(sys._getframe(1)):
            entered.environment.add(key)
        return look_up(self, key)

    environ.__getitem__ = ask  # type: ignore[method-assign]
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        environ.__getitem__ = look_up  # type: ignore[method-assign]


def _asked_by_user(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    return frame is not None and not by_version(frame.f_globals.get("__name__"))


def unwatched(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an operator of torch. What it enters is torch's, and most of what a trace enters at all."""
    watch = sys.getprofile()
    if watch is None:
        return function(*args, **kwargs)
    sys.setprofile(None)
    try:
        return function(*args, **kwargs)
    finally:
        sys.setprofile(watch)


@functools.cache
def by_version(module: Any) -> bool:
    """Whether code of this module is known by a version that is in every digest."""
    root = str(module).split(".")[0]
    if root in _BY_VERSION:
        return True
    if root not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or (file.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")))
                            and "-packages" + os.sep not in file)


# --- where a piece of code is, and what it names ----------------------------------------------------------------------


def _loaded(code: types.CodeType, names: dict[str, Any]) -> tuple[set[str], set[tuple[str, str]], set[str]]:
    """Globals that the code loads; (module, name) that it imports; globals that it sets."""
    loads, imports, sets = set(), set(), set()
    before: list[Any] = [None, None]
    module = ""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loads.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            sets.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            level = before[0] if isinstance(before[0], int) else 0
            try:
                module = importlib.util.resolve_name("." * level + step.argval, names.get("__package__") or "")
            except ImportError:
                module = step.argval
            imports.add((module, ""))
        elif step.opname == "IMPORT_FROM":
            imports.add((module, step.argval))
        if step.opname == "LOAD_CONST":
            before = [before[1], step.argval]
    if "globals" in loads:
        loads |= {value for value in code.co_consts if isinstance(value, str) and value in names}
    return loads, imports, sets


def _named(code: types.CodeType) -> set[str]:
    """Attributes that the code may look up: by name, or by a constant string."""
    return {*code.co_names, *(value for value in code.co_consts if isinstance(value, str) and value.isidentifier())}


def _is_open(code: types.CodeType) -> bool:
    """Whether the code may look up attributes by names that it makes."""
    return (not {"vars", "__dict__", "asdict", "astuple"}.isdisjoint(code.co_names)
            or "getattr" in code.co_names and not any(isinstance(value, str) for value in code.co_consts[1:]))


def _find(module: str, path: str) -> Any:
    """What a module that is loaded holds under a name, without its own __getattr__."""
    value: Any = sys.modules.get(module)
    for part in path.split(".") if path else ():
        if isinstance(value, type):
            value = next((vars(base)[part] for base in value.__mro__ if part in vars(base)), _ABSENT)
        else:
            value = getattr(value, "__dict__", {}).get(part, _ABSENT)
        if value is _ABSENT:
            return _ABSENT
    return _ABSENT if value is None and not path else value


@functools.lru_cache(maxsize=4096)
def _file_digest(path: str, _: float, __: int) -> str:
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def _file(module: str) -> str:
    path = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(path, str) or not os.path.exists(path):
        return _ABSENT
    found = os.stat(path)
    return _file_digest(path, found.st_mtime, found.st_size)


# --- values -----------------------------------------------------------------------------------------------------------

_PLAIN = (type(None), bool, int, complex, str, bytes, range, slice, type(...), type(NotImplemented), torch.dtype,
          torch.device, torch.layout, torch.memory_format, types.UnionType, types.GenericAlias)
_MUTE = (logging.Logger, type(threading.Lock()), type(threading.RLock()), type(os.environ), type(sys.stdout))
_FIELD = type(vars(collections.namedtuple("_FIELD", "name"))["name"])  # a named tuple's
_MACHINERY = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__qualname__"}
_PARTS = {property: ("fget", "fset"), staticmethod: ("__func__",), classmethod: ("__func__",),
          functools.cached_property: ("func",), functools.partial: ("func", "args", "keywords"),
          functools.partialmethod: ("func", "args", "keywords"), types.MethodType: ("__func__", "__self__"),
          functools._lru_cache_wrapper: ("__wrapped__",)}


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:32]


def _code(code: types.CodeType) -> str:
    consts = [_code(value) if isinstance(value, types.CodeType) else repr(sorted(value, key=repr))
              if isinstance(value, frozenset) else repr(value) for value in code.co_consts]
    return _digest(code.co_code.hex(), *code.co_names, *code.co_varnames, *consts)


class Writer:
    """Values as texts that are the same in every process that has the same ones.

    Args:
        names: attributes of objects and classes that count; None: all.

    Raises:
        NotKept: of write(): a value that cannot be compared, by the path under which it was found.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else frozenset(names)
        self._known: dict[int, tuple[Any, str]] = {}  # holds the value, so that no other takes its address
        self.seen: set[int] = set()  # code of functions that are among the values

    def write(self, value: Any, path: str, depth: int = 0) -> str:
        if isinstance(value, enum.Enum):
            return f"{_name(type(value))}.{value.name}"
        if type(value) is float:
            return f"float {value!r}"
        if type(value) in _PLAIN or isinstance(value, (torch.dtype, pathlib.PurePath)):
            return f"{type(value).__name__} {value!r}"
        if (known := self._known.get(id(value))) is not None:
            return known[1]
        if len(self._known) >= MAX_VALUES or depth > MAX_DEPTH:
            raise NotKept(f"{path} holds too much to compare")
        self._known[id(value)] = value, "again"
        text = self._text(value, path, depth + 1)
        self._known[id(value)] = value, text
        return text

    def _text(self, value: Any, path: str, depth: int) -> str:
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, torch.nn.Module):  # what is read of one that is not wrapped is refused by itself
            return f"a module {_name(type(value))}"
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, types.FunctionType):
            return self._function(value, path, depth)
        if isinstance(value, type):
            return self._class(value, path, depth)
        for kind, parts in _PARTS.items():
            if isinstance(value, kind):
                inner = [self.write(getattr(value, part), f"{path}.{part}", depth) for part in parts]
                return f"{kind.__name__} {_digest(*inner, self._rest(value, path, depth))}"
        if isinstance(value, (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType,
                              types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodWrapperType,
                              types.ClassMethodDescriptorType)):
            owner = getattr(value, "__self__", None)
            bound = ("" if owner is None or isinstance(owner, (types.ModuleType, type))
                     else self.write(owner, f"{path}.__self__", depth))
            return f"{type(value).__name__} {_name(value)} {bound}"
        if isinstance(value, contextvars.ContextVar):
            return f"context variable {value.name} {self.write(value.get(None), path, depth)}"
        if isinstance(value, _MUTE):
            return _name(type(value))
        if type(value).__module__ == "typing" or isinstance(value, _FIELD):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, re.Pattern):
            return f"pattern {value.flags} {value.pattern!r}"
        return self._object(value, path, depth)

    def _tensor(self, value: Tensor, path: str) -> str:
        if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout is not torch.strided:
            raise NotKept(f"{path} is a {_name(type(value))}")
        plain = value.detach().contiguous().cpu()
        content = hashlib.sha256(plain.view(-1).view(torch.uint8).numpy()).hexdigest()  # type: ignore[arg-type]
        return f"tensor {plain.dtype} {tuple(plain.shape)} {content}"

    def _function(self, value: types.FunctionType, path: str, depth: int) -> str:
        if by_version(value.__module__):
            return f"function {_name(value)}" + self._wrapped(value, path, depth)
        self.seen.add(id(value.__code__))
        cells = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            try:
                cells.append(self.write(cell.cell_contents, f"{path}.{name}", depth))
            except ValueError:
                cells.append(_ABSENT)
        rest = {**(value.__kwdefaults__ or {}), **{k: v for k, v in vars(value).items()
                                                   if k != "__wrapped__" and self._counts(k)}}
        inner = [self.write(item, f"{path}.{name}", depth) for name, item in rest.items()]
        inner += [self.write(item, f"{path}, by default", depth) for item in value.__defaults__ or ()]
        return (f"function {_name(value)} {_digest(_code(value.__code__), *cells, *rest, *inner)}"
                + self._wrapped(value, path, depth))

    def _wrapped(self, value: Any, path: str, depth: int) -> str:
        inner = getattr(value, "__dict__", {}).get("__wrapped__")
        return "" if inner is None else " of " + self.write(inner, path, depth)

    def _counts(self, name: Any) -> bool:
        return self._names is None or name in self._names

    def _class(self, value: type, path: str, depth: int) -> str:
        found = []
        for base in value.__mro__:
            if by_version(base.__module__) or self._names is None:
                continue
            for name, item in vars(base).items():
                special = name.startswith("__") and isinstance(item, types.FunctionType)
                if name not in _MACHINERY and (name in self._names or special):
                    found += [name, self.write(item, f"{path}.{name}", depth)]
        return f"class {_name(value)}" + (f" {_digest(*found)}" if found else "")

    def _object(self, value: Any, path: str, depth: int) -> str:
        kind, parts = type(value), []
        if isinstance(value, collections.defaultdict):
            parts = [self.write(value.default_factory, path, depth)]
        if isinstance(value, dict):
            parts += [self.write(part, f"{path}[{key!r}]", depth)
                      for key, item in value.items() for part in (key, item)]
        elif isinstance(value, (list, tuple)):
            parts = [self.write(item, f"{path}[{index}]", depth) for index, item in enumerate(value)]
        elif isinstance(value, (set, frozenset)):
            parts = sorted(self.write(item, f"{path}[...]", depth) for item in value)
        elif isinstance(value, (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))):
            parts = [self.write(list(value.items()) if hasattr(value, "items") else list(value), path, depth)]
        elif isinstance(value, (int, float, complex, str, bytes)):
            parts = [repr(value)]
        elif kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
            return f"numpy {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        elif not self._is_all_python(kind):
            raise NotKept(f"{path} is a {_name(kind)}, which cannot be compared in another process")
        return f"{self.write(kind, path, depth)} {_digest(*parts, self._rest(value, path, depth))}"

    @staticmethod
    def _is_all_python(kind: type) -> bool:
        """Whether all that an instance holds is in its __dict__ and slots: no class of it is written in C."""
        heap = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which a few of C's have as well
        return all(base is object or base.__flags__ & heap and any(
            "__dict__" in vars(part) or "__slots__" in vars(part) for part in base.__mro__) for base in kind.__mro__)

    def _rest(self, value: Any, path: str, depth: int) -> str:
        """Attributes of the instance."""
        kind = type(value)
        held = dict(getattr(value, "__dict__", None) or {})
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if name not in ("__dict__", "__weakref__"):
                    own = f"_{base.__name__.lstrip('_')}{name}" if name[:2] == "__" and name[-2:] != "__" else name
                    with contextlib.suppress(AttributeError):
                        held[name] = object.__getattribute__(value, own)
        held.pop("__wrapped__", None)
        return _digest(*[part for name, item in sorted(held.items(), key=lambda pair: str(pair[0]))
                         if self._counts(name) for part in (str(name), self.write(item, f"{path}.{name}", depth))])


# --- of an export -----------------------------------------------------------------------------------------------------


def described(entered: Entered | None, module: torch.nn.Module) -> dict[str, Any] | str | None:
    """written(), or why not."""
    if entered is None:
        return None
    try:
        return written(entered, module)
    except Exception as reason:  # users' objects may raise anything; that is no fault of the export's
        return str(reason) if isinstance(reason, NotKept) else f"{type(reason).__name__}: {reason}"


def written(entered: Entered, module: torch.nn.Module) -> dict[str, Any]:
    """What the trace read outside of `module`, as JSON has it.

    Raises:
        NotKept: something that another process cannot compare; by name.
    """
    if entered.unseen is not None:
        raise NotKept(entered.unseen)
    ran = [(code, names) for code, names in entered.codes.values() if not by_version(names.get("__name__"))]
    for code, names in list(ran):  # functions with a cache may have been entered before
        cached = [names[name] for name in code.co_names if isinstance(names.get(name), functools._lru_cache_wrapper)]
        ran += [(inner.__wrapped__.__code__, inner.__wrapped__.__globals__) for inner in cached
                if isinstance(inner.__wrapped__, types.FunctionType)]
    roots: set[tuple[str, str]] = set()
    attributes: set[str] = set()
    unplaced = []
    inside = {id(inner) for code, _ in ran for inner in code.co_consts if isinstance(inner, types.CodeType)}
    for code, names in ran:
        where = names.get("__name__")
        own = _named(code)
        attributes |= own
        loads, imports, sets = _loaded(code, names)
        if not isinstance(where, str) or vars(sys.modules.get(where, types)) is not names:
            if any(not isinstance(names.get(name), (types.BuiltinFunctionType, type(None))) for name in loads):
                raise NotKept(f"forward runs {code.co_qualname}, whose globals are of no module")
            continue
        if common := sorted(sets & loads):
            raise NotKept(f"forward sets the global {where}.{common[0]}")
        roots |= {(where, name) for name in loads if name in names}
        for name in loads & names.keys():
            roots |= set(_of_module(names[name], own))
        for source, name in imports:
            roots |= {(source, name)} if name else set(_of_module(sys.modules.get(source), own))
        if id(code) not in inside and code.co_name != "<module>":
            unplaced.append((code, where))
            if "<" not in code.co_qualname:
                roots.add((where, code.co_qualname))
    known = None if any(_is_open(code) for code, _ in ran if _is_own(code)) else sorted(attributes)
    files = {where for _, where in unplaced} | {where for where, _ in roots if not by_version(where)}
    writer = Writer(known)
    result = {
        "names": names, "files": {where: _file(where) for where in sorted(files)},
        "environment": {key: _digest(repr(os.environ.get(key))) for key in sorted(entered.environment)},
        "classes": _classes(writer, module),
        "values": [(where, path, writer.write(_find(where, path), f"{where}.{path}")) for where, path in sorted(roots)],
    }
    for code, where in unplaced:
        if id(code) not in writer.seen:
            raise NotKept(f"forward runs {code.co_qualname} of {where}, which is not found by its name")
    return result


def _is_own(code: types.CodeType) -> bool:
    return "-packages" + os.sep not in code.co_filename


def _of_module(value: Any, own: set[str], depth: int = 0) -> Iterator[tuple[str, str]]:
    """Names of a module that code may look up, if a value is one."""
    if isinstance(value, types.ModuleType) and depth < 8:
        for name in own & value.__dict__.keys():
            item = value.__dict__[name]
            if not by_version(value.__name__) or callable(item):
                yield value.__name__, name
            yield from _of_module(item, own, depth + 1)


def _classes(writer: Writer, module: torch.nn.Module) -> list[tuple[str, str]]:
    kinds = {_name(type(child)): type(child) for child in module.modules()}
    return [(name, writer.write(kinds[name], name) + writer.write(_find_in(kinds[name], "forward"), f"{name}.forward"))
            for name in sorted(kinds)]


def _find_in(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def differs(data: dict[str, Any], module: torch.nn.Module) -> str | None:
    """None where all that was written is so here, else what is another."""
    for where, content in data["files"].items():
        if _file(where) != content:
            return f"the source of {where}"
    for key, content in data["environment"].items():
        if _digest(repr(os.environ.get(key))) != content:
            return f"the environment's {key}"
    writer = Writer(data["names"])
    now = _classes(writer, module)
    if now != [tuple(row) for row in data["classes"]]:
        return next((f"the class {a[0]}" for a, b in zip(now, data["classes"]) if a != tuple(b)), "a class")
    for where, path, content in data["values"]:
        if writer.write(_find(where, path), f"{where}.{path}") != content:
            return f"{where}.{path}"
    return None
