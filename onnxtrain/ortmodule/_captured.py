"""ORTModule on Dynamo: what the user's Python does is recorded and guarded by PyTorch, its graphs run in the engine.

Dynamo reads the bytecode of forward, guards every value that it read, replays what forward changes, and cuts the graph
where it cannot follow. Each graph that arrives is run by an ORTModule of its own over a Graph, which is those tensor
operations as a module that has the user's parameters and buffers. Used by _module.py.
"""

from __future__ import annotations

import collections
import inspect
import random
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onnxtrain import _report
from onnxtrain._export.captured import Graph, Place, places_of
from onnxtrain._export.snapshot import Snapshot
from onnxtrain.ortmodule._fallback import FallbackPolicy

MAX_CAPTURES = 64  # of one mode; Dynamo runs the module in PyTorch after them


def _entry(module: torch.nn.Module) -> Callable[..., Any]:
    """A function that calls the module: with code of its own, by which Dynamo keeps what it compiled."""
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)


def _is_of_dynamo(error: Exception) -> bool:
    """Whether the capture raised it, and not what it captured."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (TorchDynamoException, GuardOnDataDependentSymNode,
                              fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
                              fake_tensor.UnsupportedFakeTensorException))


def _misread(module: torch.nn.Module) -> str | None:
    """What the module leads to that Dynamo reads wrongly: it takes a deque for one without an end, and the numbers of a
    generator from another one.
    """
    for value, path in Snapshot(module).objects():
        if isinstance(value, random.Random):
            return f"the random.Random {path!r}"
        if isinstance(value, collections.deque) and value.maxlen is not None:
            return f"the deque(maxlen={value.maxlen}) {path!r}"
    return None


def _cuts() -> dict[str, int]:
    """How often Dynamo has cut a graph in this process, by reason."""
    from torch._dynamo.utils import counters

    return counters["graph_break"]


class Bound:
    """The ORTModule of a graph, with the parameters and buffers that it was captured with.

    Attributes:
        model: the ORTModule.
        arguments: which of the graph's inputs are the model's.
    """

    def __init__(self, model: Any, places: Sequence[Sequence[Place]]) -> None:
        self.model = model
        self.arguments = [i for i, held in enumerate(places) if not held]
        self._places = [(i, store, name) for i, held in enumerate(places) for store, name in held]

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether the module has these parameters and buffers in the same places: another may have been put there."""
        for i, store, name in self._places:
            if store.get(name) is not inputs[i]:
                return False
        return True


class Parts:
    """The graphs of one ORTModule, and the functions that run them."""

    def __init__(self, model: Any) -> None:
        self._module: torch.nn.Module = model._module
        self._model = weakref.ref(model)
        self._graphs: dict[tuple[Any, ...], Any] = {}  # the ORTModule of each, by what it computes
        # By mode: each has its own code, and few sets of guards to try.
        self._calls: dict[tuple[bool, ...], Callable[..., Any]] = {}
        self._cuts: dict[str, int] = {}
        self._hooks_unguarded: bool | None = None  # torch's setting, while a capture goes on

    def models(self) -> Iterable[Any]:
        """The ORTModules of the graphs."""
        return self._graphs.values()

    def _compiled(self) -> Callable[..., Any]:
        def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            from onnxtrain import dynamo

            self._note_cuts()
            self._guard_hooks()
            return dynamo.compiled(graph, example_inputs, self)

        known = inspect.signature(torch.compile).parameters
        limit = {"recompile_limit": MAX_CAPTURES, "isolate_recompiles": True} if "recompile_limit" in known else {}
        return torch.compile(_entry(self._module), backend=backend, **limit)

    def bind(self, operations: torch.fx.GraphModule, inputs: Sequence[Any]) -> Bound:
        """What runs a graph for as long as these tensors, those that are no arguments, stand where they stand.

        An equal graph has its ORTModule already: Dynamo captures again whenever a Python value that it read has
        changed.
        """
        from onnxtrain import dynamo
        from onnxtrain.ortmodule._module import ORTModule

        places = places_of(self._module, inputs)
        key = dynamo.key(operations), *[(id(store), name) for held in places for store, name in held or [(None, "")]]
        model = self._graphs.get(key)
        if model is None:
            whole = self._model()
            model = self._graphs[key] = ORTModule(Graph.of(self._module, operations, places), whole._debug)
            model._fallback, model._runtime, model._announced = whole._fallback, whole._runtime, whole._announced
            model._counters = _report.Counters(whole=whole._counters, reasons=whole._counters.reasons)
            model._in_backward = whole.__dict__.get("_in_backward")
        return Bound(model, places)

    def by_torch(self, operations: Callable[..., Any], reason: str) -> Callable[..., Any]:
        """What PyTorch runs, where the policy allows it."""
        def call(*given: Any, **named: Any) -> Any:
            self._fall_back(reason)
            self._model()._counters.torch_graphs += 1
            return operations(*given, **named)

        return call

    def _fall_back(self, reason: str, cause: Exception | None = None) -> None:
        self._model()._fall_back(reason, FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL, reason, cause, None)

    def _guard_hooks(self) -> None:
        """Until this call is over, lets Dynamo guard hooks, which it leaves out unless told otherwise."""
        if self._hooks_unguarded is None:
            from torch._dynamo import config

            self._hooks_unguarded, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False

    def _hooks_as_before(self) -> None:
        from torch._dynamo import config

        config.skip_nnmodule_hook_guards, self._hooks_unguarded = self._hooks_unguarded, None

    def _note_cuts(self) -> None:
        """Says where Dynamo has cut this module's graphs since the last look."""
        cuts, found = _cuts(), self._model()._counters.graph_breaks
        for reason, times in cuts.items():
            line = " ".join(reason.split("\n")[0].split())
            if times > self._cuts.get(reason, 0) and line not in found:
                found.append(line)
        self._cuts = dict(cuts)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the module: in the engine if each of its graphs is."""
        counters = self._model()._counters
        mode = self._module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        call = self._calls.get(mode)
        if call is None:
            self._cuts = self._cuts or dict(_cuts())
            misread = _misread(self._module)
            call = self._calls[mode] = self._compiled() if misread is None else self.by_torch(
                self._module, f"Dynamo does not follow {misread}")
        engine, by_torch = counters.engine_graphs, counters.torch_graphs
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            if (engine, by_torch) != (counters.engine_graphs, counters.torch_graphs) or not _is_of_dynamo(error):
                raise
            result = self._module(*args, **kwargs)  # forward's own errors are raised here
            self._fall_back(f"Dynamo could not capture it: {str(error).splitlines()[0]}", error)
        finally:
            if self._hooks_unguarded is not None:
                self._hooks_as_before()
        if counters.torch_graphs == by_torch and counters.engine_graphs > engine:
            _report.engine_step(counters)
        else:
            if counters.torch_graphs == by_torch:
                self._note_cuts()
                cut = next(iter(counters.graph_breaks), None)
                self._fall_back("Dynamo captured no tensor operations of it" + (f": {cut}" if cut else ""))
            _report.count(counters, fallback_steps=1)
        return result
