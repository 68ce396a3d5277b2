"""One step of a program against eager PyTorch: for DebugOptions(verify=True), and before an export is used in which a
torch.autograd.Function is traced through or PyTorch runs an operator.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

from onnxtrain._export import state
from onnxtrain._export.captured import Graph
from onnxtrain._export.exclusive import exclusive
from onnxtrain._export.exported import Exported
from onnxtrain._export.instead import Instead, with_copies
from onnxtrain._onnx_functions import nodes_of
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
    for node in nodes_of(proto.graph.node):
        if node.op_type == "Dropout" and node.domain == "":
            node.input[:] = [node.input[0], ratio.name, *node.input[2:]]
    proto.graph.initializer.append(ratio)
    return proto.SerializeToString()


def _kept(input: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    """A dropout that drops nothing, and gives no view of its argument."""
    return F.dropout(input, 0.0, True)


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               *rest: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *rest, **options)


_WITHOUT_DROPOUT = with_copies({F.scaled_dot_product_attention: _attention,
                                **{getattr(F, name): _kept for name in _DROPOUTS}})


def _with_grad(args: Sequence[object], every: bool) -> list[object]:
    """Copies of the arguments; all that can require a gradient do, or those that did."""
    fresh = []
    for leaf in args:
        if isinstance(leaf, Tensor):
            wants = leaf.is_floating_point() if every else leaf.requires_grad
            leaf = leaf.detach().clone().requires_grad_(wants)
        fresh.append(leaf)
    return fresh


def _run(module: Graph, call: Callable[[Sequence[object]], Sequence[Tensor]], args: Sequence[object],
         every: bool) -> tuple[dict[str, Tensor | None], list[bool]]:
    """Outputs, gradients of every input and parameter, and buffers, by name; which outputs have a gradient."""
    leaves = _with_grad(args, every)
    outputs = call(leaves)
    weights: dict[str, Tensor] = {f"grad {name}": p for name, p in module.named_parameters() if p.requires_grad}
    weights |= {f"grad of input {i}": x for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
    found: dict[str, Tensor | None] = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    generator = torch.Generator().manual_seed(0)
    roots = [o for o in outputs if o.requires_grad]
    seeds = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in roots]
    grads = torch.autograd.grad(roots, list(weights.values()), seeds, allow_unused=True) if roots and weights else ()
    found.update(dict(zip(weights, grads)) if grads else dict.fromkeys(weights))
    found.update({f"buffer {name}": b.detach().clone() for name, b in module.named_buffers()})
    return found, [o.requires_grad for o in outputs]


def _undisturbed(module: Graph, call: Callable[[Sequence[object]], Sequence[Tensor]], args: Sequence[object],
                 every: bool, written: Collection[str]) -> tuple[dict[str, Tensor | None], list[bool]]:
    """One step, of which nothing stays on the module, whose buffers and parameters of these names forward writes."""
    with (state.random_unchanged(), state.unchanged(module), state.private_buffers(module, written),
          Instead(_WITHOUT_DROPOUT)):
        return _run(module, call, args, every)


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


def compare(module: Graph, exported: Exported, args: Sequence[object], thaw: bool = False) -> list[tuple[str, float]]:
    """(what, error relative to the largest entry) of outputs, gradients and buffers; dropout is 0 in both.

    Module, buffers, gradients and random generators are as before afterwards. Raises what the engine or forward raises.
    """
    program = Program(module, exported, without_dropout(exported.model),
                      device_of((*(leaf for leaf in args if isinstance(leaf, torch.Tensor)), *module.parameters(),
                                 *module.buffers())))
    calls = lambda leaves: module(*leaves), lambda leaves: program(leaves, True)  # noqa: E731
    written = {output.target for output in exported.outputs if output.kind == "buffer"}
    with exclusive(), torch.inference_mode(False), torch.enable_grad(), \
            _every_weight(module) if thaw else contextlib.nullcontext():
        try:
            (eager, flags), (ours, own) = [_undisturbed(module, call, args, True, written) for call in calls]
        except RuntimeError:  # forward may not bear an input that wants a gradient
            (eager, flags), (ours, own) = [_undisturbed(module, call, args, False, written) for call in calls]
    rows = [("which outputs have a gradient", 0.0 if flags == own else math.inf)]
    largest = max([g.to_dense().abs().max().item() for n, g in eager.items() if n.startswith("grad")
                   and g is not None and g.numel()],
                  default=0.0)
    for name, value in eager.items():
        # A bias before a normalisation has no gradient but rounding.
        rows.append((name, _error(ours.get(name), value, 0.01 * largest if name.startswith("grad") else 0.0)))
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


def verify(module: Graph, exported: Exported, args: Sequence[object]) -> str:
    """The table of compare(). Raises VerificationError above tolerance(module)."""
    rows, limit = compare(module, exported, args), tolerance(module)
    table = "\n".join(f"  {name:<48} {error:.2e}{'' if error <= limit else '  <-- differs'}" for name, error in rows)
    if any(not error <= limit for _, error in rows):
        raise VerificationError(
            f"The engine's results differ from eager PyTorch's by more than {limit:.0e} of the largest entry. Please "
            f"report this with the smallest script that shows it. Errors relative to the largest entry:\n{table}")
    return (f"ORTModule: verify: results are equal to eager PyTorch's, within {limit:.0e} of the largest entry. Errors "
            f"relative to the largest entry:\n{table}")
