"""One exported graph, bound to a module: gathers tensors, runs the session, writes buffers and attributes back.

The step path is here. Called by _runner.py for inputs whose schema and guards fit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from onnxtrain import _C, UnsupportedError, _timing, _torch, options
from onnxtrain._export import gradients, recompute_regions, views
from onnxtrain._export.captured import names_of_weights
from onnxtrain._export.errors import StaleError
from onnxtrain._export.exported import Exported
from onnxtrain.ortmodule import _double, _managed_gradients, _random, graph_optimizer_registry
from onnxtrain.ortmodule._chain import Chain, Run
from onnxtrain.ortmodule._device import fp32_precision, matmul_precision, tell_tf32
from onnxtrain.ortmodule._gradient_reach import Reach
from onnxtrain.ortmodule._utils import leave_alone

PROGRAMS = 64  # kept of a graph: batches differ in sizes, and in how many rows count
_modes: tuple[str, bool] | None = None  # precision of products and determinism, as the engine was told last


class CheckError(Exception):
    """A check of forward's may have fired, of which the engine knows nothing more: PyTorch has to run this call."""


class OutOfMemoryError(torch.OutOfMemoryError, MemoryError):
    """An allocation of the engine failed. The words of it are those by which accelerate knows such errors."""


def out_of_memory(error: MemoryError) -> MemoryError:
    """What a user gets for the core's exception."""
    asked = str(error).removeprefix("out of memory: ")
    made = OutOfMemoryError(f"The engine is out of memory. It could not allocate {asked}. A smaller batch, or "
                            "ORTMODULE_MEMORY_OPT_LEVEL=1 or 2, needs less.")
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made


class SharedMemoryError(Exception):
    """An argument that forward changes in place shares memory with another one: PyTorch has to run this call."""


class _ORTModuleFunction(torch.autograd.Function):
    """The autograd node of one run: all gradients at once, from one call of the engine."""

    @staticmethod
    def forward(ctx: Any, program: Program, mask: bytes, leaves: object, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs the engine, and marks and saves what an autograd node has to."""
        seed = program.seed() if program.random else 0
        outputs, run = program.session.forward(tensors, mask, seed)
        ctx.set_materialize_grads(False)
        ctx.program, ctx.seed = program, seed
        if run is None:
            ctx.mark_non_differentiable(*outputs)
            return outputs
        ctx.run = run
        saved = run.saved(tensors, outputs, leaves)
        if 0 in run.differentiable:
            plain = {id(output): output for output, flag in zip(outputs, run.differentiable) if not flag}
            ctx.mark_non_differentiable(*plain.values())
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return (None, None, None, *_double.gradients(ctx, grads, _gradients))
        return (None, None, None, *_gradients(ctx, grads))


# Past the look at transforms of torch.func that takes as long as the engine's own part of a small step: with one active
# no program runs, and what an earlier one left behind is looked for where the engine refuses it.
_apply = super(torch.autograd.Function, _ORTModuleFunction).apply


class _ChainFunction(torch.autograd.Function):
    """The node of a whole graph that runs in segments, where its gradients may be differentiated again."""

    @staticmethod
    def forward(ctx: Any, program: Program, mask: bytes, leaves: Sequence[object], *tensors: Tensor) -> object:
        ctx.set_materialize_grads(False)
        ctx.program, ctx.seed, ctx.run = program, 0, Run(program.chain, mask, leaves, tensors)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(*[result for result, flag in zip(ctx.run.results, ctx.run.differentiable)
                                      if not flag])
        return ctx.run.results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return (None, None, None, *_double.gradients(ctx, grads, _of_chain))
        return (None, None, None, *_of_chain(ctx, grads))


def _of_chain(ctx: Any, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    found: Sequence[Tensor | None] = ctx.run.backward(grads, _torch.keeps_graph())
    return found


class _SteppingFunction(torch.autograd.Function):
    """The same where the optimizer's step is in backward (onnxtrain/optim/_in_backward.py)."""

    @staticmethod
    def forward(ctx: Any, program: Program, mask: bytes, stepping: object, targets: object, *tensors: Tensor) -> object:
        ctx.stepping, ctx.targets = stepping, targets
        return _ORTModuleFunction.forward(ctx, program, mask, None, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        try:
            return (None, None, None, None, *ctx.stepping.gradients(ctx, grads))
        except MemoryError as error:
            raise out_of_memory(error) from None


def _gradients(ctx: Any, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    run, saved = ctx.run, ctx.saved_tensors
    if run.over:
        _forward_again(ctx)
    try:
        found = run.backward(saved, grads)
    except TypeError:
        _refuse_batches(grads)
        raise
    except MemoryError as error:
        raise out_of_memory(error) from None
    if not _torch.keeps_graph():
        run.forget()
    return found if len(grads) == 1 else ctx.program.reach.drop(run.differentiable, grads, found)


def _refuse_batches(grads: tuple[Tensor | None, ...]) -> None:
    """Raises RuntimeError where vmap made the gradients of the outputs."""
    if any(grad is not None and (_torch.is_batchedtensor(grad) or _torch.is_legacy_batchedtensor(grad))
           for grad in grads):
        raise RuntimeError("the engine's backward does not run under vmap, which torch.autograd.grad(is_grads_batched="
                           "True) and torch.autograd.functional.jacobian(vectorize=True) use: call it for each row, "
                           "or use torch.func, for which PyTorch runs the module")


def _forward_again(ctx: Any) -> None:
    """For a further backward of a graph that was retained: only the first one has the activations."""
    _double.refuse_changes(ctx.program, ctx.run, "a further backward, which runs forward again")
    ctx.run.again()


for _function in (_ORTModuleFunction, _ChainFunction, _SteppingFunction, _managed_gradients.HeldFunction):
    leave_alone(_function.backward)  # a forward that is captured in parts may differentiate between them
NODES = (_ORTModuleFunction._backward_cls, _SteppingFunction._backward_cls,
         _managed_gradients.HeldFunction._backward_cls)


def is_node(node: object, stepping: object = None) -> bool:
    """Whether this is autograd's node of one run, whose gradients go on from there, or to this object."""
    if type(node) is _SteppingFunction._backward_cls:
        return bool(node.stepping is stepping)  # type: ignore[attr-defined]
    return type(node) is _ORTModuleFunction._backward_cls


def _changed(change: Callable[[Tensor], Tensor], leaves: Sequence[object], inputs: Sequence[object] | None,
             grad_enabled: bool) -> tuple[list[object], bool, list[object] | None]:
    """The arguments of Program.__call__() with other tensors in the place of the user's."""
    changed = {id(leaf): change(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    placed = [[changed.get(id(value), value) for value in values or ()] for values in (leaves, inputs)]
    return placed[0], grad_enabled, None if inputs is None else placed[1]


_UNSEEN = ("buffer", "check")  # results without a gradient


def _refuse_shared(leaves: Sequence[object], written: Sequence[tuple[int, int]]) -> None:
    """Raises SharedMemoryError where one of the arguments that forward changes in place shares memory with another
    argument: in a graph the other one's readers would see what it held before.
    """
    storages = [leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    for _, index in written:
        if storages[index] and storages.count(storages[index]) > 1:
            raise SharedMemoryError("an argument that forward changes in place shares memory with another argument")


def _packed_rows(device: str) -> int:
    """Which rows may be left out, as Session takes it. On a GPU, those that have to be counted only if asked for."""
    def is_on(name: str) -> bool:
        value = options.read(name)
        return device == "cpu" if value is None else value

    if not options.read("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER"):
        return 0
    sparse = options.read("ORTMODULE_ENABLE_SPARSE_OPTIMIZER")
    labels = sparse and is_on("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER")
    padding = sparse and is_on("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER")
    return 1 + 2 * labels + 4 * padding


class Agent:
    """One set of gradients of a program; scripts compare agents to see whether it changed."""

    def __init__(self, program: Program) -> None:
        self._inference_session = program.session
        self._provider_options: dict[str, dict[str, object]] = {"CPUExecutionProvider": {}}


class Program:
    """A session and where each of its inputs and outputs lives in the user's module and call.

    Args:
        module: whose graph it is.
        places: among the inputs that each call gives, where the user's arguments are, by their numbers, and the
            weights, by their names. None: a call gives the user's arguments, and weights are read from the module.

    Raises ValueError or UnsupportedError as Session does.
    """

    def __init__(self, module: torch.nn.Module, exported: Exported, model: bytes | None = None, device: str = "cpu",
                 memory: Mapping[str, Any] = MappingProxyType({}),
                 places: Mapping[int | str, int] | None = None) -> None:
        start = time.perf_counter()
        model = exported.model if model is None else model
        model = graph_optimizer_registry.applied(model, type(module).__name__, device)
        model, calls = gradients.applied(model, exported.functions)
        parameters = {i.name for i in exported.inputs if i.kind == "parameter"}
        self.chain: Chain | None = None
        self.warnings = recompute_regions.cut(model) if calls else []
        if calls:
            self.chain = Chain(model, calls, [i.name for i in exported.inputs], [o.name for o in exported.outputs],
                               parameters, _ORTModuleFunction.apply, device, memory)
            self.sessions = self.chain.sessions
        else:
            self._session = functools.partial(
                _C.Session, model, device=device, torch_random=_random.as_torch(device),
                parameters=bytes([i.name in parameters for i in exported.inputs]), programs=PROGRAMS,
                rows=_packed_rows(device), **memory)
            self.sessions = [self._session()]
        self.session: Any = self.sessions[0] if self.sessions else None
        self.first_call: tuple[list[tuple[int, ...]], bytes] | None = None  # shapes of the graph's inputs, and the mask
        self.random = self.session is not None and self.session.random
        self.build_seconds = time.perf_counter() - start
        self.exported = exported
        self.called_with: tuple[object, ...] | None = None  # kinds of the arguments of the module's call it came from
        self.device = device
        self._module = module
        self.guards = exported.guards
        self.reach = Reach(model)
        self._held: _managed_gradients.Held | None = None
        if self.chain is None and options.read("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT"):
            self._held = _managed_gradients.Held(_ORTModuleFunction.forward, _gradients,
                                                 [source.kind != "parameter" for source in exported.inputs])
        self.double: _double.Double | None = None  # how backward under create_graph=True runs the module
        self.in_backward: Any = None  # onnxtrain.optim.StepInBackward: what updates parameters meanwhile
        self.beside_loss = ""  # what results beside the loss cost, where that is much
        self.steps = 0
        self.step_seconds = self.first_seconds = 0.0  # of all its forwards, and of the first
        self.used = 0.0  # when; the clock of time.monotonic()
        self._places = places
        self._bind_inputs(module)
        self._bind_outputs(module)
        self._aside = self._without_gradient() if b"StopGradient" in model else frozenset[int]()
        self._agents: dict[bytes, Agent] = {}
        self.latest_mask = b""
        self._complex: frozenset[int] = frozenset()  # inputs that the graph has as pairs of real numbers
        self.whole_step: Any = None  # onnxtrain.training._whole_step.Learned: a trainer's step in one call

    def _bind_inputs(self, module: torch.nn.Module) -> None:
        """Weights that a call does not give are looked up in their owners, so that a replaced parameter is seen."""
        places = self._places
        self.sources: list[tuple[dict[str, Any] | None, Any]] = []
        self._expected: list[tuple[str, torch.dtype, torch.Size] | None] = []
        for source in self.exported.inputs:
            expected = None
            if source.kind in ("parameter", "buffer"):
                path, _, name = source.target.rpartition(".")
                owner = module.get_submodule(path)
                store = owner._parameters if source.kind == "parameter" else owner._buffers
                self.sources.append((store, name) if places is None else (None, places[source.target]))
                tensor: Any = store[name]
                expected = (source.target, tensor.dtype, tensor.shape)
            elif source.kind == "constant":
                self.sources.append(({"constant": source.target}, "constant"))
            else:
                self.sources.append((None, source.target if places is None else places[source.target]))
            self._expected.append(expected)

    def _bind_outputs(self, module: torch.nn.Module) -> None:
        self._user_outputs: list[tuple[int, int]] = []  # (output, result)
        self._buffers: list[tuple[int, dict[str, Any] | None, Any]] = []  # (output, owner, name), or where it is given
        self._checks: list[int] = []
        self._written: list[tuple[int, int]] = []  # (output, argument)
        for index, target in enumerate(self.exported.outputs):
            if target.kind == "user":
                self._user_outputs.append((index, target.target))
            elif target.kind == "check":
                self._checks.append(index)
            elif target.kind == "argument":
                self._written.append((index, target.target))
            elif self._places is not None:
                self._buffers.append((index, None, self._places[target.target]))
            else:
                path, _, name = target.target.rpartition(".")
                owner: Any = module.get_submodule(path)
                self._buffers.append((index, owner._buffers if name in owner._buffers else owner._parameters, name))
        # Whether backward and an optimizer's step may follow before anything looks at the results.
        self.may_step = (self.device == "cpu" and self.chain is None
                         and not (self._checks or self._written or any(
                             [expected is not None and expected[1].is_complex for expected in self._expected])))
        self.writes = self._writes()
        self.changing = self._changing()
        self._views = None if self.exported.views is None else views.Replay(self.exported.views)
        # Whether the graph's first outputs are the results, in their order.
        self._plain = self._views is None and list(range(self.exported.results)) == [
            leaf for _, leaf in self._user_outputs] == [index for index, _ in self._user_outputs]

    def _without_gradient(self) -> frozenset[int]:
        """Arguments and weights that no gradient of a result flows to: eager's graph does not have them."""
        results = [i for i, target in enumerate(self.exported.outputs) if target.kind in ("user", "argument")]
        reached = self.reach.inputs(tuple(results))
        return frozenset(i for i, source in enumerate(self.exported.inputs)
                         if source.kind in ("user", "parameter") and i not in reached)

    def _writes(self) -> frozenset[int]:
        """Inputs of the graph that forward changes."""
        targets = {("user" if target.kind == "argument" else "weight", target.target)
                   for target in self.exported.outputs if target.kind in ("argument", "buffer")}
        return frozenset(i for i, source in enumerate(self.exported.inputs) if source.kind != "constant"
                         and ("user" if source.kind == "user" else "weight", source.target) in targets)

    def _changing(self) -> frozenset[int]:
        """The inputs that are written and whose earlier value results or gradients need."""
        own = frozenset(i for i in self.writes if self.exported.inputs[i].kind != "user")
        if not own:
            return self.writes
        results = tuple([i for i, target in enumerate(self.exported.outputs) if target.kind not in _UNSEEN])
        return self.writes - own | own & self.reach.read(results)

    def planner(self, level: int, budget: float) -> _C.Session:
        """A session of the same graph for plans at another level or budget.

        Raises:
            UnsupportedError: the graph runs in segments, with calls of torch between them.
        """
        if self.chain is not None:
            raise UnsupportedError("PyTorch runs operators between parts of this graph, so the step has no memory plan "
                                   "as a whole")
        session = functools.partial(self._session, subgraphs=()) if level else self._session  # a level reads no plans
        return session(recompute=level, budget=budget, rows=0)

    @property
    def agent(self) -> Agent:
        """Of the latest step."""
        return self._agents.setdefault(self.latest_mask, Agent(self))

    def wanting(self, kind: str) -> list[str]:
        """Inputs of a kind that wanted a gradient in the latest step."""
        return [source.name for source, wants in zip(self.exported.inputs, self.latest_mask)
                if wants and source.kind == kind]

    def totals(self) -> dict[str, float]:
        """Session.stats(), summed over the segments of a graph with calls in it."""
        each = [session.stats() for session in self.sessions]
        return {name: sum(stats[name] for stats in each) for name in (each[0] if each else ())}

    def save(self, stage: str) -> bytes:
        """Session.save() of a graph in one piece; of the first segment otherwise."""
        return self.session.save(stage)

    def name(self, index: int, tensor: Tensor) -> str:
        """Of one input of the graph, which is this tensor in a call, for a message."""
        source = self.exported.inputs[index]
        if self._places is not None and source.kind != "user":  # the call may be of an equal layer
            named = names_of_weights(self._module._captured.user())  # type: ignore[union-attr, operator]
            return named.get(id(tensor), f"{source.kind} {source.target}")
        return f"{source.kind} {source.target}" if source.kind in ("parameter", "buffer") else f"input {source.name}"

    def seed(self) -> int | torch.Generator:
        """What this run's dropout follows from."""
        return _random.seed(self.session, self.device)

    def __call__(self, leaves: Sequence[Any], grad_enabled: bool,
                 inputs: Sequence[object] | None = None) -> tuple[Tensor, ...]:
        """Runs one forward for the arguments of the graph; returns its results.

        Args:
            leaves: the user's arguments.
            inputs: where the program was made with places, these and the weights.

        Raises:
            StaleError: a weight has another dtype or shape than at the export, or is gone.
            CheckError: as it says; the random state is as before the call.
            SharedMemoryError: as it says; nothing has run.
            OutOfMemoryError: an allocation failed.
        """
        start = time.monotonic()
        given = leaves if inputs is None else inputs
        try:
            tensors, mask = _C.gather(self.sources, given, grad_enabled)
        except (AttributeError, KeyError):
            raise StaleError("the module no longer has one of its weights") from None
        if self._aside and any([mask[i] for i in self._aside]):
            tensors = tuple([t.detach() if i in self._aside and mask[i] else t for i, t in enumerate(tensors)])
            mask = bytes([flag and i not in self._aside for i, flag in enumerate(mask)])
        self.latest_mask = mask
        if self.first_call is None:
            self._complex = frozenset([i for i, tensor in enumerate(tensors) if tensor.is_complex()])
        if self._complex:
            tensors = tuple([torch.view_as_real(t.resolve_conj()) if i in self._complex else t
                             for i, t in enumerate(tensors)])
        if self.first_call is None:
            self.first_call = [tuple(tensor.shape) for tensor in tensors], mask
        wanted = 1 in mask
        if self._written:
            _refuse_shared(leaves, self._written)
        if self._places is not None and self._buffers and len({*map(id, tensors)}) < len(tensors):
            self._refuse_tied(tensors, given)
        if self.changing and wanted:  # backward wants them as they were
            tensors = tuple([t.clone() if i in self.changing else t for i, t in enumerate(tensors)])
        global _modes
        if _modes != (asked := (fp32_precision("mkldnn", "matmul"), _torch.get_deterministic_algorithms())):
            _C.set_matmul_precision(matmul_precision())
            _C.set_deterministic(asked[1])
            _modes = asked
        if self.device != "cpu":
            tell_tf32()
        if getattr(*_timing.IN_PROFILER) is not _timing.in_ranges:
            _timing.switch_ranges()
        random = _random.state(self.device) if self._checks else None
        try:
            if self.chain is not None and (wanted and not self.chain.draws and self._may_differentiate_again(leaves)):
                outputs = _ChainFunction.apply(self, mask, given, *tensors)
            elif self.chain is not None:
                outputs = self.chain(tensors, grad_enabled)
            elif wanted:
                outputs = None if self.whole_step is None else self.whole_step.steps.run(self, tensors, mask)
                if outputs is None and self.in_backward is None and self._held is None:
                    outputs = _apply(self, mask, given, *tensors)
                elif outputs is None:
                    outputs = self._under_autograd(tensors, mask, given)
            else:
                outputs, _ = self.session.forward(tensors, mask, self.seed() if self.random else 0)
        except (ValueError, TypeError, BufferError, IndexError) as error:
            self._check_weights(tensors)
            if any([isinstance(leaf, Tensor) and _torch.is_dead_tensor_wrapper(leaf) for leaf in leaves]):
                return self(*_changed(_torch.unwrap_if_dead, leaves, inputs, grad_enabled))
            if (any([isinstance(leaf, Tensor) and leaf.is_neg() for leaf in leaves]) and not self._written
                and self._views is None):
                return self(*_changed(Tensor.resolve_neg, leaves, inputs, grad_enabled))
            # What a check would have found, perhaps, or PyTorch finds as well. A device reports an index a call later.
            if random is not None or isinstance(error, IndexError) and self.device == "cpu":
                if random is not None:
                    _random.restore(self.device, random)
                raise CheckError(str(error)) from error
            raise
        except MemoryError as error:
            raise out_of_memory(error) from None
        if random is not None and not all([bool(outputs[index]) for index in self._checks]):
            _random.restore(self.device, random)
            raise CheckError("an assertion in forward fails")
        for index, leaf in self._written:
            leaves[leaf].copy_(outputs[index])  # under autograd, as forward's own change was
        if self._buffers:
            self._write_back(outputs, given)
        self.steps += 1
        self.used = time.monotonic()
        self.step_seconds += self.used - start
        self.first_seconds = self.first_seconds or self.step_seconds
        return outputs[:self.exported.results] if self._plain else self._results(outputs, leaves, given)

    def _refuse_tied(self, tensors: Sequence[Tensor], given: Sequence[object]) -> None:
        """Raises SharedMemoryError where a buffer that forward changes is another one, too, of this layer, and was none
        of that which was captured.
        """
        for _, _, place in self._buffers:
            if [tensor is given[place] for tensor in tensors].count(True) > 1:
                raise SharedMemoryError("a tensor that forward changes stands in two places of a layer, and in one of "
                                        "an equal layer")

    def _may_differentiate_again(self, leaves: Sequence[object]) -> bool:
        """Whether the caller may ask for gradients of gradients: of arguments that it made for their gradients, as for
        forces and gradient penalties.
        """
        return any([isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf for leaf in leaves])

    def _under_autograd(self, tensors: Sequence[Tensor], mask: bytes, leaves: Sequence[object]) -> tuple[Tensor, ...]:
        """Forward, as a node of autograd's."""
        targets = outputs = None
        if self.in_backward is not None and (self.device == "cpu" or self.in_backward.on_devices):
            targets = self.in_backward.targets(tensors, mask)
        if targets is not None:
            return _SteppingFunction.apply(self, self.in_backward.mask(mask, targets), self.in_backward, targets,
                                           *tensors)
        if self._held is not None:
            outputs = self._held.apply(self, mask, leaves, tensors)
        return _apply(self, mask, leaves, *tensors) if outputs is None else outputs

    def _check_weights(self, tensors: Sequence[object]) -> None:
        """The engine refused its inputs: because of one of the module's own?"""
        for tensor, expected in zip(tensors, self._expected):
            if expected is None or expected[1].is_complex:
                continue
            name, dtype, shape = expected
            if type(tensor) is not Tensor and not isinstance(tensor, Tensor):
                raise StaleError(f"{name} is no longer a tensor")
            if tensor.dtype != dtype or tensor.shape != shape or str(tensor.device) != self.device:
                raise StaleError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, but was {dtype} "
                                 f"{tuple(shape)}")

    def _write_back(self, outputs: Sequence[Tensor], given: Sequence[object]) -> None:
        with torch.no_grad():
            for index, owner, name in self._buffers:
                value = outputs[index].detach()
                buffer: Any = given[name] if owner is None else owner.get(name)
                if owner is not None and (buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype):
                    owner[name] = value  # forward put a new one in its place
                else:
                    buffer.copy_(value)

    def _weight(self, given: Sequence[Any], kind: str, name: str) -> Tensor:
        if self._places is not None:
            return given[self._places[name]]
        path, _, last = name.rpartition(".")
        owner: Any = self._module.get_submodule(path)
        tensor: Tensor = (owner._parameters if last in owner._parameters else owner._buffers)[last]
        return tensor

    def _results(self, outputs: Sequence[Tensor], leaves: Sequence[Any], given: Sequence[object]) -> tuple[Tensor, ...]:
        flat: list[Any] = [None] * self.exported.results
        for index, leaf in self._user_outputs:
            flat[leaf] = outputs[index]
        if self._views is not None:
            self._views(flat, leaves, functools.partial(self._weight, given))
        return tuple(flat)
