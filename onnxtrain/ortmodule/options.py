"""Per-module switches of ORTModule, under the names that scripts know."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any

from onnxtrain import options
from onnxtrain.ortmodule._memory_config import Plan, parse


class _SkipCheck(enum.IntFlag):
    """Checks that a script asks to skip after the first step. They cost microseconds here and stay on."""

    SKIP_CHECK_DISABLED = 1
    SKIP_CHECK_DEVICE = 2
    SKIP_CHECK_BUILD_GRADIENT = 4
    SKIP_CHECK_EXECUTION_AGENT = 8

    @classmethod
    def parse(cls, text: str) -> _SkipCheck:
        """Names joined by |. KeyError for a name that does not exist."""
        policy = cls(0)
        for name in text.split("|"):
            policy |= cls[name.strip()]
        return policy


def _read(name: str) -> object:
    return dataclasses.field(default_factory=lambda: options.read(name))


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """For modules wrapped from now on; the same as setting ORTMODULE_ENABLE_CUSTOM_AUTOGRAD."""
    os.environ["ORTMODULE_ENABLE_CUSTOM_AUTOGRAD"] = "1" if to_enable else "0"


@dataclasses.dataclass
class RuntimeOptions:
    """What one ORTModule exports and runs with; made from the environment when the module is wrapped.

    onnx_opset_version, enable_custom_autograd_function, skipped_autograd_functions, cache_dir,
    memory_optimization_level, memory_optimizer_config and memory_budget (bytes; a fraction where it is at most 1) have
    an effect on what is exported after they are set, print_memory_stats and print_input_density on the next step. The
    rest is kept for scripts that set it, and changes nothing.
    """

    onnx_opset_version: int = _read("ORTMODULE_ONNX_OPSET_VERSION")  # type: ignore[assignment]
    enable_custom_autograd_function: bool = _read("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD")  # type: ignore[assignment]
    skipped_autograd_functions: tuple[str, ...] = _read(  # type: ignore[assignment]
        "ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS")
    cache_dir: str = _read("ORTMODULE_CACHE_DIR")  # type: ignore[assignment]
    print_memory_stats: bool = _read("ORTMODULE_PRINT_MEMORY_STATS")  # type: ignore[assignment]
    print_input_density: bool = _read("ORTMODULE_PRINT_INPUT_DENSITY")  # type: ignore[assignment]
    memory_optimization_level: int = _read("ORTMODULE_MEMORY_OPT_LEVEL")  # type: ignore[assignment]
    memory_optimizer_config: str = _read("ORTMODULE_MEMORY_OPT_CONFIG")  # type: ignore[assignment]
    memory_budget: float | None = _read("ORTMODULE_MEMORY_OPT_BUDGET")  # type: ignore[assignment]
    skip_check: _SkipCheck = _read("ORTMODULE_SKIPCHECK_POLICY")  # type: ignore[assignment]
    propagate_cast_ops_strategy: object = None
    propagate_cast_ops_level: int = 1
    propagate_cast_ops_allow: list[str] = dataclasses.field(default_factory=list)
    use_external_gpu_allocator: bool = True
    use_static_shape: bool = False
    run_symbolic_shape_infer: bool = True
    enable_grad_acc_optimization: bool = False
    use_memory_efficient_gradient: bool = False

    @property
    def subgraphs(self) -> list[Plan]:
        """Those that backward runs again. Raises ValueError for a malformed memory_optimizer_config."""
        plans = parse(self.memory_optimizer_config)
        return [] if self.memory_optimization_level else plans

    def memory(self) -> dict[str, Any]:
        """Arguments of a Session that decide about memory."""
        return {"recompute": self.memory_optimization_level, "budget": self.memory_budget or 0.0,
                "subgraphs": self.subgraphs}
