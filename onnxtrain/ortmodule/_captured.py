"""ORTModule on Dynamo: what the user's Python does is recorded and guarded by PyTorch, its graphs run in the engine.

Dynamo reads the bytecode of forward, guards every value that it read, replays what forward changes, and cuts the graph
where it cannot follow. A GraphRunner runs each graph that arrives. Used by _module.py.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import math
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from onnxtrain import _report, _torch
from onnxtrain._export import formulas, messages
from onnxtrain._export.captured import graph_of, kinds_of, layouts_of, places_of
from onnxtrain._export.recompute_regions import loses_gradients
from onnxtrain._export.state import get_random_states, replaced, set_random_states, settings
from onnxtrain._torch import TABLE, get_active_ddp_module, has_any_global_hook, import_module, place, pytree
from onnxtrain.ortmodule import (
    _announce,
    _attributes,
    _double,
    _outputs,
    _packed_sequences,
    _quick_captures,
    _repeats,
    _sharded,
    _sparse,
)
from onnxtrain.ortmodule._checks import CheckError, kept_as_checks
from onnxtrain.ortmodule._fallback import FallbackPolicy
from onnxtrain.ortmodule._forget import forget
from onnxtrain.ortmodule._logging import quiet, said_later
from onnxtrain.ortmodule._methods import Methods
from onnxtrain.ortmodule._numbers import numbers_as_inputs
from onnxtrain.ortmodule._runner import GraphRunner
from onnxtrain.ortmodule._running import kind_of, running

if TYPE_CHECKING:
    from onnxtrain.ortmodule._module import ORTModule

TRY_AGAIN = 16  # calls in PyTorch, before Dynamo sees such a call again; then as many times that
MAX_WRONG = 64  # kinds of arguments, of these sizes, that forward refuses
# Before torch 2.11, Dynamo does not see that the dtype of a weight changes, or whether it wants a gradient.
GUARDS_WEIGHTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
MAX_CAPTURES = 8  # of one mode; Dynamo runs the module in PyTorch after them
# In a capture Dynamo guards hooks, follows LSTMs, and keeps data-dependent numbers and sizes in the graph, until it
# captures nothing of a module so. Python runs what Dynamo cannot follow, and draws NumPy's random numbers, which Dynamo
# would draw from torch's generator.
CAPTURE = {"skip_nnmodule_hook_guards": False, "allow_rnn": True, "suppress_errors": True,
           "use_numpy_random_stream": True, "allow_unspec_int_on_nn_module": True,
           "invalidate_compile_context_weakrefs": False,  # as for any backend but torch's, which it would import
           "record_runtime_overhead": False}  # a note for torch's profiler at each run of a graph: 10 us
_OF_NUMPY = "numpy"  # in the reason of a cut: from there on NumPy's functions, and loops of them, are Python's
CONTENTS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


@functools.cache
def follow_masks() -> None:
    """From now on Dynamo takes the mask of torch's transformers for causal where it is told so, and else applies it as
    it stands. They would look at the mask's values, and a decision by these cuts the graph in each layer. And it takes
    the fused layer of an encoder in evaluation for any size.
    """
    if (masks := place("detect_is_causal_mask")) is not None:
        @torch.compiler.substitute_in_graph(getattr(*masks))
        def detect(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
            return is_causal is True

    with contextlib.suppress(RuntimeError):  # torch has one itself since 2.11; without it an encoder has one size alone
        torch.library.register_fake("aten::_transformer_encoder_layer_fwd", lambda src, *_: torch.empty_like(src))


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of an ORTModule that goes on."""

    parts: Parts
    model: ORTModule
    args: tuple[object, ...]
    kwargs: dict[str, object]
    entry: Callable[..., object]
    training: bool
    before: contextlib.ExitStack | None = None  # puts torch's settings back; None while Dynamo has captured nothing
    cuts: list[str] = dataclasses.field(default_factory=list)  # why Dynamo has cut graphs, in captures that are over
    counted: dict[str, int] | None = None  # cut counts of the process at the start of the current capture
    error: BaseException | None = None  # the exception that was already active at that time
    failed: list[str] = dataclasses.field(default_factory=list)  # why captures ended in an exception, of each
    raised: bool = False  # forward raised it
    captures: int = 0  # of the entry, before this call
    noted: int = 0  # reasons that Dynamo had noted then
    is_whole: bool = False  # this call was captured from end to end
    leaves_numpy: bool = False
    derivative: str | None = None  # where forward differentiates
    limit: str | None = None  # what is different in each capture, where Dynamo makes no more of them
    random: Any = None  # torch's generators, as the capture found them

    def capture_begins(self) -> None:
        """Puts settings in force until the call is over. Until capture_ends() this thread holds Dynamo's lock."""
        self.counted, self.error = _cuts(), sys.exc_info()[1]
        _report.count(self.model._counters, captures=1)
        if self.before is not None:
            if not self.leaves_numpy and any(_OF_NUMPY in reason for reason in self.cuts):
                self.leaves_numpy = True
                self.before.enter_context(settings(_torch.dynamo_config, trace_numpy=False))
            return
        sizes = [str(tuple(leaf.shape)) for leaf in pytree.tree_leaves((self.args, self.kwargs))
                 if isinstance(leaf, torch.Tensor) and not leaf.is_nested]
        _report.note(self.model._counters, "sizes", ", ".join(sizes))
        self.captures, self.noted = _captures(self.entry), len(_torch.graph_break_reasons)
        self.random = get_random_states()
        self.leaves_numpy = any(isinstance(leaf, np.ndarray) for leaf in pytree.tree_leaves((self.args, self.kwargs)))
        wanted = CAPTURE | (CONTENTS if self.parts.keeps_contents else {}) | {"trace_numpy": not self.leaves_numpy}
        self.before = contextlib.ExitStack()
        self.before.enter_context(_announce.start(self.model))
        self.before.enter_context(capturing(self.args, self.kwargs, wanted))
        self.before.enter_context(kept_as_checks(self.entry, self.parts._module))
        for child in self.parts.flattened():
            self.before.enter_context(replaced(child, "_is_fsdp_managed_module", False))
        self.before.enter_context(quiet())

    def new_cuts(self) -> list[str]:
        """Why Dynamo has cut graphs in the capture that goes on: no other thread captures meanwhile."""
        counted = self.counted
        return [] if counted is None else [reason for reason, times in _cuts().items()
                                           if times > counted.get(reason, 0)]

    def capture_ends(self) -> None:
        self.cuts += self.new_cuts()
        error = sys.exc_info()[1]
        if self.counted is not None and error is not None and error is not self.error:
            self.failed.append(f"{_LEFT}: {messages.left(error)}")
        self.counted = self.error = None

    def is_over(self) -> None:
        """After a call with captures: puts the settings back that were there before."""
        self.capture_ends()  # which Dynamo did not say, where another thread was in a capture as well
        if not self.raised:
            later = [text for text in self.failed[1:] if _ONCE_MORE not in text]
            self.cuts += dict.fromkeys(later)  # the first one is this call's own function
        self.is_whole = not self.cuts and _captures(self.entry) > self.captures
        self.parts.note_cuts(self.cuts, self.noted)
        assert self.before is not None
        self.before.close()


class _Limit(logging.Filter):
    """Takes what Dynamo logs where it has captured a module often enough: that is said as other reasons are."""

    def filter(self, record: logging.LogRecord) -> bool:
        call = running.call
        if call is None or not str(record.msg).startswith(f"{TABLE['dynamo'].dotted()} hit config."):
            return True
        reason = str(record.args[3]) if isinstance(record.args, tuple) and len(record.args) > 3 else ""
        call.limit = reason.partition(": ")[2].partition("  # ")[0].strip() + messages.line(reason)
        return False


_limit = _Limit()


def _tensors(name: str, value: Any, depth: int = 5) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an argument, named as Dynamo names what it reads them from."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and not isinstance(value, torch.nn.Module):
        parts: Iterable[tuple[str, object]] = ()
        if type(value) is dict:
            parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
        elif _attributes.is_a(value, dict):
            parts = [(f"dict.__getitem__({name}, list(dict.keys({name}))[{i}])", part)
                     for i, part in enumerate(dict.values(value))]
        elif (items := _attributes.items(value)) is not None:
            parts = [(f"{name}[{i}]", part) for i, part in enumerate(items)]
        else:
            parts = [(f"{name}.{key}", part) for key, part in _attributes.attributes(value).items()]
        for name, part in parts:
            yield from _tensors(name, part, depth - 1)


def _dynamic_sizes(args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[str]:
    """The sizes that are dynamic from the first call on: of images those of the planes are not, since what strides and
    pooling make of them are long formulas.
    """
    for name, tensor in (*_tensors("L['args']", args), *_tensors("L['kwargs']", kwargs)):
        if not tensor.is_nested:
            pattern = re.sub(r"\\?[, :]", ".", re.escape(name))  # which torch takes for its own
            if tensor.dim() > 3 and tensor.is_floating_point() and ".layers[" not in name:  # an image, and of no cache
                yield from (f"{pattern}$:{axis}" for axis in range(2))  # torch 2.10 knows no axes
            else:
                yield f"{pattern}$"


@contextlib.contextmanager
def capturing(args: tuple[object, ...], kwargs: dict[str, object], wanted: Mapping[str, object]) -> Iterator[None]:
    """Dynamo's settings for the capture of a call, those of `wanted` that this torch has among them."""
    with contextlib.ExitStack() as stack:
        if import_module is not None:
            import_module.cache_clear()  # another module may have taken a name
        stack.enter_context(settings(_torch.dynamo_config, **wanted))
        stack.enter_context(formulas.bounded())
        stack.enter_context(_quick_captures.capturing())
        stack.enter_context(_repeats.remembered())
        stack.enter_context(_packed_sequences.followed())
        stack.enter_context(_sparse.followed())
        stack.enter_context(numbers_as_inputs())
        stack.enter_context(_double.followed())
        stack.enter_context(_quick_captures.collector.paused())
        stack.enter_context(said_later())
        sources = [torch.compiler.config.dynamic_sources, *_dynamic_sizes(args, kwargs)]
        stack.enter_context(settings(torch.compiler.config, dynamic_sources=",".join(filter(None, sources))))
        yield


def _uncut() -> contextlib.AbstractContextManager[None]:
    """While a part of a DistributedDataParallel's module runs. Dynamo would cut its graph where the gradients of the
    whole fill a bucket, and asks for that before it says that a capture begins.
    """
    return settings(_torch.dynamo_config, optimize_ddp=False)


_callbacks: Any = None  # of Dynamo, once it was asked to say when it begins a capture
_NOTHING = contextlib.nullcontext()
_lock = threading.Lock()
_entries = itertools.count()
# Functions that Dynamo cuts a graph for, in the reason that it gives.
_SEEDS = re.compile(r"`(manual_seed(_all)?|[gs]et_rng_state(_all)?)`|"
                    r"function (fork_rng|manual_seed|[gs]et_rng_state)\b")


def _hear_of_captures() -> None:
    """Lets Dynamo say when it begins one; torch.compiler.reset() makes it forget that."""
    global _callbacks

    with _lock:
        follow_masks()
    _callbacks = _torch.callback_handler
    logging.getLogger(TABLE["convert_frame"].dotted()).addFilter(_limit)
    _torch.callback_handler.register_start_callback(running.capture_begins)
    _torch.callback_handler.register_end_callback(running.capture_ends)


def entry(wanted: _outputs.Wanted = ()) -> Callable[..., object]:
    """A function that calls a module, for the results that are wanted: with code of its own, by which Dynamo keeps what
    it compiled; a name of its own, by which it keeps what it saw change: another module's number is no change of this
    one's; and globals of its own, to which it adds the Python modules that it reads, by name: another module may take
    that name later.
    """
    called = _reading(wanted)
    code = called.__code__.replace(co_name=f"call_{next(_entries)}")
    scope = {"__name__": __name__, "__builtins__": builtins, "torch": torch}
    return types.FunctionType(code, scope, code.co_name, None, called.__closure__)


def _reading(wanted: _outputs.Wanted) -> types.FunctionType:
    """A function that calls a module, for the results that are wanted."""
    if not wanted:
        return _call_of  # type: ignore[return-value]
    chosen = _outputs.chosen

    def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> object:
        kind = torch.nn.Module  # noqa: F841  as below
        return chosen(module(*args, **kwargs), wanted)

    return call  # type: ignore[return-value]


def _call_of(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> object:
    kind = torch.nn.Module  # noqa: F841  a class of modules in a variable: a capture without operations is kept too
    return module(*args, **kwargs)


def _captures(entry: Callable[..., object]) -> int:
    """How many calls of this function Dynamo has captured."""
    function = getattr(entry, "_torchdynamo_orig_callable", None)
    return 0 if function is None else len(_torch.debug_get_cache_entry_list(function.__code__))


def changes(what: str) -> str:
    """The reason for PyTorch where a Python value is another one at each call."""
    return (f"{what}: after {MAX_CAPTURES} graphs PyTorch runs such calls. What changes at each call is best a "
            "buffer, an argument that is a tensor, or a result that the script keeps")


def _is_of_dynamo(error: Exception) -> bool:
    """Whether the capture raised it, and not what it captured."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (_torch.TorchDynamoException, GuardOnDataDependentSymNode,
                              _torch.DataDependentOutputException, _torch.DynamicOutputShapeException,
                              _torch.UnsupportedFakeTensorException))


_LEFT = "Dynamo could not trace a function, so Python runs it"
_ONCE_MORE = "Python runs this call, and checks the contents of a tensor in later ones"
_DECISION = "Python branches on a number that a tensor held"
_OF_DECISIONS = "data-dependent expression"  # in the reason that Dynamo gives


def _cuts() -> dict[str, int]:
    """How often Dynamo has cut a graph in this process, by reason."""
    decisions = sum(_OF_DECISIONS in cut.reason for cut in _torch.graph_break_reasons)  # which Dynamo does not count
    return {**_torch.counters["graph_break"], _DECISION: decisions}


def _negative_zeros(values: Sequence[object]) -> list[bool]:
    """Which arguments are -0.0, empty where none is: to a guard of Dynamo's it equals 0.0."""
    found = [type(value) is float and value == 0.0 and math.copysign(1.0, value) < 0.0 for value in values]
    return found if any(found) else []


@dataclasses.dataclass
class _Refused:
    """A kind of call that ran in PyTorch: after how many it is tried again, as the module may have changed."""

    calls: int = 0
    again: float = 0


@dataclasses.dataclass
class _Mode:
    """Calls that share a compiled function. What Dynamo guards badly, or not at all, is equal in all of them; so each
    mode has code of its own, and few sets of guards to try.

    Attributes:
        call: the function that Dynamo has compiled, or PyTorch's; None before the first call, and once it was dropped.
        is_empty: a call was captured that has nothing to compute.
        kinds: of arguments that were captured.
        is_varied: of so many kinds that each has a mode of its own, as the limit of captures is there for what changes
            from call to call.
        most: the graphs that one call ran.
        limit: why PyTorch runs what is behind a cut.
        refused: by kind of arguments, calls that run in PyTorch.
        wrong: by kind and sizes of arguments, how often a capture of such a call ended in an exception.
    """

    call: Callable[..., object] | None = None
    is_empty: bool = False
    kinds: set[object] = dataclasses.field(default_factory=set)
    is_varied: bool = False
    most: int = 0
    limit: str | None = None
    refused: dict[object, _Refused] = dataclasses.field(default_factory=dict)
    wrong: dict[object, int] = dataclasses.field(default_factory=dict)

    def drop(self) -> None:
        """The next call is captured again."""
        self.call, self.limit, self.is_empty = None, None, False

    def stay_in_torch(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.refused[kind_of(args, kwargs)] = _Refused(again=math.inf)

    def note_wrong(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Forward raised while Dynamo captured it, which may leave out the code from now on: another one has to be
        captured. Arguments that are wrong twice are PyTorch's, until it takes them.
        """
        self.drop()
        if len(self.wrong) == MAX_WRONG:
            self.wrong.clear()
        kind = kind_of(args, kwargs, sizes=True)
        self.wrong[kind] = self.wrong.get(kind, 0) + 1


class Parts:
    """The graphs of one ORTModule and of its clones, and the functions that run them.

    Attributes:
        constants: of graphs, by what they compute, the numbers that exports of theirs have as constants.
        seeds: Dynamo has cut a graph where forward seeds torch's random generator, or reads or sets its state. What it
            draws from there on it may draw again elsewhere, as a backward that recomputes does, which PyTorch runs.
    """

    def __init__(self, model: ORTModule) -> None:
        self._latest: Callable[[], Any] = weakref.ref(model)  # the one that was called last
        self._here: Callable[[], Any] = weakref.ref(self)  # for what Dynamo keeps, which must not keep this
        self._graphs: dict[tuple[object, ...], GraphRunner] = {}  # by what they compute
        self._numbered: dict[bool, list[GraphRunner]] = {}
        self.constants: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
        self._modes: dict[tuple[object, ...], _Mode] = {}
        self._methods: Methods | None = None
        self.seeds = False
        self.keeps_contents = True

    def _model(self) -> ORTModule:
        """The ORTModule whose call goes on in this thread, or the latest one."""
        call = running.call
        return call.model if call is not None and call.parts is self else self._latest()

    @property
    def _module(self) -> torch.nn.Module:
        module: torch.nn.Module = self._model()._module
        return module

    def runners(self) -> Iterable[GraphRunner]:
        """What runs the graphs."""
        return self._graphs.values()

    def number(self, runner: GraphRunner, training: bool) -> int:
        """Which of the graphs of a mode this one's is, in the order in which they are asked for."""
        numbered = self._numbered.setdefault(training, [])
        if runner not in numbered:
            numbered.append(runner)
        return numbered.index(runner)

    def flattened(self) -> list[torch.nn.Module]:
        """Those whose weights FullyShardedDataParallel makes views of one: Dynamo refuses them for that mark alone."""
        return [child for child in self._module.modules() if getattr(child, "_is_fsdp_managed_module", False)
                and not getattr(child, "_fsdp_use_orig_params", False)]

    def _compiled(self, wanted: _outputs.Wanted) -> Callable[..., object]:
        def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
            from onnxtrain import dynamo

            derivative = None
            if running.call is not None:
                here()._note_seeds([*running.call.cuts, *running.call.new_cuts()])  # before a graph behind a cut runs
                if here()._module.training or _double.has_paths(graph):  # else the engine's gradients may be enough
                    running.call.derivative = running.call.derivative or _double.differentiates(graph)
                derivative = running.call.derivative
            if dynamo.checks_contents(graph):
                here().keeps_contents = False
                raise LookupError(_ONCE_MORE)
            if loses_gradients(graph.graph):
                raise LookupError("it calls a checkpoint with use_reentrant=True, for which no tensor that it computed "
                                  "wants a gradient")
            return dynamo.compiled(graph, here, derivative or _double.hooked(graph, here()._methods))

        here = self._here

        known = inspect.signature(torch.compile).parameters
        limit: dict[str, Any]
        limit = {"recompile_limit": MAX_CAPTURES, "isolate_recompiles": True} if "recompile_limit" in known else {}
        called = entry(wanted)
        weakref.finalize(called, forget, called.__code__).atexit = False
        with _quick_captures.backend_as_it_is():
            return torch.compile(called, backend=backend, **limit)

    def runner(self, operations: torch.fx.GraphModule, inputs: Sequence[object], numbered: bool) -> GraphRunner:
        """What runs a graph, of which these inputs are some call's.

        A graph that computes the same has one already, which takes other weights as well: equal layers between cuts
        share it, and Dynamo captures again whenever a Python value that it read has changed.
        """
        from onnxtrain import dynamo

        here, places = self._here, places_of(self._module, inputs)
        key = dynamo.key(operations), layouts_of(operations), kinds_of(inputs, places)
        runner = self._graphs.get(key)
        if runner is None:
            graph = graph_of(self._module, operations, places, lambda: here()._module)
            runner = self._graphs[key] = GraphRunner(graph, here)
        else:
            runner.captured_again(operations)
        runner.numbered = numbered
        return runner

    def by_torch(self, operations: Callable[..., object], reason: str) -> Callable[..., object]:
        """What PyTorch runs, where the policy allows it."""
        here = self._here

        def call(*given: object, **named: object) -> object:
            here()._fall_back(reason)
            here()._model()._counters.torch_graphs += 1
            return operations(*given, **named)

        return call

    def _fall_back(self, reason: str, cause: Exception | None = None) -> None:
        self._model()._fall_back(reason, FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL, reason, cause)

    def note_cuts(self, reasons: Sequence[str], noted: int | None = None) -> None:
        """Says where Dynamo has cut this module's graphs, by what it has noted from that number on."""
        for reason in reasons:
            for text in messages.places(reason, _OF_DECISIONS if reason == _DECISION else reason, noted):
                _report.note(self._model()._counters, "graph_breaks", text)
        self._note_seeds(reasons)

    def _note_seeds(self, cuts: Iterable[str]) -> None:
        self.seeds = self.seeds or any(map(_SEEDS.search, cuts))

    def _settled(self, mode: _Mode, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """True while calls of this kind wait for their next try, after Dynamo captured nothing of one."""
        refused = mode.refused.get(kind_of(args, kwargs))
        if refused is None or self._model()._fallback.retry:
            return False
        refused.calls += 1
        return refused.calls < refused.again

    def _refuse(self, mode: _Mode, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Notes that Dynamo captured nothing of this call: from now on it skips this code object."""
        mode.drop()
        if self.keeps_contents:  # the next call may be captured in parts
            self.keeps_contents = False
            return
        refused = mode.refused.setdefault(kind_of(args, kwargs), _Refused())
        refused.again = TRY_AGAIN * max(refused.again, 1)

    def _leave(self, call: _Call, mode: _Mode) -> None:
        """Says that forward differentiates: PyTorch runs such calls from now on."""
        mode.stay_in_torch(call.args, call.kwargs)
        self._fall_back(str(call.derivative))

    def _repeated(self, call: _Call, mode: _Mode) -> object:
        """PyTorch's result for a call that has failed in parts, with the random numbers that it began with."""
        self._leave(call, mode)
        if call.random is not None:
            set_random_states(call.random)
        return self._model()._in_torch(call.args, call.kwargs)

    def __call__(self, whole: ORTModule, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """One call of an ORTModule's module: in the engine if each of its graphs is."""
        self._latest = weakref.ref(whole)
        module, counters = whole._module, whole._counters
        key: tuple[object, ...] = module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if float in map(type, (*args, *kwargs.values())):
            key += tuple(_negative_zeros((*args, *kwargs.values())))
        if not GUARDS_WEIGHTS:
            key += tuple([(parameter.dtype, parameter.requires_grad) for parameter in module.parameters()])
        mode = self._modes.get(key) or self._modes.setdefault(key, _Mode())
        if mode.is_varied:
            mode = self._modes.setdefault((*key, kind_of(args, kwargs)), _Mode())
        if mode.refused and self._settled(mode, args, kwargs):
            return whole._in_torch(args, kwargs)
        if mode.wrong and mode.wrong.get(kind := kind_of(args, kwargs, sizes=True), 0) > 1:
            result = whole._in_torch(args, kwargs)
            mode.wrong.pop(kind, None)
            return result
        if self._methods is not None and self._methods.changed():
            torch.compiler.reset()  # code of parts that Dynamo captured on their own, too
            for each in self._modes.values():
                each.call, each.is_empty = None, False
            self._methods = None
        if has_any_global_hook():
            return whole._by_torch("a global module hook is registered, which a graph would not run", args, kwargs)
        if mode.call is None:
            whole._say_constants(pytree.tree_leaves((args, kwargs)))
            reason = _sharded.reason(module) or _attributes.misread(module)
            wanted = whole._wanted()
            mode.call = self._compiled(wanted) if reason is None else self.by_torch(_reading(wanted), reason)
            self._methods = self._methods or Methods(module)
        call, engine, by_torch, kept = mode.call, counters.engine_graphs, counters.torch_graphs, self.keeps_contents
        outer, running.call = running.call, (current := _Call(self, whole, args, kwargs, call, module.training))
        if _callbacks is None or running.capture_begins not in _callbacks.start_callbacks:
            _hear_of_captures()
        try:
            with _NOTHING if get_active_ddp_module is None or get_active_ddp_module() is None else _uncut():
                result = call(module, *args, **kwargs)
        except CheckError as error:
            return whole._checked_by_torch(error, args, kwargs)
        except Exception as error:
            if current.derivative is None and engine < counters.engine_graphs and _double.is_of_a_cut(error):
                current.derivative = _double.differentiated(error)
            if current.derivative is not None:
                return self._repeated(current, mode)
            if (engine, by_torch) != (counters.engine_graphs, counters.torch_graphs) or not _is_of_dynamo(error):
                if current.before is not None:
                    mode.note_wrong(args, kwargs)
                    if engine == counters.engine_graphs:
                        _report.count(counters, fallback_steps=1)
                current.raised = True
                messages.show_users_lines(error)
                raise
            result = whole._in_torch(args, kwargs)  # forward's own errors are raised here
            self._fall_back(f"Dynamo could not capture it: {str(error).splitlines()[0]}", error)
            self._refuse(mode, args, kwargs)
            return result
        finally:
            running.call = outer
            if current.before is not None:
                current.is_over()
        ran = counters.engine_graphs - engine
        if current.before is not None:
            mode.most = max(ran, mode.most)
            mode.kinds.add(kind_of(args, kwargs))
            if len(mode.kinds) > 1 and _captures(call) >= MAX_CAPTURES - 1:
                mode.is_varied = True
            if current.is_whole and (engine, by_torch) == (counters.engine_graphs, counters.torch_graphs):
                mode.is_empty = True
            elif not current.is_whole:
                mode.is_empty = False
        if current.derivative is not None:
            self._leave(current, mode)
        gave_up = kept and not self.keeps_contents
        if gave_up:
            mode.drop()  # the next call is captured in parts
        if counters.torch_graphs == by_torch and (ran or mode.is_empty):
            if current.limit is not None:
                mode.limit = changes(f"a guard of a capture behind a cut, {current.limit}, fails at each call")
            if mode.limit is not None and ran < mode.most:
                self._fall_back(mode.limit)
                _report.count(counters, fallback_steps=1)
            else:
                _report.engine_step(counters)
        else:
            if current.limit is not None or current.before is None and _captures(call) >= MAX_CAPTURES:
                mode.stay_in_torch(args, kwargs)
                self._fall_back(changes(f"a guard of its capture, {current.limit or 'which one Dynamo has not said'}, "
                                        "fails at each call"))
            elif counters.torch_graphs == by_torch and not gave_up and (current.before is not None or not self._graphs):
                cut = next(reversed(counters.graph_breaks), None)
                self._fall_back("Dynamo captured no tensor operations of it" + (f": {cut}" if cut else ""))
                self._refuse(mode, args, kwargs)
            _report.count(counters, fallback_steps=1)
        return result
