"""load_from_json: sets RuntimeOptions, DebugOptions and the fallback policy of one ORTModule."""

from __future__ import annotations

import enum
import functools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtrain import options
from onnxtrain.ortmodule._debug import DebugOptions, LogLevel
from onnxtrain.ortmodule._fallback import FallbackPolicy
from onnxtrain.ortmodule.options import _SkipCheck

if TYPE_CHECKING:
    from onnxtrain.ortmodule._module import ORTModule


class PropagateCastOpsStrategy(enum.IntEnum):
    """Kept for scripts that set it: 16-bit types stay where autocast put them."""

    NONE = -1
    INSERT_AND_REDUCE = 0
    FLOOD_FILL = 1


def _flags(kind: Any, names: list[str]) -> Any:
    return functools.reduce(operator.or_, (kind[name] for name in names), kind(0))


def _set(name: str, expected: type) -> Callable[[ORTModule, Any], None]:
    def apply(model: ORTModule, value: Any) -> None:
        if type(value) is not expected:
            raise TypeError(f"{name} is {value!r}, expected {expected.__name__}")
        setattr(model._runtime, name, value)

    return apply


def _cast_ops(model: ORTModule, value: dict[str, Any]) -> None:
    model._runtime.propagate_cast_ops_strategy = PropagateCastOpsStrategy[value["Strategy"]]
    model._runtime.propagate_cast_ops_level = value["Level"]
    model._runtime.propagate_cast_ops_allow = list(value.get("Allow", []))


def _skip_check(model: ORTModule, value: list[str]) -> None:
    model._runtime.skip_check = _flags(_SkipCheck, value)


def _debug(model: ORTModule, value: dict[str, Any]) -> None:
    model._debug = DebugOptions(LogLevel[value.get("LogLevel", "WARNING")], value.get("SaveONNX", False),
                                value.get("ONNXPrefix", ""), value.get("SaveONNXPath", value.get("SavePath", "")))


def _policy(model: ORTModule, value: list[str]) -> None:
    model._fallback.policy = _flags(FallbackPolicy, value)


_SETTERS: dict[str, Callable[[ORTModule, Any], None]] = {
    "PropagateCastOps": _cast_ops,
    "UseExternalGPUAllocator": _set("use_external_gpu_allocator", bool),
    "EnableCustomAutogradFunction": _set("enable_custom_autograd_function", bool),
    "EnableGradAccOptimization": _set("enable_grad_acc_optimization", bool),
    "UseStaticShape": _set("use_static_shape", bool),
    "RunSymbolicShapeInference": _set("run_symbolic_shape_infer", bool),
    "SkipCheck": _skip_check,
    "DebugOptions": _debug,
    "UseMemoryEfficientGradient": _set("use_memory_efficient_gradient", bool),
    "FallbackPolicy": _policy,
    "OnnxOpsetVersion": _set("onnx_opset_version", int),
}


def load_from_json(ortmodule: ORTModule, path: str | None = None) -> None:
    """Sets what the file names; the rest stays. ORTMODULE_JSON_CONFIG_PATH overrides `path`.

    Raises:
        ValueError: no path at all, or a key that does not exist; the message lists those that do.
        TypeError, KeyError: a value of another type, or a name that does not exist.
    """
    chosen = options.read("ORTMODULE_JSON_CONFIG_PATH") or path
    if not chosen:
        raise ValueError("load_from_json() needs a path: pass one, or set ORTMODULE_JSON_CONFIG_PATH")
    config = json.loads(Path(chosen).read_text(encoding="utf-8"))
    for key, value in config.items():
        if key not in _SETTERS:
            raise ValueError(f"{chosen}: {key!r} is not one of {', '.join(_SETTERS)}")
        _SETTERS[key](ortmodule, value)
