"""torch.autograd.grad() inside forward, as forces and gradient penalties want it: its operators as nodes of the graph.

export.py enters Differentiated in the place of Functionalized where a graph calls it. Autograd then runs while the
graph is traced, on the tensors of the trace, so that the operators of its formulas are recorded like those of forward,
and the engine differentiates them once more where the module is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onnxtrain._export import views
from onnxtrain._export.errors import Untraceable
from onnxtrain._export.functionalization import Functionalized, traced_value
from onnxtrain._torch import FunctionalTensor, OpOverload, decomposition_table, dispatch_has_kernel, pytree

aten = torch.ops.aten
Tensors = Tensor | Sequence[Tensor]


def differentiates(graph: torch.fx.GraphModule) -> bool:
    """Whether what has a `graph` of Dynamo's calls torch.autograd.grad() in it."""
    return any(node.target is torch.autograd.grad for node in graph.graph.nodes)


class Differentiated(Functionalized):
    """Functionalized, for a graph that differentiates.

    Composite operators are traced in parts: what autograd saves inside one would be no value of the trace.
    """

    def __init__(self) -> None:
        super().__init__()
        self._traced: dict[tuple[object, ...], Tensor] = {}  # tensors of the trace, by their places in memory
        self._differentiating = False

    def want_gradient(self, tensor: Tensor) -> None:
        """Has the trace see a tensor of forward's as one that asks for its gradient."""
        traced_value(tensor).requires_grad_()

    def grad(self, outputs: Tensors, inputs: Tensors, grad_outputs: Any = None, retain_graph: bool | None = None,
             create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
             is_grads_batched: bool = False, materialize_grads: bool = False) -> tuple[Tensor | None, ...]:
        """torch.autograd.grad(), whose graph is kept in any case.

        Raises:
            Untraceable: several gradients at once are asked for.
        """
        if is_grads_batched:
            raise Untraceable("The module calls torch.autograd.grad(is_grads_batched=True) inside forward.")
        results = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        if grad_outputs is None or isinstance(grad_outputs, Tensor):
            grad_outputs = [grad_outputs] * len(results)
        seeds = [torch.ones_like(result) if seed is None else seed
                 for result, seed in zip(results, grad_outputs, strict=True)]
        wanted = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        traced = [[traced_value(tensor) for tensor in each] for each in (results, wanted, seeds)]
        self._differentiating = True
        try:
            found: Sequence[Tensor | None] = torch.autograd.grad(
                traced[0], traced[1], traced[2], retain_graph=True, create_graph=True, allow_unused=allow_unused,
                materialize_grads=materialize_grads)
        finally:
            self._differentiating = False
        made = tuple([self.wrap(tensor) for tensor in found])
        return made if create_graph else tuple([tensor if tensor is None else tensor.detach() for tensor in made])

    def __torch_dispatch__(self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, object] | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func) or func in _SAVING:
            with self:
                decompose = decomposition_table[func] if func in _SAVING else func.decompose
                parts = decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
        if self._differentiating:  # what autograd saved of a result comes back as another tensor
            args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: self._traced.get(_place(tensor), tensor),
                                                (args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(traced_value(leaf))
        return result

    def wrap(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, FunctionalTensor):
            self._note(value)
        return super().wrap(value)

    def _note(self, tensor: Tensor) -> None:
        self._traced[_place(tensor)] = tensor

    @staticmethod
    def settle(program: torch.export.ExportedProgram) -> None:
        """Autograd's formulas write into tensors that they have just made: has a program make other ones.

        Raises:
            Untraceable: a formula writes into a view.
        """
        graph, order = program.graph, {node: i for i, node in enumerate(program.graph.nodes)}
        for node in list(graph.nodes):
            if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
                continue
            name, overload = node.target._schema.name.split("::")[1], node.target._overloadname
            plain = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
            written: Any = node.args[0]
            if plain is None or plain is node.target or views.makes_views(written.target) or any(
                    order[user] > order[node] for user in written.users):
                raise Untraceable("The module calls torch.autograd.grad() inside forward, whose formula writes in "
                                  f"place ({node.target}).")
            node.target = plain


def _place(tensor: Tensor) -> tuple[object, ...]:
    """By the sizes of the call that is traced: a symbol may have become a number meanwhile."""
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (tensor.untyped_storage()._cdata, *[x.node.hint if isinstance(x, torch.SymInt) else x for x in sizes])


def _is_composite(func: OpOverload) -> bool:
    return (isinstance(func, OpOverload) and func.namespace == "aten" and func not in _OF_SIZES
            and dispatch_has_kernel(func.name(), "CompositeImplicitAutograd"))


# The formulas of these read statistics that are no results of forward's, of which a graph would have no gradient.
_SAVING = frozenset((aten.native_layer_norm.default, aten.native_group_norm.default))
_OF_SIZES = frozenset((aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default))
