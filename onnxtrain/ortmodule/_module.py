"""ORTModule itself: delegation to the user's module, the choice of a program for each call, and the fallback."""

from __future__ import annotations

import functools
import logging
import re
import time
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from onnxtrain import _C, UnsupportedError, _report, _timing, _torch, options
from onnxtrain._export import cache, exclusive, products
from onnxtrain._export.captured import Graph
from onnxtrain._export.errors import (
    ArgumentError,
    ConstantsWanted,
    DefinitionError,
    ExportError,
    NothingToCompute,
    StaleError,
)
from onnxtrain._export.exported import OPSETS
from onnxtrain._export.function_apply import CustomFunctions
from onnxtrain.ortmodule import _announce, _checks, _memory_config, _named_methods, _outputs, _random, _special
from onnxtrain.ortmodule._captured import Parts, is_cut, kind_of_call, names_of_call
from onnxtrain.ortmodule._debug import DebugOptions
from onnxtrain.ortmodule._device import device_of, on_several
from onnxtrain.ortmodule._double import Double
from onnxtrain.ortmodule._fallback import (
    Fallback,
    FallbackPolicy,
    ORTModuleFallbackException,
    ORTModuleTorchModelException,
    named,
)
from onnxtrain.ortmodule._forward import Adopted, Forward, calls_forward_of, watched
from onnxtrain.ortmodule._key import Key, describe, function_mode, torch_modes
from onnxtrain.ortmodule._managers import View
from onnxtrain.ortmodule._program import CheckError, Program, SharedMemoryError
from onnxtrain.ortmodule._utils import leave_alone
from onnxtrain.ortmodule._verify import VerificationError, compare, tolerance, verify
from onnxtrain.ortmodule.options import RuntimeOptions

_FORWARD_AD_LEVEL: Any = _torch.place("forward_ad_level")
_OWN = frozenset(("_module", "_debug", "_programs", "_known", "_counters", "_fallback", "_fallen", "_idle",
                  "_announced", "_parts", "_runtime", "_view", "_lazy", "_in_backward", "_outputs",
                  "_methods"))
_STORES = ("_parameters", "_buffers", "_modules")
MAX_PROGRAMS = 32  # exports kept per schema; the one that was made first goes
MAX_BY_TORCH = 8  # operators of one graph that torch runs; with more, torch runs the module
KEPT = {"": 0, "bf16": 16, "int8": 3}  # ORTMODULE_ACTIVATION_COMPRESSION as Session takes it
_UNTRANSLATED = re.compile(r"No ONNX function found for <OpOverload\(op='(aten\.\w+)', overload='(\w+)'\)>")
_TRANSFORMED = "a transform of torch.func"


class ORTModule(torch.nn.Module):
    """Runs a module's forward and backward in onnxtrain's engine; otherwise it is the module.

    Args:
        module: any torch.nn.Module on the CPU. This object has its signature, parameters, buffers, state_dict and
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
        object.__setattr__(self, "__class__", _special.classed(type(self), module))
        self._debug = debug_options if debug_options is not None else DebugOptions()
        self._fallback = Fallback()
        self._runtime = RuntimeOptions()
        _ = self._runtime.subgraphs  # raises ValueError for a malformed setting
        options.warn_of_ignored()
        asked = options.read("ORTMODULE_OUTPUTS") or None if outputs is None else outputs
        self._outputs = None if asked is None else _outputs.wanted_of(asked)  # None: no one has said
        self._counters = _report.Counters()
        self._module: Any = module  # a Graph, where it is one of Dynamo's
        self._programs: dict[Key, list[Program]] = {}
        self._known: dict[tuple[bytes, tuple[Any, ...]], tuple[Key, list[Program]]] = {}  # by what C says of tensors
        self._fallen: dict[Key | str, str] = {}  # why PyTorch runs such calls
        self._idle: set[Key] = set()  # calls whose results are views of arguments
        self._announced: set[bool] = set()
        self._parts = None if isinstance(module, Graph) else Parts(self)
        self._lazy = any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))
        self.__dict__["training"] = module.training
        for store in _STORES:  # the very dicts: torch's own walks find everything here
            self.__dict__[store] = module.__dict__[store]
        _special.warn_of_collisions({*vars(ORTModule), *_OWN}, module, self._debug)
        self._methods = _named_methods.made(self, methods)
        if isinstance(module, torch.nn.DataParallel):
            self._fall_back("the module", FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL,
                            "ORTModule is not compatible with torch.nn.DataParallel, which copies its module at "
                            "every step: wrap the ORTModule in torch.nn.parallel.DistributedDataParallel instead", None)
            self._fallback.give_up()

    # ---- running ----

    forward = Forward()
    _ort_is_root = False  # of the walks over modules

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward: same arguments, same result."""
        if exclusive.owner is not None:
            if exclusive.here():
                return self._eager(args, kwargs)  # a part of what is being exported
            exclusive.wait()
        if self._fallback.forced:
            self._fallback.note_forced()
            if not self._fallback.always:
                self._note(f"the policy {self._fallback.policy.name} forces every call into PyTorch")
            return self._in_torch(args, kwargs)
        if _torch.are_functorch_transforms_active():
            if _TRANSFORMED not in self._fallen:
                self._fall_back(_TRANSFORMED, FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL,
                                "torch.func differentiates and batches with its own interpreters, which cannot see "
                                "inside the engine", None)
            return self._in_torch(args, kwargs)
        if (_torch.len_torch_dispatch_stack() or _torch.get_tracing_state() is not None
            or getattr(*_FORWARD_AD_LEVEL) >= 0):
            self._note("a trace, a mode of torch's dispatcher or forward-mode differentiation is active, and must "
                       "see every operator")
            return self._in_torch(args, kwargs)
        if _torch.len_torch_function_stack() and (active := function_mode()) is not None:
            return self._by_torch(f"the mode {active} must see every function of torch", args, kwargs)
        if self._lazy and self._still_lazy():
            return self._in_torch(args, kwargs)
        if self._parts is None:
            return self._graph(args)
        start, captures = time.monotonic(), self._counters.captures
        result = self._parts(self, args, kwargs)
        if captures == self._counters.captures:
            _report.forward_took(self._counters, time.monotonic() - start)
        return result

    # ---- running one graph ----

    def _graph(self, args: tuple[Any, ...]) -> Any:
        """A call of a Graph, in a program that was exported for such arguments."""
        grad_enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        mode = self._module.training and grad_enabled, torch_modes()
        signature = _C.signature(args)
        known = None if signature is None else self._known.get((signature, mode))
        if known is not None:
            key, programs = known
            tensors: Sequence[Any] = args
        else:
            key = Key(tuple([describe(leaf) for leaf in args]), *mode)
            programs = self._programs.get(key, [])
            if signature is not None and programs:
                self._known[signature, mode] = key, programs
            tensors = [leaf for leaf in args if isinstance(leaf, torch.Tensor)]
        for program in programs:
            if program.guards(tensors) is None:
                if program.steps < self._debug.verify:
                    self._debug.log(logging.WARNING, "%s", verify(self._module, program.exported, args))
                try:
                    if self._debug.trace is None and not self._runtime.prints:
                        result = program(args, grad_enabled)
                    else:
                        result = self._run(program, args, grad_enabled)
                except StaleError as error:
                    programs.remove(program)
                    self._debug.log(logging.WARNING, "ORTModule exports the module again, because %s", error)
                    break
                except CheckError as error:
                    return self._checked_by_torch(error, args)
                except SharedMemoryError as error:
                    return self._by_torch(str(error), args, {})
                except UnsupportedError as error:
                    self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL, str(error), error)
                    return self._in_torch(args, {})
                _report.engine_step(self._counters)
                return result
        if key in self._idle:
            return self._module(*args)
        if key in self._fallen and not self._fallback.retry:
            return self._in_torch(args, {})
        return self._export_and_run(key, tensors, grad_enabled, args)

    def _run(self, program: Program, leaves: Sequence[Any], grad_enabled: bool) -> Any:
        """One step in the engine, traced, and its memory or density printed, where that was asked for."""
        trace = self._debug.trace
        result = program(leaves, grad_enabled) if trace is None else trace.call(
            program, type(self._module).__name__, functools.partial(program, leaves, grad_enabled))
        if self._runtime.print_memory_stats:
            _announce.memory(self, program)
        if self._runtime.print_input_density:
            _announce.density(self, program)
        return result

    def _still_lazy(self) -> bool:
        """Whether parameters have no shape yet. PyTorch runs the first call, which sets the shapes."""
        self._lazy = any([is_lazy(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())])
        if self._lazy:
            self._debug.log(logging.INFO,
                            "ORTModule: %s has lazy parameters: PyTorch runs the call that gives them their shapes",
                            type(self._module).__name__)
        return self._lazy

    def _by_torch(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call in PyTorch that no graph can represent; warns once and notes the reason."""
        if reason not in self._counters.reasons:
            self._debug.log(logging.WARNING, "ORTModule: PyTorch runs this call of %s, because %s",
                            type(self._module).__name__, reason)
        self._note(reason)
        return self._in_torch(args, kwargs)

    def _in_torch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _report.count(self._counters, fallback_steps=1)
        with _timing.span("fallback", type(self._module).__name__):
            return self._eager(args, kwargs)

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward by PyTorch, with the results that are wanted."""
        wanted = self._wanted()
        result = self._module(*args, **kwargs)
        return _outputs.chosen(result, wanted) if wanted else result

    def _wanted(self) -> _outputs.Wanted:
        """The results of a call now that its caller reads; empty for all."""
        return self._outputs or () if self._module.training else ()

    def _checked_by_torch(self, error: CheckError, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """One call for which forward may have to raise; it does so itself: all of it, where a graph has its checks."""
        if isinstance(self._module, Graph) and _checks.has_checks(self._module._captured.graph):
            raise error
        self._debug.log(logging.WARNING, "ORTModule: PyTorch runs this call, because %s", error)
        self._note(f"in some calls {error}; PyTorch runs them and raises what forward would raise")
        result = self._in_torch(args, kwargs or {})
        self._fallback.check(FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL, f"{error}, and PyTorch did not raise.",
                             error)
        return result

    def _note(self, reason: str) -> None:
        """Notes a reason for stats() and explain(), once."""
        _report.note(self._counters, "reasons", reason)

    def _export_and_run(self, key: Key, tensors: Sequence[torch.Tensor], grad_enabled: bool,
                        args: tuple[Any, ...]) -> Any:
        """A schema, mode or size for which there is no program yet."""
        if any([tensor.is_nested for tensor in tensors]):
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_DATA, "an argument is a nested tensor", None)
            return self._in_torch(args, {})
        known = self._programs.setdefault(key, [])
        if known and (reason := known[-1].guards(tensors)):
            self._debug.log(logging.WARNING, "ORTModule exports the module again, because the export does not fit this "
                            "call: %s", reason)
        try:
            device = device_of((*tensors, *self._module.parameters(), *self._module.buffers()))
        except UnsupportedError as error:
            text = on_several(self._named(tensors)) or str(error)
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE, text, error)
            return self._in_torch(args, {})
        try:
            if (view := self.__dict__.get("_view")) is not None:
                view._execution_manager(key.training)._graph_transition_manager.check_extra_kwargs()
        except UnsupportedError as error:
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL, str(error), error)
            return self._in_torch(args, {})
        _C.set_log_level(self._debug.log_level.logging_level)
        if self._runtime.cache_dir:
            products.recall(self._runtime.cache_dir)
        by_torch: list[str] = []
        while True:
            program = None
            try:
                with exclusive.exclusive():
                    program = (self._known_export(key, tensors, device)
                               or self._program(key, args, tuple(by_torch), device))
                if program.chain is None or not program.chain.draws:
                    program.double = Double(self._module, key, self._fallback, self._counters, self._debug)
                if self._debug.verify:
                    self._debug.log(logging.WARNING, "%s", verify(self._module, program.exported, args))
                result = self._first_run(program, args, grad_enabled)
            except (CheckError, MemoryError) as error:
                if program is not None:
                    known.append(program)
                    _report.register(program)
                if isinstance(error, MemoryError):
                    raise
                return self._checked_by_torch(error, args)
            except SharedMemoryError as error:
                return self._by_torch(str(error), args, {})
            except NothingToCompute:
                self._idle.add(key)
                return self._module(*args)
            except (DefinitionError, VerificationError, ORTModuleFallbackException):
                raise  # meant for the user
            except Exception as error:
                if not isinstance(error, (ExportError, UnsupportedError, StaleError)):
                    error = named(error)
                lacking = self._lacking(error, program)
                if lacking is None or lacking in by_torch or len(by_torch) == MAX_BY_TORCH:
                    failed = error
                    break
                by_torch.append(lacking)  # once more, with this operator run by torch
                continue
            if self._debug.save_onnx:
                self._debug.write_models(program, key.training, self._number(key.training),
                                         self._runtime.onnx_opset_version)
            program.called_with = kind_of_call()
            known.append(program)
            _report.register(program)
            del known[:-MAX_PROGRAMS]
            self._leave_devices(device)
            self._fallen.pop(key, None)
            if key.training:
                program.beside_loss = _outputs.beside_loss(result, program.totals())
            self._announce(key, program)
            if self._runtime.cache_dir:
                products.keep(self._runtime.cache_dir)
            _report.engine_step(self._counters)
            return result
        if self.__dict__.get("_numbered"):
            raise ConstantsWanted(str(failed)) from failed
        text, kind = " ".join(str(failed).split()).rstrip("."), FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
        if isinstance(failed, UnsupportedError):
            kind = FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
        elif isinstance(failed, ArgumentError):
            kind = FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
        self._fallback.check(kind, f"{text}.", failed)
        result = self._in_torch(args, {})  # where torch itself refuses these arguments, that says nothing of the engine
        self._fall_back(key, kind, text, failed)
        return result

    def _named(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Arguments, parameters and buffers, with the names that they have for the user."""
        called = names_of_call()
        named = [(f"argument {called[id(tensor)]}" if id(tensor) in called else f"input {i} of the graph", tensor)
                 for i, tensor in enumerate(tensors)]
        named += [(f"parameter {name}", parameter) for name, parameter in self._module.named_parameters()]
        return named + [(f"buffer {name}", buffer) for name, buffer in self._module.named_buffers()]

    def _leave_devices(self, device: str) -> None:
        """Drops the programs for other devices, with the memory that they hold there: the weights have moved."""
        if next(self._module.parameters(), None) is None and next(self._module.buffers(), None) is None:
            return
        for programs in self._programs.values():
            programs[:] = [program for program in programs if program.device == device]

    def _say_constants(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, str):
                self._debug.log(logging.INFO, "Received input of type %s is treated as a constant by ORT by default.",
                                type(leaf))

    def _first_run(self, program: Program, leaves: Sequence[Any], grad_enabled: bool) -> Any:
        """A graph that does not run even for the arguments that it was exported with is the export's fault, or
        eager's. Whatever runs the call then draws the same random numbers.
        """
        program.in_backward = self.__dict__.get("_in_backward")
        random = _random.state(program.device)
        try:
            return self._run(program, leaves, grad_enabled)
        except Exception as error:
            _random.restore(program.device, random)
            if isinstance(error, (TypeError, ValueError)):
                raise ExportError(f"The exported graph does not run: {error}{program.exported.line(error)}.") from error
            raise

    def _all_programs(self) -> list[tuple[Key, list[Program]]]:
        """The programs of each schema, those of its graphs among them."""
        found = list(self._programs.items())
        for graph in self._graphs():
            found += graph._all_programs()
        return found

    def _graphs(self) -> list[ORTModule]:
        """What runs the graphs of forward, and the methods."""
        return [*(self._parts.models() if self._parts is not None else ()), *self._methods.values()]

    def _join(self, handle: Any) -> None:
        """For onnxtrain.optim.step_in_backward(): the optimizer that backward updates parameters by, or None."""
        self._in_backward = handle
        for programs in self._programs.values():
            for program in programs:
                program.in_backward = handle
        for graph in self._graphs():
            graph._join(handle)

    def _lacking(self, error: Exception, program: Program | None) -> str | None:
        """The torch operator behind a node that the engine does not have, where torch may run it instead."""
        if not self._fallback.allows(FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL):
            return None
        if isinstance(error, ExportError):
            untranslated = _UNTRANSLATED.search(str(error))
            return None if untranslated is None else f"{untranslated[1]}.{untranslated[2]}"
        exported = getattr(error, "exported", None) if program is None else program.exported
        if exported is None or not isinstance(error, UnsupportedError):
            return None
        found = [origin.operator for origin in exported.named_by(error)]
        return next((operator for operator in found if operator.startswith("aten.")), None)

    def _digest(self, key: Key) -> str | None:
        """The name of this module's exports on disk; None where they are not kept."""
        if not self._runtime.cache_dir:
            return None
        runtime = self._runtime
        settings = (runtime.onnx_opset_version, runtime.enable_custom_autograd_function,
                    runtime.skipped_autograd_functions)
        try:
            return cache.digest(self._module, key, settings)
        except (cache.NotKept, OSError, NotImplementedError, TypeError) as reason:
            self._debug.log(logging.INFO, "ORTModule does not keep exports of this module in %s: %s",
                            runtime.cache_dir, reason)
            return None

    def _memory(self) -> dict[str, Any]:
        """Arguments of a Session that decide about memory."""
        runtime = self._runtime
        return {"recompute": runtime.memory_optimization_level, "budget": runtime.memory_budget or 0.0,
                "subgraphs": runtime.subgraphs, "kept": KEPT[runtime.activation_compression]}

    def _known_export(self, key: Key, tensors: Sequence[torch.Tensor], device: str) -> Program | None:
        """A program of an export on disk, or of that of a graph that computes the same with other weights."""
        name = self._digest(key)
        exported = None if name is None else cache.load(self._runtime.cache_dir, name, tensors)
        cached = exported is not None
        if exported is None and (parts := self.__dict__.get("_part_of", lambda: None)()) is not None:
            exported = parts.twins.find(self._module, (key, device), tensors)
        if exported is None:
            return None
        program = Program(self._module, exported, device=device, memory=self._memory())
        _report.count(self._counters, cached_exports=int(cached), build_seconds=program.build_seconds)
        return program

    def _program(self, key: Key, args: tuple[Any, ...], by_torch: tuple[str, ...], device: str) -> Program:
        """Exports, loads, and compares with eager where that is needed or asked for."""
        from onnxtrain.export import export  # and with it torch's exporter, which no kept export needs

        runtime = self._runtime
        custom = CustomFunctions(runtime.enable_custom_autograd_function, runtime.skipped_autograd_functions)
        exported = export(self._module, args, opset=runtime.onnx_opset_version, custom=custom, by_torch=by_torch)
        _report.count(self._counters, exports=1, export_seconds=exported.seconds.get("total", 0.0))
        try:
            program = Program(self._module, exported, device=device, memory=self._memory())
        except UnsupportedError as error:
            error.exported = exported  # type: ignore[attr-defined]
            raise
        except DefinitionError:
            raise
        except ValueError as error:
            raise ExportError(f"The exported graph is not valid: {error}{exported.line(error)}.") from error
        if by_torch:
            exported.notes.append("PyTorch runs these operators between segments, because the engine does not have "
                                  f"them: {', '.join(by_torch)}.")
            exported.needs_verification = True  # not every operator of torch has a gradient below the autograd level
        _report.count(self._counters, build_seconds=program.build_seconds)
        if exported.needs_verification:
            try:
                rows = compare(self._module, exported, args, thaw=True)
            except (TypeError, ValueError) as error:
                raise ExportError(f"The exported graph does not run: {error}{exported.line(error)}.") from error
            worst = max(rows, key=lambda row: row[1])
            if not worst[1] <= tolerance(self._module):
                raise ExportError(
                    f"The exported graph is wrong: for one batch, {worst[0]} differs from eager PyTorch's by "
                    f"{worst[1]:.1e} of its largest entry."
                )
            exported.notes.append("Outputs and every gradient of one batch were equal to eager PyTorch's.")
        if (parts := self.__dict__.get("_part_of", lambda: None)()) is not None and not by_torch:
            parts.twins.keep(self._module, (key, device), exported)
        name = self._digest(key)
        if name is not None:
            cache.store(self._runtime.cache_dir, name, exported)
        return program

    def _number(self, training: bool) -> int:
        """How many graphs of the user's module were captured before this one."""
        parts = self.__dict__.get("_part_of", lambda: None)()
        return 0 if parts is None else parts.number(self, training)

    def _announce(self, key: Key, program: Program) -> None:
        wanted = self._runtime.onnx_opset_version
        if program.exported.opset != wanted:
            self._debug.log(logging.WARNING,
                            "ORTModule: %s: opset %d was requested, and %d is used, because an export has %d to %d",
                            type(self._module).__name__, wanted, program.exported.opset, *OPSETS)
        for note in dict.fromkeys((*program.warnings, *program.exported.notes)):
            level = logging.WARNING if note in program.warnings else logging.INFO
            self._debug.log(level, "ORTModule: %s", note)
        if key.training not in self._announced:
            _announce.beside_loss(self, program)
            if key.training and not self._runtime.memory_optimization_level:
                _memory_config.announce(self._debug.log, self._runtime.subgraphs, program.sessions)

    def _fall_back(self, key: Key | str, reason: FallbackPolicy, text: str, cause: Exception | None) -> None:
        """Remembers that this signature runs in PyTorch and says so once; raises where the policy forbids it."""
        text = " ".join(text.split()).rstrip(".")
        self._fallback.check(reason, f"{text}.", cause)
        if self._fallen.get(key) != text:
            self._fallen[key] = text
            self._note(text)
            part = "a part of " if is_cut() else ""
            self._debug.log(
                logging.WARNING,
                "ORTModule: %s%s runs in PyTorch, not in the onnxtrain engine, for this kind of call: %s. Results are "
                "right, but not faster. onnxtrain.explain(model) lists what ran where. "
                "ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE makes this an error.", part, type(self._module).__name__,
                text)

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
        return _special.bound(self, value)

    def __init_subclass__(cls, **settings: Any) -> None:
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
        elif name in _OF_ORTMODULE or _special.is_custom_method(self._module, name) or calls_forward_of(self, value):
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

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return _special.blank, (getattr(type(self), "_plain_class", type(self)),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
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

    def _apply(self, fn: Any, recurse: bool = True) -> ORTModule:
        self._module._apply(fn, recurse)
        return self

    def apply(self, fn: Any) -> ORTModule:
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

    def method(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
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
_OF_ORTMODULE = frozenset(name for name in vars(ORTModule) if not hasattr(torch.nn.Module, name))
