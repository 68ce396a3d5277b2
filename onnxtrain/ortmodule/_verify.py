"""One step of a program against eager PyTorch: for DebugOptions(verify=True),
and before a TorchScript export is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from onnxtrain._export import state, trees
from onnxtrain._export.exclusive import exclusive, only_here
from onnxtrain.export import Exported
from onnxtrain.ortmodule._device import device_of
from onnxtrain.ortmodule._program import Program

TOLERANCE = 1e-4  # of the largest entry, in float32 and float64
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def tolerance(module: torch.nn.Module) -> float:
    """Of the largest entry: TOLERANCE, or four roundings of the 16-bit floats that the module computes in."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if torch.is_autocast_enabled("cpu"):
        dtypes.add(torch.get_autocast_dtype("cpu"))
    return max([TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in dtypes)])


class VerificationError(RuntimeError):
    """The engine's result differs from eager PyTorch's by more than the tolerance."""


def without_dropout(model: bytes) -> bytes:
    """The same graph with the ratio of every Dropout 0."""
    proto = onnx.load_model_from_string(model)
    ratio = onnx.helper.make_tensor("verify_ratio", onnx.TensorProto.FLOAT, [], [0.0])

    def clear(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == "Dropout" and node.domain == "":
                given = list(node.input)
                del node.input[:]
                node.input.extend([given[0], ratio.name, *given[2:]])
            for attribute in node.attribute:
                for inner in ([attribute.g] if attribute.HasField("g") else attribute.graphs):
                    clear(inner)

    clear(proto.graph)
    proto.graph.initializer.append(ratio)
    return proto.SerializeToString()


@contextlib.contextmanager
def _eager_without_dropout(module: torch.nn.Module) -> Iterator[None]:
    """Enter it inside unchanged(): it changes the dropout ratios of modules."""

    def identity(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            return original(input, 0.0, True)

        return call

    attention = F.scaled_dot_product_attention

    def sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
             **options: Any) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, **options)

    with contextlib.ExitStack() as stack:
        for name in _DROPOUTS:
            stack.enter_context(state.replaced(F, name, only_here(identity(getattr(F, name)), getattr(F, name))))
        stack.enter_context(state.replaced(F, "scaled_dot_product_attention", only_here(sdpa, attention)))
        for child in module.modules():
            if isinstance(child, torch.nn.modules.dropout._DropoutNd):
                child.p = 0.0
            elif isinstance(getattr(child, "dropout", None), float):
                child.dropout = 0.0  # type: ignore[assignment]
        yield


class _Result:
    """What one step gave: rows of (name, tensor or None), and the rest, to be equal."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | None] = {}
        self.others: list[Any] = []


def _leaves_with_grad(args: tuple[Any, ...], kwargs: dict[str, Any], every: bool) -> tuple[list[Any], pytree.TreeSpec]:
    """Copies of the arguments; all that can require a gradient do, or those that did."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    fresh = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            wants = leaf.is_floating_point() if every else leaf.requires_grad
            leaf = leaf.detach().clone().requires_grad_(wants)
        fresh.append(leaf)
    return fresh, spec


def _run(module: torch.nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
         every: bool) -> _Result:
    """Outputs, gradients of every input and parameter, buffers and attributes; the module is as before afterwards."""
    result = _Result()
    leaves, spec = _leaves_with_grad(args, kwargs, every)
    trained = [p for p in module.parameters() if p.requires_grad]
    held = set(module.__dict__)
    flat, out_spec = pytree.tree_flatten(call(leaves, spec))
    weights: dict[str, Tensor] = {f"grad {name}": p for name, p in module.named_parameters() if p.requires_grad}
    weights |= {f"grad of input {i}": x for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
    result.others = [out_spec] + [leaf for leaf in flat if not isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    result.tensors.update({f"output {i}": output.detach() for i, output in enumerate(outputs)})
    generator = torch.Generator().manual_seed(0)
    roots = [o for o in outputs if o.requires_grad]
    seeds = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in roots]
    grads = torch.autograd.grad(roots, list(weights.values()), seeds, allow_unused=True) if roots and weights else ()
    result.others.append([o.requires_grad for o in outputs])
    for parameter in trained:  # forward may freeze some
        parameter.requires_grad_(True)
    result.tensors.update(dict(zip(weights, grads)) if grads else dict.fromkeys(weights))
    result.tensors.update({f"buffer {name}": b.detach().clone() for name, b in module.named_buffers()})
    fresh = {name: value for name, value in module.__dict__.items() if isinstance(value, Tensor) or name not in held}
    result.tensors.update({f"attribute {n}": v.detach() for n, v in fresh.items() if isinstance(v, Tensor)})
    return result


def _undisturbed(module: torch.nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
                 every: bool) -> _Result:
    """One step, of which nothing stays on the module."""
    with (state.random_unchanged(), state.unchanged(module), state.private_buffers(module),
          _eager_without_dropout(module)):
        return _run(module, call, args, kwargs, every)


@contextlib.contextmanager
def _every_weight(module: torch.nn.Module) -> Iterator[None]:
    """Frozen parameters may be thawed later, with the same graph."""
    frozen = [p for p in module.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def compare(module: torch.nn.Module, exported: Exported, args: tuple[Any, ...], kwargs: dict[str, Any],
            thaw: bool = False) -> list[tuple[str, float]]:
    """(what, error relative to the largest entry) of outputs, gradients, buffers and attributes; dropout is 0 in both.

    Module, buffers, gradients and random generators are as before afterwards. Raises what the engine or forward raises.
    """
    program = Program(module, exported, without_dropout(exported.model),
                      device_of((*module.parameters(), *module.buffers())))
    calls = (lambda leaves, spec: module(*pytree.tree_unflatten(leaves, spec)[0],
                                         **pytree.tree_unflatten(leaves, spec)[1]),
             lambda leaves, spec: program(trees.Leaves(leaves, pytree.tree_unflatten(leaves, spec)),
                                          torch.is_grad_enabled()))
    every = exported.modes is None  # else forward looks, and the graph is true for what it saw
    grad, inference = (True, False) if exported.modes is None else exported.modes[:2]
    with exclusive(), torch.inference_mode(inference), torch.set_grad_enabled(grad), \
            _every_weight(module) if thaw and every else contextlib.nullcontext():
        try:
            eager, ours = [_undisturbed(module, call, args, kwargs, every) for call in calls]
        except RuntimeError:  # forward may not bear an input that wants a gradient: it sets requires_grad itself
            eager, ours = [_undisturbed(module, call, args, kwargs, False) for call in calls]
    rows = [("structure", 0.0 if eager.others == ours.others else math.inf)]
    largest = max([g.to_dense().abs().max().item() for n, g in eager.tensors.items() if n.startswith("grad")
                   and g is not None and g.numel()],
                  default=0.0)
    for name, value in eager.tensors.items():
        if name.startswith("attribute") and ours.tensors.get(name) is None:
            continue  # a cache of forward's, made again each time
        # A bias before a normalisation has no gradient but rounding.
        rows.append((name, _error(ours.tensors.get(name), value, 0.01 * largest if name.startswith("grad") else 0.0)))
    return rows


def _error(ours: Tensor | None, eager: Tensor | None, least: float) -> float:
    if ours is None or eager is None:
        present = ours if eager is None else eager
        present = present.to_dense() if present is not None and present.is_sparse else present
        return 0.0 if present is None or not present.any() else math.inf
    ours, eager = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in (ours, eager)]
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return math.inf
    if not ours.numel():
        return 0.0
    ours, eager = ours.double(), eager.double()
    finite = eager.isfinite()
    if (not torch.equal(ours[~finite].nan_to_num(1.5), eager[~finite].nan_to_num(1.5))
        or not ours[finite].isfinite().all()):
        return math.inf
    if not finite.any():
        return 0.0
    scale = max(eager[finite].abs().max().item(), least, 1e-12)
    return ((ours - eager)[finite].abs().max() / scale).item()


def verify(module: torch.nn.Module, exported: Exported, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The table of compare(). Raises VerificationError above tolerance(module)."""
    rows, limit = compare(module, exported, args, kwargs), tolerance(module)
    table = "\n".join(f"  {name:<48} {error:.2e}{'' if error <= limit else '  <-- differs'}" for name, error in rows)
    if any(not error <= limit for _, error in rows):
        raise VerificationError(f"onnxtrain differs from eager PyTorch (relative to the largest entry):\n{table}")
    return f"verify: equal to eager PyTorch (relative to the largest entry)\n{table}"
