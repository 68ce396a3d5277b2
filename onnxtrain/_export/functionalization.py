"""Changes in place, views and aliases, made functional by PyTorch's own functionalization while a graph is traced.

export.py runs the graph of Dynamo on the tensors that Functionalized.wrap() gives: what the trace records writes
nothing, each later reader of a changed tensor or of its views reads the new value, and what the graph's inputs hold
afterwards are further values. What a functional graph cannot say of gradients is refused.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor

from onnxtrain import _torch
from onnxtrain._export import messages
from onnxtrain._export.errors import Untraceable
from onnxtrain._torch import FunctionalTensor, FunctionalTensorMode, OpOverload, pytree

aten = torch.ops.aten
_DROPOUTS = frozenset((aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default,
                       aten.feature_alpha_dropout.default))
_IN_PLACE = {aten.dropout_.default: aten.dropout.default, aten.alpha_dropout_.default: aten.alpha_dropout.default,
             aten.feature_dropout_.default: aten.feature_dropout.default,
             aten.feature_alpha_dropout_.default: aten.feature_alpha_dropout.default}
# Composite operators that are traced in parts: those that may return an argument, which their schemas do not say (left
# whole, their results would stand for the argument from then on), and those that join tensors.
_IN_PARTS = frozenset(getattr(getattr(aten, name), overload) for name in (
    "type_as", "broadcast_tensors", "sum_to_size", "atleast_1d", "atleast_2d", "atleast_3d", "to_dense",
    "cartesian_prod", "column_stack", "hstack", "vstack", "dstack") for overload in getattr(aten, name).overloads())
# But under autocast, which has rules for these and none for their parts: those that raise, and those that have no
# translation, for which the program would be traced once more.
_IN_PARTS_UNCAST = frozenset(getattr(getattr(aten, name), overload) for name in (
    "inverse", "linalg_inv", "linalg_cholesky", "linalg_solve", "linalg_solve_ex", "linalg_lu_factor",
    "linalg_ldl_factor", "tensordot", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    ) for overload in getattr(aten, name).overloads())
# In place, of floats: the results are floats, which eager's autograd follows, and those of the plain operators are not.
_COMPARES = frozenset(f"aten::{name}_" for name in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
                                                    "logical_xor", "logical_not"))


class _Memory:
    """The tensors of one storage, and whether one of them has had a value with a gradient.

    Autograd knows two of them as views of one another, unless one was made by detach() or inside torch.no_grad(): each
    such one begins a family of its own.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage  # held, so that no other one gets its address
        self._aliases: dict[int, tuple[weakref.ref[FunctionalTensor], int]] = {}  # and its family
        self.differentiable = False
        self.elements: int | None = None
        self.parameter: str | None = None  # the name of the one that it is
        self.trace: str | None = None  # of the latest write
        self.given = False  # whether it is an input's
        self.inputs: set[int | None] = set()  # the families of inputs
        self.stopped = False  # whether detach() stands between two of the tensors in the graph

    def add(self, tensor: FunctionalTensor, sources: Sequence[FunctionalTensor]) -> None:
        """A tensor that was made of others."""
        if self.elements is None:
            self.elements = _elements(tensor)  # of the first one, which is the whole
        if self._family(tensor) is None:
            families = [family for source in sources if (family := self._family(source)) is not None]
            self._aliases[id(tensor)] = weakref.ref(tensor), families[0] if families else len(self._aliases)
        self.differentiable = self.differentiable or _wants_gradient(tensor)

    def _family(self, tensor: FunctionalTensor) -> int | None:
        alias, family = self._aliases.get(id(tensor), (None, None))
        return family if alias is not None and alias() is tensor else None

    def has_strangers(self, tensor: FunctionalTensor) -> bool:
        """Whether there are tensors that autograd does not know as views of this one."""
        return any(alias() is not None and family != self._family(tensor) for alias, family in self._aliases.values())

    def give(self, tensor: FunctionalTensor) -> None:
        """Notes an input."""
        self.given = True
        self.inputs.add(self._family(tensor))

    def is_behind(self, tensor: FunctionalTensor) -> bool:
        """Whether it is an input's memory, behind detach() or .data: in eager, what is written has no gradient in the
        input itself.
        """
        return self.given and self._family(tensor) not in self.inputs

    def lose_gradient(self, tensor: FunctionalTensor) -> None:
        """Notes of such a tensor and its views that a value was written without the gradient that eager has there."""
        for alias, family in self._aliases.values():
            if family == self._family(tensor) and (other := alias()) is not None:
                other.lacks_gradient = True

    def follow_given(self, tensor: FunctionalTensor) -> None:
        """Notes of a tensor and its views that they hold what may have a gradient in a later step."""
        for alias, family in self._aliases.values():
            if family == self._family(tensor) and (other := alias()) is not None:
                other.follows_given = True

    def has_others(self, tensor: FunctionalTensor) -> bool:
        """Whether there are further tensors of this storage."""
        alive = [alias() for alias, _ in self._aliases.values()]
        return any(other is not None and other is not tensor for other in alive)

    def is_written(self) -> None:
        """Makes the aliases again at once. Left alone, each is made where it is read next: within torch.no_grad(), say,
        where it would have no gradient for later readers either.
        """
        self.trace = torch.fx.traceback.get_current_meta().get("stack_trace")
        for alias, _ in self._aliases.values():
            if (tensor := alias()) is not None:
                _torch.sync(tensor)
                self.differentiable = self.differentiable or _wants_gradient(tensor)


class Functionalized(FunctionalTensorMode):  # type: ignore[misc]
    """Entered around the call of a graph, on tensors of wrap().

    Autograd does not see a change behind detach() or .data, or inside torch.no_grad(): in eager PyTorch the gradient
    of what was there before still flows, and the functional graph has the new value alone. Raises Untraceable there.
    """

    def __init__(self) -> None:
        super().__init__(pre_dispatch=True, export=True)
        self._wrapped: dict[int, tuple[Tensor, FunctionalTensor]] = {}  # by the id of a tensor
        self._memories: dict[int, _Memory] = {}  # by the address of a storage
        self._restores = False  # what is written now depends on what was there before
        self.checked: list[Tensor] = []  # conditions without which torch would raise

    def wrap(self, value: Any) -> Any:
        """A tensor of the trace as one that this mode follows; anything else as it is."""
        if not isinstance(value, Tensor) or isinstance(value, FunctionalTensor):
            return value
        if id(value) not in self._wrapped:
            self._wrapped[id(value)] = value, FunctionalTensor.to_functional(value)
            self._memory(self._wrapped[id(value)][1]).give(self._wrapped[id(value)][1])
            self._wrapped[id(value)][1].follows_given = _is_real(value)
        return self._wrapped[id(value)][1]

    def wrap_parameter(self, parameter: Tensor, name: str) -> Tensor:
        """wrap() of a tensor that a message calls by its name."""
        wrapped = self.wrap(parameter)
        self._memory(wrapped).parameter = name
        return wrapped

    def unwrap(self, values: object) -> Any:
        """What tensors of this mode hold now, as tensors of the trace."""
        _refuse_lacking(_functional(values))
        return pytree.tree_map_only(FunctionalTensor, lambda tensor: tensor.from_functional(), values)

    def changed(self) -> list[tuple[Tensor, Tensor, str | None]]:
        """Tensors that were given to wrap() and hold another value now, that one, and the stack at the last write."""
        found = [(before, tensor.from_functional(), self._memory(tensor).trace)
                 for before, tensor in self._wrapped.values()]
        return [each for each in found if each[1] is not each[0]]

    @staticmethod
    def settle(program: torch.export.ExportedProgram) -> None:
        """Puts right what this trace leaves in a program: nothing."""

    def __torch_dispatch__(self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, object] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._linalg_check_errors.default:  # a matrix without an inverse, say
            with self:
                self.checked.append((args[0] == 0).all())
            return None
        if func in _DROPOUTS or func in _IN_PLACE:
            return self._dropout(func, types, args, kwargs)
        if func in _IN_PARTS or func in _IN_PARTS_UNCAST and not _torch.is_any_autocast_enabled():
            with self:
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        follows = func is not aten.detach.default and torch.is_grad_enabled()
        if func is aten.detach_.default and (self._memory(args[0]).has_others(args[0]) or any(
                args[0] is given for _, given in self._wrapped.values())):
            raise Untraceable("The module calls detach_() on a tensor that it was given, holds, or has views of.")
        if func in (aten.detach.default, aten.detach_.default) and not _wants_gradient(args[0]):
            if func is aten.detach_.default:
                return args[0]
            if _may_want_gradient(args[0]):
                self._memory(args[0]).stopped = not self._memory(args[0]).given
            else:
                func = aten.alias.default  # later writes may bring a gradient
        written, given = _written(func, args, kwargs), _functional((args, kwargs))
        if torch.is_grad_enabled():
            _refuse_lacking([tensor for tensor in given if not any(tensor is other for other in written)])
        for tensor in written:
            self._refuse_hidden(func, tensor)
            if torch.is_grad_enabled() and self._memory(tensor).is_behind(tensor):
                args, kwargs = self._without_gradients(tensor, args, kwargs)
                given = _functional((args, kwargs))
            if torch.is_grad_enabled() and any(map(_may_want_gradient, given)):
                self._refuse_hiding(func, tensor)
            if torch.is_grad_enabled() and any(map(_wants_gradient, given)):
                self._refuse_strangers(func, tensor)
                if func._schema.name in _COMPARES:
                    raise Untraceable(f"The module compares in place ({func}), with gradients; a graph has none there.")
        before = self._before(args[0]) if written and _overwrites(func) else None
        plain = _plain_form(func) if len(written) == 1 and written[0] is args[0] else None
        result = super().__torch_dispatch__(plain or func, types, args, kwargs)
        if plain is not None:
            result = _replace(args[0], result)
        if before is not None:
            self._restores = True
            with self:
                args[0].copy_(torch.where(torch.ones((), dtype=torch.bool, device=before.device), args[0], before))
            self._restores = False
        sources = given if follows else []
        for leaf in _functional(result):
            self._memory(leaf, sources)
            leaf.follows_given = _is_real(leaf) and any(
                map(_may_want_gradient, [leaf, *sources]))
        for tensor in written:
            memory = self._memory(tensor)
            memory.is_written()
            memory.differentiable = memory.differentiable and func is not aten.detach_.default
        return result

    def _without_gradients(self, tensor: FunctionalTensor, args: tuple[object, ...],
                           kwargs: dict[str, object]) -> tuple[tuple[Any, ...], dict[str, object]]:
        """Arguments of a write into this tensor, which is_behind(): the input gets the values alone."""
        def cut(leaf: object) -> object:
            if not isinstance(leaf, FunctionalTensor) or leaf is tensor or not (
                    _wants_gradient(leaf) or _may_want_gradient(leaf)):
                return leaf
            self._memory(tensor).lose_gradient(tensor)
            return aten.detach.default(leaf)

        with self:
            return pytree.tree_map(cut, (args, kwargs))

    def _dropout(self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...],
                 kwargs: dict[str, object]) -> Tensor:
        """One that drops nothing is its argument; torch forbids changes of the result of any, which may be that."""
        source, p, train = args
        if not train or p == 0:
            return source
        dropped = super().__torch_dispatch__(_IN_PLACE.get(func, func), types, args, kwargs)
        with self:
            if func in _IN_PLACE:
                return source.copy_(dropped)
            result = FunctionalTensor.to_functional(dropped.from_functional())
        self._memory(result)
        return result

    def _before(self, tensor: FunctionalTensor) -> Tensor | None:
        """The value of a tensor whose elements are all overwritten: its gradient is zero then, and not None."""
        value = traced_value(tensor)
        if not (torch.is_grad_enabled() and value.requires_grad and _elements(tensor) == self._memory(tensor).elements
                and not self._restores):
            return None
        with self:
            return tensor.clone()

    def _memory(self, tensor: FunctionalTensor, sources: Sequence[FunctionalTensor] = ()) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.setdefault(storage._cdata, _Memory(storage))
        memory.add(tensor, sources)
        return memory

    def _refuse_hidden(self, func: OpOverload, tensor: FunctionalTensor) -> None:
        if (func is not aten.detach_.default and self._memory(tensor).differentiable
                and not (torch.is_grad_enabled() and _wants_gradient(tensor))):
            if (name := self._memory(tensor).parameter) is not None:
                raise Untraceable(f"The module changes its parameter {name} in place inside forward ({func}).")
            raise Untraceable(f"The module changes a tensor in place ({func}) without autograd seeing it, through "
                              "detach() or .data or inside torch.no_grad(), while its gradient still flows; a graph "
                              "cannot express that.")

    def _refuse_strangers(self, func: OpOverload, tensor: FunctionalTensor) -> None:
        if self._memory(tensor).has_strangers(tensor):
            raise Untraceable(f"The module writes a value with a gradient ({func}) into memory that it also holds "
                              "behind detach() or .data or out of torch.no_grad(), where eager has no gradient; "
                              "a graph cannot express that.")

    def _refuse_hiding(self, func: OpOverload, tensor: FunctionalTensor) -> None:
        """Before a write of a value that may have a gradient in a later step."""
        memory = self._memory(tensor)
        if memory.stopped:
            raise Untraceable(f"The module writes a value that may have a gradient ({func}) into memory that it holds "
                              "behind detach(); a graph cannot express that.")
        if not memory.given:
            self._refuse_strangers(func, tensor)
        memory.follow_given(tensor)


class Batched(contextlib.AbstractContextManager["Batched"]):
    """In the place of Functionalized, for a graph with torch.vmap(), whose tensors functionalization cannot follow in a
    trace (2.13).
    """

    checked = ()

    def __exit__(self, *error: object) -> None:
        return None

    def wrap(self, value: object) -> Any:
        return value

    def wrap_parameter(self, parameter: Tensor, name: str) -> Tensor:
        return parameter

    def unwrap(self, values: object) -> Any:
        return values

    def changed(self) -> list[tuple[Tensor, Tensor, str | None]]:
        return []

    @staticmethod
    def settle(program: torch.export.ExportedProgram) -> None:
        """Raises Untraceable where a program writes in place."""
        for part in program.graph_module.modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                    with messages.raised_by(node):
                        raise Untraceable("The module calls torch.vmap() and changes a tensor in place "
                                          f"({node.target}).")


def is_batched(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's calls torch.vmap()."""
    return any("_vmap_increment_nesting" in str(getattr(node.target, "__name__", "")) for node in graph.graph.nodes)


def follow(graph: torch.fx.GraphModule) -> None:
    """Has operators of a graph that take parts of it, as torch.cond takes branches, work in our mode as in PyTorch's:
    they have a rule for each class of modes.
    """
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            rules = getattr(node.target, "python_key_table", {})
            if FunctionalTensorMode in rules and Functionalized not in rules:
                node.target.py_impl(Functionalized)(rules[FunctionalTensorMode])


def _overwrites(func: OpOverload) -> bool:
    """Whether an operator in place leaves nothing of what was there."""
    return (func in (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
            or torch.Tag.nondeterministic_seeded in func.tags and func not in _IN_PLACE)


@functools.cache
def _plain_form(func: OpOverload) -> OpOverload | None:
    """Of an operator that writes into its first argument, aten::mul_ say, the one that makes a new tensor."""
    library, name = func._schema.name.split("::")
    if (library != "aten" or not name.endswith("_") or torch.Tag.inplace_view in func.tags
            or func is aten.detach_.default):
        return None
    plain = getattr(getattr(aten, name[:-1], None), func._overloadname, None)
    takes = [[(each.name, str(each.type)) for each in form._schema.arguments] for form in (func, plain) if form]
    return plain if takes[0] == takes[-1] else None  # pow_.Scalar and pow.Scalar are two things


def _replace(tensor: FunctionalTensor, value: FunctionalTensor) -> FunctionalTensor:
    """Gives a tensor a value, as functionalization does for an operator in place. It would first run the operator on
    tensors of the same sizes, which Dynamo has done: with symbolic ones that takes half of some exports.
    """
    _torch.functionalize_replace(tensor.elem, traced_value(value))
    _torch.functionalize_commit_update(tensor.elem)
    _torch.functionalize_sync(tensor.elem)
    return tensor


def _written(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[FunctionalTensor]:
    """The tensors that an operator writes into."""
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = dict(zip([argument.name for argument in arguments], args)) | kwargs
    found = [given.get(argument.name) for argument in arguments
             if argument.alias_info is not None and argument.alias_info.is_write]
    return _functional(found)


def _functional(values: object) -> list[FunctionalTensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, FunctionalTensor)]


def _elements(tensor: FunctionalTensor) -> int | None:
    """How many, for the sizes of the trace; None where they depend on contents."""
    number: int | torch.SymInt = traced_value(tensor).numel()
    return number.node.hint if isinstance(number, torch.SymInt) else number


def _wants_gradient(tensor: FunctionalTensor) -> bool:
    return bool(traced_value(tensor).requires_grad)


def _refuse_lacking(tensors: Sequence[FunctionalTensor]) -> None:
    if any(getattr(tensor, "lacks_gradient", False) for tensor in tensors):
        raise Untraceable("The module writes a value with a gradient through .data or detach(), and reads it there; a "
                          "graph has the value alone.")


def _is_real(tensor: Tensor) -> bool:
    """Whether tensors of its dtype have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _may_want_gradient(tensor: FunctionalTensor) -> bool:
    """Whether it follows from a float of the caller's or of the module, which may want a gradient in a later step."""
    return getattr(tensor, "follows_given", False)


def traced_value(tensor: Tensor) -> Tensor:
    """The tensor of the trace in one of ours: what is asked of that one is not recorded."""
    return _torch.from_functional_tensor(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor
