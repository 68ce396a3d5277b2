"""backward(create_graph=True): the module runs once more, in PyTorch, which can differentiate its gradients again.

The engine's gradients are numbers; a gradient penalty, MAML's inner loop or a Hessian-vector product want a graph of
them. So the node of a forward, asked for one, calls the module as it was called, on the very tensors of that forward,
and leaves the rest to autograd. Called by _program.py.

A forward that differentiates, as for forces, is found where its graph ends (differentiates()), or where it asks a node
for such gradients (gradients()): PyTorch runs its later calls.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export import derivatives, messages, state
from onnxtrain._export.captured import Graph
from onnxtrain.optim._in_backward import executes
from onnxtrain.ortmodule import _masks
from onnxtrain.ortmodule._fallback import FallbackPolicy, ORTModuleTorchModelException
from onnxtrain.ortmodule._methods import HOOKS, Methods
from onnxtrain.ortmodule._running import running

_NOTE = ("backward(create_graph=True) runs the module a second time, in PyTorch, whose gradients can be differentiated "
         "again")

_DERIVATIVE = re.compile(r"autograd\.grad\b|Tensor\.backward\b|function `(grad|backward)` in file .*autograd")


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Has Dynamo trace torch.autograd.grad() in forward, and leave Tensor.backward() to Python: the gradients that it
    stores in a trace (2.13, 2.15) have no gradients of their own.
    """
    if _torch.place("collect_backward_inputs") is None or _torch.place("check_leaks") is None:
        yield
        return

    def cut(*_args: object, **_kwargs: object) -> None:
        _torch.unimplemented(gb_type="Unsupported Tensor.backward() call", context="", explanation="", hints=[])

    def leaks(plain: Callable[..., None]) -> Callable[..., None]:
        def check(self: Any, *args: object) -> None:
            """That a result depends on a tensor which forward has asked a gradient of is for the export to judge."""
            if not derivatives.differentiates(self):
                plain(self, *args)

        return check

    with state.settings(_torch.dynamo_config, trace_autograd_ops=True), \
            state.wrapped("collect_backward_inputs", lambda _: cut), state.wrapped("check_leaks", leaks):
        yield


def differentiates(graph: torch.fx.GraphModule) -> str | None:
    """Where forward differentiates, in words; None where Dynamo has ended the graph for another reason."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not _DERIVATIVE.search(reason.reason):
        return None
    return _place(reason.user_stack)


def differentiates_here() -> str:
    """As differentiates(), of the code that runs."""
    return _place(traceback.extract_stack(sys._getframe(1)))


def differentiated(error: Exception) -> str:
    """As differentiates(), of the code that has raised the error."""
    return _place(traceback.extract_tb(error.__traceback__))


def is_of_a_cut(error: Exception) -> bool:
    """Whether autograd found no path from one result of a graph to another: both come from one node."""
    return isinstance(error, RuntimeError) and "appears to not have been used in the graph" in str(error)


def has_paths(graph: torch.fx.GraphModule) -> bool:
    """Whether one result is computed from another: both come from one node, so autograd cannot see the path."""
    (results,) = next(node for node in reversed(graph.graph.nodes) if node.op == "output").args
    wanted = {node for node in results if isinstance(node, torch.fx.Node) and node.op != "placeholder"}
    behind: set[torch.fx.Node] = set()  # what is computed from a result
    for node in graph.graph.nodes:
        if node.op != "output" and any(source in wanted or source in behind for source in node.all_input_nodes):
            behind.add(node)
    return not wanted.isdisjoint(behind)


def hooked(graph: torch.fx.GraphModule, methods: Methods | None) -> str | None:
    """Why PyTorch runs this part of forward: one of its results may get a hook behind it, and another is computed from
    that one. Both results would come from one node, so that the hook would miss a gradient.
    """
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not has_paths(graph):
        return None
    lines = [frame.line or "" for frame in reason.user_stack]
    if (methods is None or not methods.hooks) and not any(name in line for name in HOOKS for line in lines):
        return None
    at = messages.line("".join(traceback.format_list(reason.user_stack))).removeprefix(",")
    return f"forward gives a tensor a hook, and goes on with the tensor in the part of the graph that ends{at}"


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost of the frames that is the user's, in words."""
    at = messages.line("".join(traceback.format_list(frames))).removeprefix(",")
    return f"forward differentiates{at}, and the engine's gradients cannot be differentiated"


def refuse_changes(program: Any, run: Any, who: str) -> None:
    """Raises RuntimeError where a tensor that forward read, and that its results depend on, was changed in place."""
    changed = run.changed()
    if not changed:
        return
    reached = program.reach.read(tuple([i for i, flag in enumerate(run.differentiable) if flag]))
    for index in changed:
        if index in reached:
            name = program.name(index, run.inputs[index])
            raise RuntimeError(f"one of the variables needed for gradient computation has been modified by an inplace "
                               f"operation: {name} of the module, whose value in forward is needed by {who}")


def gradients(ctx: Any, grads: tuple[Tensor | None, ...], plain: Callable[..., Any]) -> Sequence[Tensor | None]:
    """One gradient per input of the graph, that autograd can differentiate.

    Args:
        ctx: the autograd node, with ``program`` and ``run``.
        grads: of the outputs of the graph.
        plain: gives the engine's own, for a graph that PyTorch cannot run again: these raise where they are
            differentiated.
    """
    if running.call is not None:
        running.call.derivative = running.call.derivative or differentiates_here()
    program = ctx.program
    lacking = _lacking(program)
    if lacking is None:
        return program.double.gradients(ctx, grads)
    with torch.no_grad():
        found = list(plain(ctx, grads))
    there = [index for index, grad in enumerate(found) if grad is not None]
    message = f"gradients of an ORTModule cannot be differentiated again here: {lacking}"
    sources = [tensor for tensor in (*(ctx.run.inputs or ()), *grads) if tensor is not None and tensor.requires_grad]
    delayed = _Refusal.apply(message, len(there), *[found[index] for index in there], *sources)
    for index, grad in zip(there, delayed):
        found[index] = grad
    return found


class _Refusal(torch.autograd.Function):
    """Returns gradients unchanged, connected to the tensors they belong to; its own backward raises an error."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple([tensor.view_as(tensor) for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(ctx.message)


def _lacking(program: Any) -> str | None:
    """Why PyTorch cannot repeat a forward of the engine."""
    if program.double is None:
        return "functions that PyTorch runs cut its graph into parts, and no PyTorch module corresponds to a part"
    if b"MatMulBnb4" in program.exported.model:
        return "it has matrix products of bitsandbytes, whose captured backward is not differentiable"
    if any(node.target is torch.ops.higher_order.cond for node in program._module._captured.graph.graph.nodes):
        return "it has a torch.cond, whose gradients PyTorch does not differentiate"
    if program.random and (program.device != "cpu" or _masks.model_with(program.exported.model) is None):
        return ("it draws random numbers other than the masks of dropout on the CPU, and PyTorch would draw others "
                "than the engine has drawn; put such layers into eval(), or set "
                "ORTMODULE_FALLBACK_POLICY=FALLBACK_FORCE_TORCH_FORWARD")
    return None


class Double:
    """How one program's module is called again.

    Args:
        module: the Graph.
        key: what the program was exported for, with torch's modes.
        fallback: the policy.
        counters: of the module; gets the note, once.
        debug: writes it to the log.
    """

    def __init__(self, module: Graph, key: Any, fallback: Any, counters: Any, debug: Any) -> None:
        self._module, self._key, self._fallback, self._counters, self._debug = module, key, fallback, counters, debug
        self._source: _masks.Source | None = None

    def _say(self) -> None:
        if _NOTE not in self._counters.reasons:
            self._counters.reasons.append(_NOTE)
            self._debug.log(logging.WARNING, "ORTModule: %s: %s", type(self._module).__name__, _NOTE)

    def gradients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """See gradients(). Raises RuntimeError where the module or its tensors are not what they were in forward."""
        program, run = ctx.program, ctx.run
        if not self._fallback.allows(FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL):
            raise ORTModuleTorchModelException(f"{_NOTE}; the policy {self._fallback.policy.name} does not allow that")
        _ = ctx.saved_tensors  # raises where the graph is gone, or one of them was changed
        refuse_changes(program, run, "create_graph=True, which runs the module again in PyTorch")
        self._say()
        if program.random and self._source is None:
            self._source = _masks.Source(program.exported.model)
        masks = self._source.masks(run.inputs, ctx.seed) if self._source is not None else None
        wanted = [i for i, (node, _) in enumerate(ctx.next_functions) if node is not None and executes(node, leaf=True)]
        inputs = [tensor.view_as(tensor) for tensor in run.inputs]  # of which no other depends on another
        placed = [tensor.clone() if i in program.writes or source.kind == "buffer" else tensor
                  for i, (tensor, source) in enumerate(zip(inputs, program.exported.inputs))]
        with self._modes(), state.random_unchanged(), masks or contextlib.nullcontext():
            outputs = self._outputs(program, placed, run.call, grads)
        if masks is not None:
            masks.check(outputs)
        roots = [(output, grad) for output, grad in zip(outputs, grads)
                 if output is not None and grad is not None and output.requires_grad]
        found: list[Tensor | None] = [None] * len(inputs)
        if roots and wanted:
            for i, grad in zip(wanted, torch.autograd.grad(
                    [output for output, _ in roots], [inputs[i] for i in wanted], [grad for _, grad in roots],
                    create_graph=True, allow_unused=True)):
                found[i] = grad
        self._refuse_lost(program, run.inputs, grads, wanted, found)
        return found

    def _outputs(self, program: Any, inputs: Sequence[Tensor], call: Sequence[Any],
                 grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Calls the graph's operations as `call` did, with these inputs; the results by the program's outputs."""
        operations = self._module._captured
        given = [value.clone() if held and held[0].kind == "_buffers" else value  # which forward may write
                 for value, held in zip(call, operations.places, strict=True)]
        for (owner, index), tensor in zip(program.sources, inputs):
            if owner is None:
                given[index] = tensor
        results, places = operations.graph.forward(*given), operations.positions()
        outputs: list[Tensor | None] = []
        for target, grad in zip(program.exported.outputs, grads):
            if grad is None:
                outputs.append(None)
            elif target.kind == "user":
                outputs.append(results[target.target])
            elif target.kind == "argument":
                outputs.append(given[places[target.target]])
            else:
                raise RuntimeError(f"create_graph=True: a gradient comes through the {target.kind} {target.name} that "
                                   "forward sets, which is not supported")
        return outputs

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        """Torch's modes of the forward."""
        on, dtype, cuda_on, cuda_dtype, default, _ = self._key.torch_modes
        before = torch.get_default_dtype()
        with torch.enable_grad(), torch.autocast("cpu", dtype, on), contextlib.ExitStack() as stack:
            if cuda_on:
                stack.enter_context(torch.autocast("cuda", cuda_dtype, True))
            torch.set_default_dtype(default)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    @staticmethod
    def _refuse_lost(program: Any, inputs: Sequence[Tensor], grads: tuple[Tensor | None, ...], wanted: Sequence[int],
                     found: Sequence[Tensor | None]) -> None:
        """A parameter that the graph reads, but did not get here, would silently have no gradient."""
        reached = program.reach.inputs(tuple([i for i, grad in enumerate(grads) if grad is not None]))
        for index in wanted:
            if found[index] is None and index in reached:
                raise RuntimeError("create_graph=True: PyTorch found no gradient of "
                                   f"{program.name(index, inputs[index])}, which the engine's graph depends on")
