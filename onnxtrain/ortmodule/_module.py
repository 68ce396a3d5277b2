"""ORTModule itself: delegation to the user's module, the choice of a program for each call, and the fallback."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from onnxtrain import UnsupportedError, _C, _report, options
from onnxtrain.export import ExportError, export
from onnxtrain.ortmodule._debug import DebugOptions
from onnxtrain.ortmodule._fallback import Fallback, FallbackPolicy, ORTModuleTorchModelException
from onnxtrain.ortmodule._program import Program
from onnxtrain.ortmodule._verify import verify

_log = logging.getLogger("onnxtrain")
_OWN = frozenset(("_module", "_debug", "_programs", "_counters", "_fallback", "_fallen", "_submodules"))


class Key(NamedTuple):
    """What a program was exported for; sizes are the guards' business."""

    schema: tuple[Any, ...]  # per leaf: (dtype, ndim, device type), or the value of what is no tensor
    spec: pytree.TreeSpec | None  # None: positional tensors only
    training: bool
    modes: tuple[bool, ...]  # training flag of every submodule
    autocast: tuple[Any, ...]


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.device.type
    return type(leaf), leaf


class ORTModule(torch.nn.Module):
    """Runs a module's forward and backward in onnxtrain's engine; otherwise it is the module.

    Args:
        module: any torch.nn.Module on the CPU. Its signature, parameters, buffers, state_dict and attributes are this
            object's. Wrap before DistributedDataParallel.
        debug_options: see DebugOptions.

    The graph is exported at the first call, once per input schema and mode; new sizes are specialised in milliseconds.
    What the engine does not have runs in PyTorch, said once, as ORTMODULE_FALLBACK_POLICY allows.

    Raises:
        TypeError: module is no torch.nn.Module.
        ORTModuleTorchModelException: module is a DataParallel or an ORTModule.
    """

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"ORTModule wraps a torch.nn.Module, not {type(module).__name__}")
        if isinstance(module, (torch.nn.DataParallel, ORTModule)):
            raise ORTModuleTorchModelException(f"ORTModule does not support a {type(module).__name__} as its module")
        super().__init__()
        self._debug = debug_options if debug_options is not None else DebugOptions()
        self._fallback = Fallback()
        self._counters = _report.Counters()
        self._module = module
        self._forget()

    def _forget(self) -> None:
        """Drops every export: the module may have changed."""
        self._programs: dict[Key, list[Program]] = {}
        self._fallen: dict[Key, str] = {}
        self._submodules: list[torch.nn.Module] = list(self._module.modules())

    # ---- running ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward: same arguments, same result."""
        if self._fallback.forced:
            return self._in_torch(args, kwargs)
        if kwargs or any([type(arg) is not torch.Tensor for arg in args]):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        else:
            leaves, spec = list(args), None  # tensors in a row are their own leaves
        grad_enabled = torch.is_grad_enabled()
        key = Key(tuple([_describe(leaf) for leaf in leaves]), spec, self._module.training and grad_enabled,
                  tuple([m.training for m in self._submodules]),
                  (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        if key in self._fallen and not self._fallback.retry:
            return self._in_torch(args, kwargs)
        tensors = leaves if spec is None else [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for program in self._programs.get(key, ()):
            if program.guards(tensors) is None:
                return self._in_engine(program, key, leaves, grad_enabled, args, kwargs)
        return self._first_call(key, leaves, tensors, grad_enabled, args, kwargs)

    def _in_torch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _report.count(self._counters, fallback_steps=1)
        return self._module(*args, **kwargs)

    def _in_engine(self, program: Program, key: Key, leaves: list[Any], grad_enabled: bool, args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> Any:
        try:
            result = program(leaves, grad_enabled)
        except UnsupportedError as error:
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL, error)
            return self._in_torch(args, kwargs)
        _report.engine_step(self._counters)
        return result

    def _first_call(self, key: Key, leaves: list[Any], tensors: list[torch.Tensor], grad_enabled: bool,
                    args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A schema, mode or size for which there is no program yet."""
        known = self._programs.setdefault(key, [])
        if known:
            reason = known[-1].guards(tensors)
            _log.warning("ORTModule: %s, so the export at hand does not fit: exporting again, this call runs in PyTorch", reason)
        try:
            self._check_device(tensors)
            _C.set_log_level(self._debug.log_level.logging_level)
            opset = options.read("ORTMODULE_ONNX_OPSET_VERSION")
            # The TorchScript exporter freezes branches and drops detach(): not taken until its results are verified.
            exported = export(self._module, args, kwargs, training=self._module.training, opset=opset, exporter="dynamo")
            program = Program(self._module, exported)
        except UnsupportedError as error:
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL, error)
            return self._in_torch(args, kwargs)
        except ExportError as error:
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL, error)
            return self._in_torch(args, kwargs)
        self._submodules = list(self._module.modules())
        _report.count(self._counters, exports=1, export_seconds=exported.seconds.get("total", 0.0),
                      build_seconds=program.build_seconds)
        for note in exported.notes:
            _log.info("ORTModule: %s", note)
        if self._debug.save_onnx:
            self._debug.write_model(exported.model, "torch_exported", key.training)
        again = bool(known)
        known.append(program)
        if again:
            return self._in_torch(args, kwargs)
        if self._debug.verify and grad_enabled:
            _log.warning("%s", verify(self._module, program, args, kwargs, leaves))
        return self._in_engine(program, key, leaves, grad_enabled, args, kwargs)

    def _check_device(self, tensors: list[torch.Tensor]) -> None:
        for tensor in (*tensors, *self._module.parameters(), *self._module.buffers()):
            if tensor.device.type != "cpu":
                raise UnsupportedError(f"a tensor is on {tensor.device}: this build runs on the CPU")

    def _fall_back(self, key: Key, reason: FallbackPolicy, error: Exception) -> None:
        """Remembers that this signature runs in PyTorch and says so once; raises where the policy forbids it."""
        if not self._fallback.allows(reason):
            raise error
        if key not in self._fallen:
            text = " ".join(str(error).split())
            self._fallen[key] = text
            self._counters.reasons.append(text)
            _log.warning(
                "ORTModule: %s runs in PyTorch, not in the onnxtrain engine, for this kind of call: %s. Results are "
                "PyTorch's own, nothing is faster. ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE makes this an error; "
                "onnxtrain.explain(model) lists what ran where.", type(self._module).__name__, text)

    # ---- being the module ----

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._module

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_module")
        if module is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            self.__dict__[name] = value  # past torch's registration: the wrapped module is no child
        elif "_module" not in self.__dict__ or name in self.__dict__ or name == "training":
            super().__setattr__(name, value)
        else:
            setattr(self._module, name, value)
            self._forget()

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module, "debug": self._debug}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"], state["debug"])  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        import copy

        return ORTModule(copy.deepcopy(self._module, memo), self._debug)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        raise ORTModuleTorchModelException("ORTModule does not support adding modules to it: add them before wrapping")

    def train(self, mode: bool = True) -> ORTModule:
        self._module.train(mode)
        self.__dict__["training"] = mode
        return self

    def eval(self) -> ORTModule:
        return self.train(False)

    def _apply(self, fn: Any, recurse: bool = True) -> ORTModule:
        self._module._apply(fn, recurse)
        self._forget()
        return self

    def apply(self, fn: Any) -> ORTModule:
        self._module.apply(fn)
        return self

    def __repr__(self) -> str:
        return f"ORTModule({self._module!r})"


def _delegate(name: str) -> None:
    """Defines ORTModule.<name> as the wrapped module's: torch looks such methods up on the class."""
    original = getattr(torch.nn.Module, name)

    def method(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._module, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, original.__doc__
    setattr(ORTModule, name, method)


for _name in ("state_dict", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers", "children",
              "named_children", "modules", "named_modules", "zero_grad", "get_parameter", "get_buffer", "get_submodule",
              "register_buffer", "register_parameter", "share_memory", "extra_repr"):
    _delegate(_name)


def _requires_grad_(self: ORTModule, requires_grad: bool = True) -> ORTModule:
    self._module.requires_grad_(requires_grad)
    return self


ORTModule.requires_grad_ = _requires_grad_  # type: ignore[method-assign]
