"""Changes in place, and regions without gradient, in a traced program: marked where a graph can say them, else refused.

export.py calls both between torch.export and torch.onnx.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtrain._export import views
from onnxtrain._export.errors import ExportError, Untraceable


def _no_grad_regions(program: torch.export.ExportedProgram) -> Iterator[tuple[torch.fx.Graph, torch.fx.Node]]:
    for child in program.graph_module.modules():
        if isinstance(child, torch.fx.GraphModule):
            for node in list(child.graph.nodes):
                if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
                    yield child.graph, node


def mark_no_grad(program: torch.export.ExportedProgram) -> None:
    """A detach after every result of a torch.no_grad() region, which the exporter is about to inline."""
    renamed: dict[str, str] = {}
    for graph, region in _no_grad_regions(program):
        for result in list(region.users):
            with graph.inserting_after(result):
                barrier = graph.call_function(torch.ops.aten.detach.default, (result,))
            barrier.meta.update(result.meta)
            result.replace_all_uses_with(
                barrier, delete_user_cb=lambda user, barrier=barrier: user is not barrier)  # type: ignore[misc]
            renamed[result.name] = barrier.name
    for output in program.graph_signature.output_specs:
        if getattr(output.arg, "name", None) in renamed:
            output.arg.name = renamed[output.arg.name]
    program.graph_module.recompile()


def check(program: torch.export.ExportedProgram) -> None:
    """Refuses in-place changes that autograd does not see, on tensors whose gradient it does: no graph can say that.

    Nor can it say a complex number: torch.onnx writes it as two real ones.
    """
    for result in pytree.tree_leaves(next(node for node in program.graph.nodes if node.op == "output").args):
        if isinstance(result, torch.fx.Node) and isinstance(value := result.meta.get("val"), torch.Tensor) \
                and value.is_complex():
            raise ExportError(f"The module returns, or keeps, a tensor of {value.dtype}, which a graph cannot hold.")
    kinds = {spec.arg.name: spec.kind.name for spec in program.graph_signature.input_specs}
    for scope in _scopes(views.Scope(program.graph_module)):
        for node in scope.module.graph.nodes:
            if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
                continue
            owner, hidden = _changed(node, scope)
            kind = kinds.get(getattr(owner, "name", None))
            if kind == "PARAMETER":
                text = f"The module changes its parameter {owner} in place ({node.target}) inside forward."
                # TorchScript's exporter would differentiate the change; one batch does not always show that.
                raise ExportError(text) from Untraceable(text)
            if kind == "CONSTANT_TENSOR":
                text = f"The module changes {owner.name}, a tensor that is not a buffer, in place ({node.target})."
                raise ExportError(text) from Untraceable(text)
            if hidden and kind != "BUFFER" and node.meta["val"].is_floating_point():
                raise ExportError(
                    f"The module changes a tensor in place ({node.target}) without autograd seeing it, through "
                    "detach() or .data or inside torch.no_grad(), while its gradient still flows; a graph cannot "
                    "express that."
                )


def written(leaves: Sequence[torch.Tensor], before: Sequence[tuple[int, torch.Size]]) -> list[torch.Tensor]:
    """Those of the arguments that forward has changed in place; before: their version counters and shapes.

    Raises Untraceable where it is the shape.
    """
    if any([leaf.shape != shape for leaf, (_, shape) in zip(leaves, before)]):
        raise Untraceable("The module changes the shape of an argument in place; a graph would lose that.")
    return [leaf for leaf, (version, _) in zip(leaves, before) if leaf._version != version]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that counts its versions, as no tensor of inference mode does."""
    with torch.inference_mode(False):
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _scopes(scope: views.Scope) -> Iterator[views.Scope]:
    """A graph and those of the regions in it, at any depth, which run under another mode."""
    yield scope
    for node in scope.module.graph.nodes:
        if (found := views.region(node, scope)) is not None:
            yield from _scopes(found[1])


def _changed(node: torch.fx.Node, scope: views.Scope) -> tuple[Any, bool]:
    """The node that made the tensor that an operator changes, outside of all regions; whether the change hides from
    autograd, which sees the tensor: it is behind a detach(), or in a no_grad() region that the tensor is older than.
    """
    out = node.kwargs.get("out")
    owner, detached = _owner(node.args[0] if out is None else out)
    hidden = detached and scope.grad is not False
    while scope.outside is not None and owner in scope.inputs:
        hidden |= scope.grad is False and scope.outside.grad is not False
        out = scope.inputs.get(out)
        owner, scope = _owner(scope.inputs[owner])[0], scope.outside
    # Later readers of a whole tensor that is written by out= read the region's result, unless through a view.
    seen = owner is out and _has_no_gradient(owner) and not any(map(views.aliases, owner.users))
    return owner, hidden and not seen


def _has_no_gradient(node: torch.fx.Node) -> bool:
    """Whether this is an argument that wants no gradient, or a new tensor made of no other, as by torch.zeros()."""
    if node.op == "placeholder":
        return not node.meta["val"].requires_grad
    return node.op == "call_function" and not any(isinstance(made_of.meta.get("val"), torch.Tensor)
                                                  for made_of in node.all_input_nodes)


def _owner(node: Any) -> tuple[Any, bool]:
    """Through views and in-place results to the node that made the storage; whether a detach lies between."""
    detached = False
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and node.args and views.aliases(node):
        detached |= node.target is torch.ops.aten.detach.default
        node = node.args[0]
    return node, detached

