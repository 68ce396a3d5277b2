"""What runs one graph that Dynamo captured: in a program of the engine for each kind of arguments, or in PyTorch.

Made by _captured.py for the graphs of an ORTModule, and by dynamo.py for those of torch.compile(backend="onnxtrain").
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onnxtrain import _C, UnsupportedError, _report
from onnxtrain._export import cache, exclusive, products
from onnxtrain._export.autograd_calls import CustomFunctions
from onnxtrain._export.captured import Graph, names_of_weights
from onnxtrain._export.errors import (
    ArgumentError,
    ConstantsWanted,
    DefinitionError,
    ExportError,
    NothingToCompute,
    StaleError,
)
from onnxtrain._export.exported import OPSETS, Exported
from onnxtrain.ortmodule import _announce, _checks, _memory_config, _outputs, _random
from onnxtrain.ortmodule._debug import DebugOptions
from onnxtrain.ortmodule._device import device_of, on_several
from onnxtrain.ortmodule._double import Double
from onnxtrain.ortmodule._fallback import Fallback, FallbackPolicy, FallsBack, ORTModuleFallbackException, named
from onnxtrain.ortmodule._key import Key, describe, torch_modes
from onnxtrain.ortmodule._program import CheckError, Program, SharedMemoryError
from onnxtrain.ortmodule._running import kind_of_call, names_of_call, running
from onnxtrain.ortmodule._verify import VerificationError, compare, tolerance, verify
from onnxtrain.ortmodule.options import RuntimeOptions

if TYPE_CHECKING:
    from onnxtrain.ortmodule._captured import Parts
    from onnxtrain.ortmodule._key import Modes

MAX_PROGRAMS = 32  # exports kept per schema; the one that was made first goes
MAX_BY_TORCH = 8  # operators of one graph that torch runs; with more, torch runs the graph
_UNTRANSLATED = re.compile(r"No ONNX function found for <OpOverload\(op='(aten\.\w+)', overload='(\w+)'\)>")


class GraphRunner(FallsBack):
    """Runs one graph.

    Args:
        graph: the operations, with the weights that they were captured with.
        parts: gives the Parts of the ORTModule that the graph is one of; None for torch.compile's.

    Attributes:
        numbered: whether tensors of the graph stand for numbers of Python's. If the export fails, it is tried again
            with the numbers as constants.
    """

    def __init__(self, graph: Graph, parts: Callable[[], Parts] | None = None) -> None:
        whole = None if parts is None else parts()._model()
        self._module, self._parts = graph, parts
        self._debug = DebugOptions() if whole is None else whole._debug
        self._fallback = Fallback() if whole is None else whole._fallback
        self._runtime = RuntimeOptions() if whole is None else whole._runtime
        self._counters = _report.Counters() if whole is None else whole._counters
        self._counted = "fallback_steps" if whole is None else "torch_graphs"
        self._programs: dict[Key, list[Program]] = {}
        self._known: dict[tuple[bytes, tuple[bool, Modes]], tuple[Key, list[Program]]] = {}  # by what C says of tensors
        self._fallen: dict[Key | str, str] = {}  # why PyTorch runs such calls
        self._idle: set[Key] = set()  # calls whose results are views of arguments
        self._own = [i for i, held in enumerate(graph._captured.held) if held is None]
        self.numbered = False

    def captured_again(self, operations: torch.fx.GraphModule) -> None:
        """Dynamo captured the same operations once more."""
        self._module._captured.take(operations)

    def __call__(self, inputs: Sequence[object]) -> Any:
        """The graph's results for all of its inputs; weights may be others than those that it was captured with."""
        modes = torch_modes()
        if ((self._fallback.forced or exclusive.owner is not None or modes is None)
                and (by_torch := self._outside()) is not None):
            return by_torch(inputs)
        assert modes is not None  # else PyTorch has run the call
        args = tuple(map(inputs.__getitem__, self._own))
        call, runtime = running.call, self._runtime
        grad_enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        training = self._module.training if call is None or self._parts is None else call.training
        mode, signature = (training and grad_enabled, modes), _C.signature(args)
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
                    self._debug.log(logging.WARNING, "%s", self._verified(program, args, inputs))
                try:
                    if not (runtime.print_memory_stats or runtime.print_input_density):
                        result = program(args, grad_enabled, inputs)
                    else:
                        result = self._run(program, args, grad_enabled, inputs)
                except StaleError as error:
                    programs.remove(program)
                    self._debug.log(logging.WARNING, "ORTModule exports the module again, because %s", error)
                    break
                except CheckError as error:
                    return self._after_check(error, inputs)
                except SharedMemoryError as error:
                    return self._by_torch(str(error), inputs)
                except UnsupportedError as error:
                    self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL, str(error), error)
                    return self._in_torch(inputs)
                if self._parts is None:
                    _report.engine_step(self._counters)
                else:
                    self._counters.engine_graphs += 1
                return result
        if key in self._idle:
            return self._eager(inputs)
        if key in self._fallen and not self._fallback.retry:
            return self._in_torch(inputs)
        return self._export_and_run(key, tensors, grad_enabled, args, inputs)

    def _run(self, program: Program, args: Sequence[object], grad_enabled: bool,
             inputs: Sequence[object]) -> tuple[torch.Tensor, ...]:
        """One step in the engine, and its memory or density printed, where that was asked for."""
        result = program(args, grad_enabled, inputs)
        if self._runtime.print_memory_stats:
            _announce.memory(self._module, program)
        if self._runtime.print_input_density:
            _announce.density(self._module, program)
        return result

    def _verified(self, program: Program, args: Sequence[object], inputs: Sequence[object]) -> str:
        """The table of DebugOptions(verify=True)."""
        with exclusive.exclusive():
            self._module._captured.hold(inputs)
            return verify(self._module, program.exported, args)

    def _after_check(self, error: CheckError, inputs: Sequence[object]) -> object:
        """A call for which forward may have to raise: all of forward runs in PyTorch, where the graph has its checks.
        """
        if _checks.has_checks(self._module._captured.graph):
            raise error
        return self._checked_by_torch(error, inputs)

    def programs(self) -> list[tuple[Key, list[Program]]]:
        """Those of each schema."""
        return list(self._programs.items())

    def join(self, handle: object) -> None:
        """For onnxtrain.optim.step_in_backward(): the optimizer that backward updates parameters by, or None."""
        for programs in self._programs.values():
            for program in programs:
                program.in_backward = handle

    def _whole(self) -> Any:
        """The ORTModule whose graph this is; None where it is torch.compile's."""
        return None if self._parts is None else self._parts()._model()

    def _eager(self, inputs: Sequence[object]) -> object:
        """The results, as PyTorch gives them."""
        return self._module._captured.graph.forward(*inputs)

    def _export_and_run(self, key: Key, tensors: Sequence[torch.Tensor], grad_enabled: bool,
                        args: tuple[object, ...], inputs: Sequence[object]) -> object:
        """A schema, mode or size for which there is no program yet."""
        if any([tensor.is_nested for tensor in tensors]):
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_DATA, "an argument is a nested tensor", None)
            return self._in_torch(inputs)
        known = self._programs.setdefault(key, [])
        if known and (reason := known[-1].guards(tensors)):
            self._debug.log(logging.WARNING, "ORTModule exports the module again, because the export does not fit this "
                            "call: %s", reason)
        try:
            device = device_of([value for value in inputs if isinstance(value, torch.Tensor)])
        except UnsupportedError as error:
            text = on_several(self._named(inputs)) or str(error)
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE, text, error)
            return self._in_torch(inputs)
        whole = self._whole()
        try:
            if whole is not None and (view := whole.__dict__.get("_view")) is not None:
                view._execution_manager(key.training)._graph_transition_manager.check_extra_kwargs()
        except UnsupportedError as error:
            self._fall_back(key, FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL, str(error), error)
            return self._in_torch(inputs)
        _C.set_log_level(self._debug.log_level.logging_level)
        if self._runtime.cache_dir:
            products.recall(self._runtime.cache_dir)
        by_torch: list[str] = []
        while True:
            program = None
            try:
                with exclusive.exclusive():
                    self._module._captured.hold(inputs)  # what is exported and compared
                    program = (self._known_export(key, tensors, device)
                               or self._program(key, args, tuple(by_torch), device))
                if program.chain is None or not program.chain.draws:
                    program.double = Double(self._module, key, self._fallback, self._counters, self._debug)
                if self._debug.verify:
                    self._debug.log(logging.WARNING, "%s", self._verified(program, args, inputs))
                result = self._first_run(program, args, grad_enabled, inputs)
            except (CheckError, MemoryError) as error:
                if program is not None:
                    known.append(program)
                    _report.register(program)
                if isinstance(error, MemoryError):
                    raise
                return self._after_check(error, inputs)
            except SharedMemoryError as error:
                return self._by_torch(str(error), inputs)
            except NothingToCompute:
                self._idle.add(key)
                return self._eager(inputs)
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
            if self._parts is None:
                _report.engine_step(self._counters)
            else:
                self._counters.engine_graphs += 1
            return result
        if self.numbered:
            raise ConstantsWanted(str(failed)) from failed
        text, kind = " ".join(str(failed).split()).rstrip("."), FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
        if isinstance(failed, UnsupportedError):
            kind = FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
        elif isinstance(failed, ArgumentError):
            kind = FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
        self._fallback.check(kind, f"{text}.", failed)
        result = self._in_torch(inputs)  # where torch itself refuses these arguments, that says nothing of the engine
        self._fall_back(key, kind, text, failed)
        return result

    def _named(self, inputs: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        """Arguments, then parameters and buffers, with the names that they have for the user."""
        called, held = names_of_call(), names_of_weights(self._module._captured.user())
        found = [(f"argument {called[id(inputs[i])]}" if id(inputs[i]) in called else f"input {number} of the graph",
                  inputs[i]) for number, i in enumerate(self._own) if isinstance(inputs[i], torch.Tensor)]
        return found + [(held[id(tensor)], tensor) for tensor in inputs if id(tensor) in held]

    def _leave_devices(self, device: str) -> None:
        """Drops the programs for other devices, with the memory that they hold there: the weights have moved."""
        if any(self._module._captured.places):
            for programs in self._programs.values():
                programs[:] = [program for program in programs if program.device == device]

    def _first_run(self, program: Program, args: Sequence[object], grad_enabled: bool,
                   inputs: Sequence[object]) -> tuple[torch.Tensor, ...]:
        """A graph that does not run even for the arguments that it was exported with is the export's fault, or
        eager's. Whatever runs the call then draws the same random numbers.
        """
        whole = self._whole()
        program.in_backward = None if whole is None else whole.__dict__.get("_in_backward")
        random = _random.state(program.device)
        try:
            return self._run(program, args, grad_enabled, inputs)
        except Exception as error:
            _random.restore(program.device, random)
            if isinstance(error, (TypeError, ValueError)):
                raise ExportError(f"The exported graph does not run: {error}{program.exported.line(error)}.") from error
            raise

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

    def _known_export(self, key: Key, tensors: Sequence[torch.Tensor], device: str) -> Program | None:
        """A program of an export on disk."""
        name = self._digest(key)
        exported = None if name is None else cache.load(self._runtime.cache_dir, name, tensors)
        if exported is None:
            return None
        program = self._bound(exported, device)
        _report.count(self._counters, cached_exports=1, build_seconds=program.build_seconds)
        return program

    def _bound(self, exported: Exported, device: str) -> Program:
        """A program that takes the inputs of the graph, weights among them."""
        return Program(self._module, exported, device=device, memory=self._runtime.memory(),
                       places=self._module._captured.positions())

    def _program(self, key: Key, args: tuple[object, ...], by_torch: tuple[str, ...], device: str) -> Program:
        """Exports, loads, and compares with eager where that is needed or asked for."""
        from onnxtrain.export import export  # and with it torch's exporter, which no kept export needs

        runtime = self._runtime
        custom = CustomFunctions(runtime.enable_custom_autograd_function, runtime.skipped_autograd_functions)
        exported = export(self._module, args, opset=runtime.onnx_opset_version, custom=custom, by_torch=by_torch)
        _report.count(self._counters, exports=1, export_seconds=exported.seconds.get("total", 0.0))
        try:
            program = self._bound(exported, device)
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
        name = self._digest(key)
        if name is not None:
            cache.store(self._runtime.cache_dir, name, exported)
        return program

    def _number(self, training: bool) -> int:
        """How many graphs of the user's module were captured before this one."""
        return 0 if self._parts is None else self._parts().number(self, training)

    def _announce(self, key: Key, program: Program) -> None:
        wanted = self._runtime.onnx_opset_version
        if program.exported.opset != wanted:
            self._debug.log(logging.WARNING,
                            "ORTModule: %s: opset %d was requested, and %d is used, because an export has %d to %d",
                            type(self._module).__name__, wanted, program.exported.opset, *OPSETS)
        for note in dict.fromkeys((*program.warnings, *program.exported.notes)):
            level = logging.WARNING if note in program.warnings else logging.INFO
            self._debug.log(level, "ORTModule: %s", note)
        whole = self._whole()
        if whole is not None and key.training not in whole._announced:
            _announce.beside_loss(whole, program)
            if key.training and not self._runtime.memory_optimization_level:
                _memory_config.announce(self._debug.log, self._runtime.subgraphs, program.sessions)
