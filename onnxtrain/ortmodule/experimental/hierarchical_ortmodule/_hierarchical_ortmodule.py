"""HierarchicalORTModule: the first call shows what each submodule is given; the largest that export are wrapped."""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain._export.errors import ExportError
from onnxtrain.ortmodule._debug import DebugOptions
from onnxtrain.ortmodule._module import ORTModule
from onnxtrain.ortmodule._whole import export_whole


class HierarchicalORTModule(torch.nn.Module):
    """Runs what it can of a module in the engine, submodule by submodule.

    Args:
        module: the user's; its submodules are replaced by wrapped ones in place, at the first call, which runs in
        PyTorch.
        debug_options: those of every wrapped part.
    """

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None) -> None:
        super().__init__()
        self._original_module = module
        self._debug_options = debug_options
        self._initialized = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self._initialized:
            return self._original_module(*args, **kwargs)
        seen: dict[torch.nn.Module, tuple[Any, Any]] = {}
        handles = [
            child.register_forward_pre_hook(lambda m, a, k: seen.setdefault(m, (a, k)) and None, with_kwargs=True)
            for child in self._original_module.modules()
        ]
        try:
            result = self._original_module(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        self._original_module = self._wrapped(self._original_module, seen, {})
        self._initialized = True
        return result

    def _wrapped(self, module: torch.nn.Module, seen: dict[torch.nn.Module, tuple[Any, Any]],
                 done: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
        """The module wrapped where it exports; otherwise itself, with its children treated alike."""
        if module in done:
            return done[module]
        done[module] = module
        if module in seen and self._exports(module, *seen[module]):
            done[module] = ORTModule(module, self._debug_options, outputs=())
            return done[module]
        for name, child in list(module.named_children()):
            module._modules[name] = self._wrapped(child, seen, done)
        return module

    @staticmethod
    def _exports(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            return False
        try:
            export_whole(module, args, kwargs, exporter="dynamo")
        except ExportError:
            return False
        return True
