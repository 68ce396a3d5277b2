"""`import onnxtrain.compat.onnxruntime` makes `onnxruntime.training` and its submodules importable: they are
onnxtrain's.

Beside an installed onnxruntime, which has no `training`, only that is added; without one, a package `onnxruntime` is
made that holds nothing else. `python -m onnxtrain run script.py` does the same for a script that shall not be edited.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
import types

from onnxtrain.compat import _pybind_state

_PARTS = ("ortmodule", "utils", "optim", "artifacts", "onnxblock", "api")
RELEASE = "1.19.2"  # whose surface this is


class GraphOptimizationLevel(enum.IntEnum):
    """Kept for scripts that name it."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_ALL = 99


class SessionOptions:
    """Kept for scripts that set attributes of it, and give it to ORTTrainerOptions: none has an effect."""


def _package(name: str, **contents: object) -> types.ModuleType:
    """A package made here, or the one that is there, with these contents added where it lacks them."""
    module = sys.modules.get(name)
    if module is None:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for key, value in contents.items():
        if not hasattr(module, key):
            setattr(module, key, value)
    return module


def _alias(name: str, alias: str) -> None:
    """The module `name` and everything below it, under another name."""
    module = importlib.import_module(name)
    sys.modules[alias] = module
    parent, _, child = alias.rpartition(".")
    setattr(sys.modules[parent], child, module)
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if found.name not in ("__main__", "install"):
            _alias(f"{name}.{found.name}", f"{alias}.{found.name}")


def install() -> None:
    """Puts the names into sys.modules; a second time changes nothing."""
    if "onnxruntime" not in sys.modules and importlib.util.find_spec("onnxruntime") is not None:
        importlib.import_module("onnxruntime")
    _package("onnxruntime", __version__=RELEASE, set_seed=_pybind_state.set_seed,
             GraphOptimizationLevel=GraphOptimizationLevel, SessionOptions=SessionOptions)
    _package("onnxruntime.capi")
    _package("onnxruntime.capi._pybind_state",
             **{name: getattr(_pybind_state, name) for name in _pybind_state.__all__})
    _package("onnxruntime.training")
    for part in _PARTS:
        if importlib.util.find_spec(f"onnxtrain.{part}") is not None:
            _alias(f"onnxtrain.{part}", f"onnxruntime.training.{part}")
    training = sys.modules["onnxruntime.training"]
    training.ORTModule = training.ortmodule.ORTModule  # type: ignore[attr-defined]
    _install_trainers()


def _install_trainers() -> None:
    """The trainers, as parts of the package that is there; `optim` has their configurations and the optimizers."""
    ours = importlib.import_module("onnxtrain.training")
    for found in pkgutil.iter_modules(ours.__path__):
        if found.name not in ("legacy", "step"):
            _alias(f"onnxtrain.training.{found.name}", f"onnxruntime.training.{found.name}")
    for name in ours.__all__:
        setattr(sys.modules["onnxruntime.training"], name, getattr(ours, name))
    _alias("onnxtrain.training.legacy", "onnxruntime.capi.ort_trainer")
    _package("onnxruntime", trainer=importlib.import_module("onnxtrain.training.step").trainer)


install()
