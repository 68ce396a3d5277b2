"""The loss outside the module: torch's cross_entropy of scores that the engine made runs in the engine as well.

Over a large vocabulary torch's own loss writes the scores three times over, in fresh memory at every step, and takes
longer than the rest of a small model's. So two entries of torch's dispatcher are replaced (`torch.library`) when the
engine first hands out large scores with a gradient: they look at where scores come from, and hand everything else to
the kernels that stood there before. Called by _program.py. ONNXTRAIN_DISABLE=outside_loss leaves it out.

Scores without any reference when backward runs, as in `cross_entropy(model(x), target)`, hold their gradient
afterwards: one tensor of the vocabulary's size in place of two.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onnxtrain import _C, options

OPERATOR = "aten::cross_entropy_loss"
LEAST_ELEMENTS = 1 << 18  # a smaller loss is cheap, and looking at it is not free
_REDUCTIONS = ("none", "mean", "sum")
WATCHED = "onnxtrain_scores"  # in the metadata of the engine's node: a step of _deferred.py, told of losses
_MAX_NODES = 8  # between the scores and the engine's node: views, slices, copies
_log = logging.getLogger("onnxtrain")
_library: torch.library.Library | None = None


def _source(scores: Tensor) -> Tensor:
    """The tensor that they are a view of, or they themselves."""
    base = scores._base
    return scores if base is None else base


def saved_by_hooks() -> bool:
    """Whether code of the user's packs what autograd saves in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _saved(ctx: Any) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
    """The saved scores and target, and the references to scores where their graph goes with this backward: how many
    refer to scores, to what they are a view of, and to their memory, from Python and from C++; whether other processes
    may. _Loss and _Probe both count here, and no tensor is passed to a Python function on the way: CPython keeps one
    more reference for such a call while Dynamo's frame evaluation is installed.
    """
    scores, target = ctx.saved_tensors
    if ctx.alone is None or torch._C._autograd._get_current_graph_task_keep_graph():
        return scores, target, None
    source = scores if scores._base is None else scores._base
    memory = source.untyped_storage()
    return scores, target, (
        scores._use_count(), sys.getrefcount(scores), weakref.getweakrefcount(scores),
        source._use_count(), sys.getrefcount(source), weakref.getweakrefcount(source),
        torch._C._storage_Use_Count(memory._cdata), sys.getrefcount(memory), weakref.getweakrefcount(memory),
        memory.is_shared())


class _Probe(torch.autograd.Function):
    """Saves its input as _Loss does, and counts in backward who refers to it."""

    @staticmethod
    def forward(ctx: Any, found: list[tuple[int, ...]], scores: Tensor, target: Tensor) -> Tensor:
        ctx.found, ctx.alone = found, ()
        ctx.save_for_backward(scores, target)
        return scores.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.found.append(_saved(ctx)[2])
        return None, None, None


class _Copy(torch.autograd.Function):
    """Stands for the engine's node in a probe."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _probe(view: bool, hold: Any) -> tuple[int, ...]:
    """The references of scores that hold(source, scores) keeps in its result until backward is over."""
    found: list[tuple[int, ...]] = []

    def forward() -> tuple[Tensor, Any]:
        source = _Copy.apply(torch.zeros(2, 2, dtype=torch.float32, device="cpu", requires_grad=True))
        scores = source.view(-1, 2) if view else source
        return _Probe.apply(found, scores, torch.zeros(2, device="cpu")), hold(source, scores)

    loss, held = forward()
    loss.backward()
    del held
    return found[0]


_HOLDERS = {  # who may still read scores, each of which must show in their references
    "a variable": lambda source, scores: scores,
    "what they are a view of": lambda source, scores: source,
    "a view": lambda source, scores: source.view(-1),
    "a detached tensor": lambda source, scores: scores.detach(),
    "memory": lambda source, scores: source.untyped_storage(),
    "NumPy": lambda source, scores: scores.detach().numpy(),
    "a weak reference": lambda source, scores: weakref.ref(scores),
    "another gradient": lambda source, scores: scores.square(),
    "a gradient of what they are a view of": lambda source, scores: source.square(),
    "DLPack": lambda source, scores: torch.utils.dlpack.to_dlpack(scores.detach()),
}


@functools.lru_cache(maxsize=2)
def _references_alone(view: bool) -> tuple[int, ...] | None:
    """What _saved() counts in backward where only the saved tensor refers to scores; None where that cannot be told,
    with this torch, from scores that other code holds."""
    found: list[tuple[int, ...]] = []

    def probe() -> None:
        try:
            alone = None if saved_by_hooks() else _probe(view, lambda source, scores: None)
            unseen = [name for name, hold in _HOLDERS.items() if _probe(view, hold) == alone]
        except Exception as error:  # counters of torch's own, which another version may not have
            unseen = [str(error)]
        if unseen:
            _log.debug("gradients of scores lie apart from them: %s", ", ".join(unseen))
        else:
            found.extend(() if alone is None else (alone,))

    thread = threading.Thread(target=probe)  # where no mode or hook of the caller's is in force
    thread.start()
    thread.join()
    return found[0] if found else None


class _Loss(torch.autograd.Function):
    """Mean, sum or each of the cross-entropies of rows of scores, by a session. alone: what _saved() counts for scores
    whose gradient may be written over them, or None."""

    @staticmethod
    def forward(ctx: Any, session: _C.Session, scores: Tensor, target: Tensor, reduction: str, ignore_index: int,
                alone: tuple[int, ...] | None) -> Tensor:
        (loss,), ctx.run = session.forward((scores, target), b"\1\0", 0)
        ctx.reduction, ctx.ignore_index = reduction, ignore_index
        ctx.alone, ctx.spent = alone, False
        ctx.save_for_backward(scores, target)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scores, target, references = _saved(ctx)
        run, ctx.run = ctx.run, None
        differentiable = torch.is_grad_enabled()
        if run is not None and not differentiable:
            ctx.spent = references is not None and references == ctx.alone
            found = run.backward([(scores, target)[i] for i in run.saved_inputs], (grad,),
                                 (0,) if ctx.spent else ())[0]
            found = found.detach() if found is scores else found
        elif ctx.spent:
            raise RuntimeError("cross_entropy_loss: an earlier backward failed and has overwritten the scores: "
                               "run forward again")
        else:  # a second time, or to be differentiated again: torch computes it
            with torch.enable_grad():
                leaf = scores if differentiable else scores.detach().requires_grad_()
                loss = F.nll_loss(F.log_softmax(leaf.float(), 1), target, reduction=ctx.reduction,
                                  ignore_index=ctx.ignore_index)
                found = torch.autograd.grad(loss, leaf, grad, create_graph=differentiable)[0]
        return None, found, None, None, None, None


@functools.lru_cache(maxsize=64)
def _session(dtype: torch.dtype, reduction: str, ignore_index: int) -> _C.Session:
    """Of (N, C) scores and N labels; the loss is float32."""
    import onnx
    from onnx import helper

    kinds = {torch.float32: onnx.TensorProto.FLOAT, torch.bfloat16: onnx.TensorProto.BFLOAT16,
             torch.float16: onnx.TensorProto.FLOAT16}
    nodes = []
    if dtype != torch.float32:
        nodes.append(helper.make_node("Cast", ["scores"], ["wide"], to=onnx.TensorProto.FLOAT))
    nodes.append(helper.make_node("SoftmaxCrossEntropyLoss", ["wide" if nodes else "scores", "target"], ["loss"],
                                  name="cross_entropy_loss", reduction=reduction, ignore_index=ignore_index))
    graph = helper.make_graph(
        nodes, "cross_entropy_loss",
        [helper.make_tensor_value_info("scores", kinds[dtype], ["N", "C"]),
         helper.make_tensor_value_info("target", onnx.TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, ["N"] if reduction == "none" else [])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return _C.Session(model.SerializeToString())


def _maker(scores: Tensor, kinds: tuple[type, ...]) -> Any:
    """The engine's node that made them, perhaps with views and copies in between; None where none did."""
    node = scores.grad_fn
    for _ in range(_MAX_NODES):
        if node is None or type(node) in kinds:
            return node
        following = node.next_functions
        node = following[0][0] if following else None
    return None


def _in_engine(kinds: tuple[type, ...], dtypes: tuple[torch.dtype, ...], is_last: bool, scores: Tensor, target: Tensor,
               weight: Tensor | None, reduction: int, ignore_index: Any, label_smoothing: float) -> Tensor | None:
    """The loss, where the engine is to compute it. is_last: torch's own kernel does not come here again."""
    if (type(scores) is not Tensor or weight is not None or label_smoothing or scores.numel() < LEAST_ELEMENTS
            or target.dtype is not torch.int64 or type(target) is not Tensor or type(ignore_index) is not int
            or not torch.is_grad_enabled() or (maker := _maker(scores, kinds)) is None):
        return None
    is_ours = scores.dtype in dtypes and scores.dim() == 2 and target.dim() == 1
    if (is_ours or is_last) and (step := maker.metadata.get(WATCHED)) is not None:
        step.note(scores)
    if not is_ours:
        return None
    name = _REDUCTIONS[reduction]
    # Of memory that the engine made only tensors know; what hooks pack and unpack is theirs.
    alone = _references_alone(scores._base is not None) if type(_source(scores).grad_fn) in kinds else None
    if alone is not None and saved_by_hooks():
        alone = None
    try:
        return _Loss.apply(_session(scores.dtype, name, ignore_index), scores, target, name, ignore_index, alone)
    except (ValueError, TypeError, IndexError, BufferError) as error:
        _log.debug("cross_entropy_loss runs in PyTorch: %s", error)
        return None  # torch says what is wrong, in its own words


def _replacement(key: str, kinds: tuple[type, ...], dtypes: tuple[torch.dtype, ...]) -> Any:
    """A kernel for one key of the dispatcher, which falls back on the one that stands there."""
    there = torch.library.get_kernel(OPERATOR, key)

    def cross_entropy_loss(keys: Any, scores: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
                           ignore_index: Any = -100, label_smoothing: float = 0.0) -> Tensor:
        given = scores, target, weight, reduction, ignore_index, label_smoothing
        loss = _in_engine(kinds, dtypes, key == "AutogradCPU", *given)
        return there.call_boxed(keys, *given) if loss is None else loss

    return cross_entropy_loss


def watch(kinds: tuple[type, ...], outputs: tuple[Tensor, ...]) -> bool:
    """Sees to it that losses of such outputs reach the engine.

    Args:
        kinds: classes of the engine's autograd nodes.
        outputs: of a step.

    Returns:
        Whether that is settled for good, so that later steps need not ask.
    """
    global _library
    if _library is not None:
        return True
    if not any([output.numel() >= LEAST_ELEMENTS and output.requires_grad for output in outputs]):
        return False
    if not hasattr(torch.library, "get_kernel") or "outside_loss" in options.read("ONNXTRAIN_DISABLE").split(","):
        return True
    _log.info("ORTModule: the engine runs torch's cross_entropy of large scores of an ORTModule from now on")
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch says once that a kernel is replaced
        warnings.filterwarnings("ignore", message="[^$]*Overriding a previously registered kernel")
        for key, dtypes in (("AutogradCPU", (torch.float32,)),
                            ("AutocastCPU", (torch.float32, torch.bfloat16, torch.float16))):
            kernel = _replacement(key, kinds, dtypes)
            _library.impl("cross_entropy_loss", kernel, key, with_keyset=True, allow_override=True)
    return True
