"""Exports kept on disk: ORTMODULE_CACHE_DIR. A second process loads the graph and never imports torch.onnx.

The name of a file is a digest of everything that a trace depends on: structure and weights' shapes of the module, the
source of the program's own files, versions, schema, mode, autocast. What forward read of the module's attributes, and
outside of the module (values.py), is kept in the file and compared with what is at hand. What cannot be compared is not
kept. The file is a zip of JSON and ONNX, with the hash of both in its name; loading it runs no code: expressions of
guards are parsed and admitted by kind, containers are those that are registered (trees.py), nothing is imported.
"""

from __future__ import annotations

import ast
import collections
import functools
import hashlib
import importlib.metadata
import inspect
import io
import json
import logging
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export import attributes, files, trees, values, views
from onnxtrain._export import guards as shape_guards
from onnxtrain._export.errors import NotKept
from onnxtrain._export.snapshot import Snapshot
from onnxtrain._export.state import Setting

_log = logging.getLogger("onnxtrain")
FORMAT = 7
MAX_ENTRIES = 16  # per digest: exports that differ in sizes, attributes, or values outside of the module
MAX_BYTES = 1 << 29  # of all exports in the folder


# --- the digest -------------------------------------------------------------------------------------------------------


def _own_files() -> Iterator[str]:
    """Source files of loaded modules that belong to no installed package."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places.append(os.path.dirname(os.path.dirname(__file__)))
    installed = tuple({folder + os.sep for place in places for folder in (place, os.path.realpath(place))})
    outside: dict[str, bool] = {}  # thousands of modules share a few hundred folders
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or path.startswith(installed):
            continue
        folder = os.path.dirname(path)
        if folder not in outside:
            outside[folder] = (not (os.path.realpath(folder) + os.sep).startswith(installed) and "/site-packages/" not
                               in folder + os.sep)
        if outside[folder] and os.path.exists(path):
            yield os.path.realpath(path)


def _classes(module: torch.nn.Module) -> Iterator[type]:
    """Of the module's tree, torch's own apart."""
    for kind in {base for child in module.modules() for base in type(child).__mro__}:
        if kind.__module__.split(".")[0] not in ("torch", "builtins", "typing", "abc"):
            yield kind


def _source_files(module: torch.nn.Module) -> list[str]:
    found = set(_own_files())
    for kind in _classes(module):
        try:
            found.add(os.path.realpath(inspect.getfile(kind)))
        except (TypeError, OSError):
            raise NotKept(f"the source of {kind.__qualname__} is not known") from None
    if any(not os.path.exists(path) for path in found):
        raise NotKept("a class has no source file")
    return sorted(found)


def _structure(module: torch.nn.Module) -> list[Any]:
    first: dict[int, str] = {}
    rows: list[Any] = []
    for name, child in module.named_modules(remove_duplicate=False):
        rows.append((name, type(child).__module__, type(child).__qualname__, child.training))
        for kind, store in (("p", child._parameters), ("b", child._buffers)):
            for key, tensor in store.items():
                if tensor is None:
                    rows.append((kind, key, None))
                else:
                    tied = first.setdefault(id(tensor), f"{name}.{key}")
                    rows.append((kind, key, tied, str(tensor.dtype), tuple(tensor.shape), str(tensor.device)))
    return rows


@functools.cache
def _versions() -> list[str | None]:
    """Of what translates, and of NumPy. Other packages count by the files that a trace enters: values.py."""
    found: list[str | None] = []
    for name in ("numpy", "onnx", "onnx-ir", "onnxscript"):
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append(None)
    return found


def digest(module: torch.nn.Module, key: Any, settings: Sequence[Any]) -> str:
    """A name for all exports of this module with this schema. Raises NotKept where part of it has no stable name."""
    from onnxtrain import _C

    code = hashlib.sha256()
    for path in _source_files(module):
        code.update(hashlib.sha256(Path(path).read_bytes()).digest())
    spec = None if key.spec is None else json.dumps(trees.written(key.spec))
    schema = [item if isinstance(item, tuple) else repr(item) for item in key.schema]
    parts = [FORMAT, torch.__version__, _C.build_info()["version"], sys.version, _versions(), code.hexdigest(),
             _structure(module), repr(schema), spec, key.training, repr(key.torch_modes), *map(repr, settings),
             torch.are_deterministic_algorithms_enabled()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


# --- what forward read of the module ----------------------------------------------------------------------------------


class _Written(attributes._Snapshot):
    """A State's values, each as a text that is the same in every process that has the same one."""

    def __init__(self, state: attributes.State, names: dict[int, str]) -> None:
        super().__init__(state._bound)
        self._writer = values.Writer()
        for child, name, read in [entry for entry in state._reads if id(entry[0]) in names]:
            self.add_module(child, name, read)
        self.add_global_hooks()
        self.texts = {path: self._text(path, value) for path, value in self.values.items()}

    def _value(self, path: str, value: Any, depth: int) -> None:
        self.values[path] = f"={value!r}" if value is attributes.ABSENT else self._writer.write(value, path)

    def _text(self, path: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        return self._writer.write(value.value if isinstance(value, attributes._Identity) else value, path)


def _state_out(module: torch.nn.Module, state: attributes.State) -> dict[str, Any]:
    names = {id(child): name for name, child in module.named_modules()}
    reads = [(names.get(id(child)), child, sorted(read)) for child, _, read in state._reads]
    for name, child, read in reads:
        if name is None and "call_super_init" not in read:  # which __init__ asks for: forward made this one itself
            raise NotKept(f"forward reads a {type(child).__qualname__} outside of the module that is wrapped")
    return {
        "reads": [(name, read) for name, _, read in reads if name is not None],
        "bound": sorted((names[owner], name) for owner, name in state._bound),
        "values": _Written(state, names).texts,
    }


def _state_in(module: torch.nn.Module, data: dict[str, Any]) -> attributes.State | None:
    """None where the module's attributes are others now."""
    modules = dict(module.named_modules())
    record = attributes.Record({modules[name]: set(read) for name, read in data["reads"]})
    bound = frozenset((id(modules[name]), attribute) for name, attribute in data["bound"])
    state = attributes.State(module, record, bound)
    texts = _Written(state, {id(child): name for name, child in modules.items()}).texts
    for path in (*data["values"], *texts):
        if texts.get(path) != data["values"].get(path):
            _log.debug("ORTModule: an export on disk is for another value of the attribute %s", path)
            return None
    return state


def _settings_out(module: torch.nn.Module, settings: Sequence[Setting]) -> list[tuple[str, str, Any]]:
    """(how the module leads to the object, attribute, value) of what forward sets at its first call."""
    if not settings:
        return []
    paths = {id(attributes): path for path, attributes in _objects(module).items()}
    if not all(id(setting.attributes) in paths and type(setting.value) in _PLAIN for setting in settings):
        raise NotKept(f"forward sets {settings[0].place!r} at its first call")
    return [(paths[id(setting.attributes)], setting.name, setting.value) for setting in settings]


def _settings_in(module: torch.nn.Module, data: Sequence[Any]) -> tuple[Setting, ...]:
    """Raises KeyError where the module leads to no such object."""
    found = _objects(module) if data else {}
    return tuple(Setting(found[path], name, value, f"{path}.{name}") for path, name, value in data)


def _objects(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of what the module leads to, by the way to them, where one way leads to one object alone."""
    ways = [(path, value) for value, path in Snapshot(module).objects() if type(value) is dict]
    times = collections.Counter(path for path, _ in ways)
    return {path: value for path, value in ways if times[path] == 1}


# --- files ------------------------------------------------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, str)


def _plain(constants: dict[int, Any]) -> list[Any]:
    if not all(type(value) in _PLAIN for value in constants.values()):
        raise NotKept("the result holds a value that is not a plain constant")
    return sorted(constants.items())


def _meta(module: torch.nn.Module, exported: Any) -> dict[str, Any]:
    if exported.modes is not None:
        raise NotKept("forward asks which tensors require a gradient, or for grad mode")
    if exported.functions:
        raise NotKept("the module calls a torch.autograd.Function")
    if exported.filled or exported.given:
        raise NotKept("forward fills a cache that it is given")
    if any(source.kind == "constant" for source in exported.inputs):
        raise NotKept("forward uses a large tensor that does not belong to the module")
    if not isinstance(exported.outside, dict):
        raise NotKept(exported.outside or "the export did not record what forward reads outside the module")
    return {
        "outside": exported.outside, "inputs": [(i.kind, i.name, i.target) for i in exported.inputs],
        "outputs": [(o.kind, o.name, o.target) for o in exported.outputs],
        "out_spec": trees.written(exported.out_spec), "out_constants": _plain(exported.out_constants),
        "guards": exported.guards.source,
        "assignments": [(a.module, a.name, trees.written(a.spec), _plain(a.constants), a.tensors)
                        for a in exported.assignments],
        "state": _state_out(module, exported.state), "exporter": exported.exporter, "opset": exported.opset,
        "notes": exported.notes, "conditional": exported.conditional, "same": exported.same,
        "views": exported.views, "settings": _settings_out(module, exported.settings),
    }


def _entry(meta: bytes, model: bytes) -> str:
    return hashlib.sha256(hashlib.sha256(meta).digest() + model).hexdigest()


def store(folder: str, name: str, module: torch.nn.Module, exported: Any) -> bool:
    """Keeps an export; whether that was possible. Failures of the disk are logged, never raised."""
    if not files.usable(folder):
        return False
    try:
        meta = json.dumps(_meta(module, exported)).encode()
        with (files.replacing(Path(folder) / f"{name}-{_entry(meta, exported.model)}.zip") as file,
              zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive):
            archive.writestr("meta.json", meta)
            archive.writestr("model.onnx", exported.model)
        files.evict(Path(folder), f"{name}-*.zip", count=MAX_ENTRIES)
        files.evict(Path(folder), "[0-9a-f]" * 40 + "-*.zip", size=MAX_BYTES)
        return True
    except NotKept as reason:
        _log.info("ORTModule: this export is not kept in %s: %s", folder, reason)
    except (OSError, TypeError, ValueError, NotImplementedError) as error:
        _log.warning("ORTModule: %s cannot keep an export: %s", folder, error)
    return False


def load(folder: str, name: str, module: torch.nn.Module, tensors: Sequence[Tensor]) -> Any | None:
    """An export that holds for this module and these sizes, or None. A file that cannot be read is passed over."""
    if not files.usable(folder):
        return None
    for path in files.newest(Path(folder), f"{name}-*.zip")[:MAX_ENTRIES]:
        try:
            exported = _read(path, module, tensors)
        except FileNotFoundError:  # another process has just removed it
            continue
        except Exception as error:  # whatever it holds, the module is exported then
            _log.warning("ORTModule: %s is passed over: %s: %s", path, type(error).__name__, error)
            continue
        if exported is not None:
            files.used(path)
            return exported
    return None


def _views(value: Any) -> Any:
    """As written, once every step of it is known to be a view."""
    if value is not None:
        views.Replay(value)
    return value


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read(path: Path, module: torch.nn.Module, tensors: Sequence[Tensor]) -> Any | None:
    from onnxtrain.export import Assignment, Exported, GraphInput, GraphOutput

    with zipfile.ZipFile(io.BytesIO(files.content(path, MAX_BYTES))) as archive:
        if sum(part.file_size for part in archive.infolist()) > MAX_BYTES:
            raise ValueError("it is too large")
        text, model = archive.read("meta.json"), archive.read("model.onnx")
    if not path.stem.endswith(f"-{_entry(text, model)}"):
        raise ValueError("its content does not match its name")
    meta = json.loads(text)
    guards = _guards(meta["guards"])
    if guards(tensors) is not None:
        return None
    if (other := values.differs(meta["outside"], module)) is not None:
        _log.debug("ORTModule: %s is passed over: %s is another", path, other)
        return None
    if (state := _state_in(module, meta["state"])) is None:
        return None
    return Exported(
        model, tuple(GraphInput(*i) for i in meta["inputs"]),
        tuple(GraphOutput(kind, name, _tupled(target)) for kind, name, target in meta["outputs"]),
        trees.read(meta["out_spec"]), dict(map(tuple, meta["out_constants"])), guards,
        tuple(Assignment(owner, name, trees.read(spec), dict(map(tuple, constants)), tuple(leaves))
              for owner, name, spec, constants, leaves in meta["assignments"]),
        state, meta["exporter"], meta["opset"], {"total": 0.0}, [*meta["notes"], f"Loaded from {path}."],
        conditional=(tuple(meta["conditional"][0]), tuple(meta["conditional"][1])),
        same=tuple(tuple(pair) for pair in meta["same"]),
        views=_views(meta["views"]), settings=_settings_in(module, meta["settings"]),
    )


_ADMITTED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult,
    ast.FloorDiv, ast.Mod, ast.Div, ast.Pow, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Call,
    ast.Name, ast.Load, ast.Constant,
)


def _guards(source: Sequence[Any]) -> shape_guards.Guards:
    """The function of guards, once every expression is seen to be arithmetic on sizes."""
    ranks, checks, symbols = source
    known = {f"d{i}_{axis}" for i, rank in enumerate(ranks) for axis in range(int(rank))}
    if any(not name.isidentifier() or value not in known for name, value in symbols):
        raise ValueError("a symbol that is no size")
    known |= {name for name, _ in symbols} | set(shape_guards._NAMESPACE)
    for expression, _ in checks:
        for node in ast.walk(ast.parse(expression, mode="eval")):
            if not isinstance(node, _ADMITTED) or isinstance(node, ast.Name) and node.id not in known:
                raise ValueError(f"a guard is {expression!r}")
    return shape_guards._compile([int(rank) for rank in ranks], [tuple(c) for c in checks], [tuple(s) for s in symbols])
