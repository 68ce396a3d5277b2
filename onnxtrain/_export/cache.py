"""Exports kept on disk: ORTMODULE_CACHE_DIR. A second process loads the graph and never imports torch.onnx.

The name of a file is a digest of everything that a trace depends on: structure and weights' shapes of the module, the
source of the program's own files, versions, schema, mode, autocast. What forward read of the module's attributes is
kept in the file and compared with the module at hand. What cannot be compared is not kept. The file is a zip of JSON
and ONNX; loading it runs no code: expressions of guards are parsed and admitted by kind.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import os
import sys
import sysconfig
import types
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onnxtrain._export import attributes, views
from onnxtrain._export import guards as shape_guards
from onnxtrain._export.files import replacing

_log = logging.getLogger("onnxtrain")
FORMAT = 4
MAX_ENTRIES = 16  # per digest: exports that differ in sizes, or in attributes


class NotKept(Exception):
    """Something of an export cannot be written down, or compared in another process; the message says what."""


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
    files = set(_own_files())
    for kind in _classes(module):
        try:
            files.add(os.path.realpath(inspect.getfile(kind)))
        except (TypeError, OSError):
            raise NotKept(f"the source of {kind.__qualname__} is not known") from None
    if any(not os.path.exists(path) for path in files):
        raise NotKept("a class has no source file")
    return sorted(files)


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


def digest(module: torch.nn.Module, key: Any, settings: Sequence[Any]) -> str:
    """A name for all exports of this module with this schema. Raises NotKept where part of it has no stable name."""
    from onnxtrain import _C

    code = hashlib.sha256()
    for path in _source_files(module):
        code.update(hashlib.sha256(Path(path).read_bytes()).digest())
    spec = None if key.spec is None else pytree.treespec_dumps(key.spec)
    schema = [item if isinstance(item, tuple) else repr(item) for item in key.schema]
    parts = [FORMAT, torch.__version__, _C.build_info()["version"], sys.version_info[:2], code.hexdigest(),
             _structure(module), repr(schema), spec, key.training, repr(key.torch_modes), *map(repr, settings),
             torch.are_deterministic_algorithms_enabled()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


# --- what forward read of the module ----------------------------------------------------------------------------------


def _stable(value: Any) -> str:
    """An entry of a State's values, the same in every process."""
    if value is None or value is attributes.ABSENT or isinstance(value, str):
        return f"={value!r}"
    if isinstance(value, attributes._Identity):
        return _identity(value.value)
    kind, content = value
    if isinstance(content, frozenset):
        content = sorted(map(repr, content))
    if (isinstance(content, tuple) and not all(isinstance(item, (str, int, float, bool, type(None)))
                                               for item in content)):
        raise NotKept(f"an attribute holds {content!r}")
    return f"{kind.__module__}.{kind.__qualname__}:{content!r}"


def _identity(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return f"module {type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Tensor):
        plain = value.detach().contiguous().cpu()
        digest = hashlib.sha256(plain.view(-1).view(torch.uint8).numpy()).hexdigest()
        return f"tensor {plain.dtype} {tuple(plain.shape)} {digest}"
    if isinstance(value, types.MethodType):
        return f"method {_identity(value.__func__)}"
    if isinstance(value, types.FunctionType):
        if value.__closure__ or value.__defaults__ or value.__kwdefaults__:
            raise NotKept(f"an attribute is the function {value.__qualname__}, with values of its own")
        digest = hashlib.sha256(value.__code__.co_code).hexdigest()
        return f"function {value.__module__}.{value.__qualname__} {digest} {value.__code__.co_consts!r}"
    if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
        name = getattr(value, "__qualname__", value.__name__)
        return f"{type(value).__name__} {getattr(value, '__module__', '')}.{name}"
    if isinstance(value, logging.Logger):
        return f"logger {value.name}"
    raise NotKept(f"an attribute is a {type(value).__qualname__}")


def _state_out(module: torch.nn.Module, state: attributes.State) -> dict[str, Any]:
    names = {id(child): name for name, child in module.named_modules()}
    if any(id(child) not in names for child, _, _ in state._reads):
        raise NotKept("forward reads a module outside of the one that is wrapped")
    return {
        "reads": [(names[id(child)], sorted(read)) for child, _, read in state._reads],
        "bound": sorted((names[owner], name) for owner, name in state._bound),
        "values": {path: _stable(value) for path, value in state._values.items()},
    }


def _state_in(module: torch.nn.Module, data: dict[str, Any]) -> attributes.State | None:
    """None where the module's attributes are others now."""
    modules = dict(module.named_modules())
    record = attributes.Record({modules[name]: set(read) for name, read in data["reads"]})
    bound = frozenset((id(modules[name]), attribute) for name, attribute in data["bound"])
    state = attributes.State(module, record, bound)
    if {path: _stable(value) for path, value in state._values.items()} != data["values"]:
        return None
    return state


# --- files ------------------------------------------------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, str)


def _plain(values: dict[int, Any]) -> list[Any]:
    if not all(type(value) in _PLAIN for value in values.values()):
        raise NotKept("the result holds a value that is no plain constant")
    return sorted(values.items())


def _spec_out(spec: pytree.TreeSpec) -> str:
    text = pytree.treespec_dumps(spec)
    if pytree.treespec_loads(text) != spec:
        raise NotKept("the result's structure cannot be written down")
    return text


def _meta(module: torch.nn.Module, exported: Any) -> dict[str, Any]:
    if exported.modes is not None:
        raise NotKept("forward asks which tensors require a gradient, or for grad mode")
    if exported.functions:
        raise NotKept("the module calls a torch.autograd.Function")
    if any(source.kind == "constant" for source in exported.inputs):
        raise NotKept("forward uses a large tensor that is no part of the module")
    return {
        "inputs": [(i.kind, i.name, i.target) for i in exported.inputs],
        "outputs": [(o.kind, o.name, o.target) for o in exported.outputs],
        "out_spec": _spec_out(exported.out_spec), "out_constants": _plain(exported.out_constants),
        "guards": exported.guards.source,  # type: ignore[attr-defined]
        "assignments": [(a.module, a.name, _spec_out(a.spec), _plain(a.constants), a.tensors)
                        for a in exported.assignments],
        "state": _state_out(module, exported.state), "exporter": exported.exporter, "opset": exported.opset,
        "notes": exported.notes, "conditional": exported.conditional, "same": exported.same,
        "views": exported.views,
    }


def store(folder: str, name: str, module: torch.nn.Module, exported: Any) -> bool:
    """Keeps an export; whether that was possible. Failures of the disk are logged, never raised."""
    try:
        meta = json.dumps(_meta(module, exported))
        entry = hashlib.sha256(meta.encode() + exported.model).hexdigest()[:16]
        with (replacing(Path(folder) / f"{name}-{entry}.zip") as file,
              zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive):
            archive.writestr("meta.json", meta)
            archive.writestr("model.onnx", exported.model)
        return True
    except NotKept as reason:
        _log.info("ORTModule: this export is not kept in %s: %s", folder, reason)
    except (OSError, TypeError, ValueError, NotImplementedError) as error:
        _log.warning("ORTModule: %s cannot keep an export: %s", folder, error)
    return False


def load(folder: str, name: str, module: torch.nn.Module, tensors: Sequence[Tensor]) -> Any | None:
    """An export that holds for this module and these sizes, or None. A file that cannot be read is passed over."""
    for path in sorted(Path(folder).glob(f"{name}-*.zip"))[:MAX_ENTRIES]:
        try:
            exported = _read(path, module, tensors)
        except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile, NotKept, NotImplementedError,
                SyntaxError) as error:
            _log.warning("ORTModule: %s is passed over: %s", path, error)
            continue
        if exported is not None:
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

    with zipfile.ZipFile(path) as archive:
        meta = json.loads(archive.read("meta.json"))
        model = archive.read("model.onnx")
    guards = _guards(meta["guards"])
    if guards(tensors) is not None or (state := _state_in(module, meta["state"])) is None:
        return None
    return Exported(
        model, tuple(GraphInput(*i) for i in meta["inputs"]),
        tuple(GraphOutput(kind, name, _tupled(target)) for kind, name, target in meta["outputs"]),
        pytree.treespec_loads(meta["out_spec"]), dict(map(tuple, meta["out_constants"])), guards,
        tuple(Assignment(owner, name, pytree.treespec_loads(spec), dict(map(tuple, constants)), tuple(leaves))
              for owner, name, spec, constants, leaves in meta["assignments"]),
        state, meta["exporter"], meta["opset"], {"total": 0.0}, [*meta["notes"], f"Loaded from {path}."],
        conditional=tuple(tuple(part) for part in meta["conditional"]),
        same=tuple(tuple(pair) for pair in meta["same"]),
        views=_views(meta["views"]),
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
