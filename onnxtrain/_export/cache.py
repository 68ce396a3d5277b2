"""Exports kept on disk: ORTMODULE_CACHE_DIR. A second process loads the graph and never imports torch.onnx.

The name of a file is a digest of everything that a trace depends on: the operations that Dynamo captured, names and
shapes of the weights, versions, schema, mode, autocast. The file is a zip of JSON and ONNX, with the hash of both in
its name; loading it runs no code: expressions of guards are parsed and admitted by kind, nothing is imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import io
import json
import logging
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onnxtrain._export import autograd_functions, files, views
from onnxtrain._export import guards as shape_guards
from onnxtrain._export.captured import Graph
from onnxtrain._export.errors import NotKept

if TYPE_CHECKING:
    from onnxtrain._export.exported import Exported
    from onnxtrain.ortmodule._key import Key

_log = logging.getLogger("onnxtrain")
FORMAT = 14
MAX_ENTRIES = 16  # per digest: exports that differ in sizes, attributes, or values outside of the module
MAX_BYTES = 1 << 29  # of all exports in the folder


# --- the digest -------------------------------------------------------------------------------------------------------


def structure(module: torch.nn.Module) -> list[object]:
    """Its parameters and buffers, and which of them are one."""
    first: dict[int, str] = {}
    rows: list[object] = [module.training]
    for kind, named in (("p", module.named_parameters), ("b", module.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            tied = first.setdefault(id(tensor), name)
            rows.append((kind, name, tied, str(tensor.dtype), tuple(tensor.shape), str(tensor.device)))
    return rows


@functools.cache
def versions() -> list[object]:
    """Of what translates, and of NumPy. Size and time of our own files: a checkout changes without a new version."""
    package = Path(__file__).parents[1]
    found: list[object] = [(path.name, status.st_size, status.st_mtime_ns)
                        for path in sorted([*package.glob("*.so"), *package.rglob("*.py")])
                        for status in [path.stat()]]
    for name in ("numpy", "onnx", "onnx-ir", "onnxscript"):
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append(None)
    return found


def digest(module: Graph, key: Key, settings: Sequence[object]) -> str:
    """A name for all exports of these operations with this schema. Raises NotKept where no text stands for them."""
    from onnxtrain import _C

    text = module._captured.text
    if text is None:
        raise NotKept("the graph calls functions or holds tensors that have no description as text")
    schema = [item if isinstance(item, tuple) else repr(item) for item in key.schema]
    parts = [FORMAT, torch.__version__, _C.__version__, sys.version, versions(), text,
             structure(module), repr(schema), key.training, repr(key.torch_modes), *map(repr, settings),
             torch.are_deterministic_algorithms_enabled()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


# --- files ------------------------------------------------------------------------------------------------------------

def _meta(exported: Any) -> dict[str, object]:
    if any(source.kind == "constant" for source in exported.inputs):
        raise NotKept("forward reads a large tensor that is not a parameter, buffer or argument")
    _guards(exported.guards.source)  # what could not be read is not written
    return {
        "inputs": [(i.kind, i.name, i.target) for i in exported.inputs],
        "outputs": [(o.kind, o.name, o.target) for o in exported.outputs],
        "results": exported.results,
        "guards": exported.guards.source,
        "opset": exported.opset, "notes": exported.notes, "views": exported.views,
        "draws": [autograd_functions.as_data(call) for call in exported.functions],
    }


def _entry(meta: bytes, model: bytes) -> str:
    return hashlib.sha256(hashlib.sha256(meta).digest() + model).hexdigest()


def store(folder: str, name: str, exported: Exported) -> bool:
    """Keeps an export; whether that was possible. Failures of the disk are logged, never raised."""
    if not files.usable(folder):
        return False
    try:
        meta = json.dumps(_meta(exported)).encode()
        with (files.replacing(Path(folder) / f"{name}-{_entry(meta, exported.model)}.zip") as file,
              zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive):
            archive.writestr("meta.json", meta)
            archive.writestr("model.onnx", exported.model)
        files.evict(Path(folder), f"{name}-*.zip", count=MAX_ENTRIES)
        files.evict(Path(folder), "[0-9a-f]" * 40 + "-*.zip", size=MAX_BYTES)
        return True
    except NotKept as reason:
        _log.info("ORTModule does not keep this export in %s, because %s", folder, reason)
    except (OSError, TypeError, ValueError, NotImplementedError) as error:
        _log.log(files.level(folder), "ORTModule cannot keep an export in %s: %s", folder, error)
    return False


def load(folder: str, name: str, tensors: Sequence[Tensor]) -> Exported | None:
    """An export that holds for these sizes, or None. A file that cannot be read is passed over."""
    if not files.usable(folder):
        return None
    for path in files.newest(Path(folder), f"{name}-*.zip")[:MAX_ENTRIES]:
        try:
            exported = _read(path, tensors)
        except FileNotFoundError:  # another process has just removed it
            continue
        except Exception as error:  # whatever it holds, the module is exported then
            _log.warning("ORTModule ignores the export %s, which it cannot read: %s: %s", path,
                         type(error).__name__, error)
            continue
        if exported is not None:
            files.used(path)
            return exported
    return None


def _views(value: list[Any] | None) -> list[Any] | None:
    """As written, once every step of it is known to be a view."""
    if value is not None:
        views.Replay(value)
    return value


def _read(path: Path, tensors: Sequence[Tensor]) -> Exported | None:
    from onnxtrain._export.exported import Exported, GraphInput, GraphOutput

    with zipfile.ZipFile(io.BytesIO(files.content(path, MAX_BYTES))) as archive:
        if sum(part.file_size for part in archive.infolist()) > MAX_BYTES:
            raise ValueError("it is too large")
        text, model = archive.read("meta.json"), archive.read("model.onnx")
    if not path.stem.endswith(f"-{_entry(text, model)}"):
        raise ValueError("the content of the file does not match its name")
    meta = json.loads(text)
    guards = _guards(meta["guards"])
    if guards(tensors) is not None:
        return None
    return Exported(
        model, tuple(GraphInput(*i) for i in meta["inputs"]), tuple(GraphOutput(*o) for o in meta["outputs"]),
        int(meta["results"]), guards, meta["opset"], {"total": 0.0},
        [*meta["notes"], f"Loaded from {path}."],
        views=_views(meta["views"]),
        functions=tuple(map(autograd_functions.from_data, meta["draws"])),
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
        raise ValueError("a symbol of its guards does not stand for a size")
    known |= {name for name, _ in symbols} | set(shape_guards._NAMESPACE)
    for expression, _ in checks:
        for node in ast.walk(ast.parse(expression, mode="eval")):
            if not isinstance(node, _ADMITTED) or isinstance(node, ast.Name) and node.id not in known:
                raise ValueError(f"the guard {expression!r} is not arithmetic on sizes")
    return shape_guards._compile([int(rank) for rank in ranks], [tuple(c) for c in checks], [tuple(s) for s in symbols])
