"""The finder that makes names of onnxruntime-training importable: they are onnxtrain's modules under a second name.

compat/onnxruntime.py installs it, and so does _hook.py, which `python -m onnxtrain alias on` puts into an environment.
The hook runs this file without its package. So it imports nothing of onnxtrain, and neither torch, before a name of
training is asked for: `import onnxruntime` for inference stays what it was.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

# A module with all below it, and where we have it: the first one that exists.
OURS = (
    ("onnxruntime.capi.ort_trainer", "onnxtrain.training.legacy"),
    ("onnxruntime.training.optim.fused_adam", "onnxtrain.optim._adam"),
    ("onnxruntime.training.ortmodule._custom_autograd_function", "onnxtrain.ortmodule.options"),
    ("onnxruntime.training.ortmodule._graph_execution_manager_factory", "onnxtrain.ortmodule._managers"),
    ("onnxruntime.training.ortmodule._io", "onnxtrain.utils.torch_io_helper"),
    ("onnxruntime.training.ortmodule._onnx_models", "onnxtrain.ortmodule._managers"),
    ("onnxruntime.training.ortmodule", "onnxtrain.ortmodule"),
    ("onnxruntime.training.pytorch", "onnxtrain.training.step"),
    ("onnxruntime.training.utils", "onnxtrain.utils"),
    ("onnxruntime.training", "onnxtrain.training"),
    ("onnxruntime.training.optim", "onnxtrain.optim"),
)
# Modules that are made where no onnxruntime is installed, and their names by the module of ours that has them ("*" is
# any); those of an installed one get what they lack.
TRAINING = "onnxruntime.training"  # always ours
FILLED: dict[str, dict[str, str]] = {
    "onnxruntime": {"onnxtrain.compat.onnxruntime":
                    "GraphOptimizationLevel SessionOptions __version__ set_seed trainer"},
    "onnxruntime.capi": {},
    "onnxruntime.capi._pybind_state": {
        "onnxtrain.compat._pybind_state": "ArenaExtendStrategy PropagateCastOpsStrategy get_mpi_context_local_rank "
        "get_mpi_context_local_size get_mpi_context_world_rank get_mpi_context_world_size set_arena_extend_strategy "
        "set_cuda_device_id set_cuda_mem_limit set_seed"},
    TRAINING: {"onnxtrain.ortmodule": "ORTModule", "onnxtrain.training": "*"},
}


def ours(name: str) -> str | None:
    """Our module of a full name, of which the packages are imported; None where there is none."""
    for theirs, here in OURS:
        if name == theirs or name.startswith(f"{theirs}."):
            try:
                if importlib.util.find_spec(here + name[len(theirs):]) is not None:
                    return here + name[len(theirs):]
            except ModuleNotFoundError as error:
                if not (error.name or "").startswith("onnxtrain."):
                    raise  # such as torch
    return None


def _attribute(module: str, name: str) -> object:
    """`__getattr__` of a module of FILLED: a submodule, or a name of ours."""
    full, public = f"{module}.{name}", not name.startswith("__") or name == "__all__"
    if full in FILLED or public and ours(full):
        return importlib.import_module(full)
    for here, names in FILLED[module].items():
        if name in names.split() or names == "*" and public and hasattr(importlib.import_module(here), name):
            return getattr(importlib.import_module(here), name)
    made = "" if "__file__" in vars(sys.modules[module]) else \
        ": it is onnxtrain's alias, with what training needs (docs/compatibility.md)"
    raise AttributeError(f"module {module!r} has no attribute {name!r}{made}")


def _fill(module: types.ModuleType) -> None:
    module.__dict__.setdefault("__getattr__", functools.partial(_attribute, module.__name__))


class _Loader(importlib.abc.Loader):
    """Of a module of ours under another name, or of a package that has nothing but attributes that are looked up."""

    def __init__(self, here: str = "") -> None:
        self.here = here

    def exec_module(self, module: types.ModuleType) -> None:
        if not self.here:
            _fill(module)
            return
        sys.modules[module.__name__] = importlib.import_module(self.here)
        for theirs, _ in OURS:  # `from package import name` asks the package, which has another name, only for its own
            if theirs.rpartition(".")[0] == module.__name__:
                importlib.import_module(theirs)

    def get_code(self, name: str) -> types.CodeType | None:
        """For `python -m`."""
        spec: Any = importlib.util.find_spec(self.here)
        return spec.loader.get_code(self.here)


class Finder:
    """Of sys.meta_path: before the one of folders, which would find a second copy of our modules in our folders."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None,
                  target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "onnxruntime":
            return None
        if name in FILLED and name != TRAINING:
            return cls._filled(name, path)
        # An installed onnxruntime may look for its own training while it is imported.
        if getattr(getattr(sys.modules.get("onnxruntime"), "__spec__", None), "_initializing", False):
            return None
        if name == TRAINING:
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        here = ours(name)
        found = importlib.util.find_spec(here) if here else None
        if here is None or found is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, _Loader(here), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    @classmethod
    def _filled(cls, name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec:
        """The installed module, which gets what it lacks when it has been executed, or one that is made."""
        others = (finder.find_spec(name, path) for finder in sys.meta_path
                  if finder is not cls and hasattr(finder, "find_spec"))
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:  # none, or a folder that only has this name
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _fill(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Puts the finder first, in place of an environment's hook; a second time changes nothing."""
    sys.meta_path[:] = [Finder, *(finder for finder in sys.meta_path
                                  if finder is not Finder and type(finder).__module__ != "_onnxtrain_alias")]
    for name in FILLED.keys() & sys.modules.keys():
        _fill(sys.modules[name])
