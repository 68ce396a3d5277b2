"""ORTModule itself: it behaves as the module of the user, and has its calls captured."""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from onnxtrain import _report, _torch, options
from onnxtrain._export import exclusive
from onnxtrain.ortmodule import _named_methods, _outputs, _wrapper_class
from onnxtrain.ortmodule._captured import Parts
from onnxtrain.ortmodule._debug import DebugOptions
from onnxtrain.ortmodule._fallback import Fallback, FallbackPolicy, FallsBack, ORTModuleTorchModelException
from onnxtrain.ortmodule._forward import Adopted, Forward, calls_forward_of, watched
from onnxtrain.ortmodule._key import Key, function_mode, torch_modes
from onnxtrain.ortmodule._managers import View
from onnxtrain.ortmodule._program import Program
from onnxtrain.ortmodule._utils import leave_alone
from onnxtrain.ortmodule.options import RuntimeOptions

_OWN = frozenset(("_module", "_debug", "_counters", "_fallback", "_fallen", "_announced", "_parts", "_runtime", "_view",
                  "_lazy", "_in_backward", "_outputs", "_methods"))
_STORES = ("_parameters", "_buffers", "_modules")


class ORTModule(FallsBack, torch.nn.Module):
    """Runs a module's forward and backward in onnxtrain's engine; otherwise it is the module.

    Args:
        module: any torch.nn.Module. This object has its signature, parameters, buffers, state_dict and
            attributes. Wrap it before DistributedDataParallel.
        debug_options: see DebugOptions.
        outputs: names or positions of the results that the caller reads in training, such as "loss", 0 or
            ("loss", "hidden_states"), of a tuple, list, dict or dataclass. The others are None then, and what was for
            them alone is not computed; in evaluation all are. None: as ORTMODULE_OUTPUTS says; ():
            all. Names count for results that have names, positions for the others, or where no names are given. One
            tensor is returned as it is, and so is a result that has nothing of what is named.
        methods: names of methods that run in the engine too, as ``model.evaluate_actions(obs, actions)`` of a policy;
            forward always does.

    Dynamo captures the module at the first call, and again when a Python value that forward reads has changed. Each
    graph is exported once; new sizes are specialised in milliseconds. PyTorch runs what torch cannot export or the
    engine does not support, with one warning, if ORTMODULE_FALLBACK_POLICY allows it.

    Raises:
        TypeError: module is not a torch.nn.Module; outputs has an item that is no str and no int.
        ValueError: the module has no method of a name in methods.
        ORTModuleTorchModelException: module is an ORTModule; or it is a DataParallel, and the policy does not allow
            PyTorch to run it.
    """

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None, *,
                 outputs: str | int | Iterable[str | int] | None = None, methods: str | Iterable[str] = ()) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError("ORTModule() takes a torch.nn.Module, not "
                            + (f"the class {module.__name__}: make an instance of it" if isinstance(module, type) else
                               type(module).__name__))
        if not isinstance(debug_options, (DebugOptions, types.NoneType)):
            raise TypeError(f"ORTModule() takes DebugOptions as its second argument, not {debug_options!r}; what the "
                            "script reads is outputs=")
        if isinstance(module, ORTModule):
            raise ORTModuleTorchModelException("ORTModule does not support an ORTModule as its module: pass the module "
                                               "that it wraps")
        super().__init__()
        object.__setattr__(self, "__class__", _wrapper_class.classed(type(self), module))
        self._debug = debug_options if debug_options is not None else DebugOptions()
        self._fallback = Fallback()
        self._runtime = RuntimeOptions()
        _ = self._runtime.subgraphs  # raises ValueError for a malformed setting
        options.warn_of_ignored()
        asked = options.read("ORTMODULE_OUTPUTS") or None if outputs is None else outputs
        self._outputs = None if asked is None else _outputs.wanted_of(asked)  # None: no one has said
        self._counters = _report.Counters()
        self._module: Any = module
        self._fallen: dict[str, str] = {}  # why PyTorch runs such calls
        self._announced: set[bool] = set()
        self._parts = Parts(self)
        self._lazy = any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))
        self.__dict__["training"] = module.training
        for store in _STORES:  # the very dicts: torch's own walks find everything here
            self.__dict__[store] = module.__dict__[store]
        _wrapper_class.warn_of_collisions({*vars(ORTModule), *vars(FallsBack), *_OWN}, module, self._debug)
        self._methods = _named_methods.made(self, methods)
        if isinstance(module, torch.nn.DataParallel):
            self._fall_back("the module", FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL,
                            "ORTModule is not compatible with torch.nn.DataParallel, which copies its module at "
                            "every step: wrap the ORTModule in torch.nn.parallel.DistributedDataParallel instead", None)
            self._fallback.give_up()

    # ---- running ----

    forward = Forward()
    _ort_is_root = False  # of the walks over modules

    def _call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The module's own forward: same arguments, same result."""
        if ((self._fallback.forced or exclusive.owner is not None or torch_modes() is None)
                and (by_torch := self._outside()) is not None):
            return by_torch(args, kwargs)
        if _torch.len_torch_function_stack() and (active := function_mode()) is not None:
            return self._by_torch(f"the mode {active} must see every function of torch", args, kwargs)
        if self._lazy and self._still_lazy():
            return self._in_torch(args, kwargs)
        start, captures = time.monotonic(), self._counters.captures
        result = self._parts(self, args, kwargs)
        if captures == self._counters.captures:
            seconds = time.monotonic() - start
            self._counters.forward_seconds += seconds
            _report.process.forward_seconds += seconds
        return result

    def _still_lazy(self) -> bool:
        """Whether parameters have no shape yet. PyTorch runs the first call, which sets the shapes."""
        self._lazy = any([is_lazy(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())])
        if self._lazy:
            self._debug.log(logging.INFO,
                            "ORTModule: %s has lazy parameters: PyTorch runs the call that gives them their shapes",
                            type(self._module).__name__)
        return self._lazy

    def _eager(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The module's forward by PyTorch, with the results that are wanted."""
        wanted = self._wanted()
        result = self._module(*args, **kwargs)
        return _outputs.chosen(result, wanted) if wanted else result

    def _wanted(self) -> _outputs.Wanted:
        """The results of a call now that its caller reads; empty for all."""
        return self._outputs or () if self._module.training else ()

    def _say_constants(self, leaves: Iterable[object]) -> None:
        for leaf in leaves:
            if isinstance(leaf, str):
                self._debug.log(logging.INFO, "Received input of type %s is treated as a constant by ORT by default.",
                                type(leaf))

    def _all_programs(self) -> list[tuple[Key, list[Program]]]:
        """The programs of each schema, of every graph of forward and of the methods."""
        found = [pair for runner in self._parts.runners() for pair in runner.programs()]
        return found + [pair for method in self._methods.values() for pair in method._all_programs()]

    def _join(self, handle: object) -> None:
        """For onnxtrain.optim.step_in_backward(): the optimizer that backward updates parameters by, or None."""
        self._in_backward = handle
        for runner in self._parts.runners():
            runner.join(handle)
        for method in self._methods.values():
            method._join(handle)

    # ---- being the module ----

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._module

    _torch_module = View()

    def _is_training(self) -> bool:
        return self._module.training and torch.is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_module")
        if module is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in self._methods:
            return self._methods[name]
        value = getattr(module, name)
        function = getattr(value, "__func__", None)
        if function is None or value.__self__ is not module:
            return value
        _named_methods.note(self, name)
        return _wrapper_class.bound(self, value)

    def __init_subclass__(cls, **settings: object) -> None:
        if not hasattr(cls, "_plain_class"):  # a class that is made for a wrapper is no news for the user's
            super().__init_subclass__(**settings)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            self.__dict__[name] = value  # past torch's registration: the wrapped module is no child
        elif name == "__class__":
            object.__setattr__(self, name, value)  # fully_shard's is a subclass with state that belongs to the wrapper
            self.__dict__["_ort_is_root"] = True
        elif "_module" not in self.__dict__ or name in self.__dict__:
            super().__setattr__(name, value)
            if name == "training" and "_module" in self.__dict__:
                self._module.training = value
            elif name in _STORES:
                self._module.__dict__[name] = value
            elif name == "__dict__" and "_module" in value:
                self._separate()
        elif (name in _OF_ORTMODULE or _wrapper_class.is_custom_method(self._module, name)
              or calls_forward_of(self, value)):
            self.__dict__[name] = value
            if name == "forward":
                self.__dict__["_compiled_call_impl"] = watched(self)
        elif name == "forward" and callable(value):
            Adopted.put(value, self)
        else:
            setattr(self._module, name, value)

    def _separate(self) -> None:
        """Gives a clone, whose __dict__ is a copy of another wrapper's, a module of its own: with the same attributes,
        parameters and parts until others are put in their places, as a clone of the module itself would have. The
        graphs stay common.
        """
        of = self._module
        self._module = object.__new__(type(of))
        object.__setattr__(self._module, "__dict__", {**of.__dict__, **{name: self.__dict__[name] for name in _STORES}})
        self._methods = _named_methods.made(self, self._methods)
        if "_call" in self.__dict__:
            self.__dict__["_call"] = Adopted.calls(self)
        if "_compiled_call_impl" in self.__dict__:
            self.__dict__["_compiled_call_impl"] = watched(self)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ and name not in _OWN:
            del self.__dict__[name]
        else:
            delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._module)})

    def __reduce_ex__(self, _protocol: object) -> tuple[object, ...]:
        return _wrapper_class.blank, (getattr(type(self), "_plain_class", type(self)),), self.__getstate__()

    def __getstate__(self) -> dict[str, object]:
        return {"module": self._module, "debug": self._debug, "outputs": self._outputs, "methods": tuple(self._methods)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"], state["debug"], outputs=state.get("outputs"),  # type: ignore[misc]
                      methods=state.get("methods", ()))

    def __copy__(self) -> ORTModule:
        made = object.__new__(type(self))
        made.__dict__ = self.__dict__.copy()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        import copy

        return ORTModule(copy.deepcopy(self._module, memo), self._debug, outputs=self._outputs, methods=self._methods)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Raises ORTModuleTorchModelException: modules are added before wrapping."""
        raise ORTModuleTorchModelException("ORTModule does not support adding modules to it: add them before wrapping")

    def train(self, mode: bool = True) -> ORTModule:
        """As torch.nn.Module.train, of the wrapped module too."""
        self._module.train(mode)
        self.__dict__["training"] = mode
        return self

    def eval(self) -> ORTModule:
        """As torch.nn.Module.eval, of the wrapped module too."""
        self._module.eval()
        self.__dict__["training"] = False
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ORTModule:
        self._module._apply(fn, recurse)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> ORTModule:
        """As torch.nn.Module.apply, over the wrapped module."""
        self._module.apply(fn)
        return self

    def __repr__(self) -> str:
        return f"ORTModule({self._module!r})"

    def _get_name(self) -> str:
        """By this name transformers' Trainer decides whether to shift smoothed labels; below peft's adapters it asks
        the base model, but does not recognize them in a wrapper."""
        adapted = hasattr(self._module, "peft_config") and hasattr(self._module, "get_base_model")
        return (self._module.get_base_model() if adapted else self._module)._get_name()


def _delegate(name: str) -> None:
    """Defines ORTModule.<name> as the wrapped module's method: torch looks such methods up on the class."""
    original = getattr(torch.nn.Module, name)

    def method(self: ORTModule, *args: Any, **kwargs: Any) -> object:
        if name in _WALKS and self._ort_is_root:
            return original(self, *args, **kwargs)
        return getattr(self._module, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, original.__doc__
    setattr(ORTModule, name, method)


_WALKS = ("modules", "named_modules")  # the wrapped module comes first, unless a library gave the wrapper a class
for _name in ("state_dict", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers", "children",
              "named_children", "modules", "named_modules", "zero_grad", "get_parameter", "get_buffer", "get_submodule",
              "register_buffer", "register_parameter", "share_memory", "extra_repr", "_load_from_state_dict",
              "_save_to_state_dict", "get_extra_state", "set_extra_state", "_register_load_state_dict_pre_hook",
              "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook", "_register_state_dict_hook",
              "register_state_dict_post_hook", "register_state_dict_pre_hook", "_named_members"):
    _delegate(_name)


def _requires_grad_(self: ORTModule, requires_grad: bool = True) -> ORTModule:
    self._module.requires_grad_(requires_grad)
    return self


ORTModule.requires_grad_ = _requires_grad_  # type: ignore[assignment, method-assign]
leave_alone(ORTModule._call)
_OF_ORTMODULE = frozenset(name for name in {**vars(FallsBack), **vars(ORTModule)}
                          if not hasattr(torch.nn.Module, name))
