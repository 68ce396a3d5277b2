"""torch.compile(model, backend="onnxtrain"): every graph that Dynamo captures runs in the engine, forward and backward.

Dynamo reads the user's Python, guards what it read, and cuts the graph where it cannot follow. What arrives here is a
torch.fx graph of tensor operations, whose parameters and buffers are arguments. torch finds `backend` by an entry point
of the package (group "torch_dynamo_backends"), so nothing has to be imported.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils import checkpoint

from onnxtrain import _report, _torch
from onnxtrain._export import autograd_functions, bitsandbytes, messages
from onnxtrain._export.autograd_calls import is_traced, traced
from onnxtrain._export.captured import graph_of
from onnxtrain._export.errors import ConstantsWanted, Untraceable
from onnxtrain._export.numbers import (
    SYMBOLIC,
    NumericResults,
    copied,
    drop_arithmetic,
    example,
    floats_as_arguments,
    output_of,
    placeholders,
    sizes_from_tensors,
    wholes_as_tensors,
    without_unread,
)
from onnxtrain._export.recompute_regions import region
from onnxtrain.ortmodule import _checks, _double
from onnxtrain.ortmodule._captured import MAX_CAPTURES, changes
from onnxtrain.ortmodule._key import function_mode
from onnxtrain.ortmodule._runner import GraphRunner

if TYPE_CHECKING:
    from onnxtrain.ortmodule._captured import Parts

_log = logging.getLogger("onnxtrain")
_ONCE = once_differentiable(lambda _: None).__code__
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_TRANSFORMS = ("_grad_increment_nesting", "_jvp_increment_nesting")
_REARRANGE = ("contiguous", "reshape", "flatten")


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[object], *, mode: str | None = None,
            options: dict[str, object] | None = None) -> Callable[..., object]:
    """Compiles one graph of Dynamo's; torch.compile calls it.

    Args:
        graph: tensor operations; each placeholder has a fake tensor or a symbolic number in meta["example_value"].
        example_inputs: not read: the graph is exported at its first call, with that call's tensors.
        mode: as torch.compile takes it. The engine works in one way, which serves all of them.
        options: there are none.

    Returns:
        A function of the graph's arguments. What the engine lacks runs in PyTorch, as ORTMODULE_FALLBACK_POLICY allows;
        it warns once.

    Raises:
        ValueError: torch.compile has no such mode.
        TypeError: options were given.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"torch.compile(backend='onnxtrain'): mode is {mode!r}, expected one of {', '.join(MODES)}")
    if options:
        raise TypeError(f"torch.compile(backend='onnxtrain') takes no options, got {', '.join(map(str, options))}")
    return compiled(graph)


def compiled(graph: torch.fx.GraphModule, parts: Callable[[], Parts] | None = None,
             derivative: str | None = None) -> Callable[..., object]:
    """A function of the graph's arguments. With `parts`, the graph is one of an ORTModule's. With `derivative`, where
    forward differentiates, PyTorch runs it.
    """
    run = _compiled(graph, parts, derivative)
    return _checks.checked(run) if _checks.has_checks(graph) else run


def _compiled(graph: torch.fx.GraphModule, parts: Callable[[], Parts] | None,
              derivative: str | None) -> Callable[..., object]:
    if not _computes(graph):
        return graph.forward
    whole = graph
    if derivative is not None and parts is not None:
        return parts().by_torch(_in_torch(graph), derivative)
    try:
        if parts is None and (derivative := _double.differentiates(graph)) is not None:
            raise LookupError(derivative)
        if parts is None and checks_contents(graph):  # an ORTModule captures once more without such numbers
            raise LookupError("it checks a number that a tensor holds")
        _refuse_writes_to_data(graph)
        ready = prepared(graph)
    except LookupError as error:
        if parts is not None:
            reason = f"a graph of {len(graph.graph.nodes)} nodes runs in PyTorch, since {error}"
            return parts().by_torch(_in_torch(graph), reason)
        _log.warning("torch.compile(backend='onnxtrain'): PyTorch runs a graph of %d nodes, because %s",
                     len(graph.graph.nodes), error)
        return _counted(_in_torch(graph), str(error))
    enables_grad = any(node.target is _set_grad_enabled and node.args == (True,) for node in ready.graph.graph.nodes)
    results = [example(node) for node in output_of(ready.graph).args[0] if isinstance(node, torch.fx.Node)]
    enables_grad = enables_grad and any(isinstance(value, Tensor) and value.requires_grad for value in results)
    runner: GraphRunner | None = None
    pick = ready.picker()
    has_numbers = bool(ready.numbers)
    seen: set[tuple[object, ...]] = set()  # the numbers that exports have as constants

    def call(*given: object) -> object:
        nonlocal ready, pick, runner, seen
        inputs = given if pick is None else pick(given)
        if ready.constants:
            numbers = tuple([inputs[i] for i in ready.constants])
            if numbers not in seen and len(seen) == MAX_CAPTURES - 1:  # the first number had an export of its own
                return by_torch()(*given)
            seen.add(numbers)
        if runner is None:
            runner = made(inputs)
        try:
            if parts is None and _torch.has_any_global_hook():
                results = runner._by_torch("a global module hook would run for the captured graph, which is not a "
                                           "module of the user", inputs)
            elif _torch.len_torch_function_stack() and (active := function_mode()) is not None:
                with _torch.DisableTorchFunction():  # the mode was asked when the graph was captured: not once more
                    results = runner._by_torch(f"the mode {active} must see every function of torch", inputs)
            elif parts is not None and parts().seeds:
                results = runner._by_torch("the module seeds torch's random generator, or reads or sets its state, "
                                           "inside forward, and needs torch's own numbers", inputs)
            elif enables_grad and not torch.is_grad_enabled():
                results = runner._by_torch("it enables gradients under its caller's no_grad()", inputs)
            else:
                results = runner(inputs)  # no hook of all modules is for a graph
        except ConstantsWanted:
            ready = prepared(whole, constants=True)
            pick, runner = ready.picker(), None
            if parts is not None:  # Dynamo may capture an equal graph again
                seen = parts().constants.setdefault(key(ready.graph), seen)
            return call(*given)
        return ready.numbers.put_back(results, given) if has_numbers else results

    def made(inputs: Sequence[object]) -> GraphRunner:
        if parts is not None:
            return parts().runner(ready.graph, inputs, ready.numbered)
        alone = GraphRunner(graph_of(ready.graph, ready.graph, [()] * len(inputs)))
        alone.numbered = ready.numbered
        return alone

    @functools.cache
    def by_torch() -> Callable[..., object]:
        reason = changes(f"a number that the graph has as a constant, {_number(ready)}, is another one at each call")
        return parts().by_torch(_in_torch(whole), reason) if parts is not None else _counted(_in_torch(whole), reason)

    return call


class Prepared(NamedTuple):
    """A graph that can be exported, whose results are tensors."""

    graph: torch.fx.GraphModule
    numbers: NumericResults  # that were among the results
    kept: list[int]  # which of the arguments of Dynamo's graph it has
    wholes: frozenset[int]  # positions where Dynamo has an int, and the graph a 0-dim tensor
    floats: frozenset[int]  # positions where Dynamo has a 0-dim tensor, and the graph a number
    numbered: bool  # whether numbers are tensors of the graph
    constants: list[int]  # which of the graph's own arguments are numbers
    plain: bool  # whether it takes Dynamo's arguments as they are

    def picker(self) -> Callable[[Sequence[object]], Sequence[object]] | None:
        """What does inputs() in a step; None where there is nothing to do."""
        if self.plain or self.floats or self.wholes or len(self.kept) < 2:
            return None if self.plain else self.inputs
        return operator.itemgetter(*self.kept)

    def inputs(self, given: Sequence[Any]) -> Sequence[object]:
        """The graph's arguments, of those of Dynamo's graph."""
        if self.plain:
            return given
        return [given[i].item() if i in self.floats else torch.tensor(given[i]) if i in self.wholes else given[i]
                for i in self.kept]


def prepared(graph: torch.fx.GraphModule, constants: bool = False) -> Prepared:
    """Makes Dynamo's graph one that can be exported.

    Args:
        constants: whether a number that changes is a constant of the export, which holds for this number alone. Else it
            is a tensor, whose number the graph reads.

    Raises LookupError where there is none.
    """
    count = len(placeholders(graph))
    graph = _copied(graph)
    _refuse_transforms(graph)
    numbers = NumericResults(graph)
    if numbers:
        numbers.take_out()
    drop_arithmetic(graph)
    floats = floats_as_arguments(graph, constants)
    kept = without_unread(graph, sizes_from_tensors(graph))
    wholes = frozenset() if constants else wholes_as_tensors(graph, kept)
    graph.recompile()
    numbered = bool(wholes) or not constants and any(
        node.op == "call_method" and node.target == "item" and node.args[0].op == "placeholder"
        for node in graph.graph.nodes)
    numbers_at = [i for i, node in enumerate(placeholders(graph)) if not isinstance(example(node), Tensor)]
    return Prepared(graph, numbers, kept, wholes, floats, numbered, numbers_at,
                    not (floats or wholes) and len(kept) == count)


def _number(ready: Prepared) -> str:
    """The name of the first argument that is a number, and where it is read."""
    node = placeholders(ready.graph)[ready.constants[0]]
    lines = [messages.line(user.meta.get("stack_trace")) for user in node.users]
    return node.name.removeprefix("l_").removeprefix("module_").strip("_") + next(filter(None, lines), "")


def _computes(graph: torch.fx.GraphModule) -> bool:
    """False where a graph only makes views of its inputs, copies that no view could express, and arithmetic on sizes
    and other numbers.
    """
    if all(node.target in ("item", torch.scalar_tensor) or isinstance(example(node), SYMBOLIC)
           for node in graph.graph.nodes if node.op not in ("placeholder", "output")):
        return False
    given = [example(node) for node in placeholders(graph)]
    tensors = [value for value in given if isinstance(value, Tensor)]
    if not tensors:
        return any(value is None for value in given)
    if any(value.layout is not torch.strided or value.is_inference() or value._version for value in tensors):
        return True
    memory, views = {value.untyped_storage()._cdata for value in tensors}, 0
    for node in graph.graph.nodes:
        value = example(node)
        if node.op in ("placeholder", "output"):
            continue
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return True
            if str(getattr(node.target, "__name__", node.target)) in _REARRANGE and all(
                    example(source).untyped_storage()._cdata in memory for source in node.all_input_nodes[:1]):
                memory.add(value.untyped_storage()._cdata)
            if value.untyped_storage()._cdata not in memory:
                return True
            views += 1
        elif not isinstance(value, (int, torch.SymInt)):
            return True
    return not views


def _in_torch(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph as PyTorch runs it: Dynamo's operator for a torch.autograd.Function has no second gradients."""
    if all(node.target is not torch.ops.higher_order.autograd_function_apply for node in graph.graph.nodes):
        return graph
    try:
        return _copied(graph)
    except LookupError:
        return graph


def _refuse_writes_to_data(graph: torch.fx.GraphModule) -> None:
    """Raises LookupError where the `.data` of an argument is written, of which autograd must not know."""
    for node in graph.graph.nodes:
        if node.target is not _torch.get_data_attr:
            continue
        is_argument = node.args[0].op == "placeholder" and not re.search(r"_(parameters|buffers)_", node.args[0].name)
        if is_argument and any(map(_writes, node.users)):
            raise LookupError("it writes to the .data of an argument, past autograd's count of its changes")


def _writes(node: torch.fx.Node) -> bool:
    """Whether a node is an operation in place."""
    return node.target is operator.setitem or node.op == "call_method" and bool(re.search(r"[^_]_$", str(node.target)))


def _counted(graph: torch.fx.GraphModule, reason: str) -> Callable[..., object]:
    """The graph in PyTorch, each call of which is a fallback step of stats()."""
    counters = _report.Counters()
    _report.note(counters, "reasons", reason)

    def call(*given: object) -> object:
        _report.count(counters, fallback_steps=1)
        return graph.forward(*given)

    return call


def _refuse_transforms(graph: torch.fx.GraphModule) -> None:
    """Raises LookupError where torch.func differentiates inside: a trace that fails there would leave it begun."""
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule) and any(
                getattr(node.target, "__name__", "") in _TRANSFORMS for node in part.graph.nodes):
            raise LookupError("torch.func differentiates in it with its own interpreter")


def _copied(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy whose operators an export can follow, in graphs inside as well."""
    made = copied(graph)
    for name, part in graph.named_children():
        if isinstance(part, torch.fx.GraphModule) and hasattr(made, name):
            setattr(made, name, _copied(part))
    _undo_operators(made)
    return made


def _undo_operators(graph: torch.fx.GraphModule) -> None:
    """Puts functions in the place of Dynamo's operators for a torch.autograd.Function, a checkpoint() and a mode: what
    each is to a trace, and to PyTorch where it runs the graph.

    Raises LookupError for what torch.export would lose.
    """
    regions = 0  # of autocast, around a node
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.higher_order.autograd_function_apply:
            forward, backward = (getattr(graph, part.target) for part in node.args[:2])
            options = dict(node.kwargs)
            if (tensors := options.pop("args_tensor_mask", None)) is not None:  # torch 2.10
                _without_context(forward, backward, len(node.args) - 2 - sum(tensors))
            node.target = _function(forward, backward, node.meta.get("stack_trace") or "", **options)
            node.args, node.kwargs = node.args[2:], {}
        elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = _checkpointed(getattr(graph, node.args[0].target))
            node.args = node.args[1:]
        elif getattr(node.target, "__name__", "") == "register_hook" and node.op == "call_function":  # torch 2.13
            _keep_hook(graph, node)
        elif node.target is torch.ops.aten._assert_scalar.default:  # eager's operators check and say it themselves
            graph.graph.erase_node(node)
        elif node.target is torch.ops.higher_order.cond:
            branches = [getattr(graph, part.target) for part in node.args[1:3]]
            _refuse_modes(branches, regions)
            node.args = (*node.args[:3], _without_sizes(branches, node.args[3]))
            for branch in branches:
                _read_all(branch)
        elif node.target is torch.ops.higher_order.while_loop:
            carried, parts = node.args[2], [getattr(graph, part.target) for part in node.args[:2]]
            _refuse_modes(parts, regions)
            operands = _without_sizes(parts, (*carried, *node.args[3]), len(carried))
            node.args = (*node.args[:3], operands[len(carried):])
        elif node.target is torch.ops.higher_order.map_impl:
            name, rows, others = node.args
            _refuse_modes([getattr(graph, name.target)], regions)
            kept = sizes_from_tensors(body := getattr(graph, name.target))
            body.recompile()
            read = [[*rows, *others][i] for i in kept][len(rows):]
            node.target, node.args = torch.ops.higher_order.scan, (name, [], rows, read)  # a scan that carries nothing
        elif node.target is _torch.get_data_attr:  # a constant to a trace
            node.target = torch.detach
        elif node.target is torch.Tensor.set_ and len(node.args) == 2:  # `tensor.data = value`
            _set_data(graph, node)
        elif bitsandbytes.is_product(node):  # of a call without a gradient
            node.target = bitsandbytes.gemm_4bit
        else:
            regions += {_torch.enter_autocast: 1, _torch.exit_autocast: -1}.get(node.target, 0)
            node.target = _MODES.get(node.target, node.target)
    graph.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    graph.recompile()


def _keep_hook(graph: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Replaces a hook that forward registers on a tensor by a torch.autograd.Function between the tensor and all its
    users, so that the hook gets the sum of their gradients.

    Raises LookupError for a second hook, for a tensor that is changed in place, and where the hook would have to stand
    behind a user, or behind a change of a mode.
    """
    tensor, name, *others = cast(list[Any], node.args)
    body = getattr(graph, name.target)
    wanted = without_unread(body, sizes_from_tensors(body))
    body.recompile()
    others = [others[i - 1] for i in wanted[1:]]
    ahead = set(itertools.takewhile(lambda other: other is not tensor, graph.graph.nodes))
    users = [user for user in tensor.users if user is not node]
    stays = not ahead.issuperset(others)
    memory = example(tensor).untyped_storage()._cdata
    writes = any(_writes(other) and example(other.args[0]).untyped_storage()._cdata == memory
                 for other in graph.graph.nodes)
    behind = stays and (users or any(other.target in (*_MODES, *_MODES.values()) for other in graph.graph.nodes))
    if (writes or behind or tensor.op == "placeholder" or not example(tensor).requires_grad
            or hasattr(tensor.target, "is_hook")  # of which eager calls the first one first
            or any(user.target is torch.autograd.grad for user in users)
            or not all(isinstance(example(other), Tensor) for other in others)):
        raise LookupError("it registers a hook that a graph cannot keep: a second one, or on a tensor that has no "
                          "gradient, is changed in place or differentiated by, or is used ahead of what the hook reads")
    if not stays:
        tensor.append(node)
    for user in users:
        user.replace_input_with(tensor, node)
    node.target, node.args = _hooked(body), (tensor, *others)


def _hooked(body: torch.fx.GraphModule) -> Callable[..., object]:
    """Gives the tensor as it is, whose gradient the hook is then given."""

    class Hook(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, *others: Tensor) -> Tensor:
            ctx.save_for_backward(*others)
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            found = body(gradient, *ctx.saved_tensors)
            return gradient if found is None else found, *[None] * len(ctx.saved_tensors)

    def apply(*args: object) -> object:
        return traced(Hook, lambda tensor, *_: (tensor, ()), args, None) if is_traced() else Hook.apply(*args)

    apply.computes = apply.is_hook = "register_hook", key(body)  # type: ignore[attr-defined]
    return apply


def _set_data(graph: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Has a trace see `tensor.data = value` as a change of what the tensor holds.

    Raises LookupError where the value is in memory that has another name. (The example of a tensor that was set is that
    of the value.)
    """
    held, value = node.args
    memory = example(value).untyped_storage()._cdata  # type: ignore[arg-type]
    names = (*placeholders(graph), *output_of(graph).all_input_nodes)
    others = [example(each) for each in names if each is not held]
    if any(isinstance(other, Tensor) and other.untyped_storage()._cdata == memory for other in others):
        raise LookupError("it sets the .data of a tensor to a tensor that has another name")

    def set_data(tensor: Tensor, value: Tensor) -> Tensor:
        if not is_traced():
            return tensor.set_(value)  # type: ignore[call-overload]
        if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
            raise Untraceable("The module sets the .data of a tensor to one of another shape or type.")
        if tensor.untyped_storage()._cdata == value.untyped_storage()._cdata:  # its own
            return tensor
        return tensor.detach().copy_(value)

    set_data.computes = None  # type: ignore[attr-defined]
    node.target = set_data
    for user in list(node.users):
        if getattr(user.target, "__name__", "") == "_lower_version_count_by_1":
            user.target = _lowered(user.target)


def _lowered(plain: Any) -> Callable[[Tensor], object]:
    """Dynamo's note that a change is none for autograd, which a trace does without."""

    def lower(tensor: Tensor) -> object:
        return None if is_traced() else plain(tensor)

    lower.computes = plain  # type: ignore[attr-defined]
    return lower


def _without_context(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, lifted: int) -> None:
    """The two graphs of a Function as later torch has them: neither takes a context, and there is a gradient for each
    argument, where torch 2.10 has none for the last ones, which it has lifted.
    """
    for part in (forward, backward):
        part.graph.erase_node(placeholders(part)[0])
    output = output_of(backward)
    found = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    output.args = ((*found, *[None] * lifted),)


def _refuse_modes(bodies: Sequence[torch.fx.GraphModule], regions: int) -> None:
    """Raises LookupError where a torch.cond, while_loop or map is in one of these regions of autocast, or changes a
    mode within: torch.export (2.13) keeps no modes in its bodies.
    """
    inside = [part.graph for body in bodies for part in body.modules() if isinstance(part, torch.fx.GraphModule)]
    if regions or any(node.target in _MODES.values() for part in inside for node in part.nodes):
        raise LookupError("a torch.cond, while_loop or map is under autocast, or changes a mode within")
    if any(node.target is _torch.assert_async for part in inside for node in part.nodes):
        raise LookupError("an assertion is inside a torch.cond, while_loop or map")


def _without_sizes(branches: Sequence[torch.fx.GraphModule], operands: Sequence[object],
                   least: int = 0) -> tuple[object, ...]:
    """The operands of two branches, which read sizes off the tensors among them; the first `least` stay."""
    kept = [sizes_from_tensors(branch) for branch in branches]
    for branch in branches:
        branch.recompile()
    if kept[0] != kept[1] or kept[0][:least] != list(range(least)):
        raise LookupError("the branches of a torch.cond, or the parts of a while_loop, take different sizes")
    return tuple([operands[i] for i in kept[0]])


def _read_all(branch: torch.fx.GraphModule) -> None:
    """Has all results of a branch of torch.cond depend on all operands: PyTorch gives zeros, and not no gradient, for
    what only the other branch reads.
    """
    output, operands = output_of(branch), placeholders(branch)
    with branch.graph.inserting_before(output):
        output.args = (torch.fx.map_arg(output.args[0], lambda result: branch.graph.call_function(
            _beside, (result, *operands))),)
    branch.recompile()


def _beside(result: Tensor, *operands: object) -> Tensor:
    """The result, from which a gradient of zeros goes to the operands too."""
    numbers = [x.reshape(-1)[:1].sum().to(result.dtype) for x in operands
               if isinstance(x, Tensor) and x.is_floating_point()]
    if not numbers or not result.is_floating_point():
        return result
    return torch.where(torch.zeros((), dtype=torch.bool, device=result.device), sum(numbers[1:], numbers[0]), result)


def _enter_autocast(*args: Any) -> torch.autocast:
    """In a trace, torch's function of this name notes the region and does not enter it."""
    mode = torch.autocast(*args)
    mode.__enter__()
    return mode


def _exit_autocast(mode: torch.autocast) -> None:
    mode.__exit__(None, None, None)


def _set_grad_enabled(enabled: bool) -> None:
    """torch's. Where it is traced, between regions of autocast: of one that reaches across, torch.export (2.13) loses
    the change.
    """
    regions = [(mode, node) for mode in _torch.get_current_function_mode_stack()
               if isinstance(mode, PreDispatchTorchFunctionMode) for node in mode.enter_autocast_nodes]
    for trace, _ in regions:
        trace.__torch_function__(_torch.exit_autocast, ())
    _torch.set_grad_enabled(enabled)
    for trace, entered in regions:
        trace.__torch_function__(_torch.enter_autocast, (), entered.args)


_MODES = {_torch.enter_autocast: _enter_autocast, _torch.exit_autocast: _exit_autocast,
          _torch.set_grad_enabled: _set_grad_enabled}


def _checkpointed(part: torch.fx.GraphModule) -> Callable[..., object]:
    context = part.meta.get("_checkpoint_context_fn")

    def apply(*args: object, **options: Any) -> object:
        if is_traced():
            with region(part):
                return part(*args)
        if context is not None:
            options["context_fn"] = context
        return checkpoint.checkpoint(part, *args, **{**options, "use_reentrant": False})

    if context is None:
        apply.computes = key(part)  # type: ignore[attr-defined]
    return apply


def _class_of(trace: str, run: torch.fx.GraphModule, differentiate: torch.fx.GraphModule) -> type | None:
    """The autograd.Function that was called where the trace ends, by its lines in the traces of the two graphs.

    Where several have these lines, as those that inherit them have, or none, by the name in front of apply().
    """
    classes = list(torch.autograd.Function.__subclasses__())
    for kind in classes:
        classes += kind.__subclasses__()
    for method, part in (("forward", run), ("backward", differentiate)):
        classes = _with_lines(classes, method, part, trace) or classes
    called = re.findall(r"(\w+)\.apply\(", trace)
    classes = [kind for kind in classes if called and kind.__name__ == called[-1]] or classes
    return classes[0] if len({autograd_functions.name_of(kind) for kind in classes}) == 1 else None


def _with_lines(classes: Sequence[type], method: str, part: torch.fx.GraphModule, trace: str) -> list[type]:
    """Those whose method is the first that a trace of the graph is in, behind the trace of the call."""
    codes = [(kind, getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)) for kind in classes]
    for node in part.graph.nodes:
        inside = (node.meta.get("stack_trace") or "").removeprefix(trace.rstrip("\n"))
        for file, line in re.findall(r'File "(.+)", line (\d+), in ', inside):
            found = [kind for kind, code in codes if code is not None and code.co_filename == file
                     and int(line) in {number for *_, number in code.co_lines()}]
            if found:
                return found
    return []


def _function(run: torch.fx.GraphModule, differentiate: torch.fx.GraphModule, trace: str, *,
              non_differentiable_idx: Sequence[int] = (), saved_for_backward_idx: Sequence[int] = (),
              dirty_idx: Sequence[int] = ()) -> Callable[..., object]:
    """What two of Dynamo's graphs compute: (results, what backward wants), and the gradients of the arguments."""
    user = _class_of(trace, run, differentiate)
    taken = sizes_from_tensors(run)
    for part in (run, differentiate):
        regions = [node for node in part.graph.nodes if node.target is _set_grad_enabled]
        # A forward is called so in any case, and a backward where its own gradients are not wanted.
        if [node.args for node in regions] == [(False,), (True,)]:
            for node in regions:
                part.graph.erase_node(node)
        part.recompile()

    class Captured(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: object) -> object:
            results, kept = run(*args)
            places = results if isinstance(results, (tuple, list)) else (results,)
            ctx.mark_dirty(*[places[i] for i in dirty_idx])
            ctx.mark_non_differentiable(*[places[i] for i in non_differentiable_idx])
            ctx.save_for_backward(*[kept[i] for i in saved_for_backward_idx])
            ctx.others = [None if i in saved_for_backward_idx else value for i, value in enumerate(kept)]
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            kept = list(ctx.others)
            for i, tensor in zip(saved_for_backward_idx, ctx.saved_tensors, strict=True):
                kept[i] = tensor
            found = differentiate(*gradients, *kept)
            return tuple([found[i] for i in taken])

    if (getattr(getattr(user, "backward", None), "__code__", None) is _ONCE
            or any(node.target is _set_grad_enabled for node in differentiate.graph.nodes)):
        Captured.backward = staticmethod(once_differentiable(Captured.backward))  # type: ignore[assignment]

    in_graph = None
    if user is not None:
        Captured.__module__, Captured.__qualname__ = user.__module__, user.__qualname__
        in_graph = bitsandbytes.in_graph(autograd_functions.name_of(user), run, differentiate)

    def apply(*args: object) -> object:  # a target of a graph has a name and a module
        given = [args[i] for i in taken]
        return traced(Captured, run, given, in_graph) if is_traced() else Captured.apply(*given)

    apply.computes = (key(run), key(differentiate), *non_differentiable_idx, None,  # type: ignore[attr-defined]
                      *saved_for_backward_idx, None, *dirty_idx)
    return apply


def key(graph: torch.fx.GraphModule) -> tuple[object, ...]:
    """What a graph computes: equal for two that compute the same."""
    own = [getattr(graph, node.target.split(".")[0]) for node in graph.graph.nodes
           if node.op in ("get_attr", "call_module")]
    called = [getattr(node.target, "computes", node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return graph.code, tuple(called), tuple([key(part) if isinstance(part, torch.fx.GraphModule) else id(part)
                                             for part in own])


# A condition on an integer: an upper bound, or equal to one number. Lower bounds are checks of operators' sizes.
_OF_ONE_NUMBER = re.compile(r"expression (u\d+ <=? -?\d{1,9}|-?\d{1,9} >=? u\d+|(Eq|Ne)\(u\d+, -?\d+\)) on node")

_OF_A_TRUTH = re.compile(r"expression u\d+ (>= 0|<= 1) on node")  # a truth value's number, which has no other ones


def checks_contents(graph: torch.fx.GraphModule) -> bool:
    """Whether forward checks a number that it read from a tensor, as `assert not bool(x.isnan().any())` does.

    Dynamo keeps such a check as a condition of the numbers, without its exception. Other conditions of whole numbers
    are those of sizes, which operators check by themselves.
    """
    read: dict[torch.fx.Node, bool] = {}  # nodes that depend on such a number; whether it is a whole one
    for node in graph.graph.nodes:
        found = [read[source] for source in node.all_input_nodes if source in read]
        if node.target is torch.ops.aten._assert_scalar.default:
            if found and not any(found) and _OF_A_TRUTH.search(str(node.args[1])):
                continue
            if found and (not all(found) or _OF_ONE_NUMBER.search(str(node.args[1]))):
                return True
        elif node.op == "call_method" and node.target == "item":
            source = example(node.args[0])  # which Dynamo does not note for an entry that tolist() reads
            read[node] = isinstance(example(node), torch.SymInt) and (source is None or source.dtype is not torch.bool)
        elif found and not isinstance(example(node), Tensor):
            read[node] = all(found)
    return False


