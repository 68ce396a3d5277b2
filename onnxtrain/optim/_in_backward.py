"""The optimizer's update within the engine's backward, one parameter after the other as soon as its gradient is final.

step_in_backward() joins an optimizer of this package and an ORTModule. What it does at each step is here: which
parameters take part in a forward, what is refused before backward, and what step() still has to find out. The
arithmetic is the core's (csrc/py/optim_backward.c). Called by _base.py and by onnxtrain/ortmodule/_program.py.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from onnxtrain import _C, _timing
from onnxtrain._torch import global_optimizer_pre_hooks, will_engine_execute_node
from onnxtrain.optim._base import FusedOptimizer

if TYPE_CHECKING:
    from onnxtrain.ortmodule import ORTModule
    from onnxtrain.ortmodule._program import Program

WANT_APPLIED = 2  # a byte of a mask; csrc/run/program.h
MOST_NAMES = 8  # of parameters in a message
Target = TypeVar("Target")


class EngineNode(Protocol[Target]):
    """The autograd node of a run of the engine some of whose gradients, at `targets`, autograd does not get."""

    run: _C.Run
    program: Program
    targets: Mapping[int, Target]
    saved_tensors: Sequence[Tensor]
    next_functions: Sequence[tuple[torch.autograd.graph.Node | None, int]]


OPEN: weakref.WeakSet[Open] = weakref.WeakSet()


class Open:
    """What an optimizer's step in backward has done since the last step(). Shared by the optimizer's models."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.updater = _C.Updater(optimizer._rule, type(optimizer).__name__)
        self.handles: list[StepInBackward] = []
        self.updated: dict[int, tuple[Tensor, int, StepInBackward]] = {}  # by id: parameter, position, whose backward
        self.hyper: list[tuple[float, ...]] = []  # of those updates
        OPEN.add(self)

    def names(self) -> str:
        """The updated parameters, for a message."""
        return listed([bond.name(param, position) for param, position, bond in self.updated.values()])

    def close(self, optimizer: FusedOptimizer) -> None:
        """Begins step(): the updates in backward were whole and right, and are over.

        Raises:
            RuntimeError: they were not what a step now would do; the step stays open.
        """
        if not self.updated:
            return
        where = f"{type(optimizer).__name__}.step(): backward has updated {len(self.updated)} parameters already"
        if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(f"{where} with the scaled gradients of a GradScaler: step_in_backward() does "
                               "not work with a GradScaler")
        refuse_options(optimizer, where)
        if optimizer._hypers() != self.hyper:
            raise RuntimeError(f"{where}, and hyperparameters have changed since: change them after step() or "
                               "before backward")
        late = [bond.name(param, position) for param, position, bond in self.updated.values()
                if param.grad is not None]
        if late:
            raise RuntimeError(f"{where}, and {listed(late)} received another gradient after that, from outside "
                               "the module: step_in_backward() is for parameters that one call of the module uses")
        self.updated.clear()

    def refuse(self, what: str) -> None:
        """Raises RuntimeError for what would drop gradients or begin something new while updates wait for step()."""
        if self.updated:
            raise RuntimeError(f"{what}: backward has updated {len(self.updated)} parameters already "
                               f"({self.names()}); call step() first, which ends the step")


def refuse_clipping(params: Sequence[Tensor]) -> None:
    """Raises RuntimeError where the gradients to be clipped have been applied already."""
    for shared in OPEN:
        if shared.updated and any(id(param) in shared.updated for param in params):
            shared.refuse("clip_grad_norm_() finds no gradients")


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def refuse_options(optimizer: FusedOptimizer, where: str) -> None:
    """Raises RuntimeError for options that need all gradients at once, or change them."""
    if optimizer.max_grad_norm is not None:
        raise RuntimeError(f"{where}: max_grad_norm needs all gradients at once, but each is applied and freed in turn")
    if not isinstance(optimizer.next_unscale, Tensor) and optimizer.next_unscale == 1.0:
        return
    raise RuntimeError(f"{where}: next_unscale is set, but step_in_backward() does not unscale gradients")


class StepInBackward:
    """What step_in_backward() returns: the bond of one optimizer and one model. Ends with either, or by remove()."""

    on_devices = True  # for _program.py: programs of devices take part

    def __init__(self, optimizer: FusedOptimizer, model: ORTModule) -> None:
        self._optimizer, self._model = weakref.ref(optimizer), weakref.ref(model)

    def remove(self) -> None:
        """Takes the bond back: from the next forward on, gradients go to ``.grad`` and step() applies them.

        Raises:
            RuntimeError: updates of a backward wait for step().
        """
        optimizer, model = self._optimizer(), self._model()
        if optimizer is not None and optimizer._in_backward is not None:
            optimizer._in_backward.refuse("StepInBackward.remove()")
            optimizer._in_backward.handles.remove(self)
            if not optimizer._in_backward.handles:
                optimizer._in_backward = None
        if model is not None:
            model._join(None)

    # ---- forward ----

    def targets(self, tensors: Sequence[Tensor], flags: bytes) -> dict[int, tuple[int, Tensor]] | None:
        """The inputs of a call that the optimizer updates: index to position among its parameters, and parameter.

        Args:
            tensors: inputs of the graph.
            flags: which of them want a gradient, a byte each.

        Returns:
            None where there are none, or the optimizer is gone: gradients then go to ``.grad``.
        """
        optimizer = self._optimizer()
        if optimizer is None or optimizer._in_backward is None:
            return None
        position = {id(param): i for i, param in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        found = {i: (position[id(tensor)], tensor) for i, (tensor, flag) in enumerate(zip(tensors, flags))
                 if flag and id(tensor) in position}
        if len({at for at, _ in found.values()}) < len(found):  # one that is two inputs has the sum of their gradients
            count = Counter(at for at, _ in found.values())
            found = {i: target for i, target in found.items() if count[target[0]] == 1}
        return found or None

    @staticmethod
    def mask(flags: bytes, targets: Container[int]) -> bytes:
        """The engine's mask of a call: bytes 0, 1 for a gradient, 2 for one that is applied."""
        return bytes([WANT_APPLIED if i in targets else flag for i, flag in enumerate(flags)])

    # ---- backward ----

    def gradients(self, ctx: EngineNode[tuple[int, Tensor]],
                  grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        """Runs the engine's backward of a node and updates parameters on the way.

        Args:
            ctx: the autograd node, with ``run``, ``program`` and ``targets``.
            grads: of the outputs.

        Returns:
            One gradient per input of the graph, None where it was applied or there is none.

        Raises:
            RuntimeError: something does not fit (nothing was updated then), or an operator failed; then notes of the
                exception say which parameters were updated.
        """
        optimizer = self._optimizer()
        if optimizer is None or optimizer._in_backward is None:
            raise RuntimeError("step_in_backward() was removed, or its optimizer was deleted, between forward and "
                               "backward")
        shared, run = optimizer._in_backward, ctx.run
        reached: Sequence[int | None] = range(len(ctx.next_functions))
        if len(grads) > 1:
            reached = ctx.program.reach.drop(run.differentiable, grads, reached)
        targets = [(i, *ctx.targets[i]) for i in run.applied
                   if reached[i] is not None and ctx.targets[i][1].requires_grad]  # as autograd, which asks again
        hyper = optimizer._hypers()
        self._refuse(ctx, optimizer, targets, hyper)
        done = bytearray(len(targets))
        try:
            found = shared.updater.backward(run, ctx.saved_tensors, grads, optimizer.param_groups, hyper,
                                            optimizer.state, optimizer._prepare, optimizer._seed(), targets, done)
        except BaseException as error:
            updated = {id(target[2]) for target, flag in zip(targets, done) if flag}
            optimizer._drop_fresh(updated)
            if updated:
                error.add_note(self._note(targets, done))
            raise
        finally:
            optimizer._fresh.clear()
            if any(done):
                shared.hyper = hyper
                shared.updated.update([(id(param), (param, position, self))
                                       for (_, position, param), flag in zip(targets, done) if flag])
        return found if len(grads) == 1 else ctx.program.reach.drop(run.differentiable, grads, found)

    def _refuse(self, ctx: EngineNode[tuple[int, Tensor]], optimizer: FusedOptimizer,
                targets: list[tuple[int, int, Tensor]], hyper: list[tuple[float, ...]]) -> None:
        shared = optimizer._in_backward
        assert shared is not None
        where = "backward after step_in_backward()"
        if torch.is_grad_enabled():
            raise RuntimeError(f"{where}: create_graph=True would differentiate through parameters that backward "
                               "updates")
        if not_alone():
            raise RuntimeError(f"{where}: torch.distributed or horovod is in use and would have to average all "
                               "gradients, but each is applied and freed in turn")
        refuse_options(optimizer, where)
        hooks = {**global_optimizer_pre_hooks, **optimizer._optimizer_step_pre_hooks}
        if hooks and not all([hook is _timing.optimizer_begins for hook in hooks.values()]):
            raise RuntimeError(f"{where}: the optimizer has hooks that run before step(), but parameters are updated "
                               "earlier")
        if any(id(param) in shared.updated for _, _, param in targets):
            raise RuntimeError(f"{where}: {len(shared.updated)} parameters were updated by an earlier backward, and "
                               "step() was not called since: call step() after each backward. Gradients cannot be "
                               "accumulated over several backwards or several calls of the module")
        if shared.updated and hyper != shared.hyper:
            raise RuntimeError(f"{where}: hyperparameters have changed since another module's backward of this step")
        for i, position, param in targets:
            if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(f"{where}: {self.name(param, position)} has a hook that needs its gradient")
            if getattr(param, "grad_dtype", None) not in (None, param.dtype):
                raise RuntimeError(f"{where}: {self.name(param, position)} has a grad_dtype that is not its own "
                                   "dtype")
            if not executes(ctx.next_functions[i][0], leaf=False):
                raise RuntimeError(f"{where}: torch.autograd.grad() or backward(inputs=...) does not ask for the "
                                   f"gradient of {self.name(param, position)}, which would still be updated")

    def _names(self) -> dict[int, str]:
        model = self._model()
        return {} if model is None else {id(param): name for name, param in model._module.named_parameters()}

    def name(self, param: Tensor, position: int) -> str:
        """The model's of a parameter, for a message."""
        return self._names().get(id(param), f"parameter {position}")

    def _note(self, targets: list[tuple[int, int, Tensor]], done: bytearray) -> str:
        updated = [self.name(param, position) for (_, position, param), flag in zip(targets, done) if flag]
        return (f"{len(updated)} of {len(targets)} parameters and their states had been updated when this was raised: "
                f"{', '.join(updated)}. The others did not change. step() ends the step in this state.")


def executes(node: torch.autograd.graph.Node | None, leaf: bool) -> bool:
    """Whether the backward that runs goes on to this node; `leaf` where torch.autograd.grad() takes its gradient."""
    try:
        return will_engine_execute_node(node)
    except RuntimeError:  # PyTorch answers for no leaf that grad() was asked for
        return leaf


def not_alone() -> bool:
    """Whether torch.distributed is initialised or Horovod imported: they average gradients of several processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed or "horovod" in sys.modules


def own_classes(optimizer: FusedOptimizer) -> list[type]:
    """The classes between the optimizer and those of this package."""
    return [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith(("onnxtrain.", "torch."))]


def step_in_backward(optimizer: FusedOptimizer, model: ORTModule) -> StepInBackward:
    """Has ``loss.backward()`` update the model's parameters one by one, so that gradients never exist all at once.

    From the next forward on, the engine's backward applies the optimizer's rule to each parameter as soon as its
    gradient is final and no later part of backward reads the parameter. ``.grad`` of those parameters stays None, and
    ``optimizer.step()`` is still to be called: it closes the step. Parameters, states and all that follows from them
    are bit by bit what backward and then step() give. The idea is that of
    torch.distributed's ``_apply_optimizer_in_backward``; it saves the memory of gradients that are not needed
    together, and a pass over it.

    Hyperparameters are those that the groups have when backward begins; learning rate schedulers, called after
    ``step()``, work as ever. Where the engine leaves a call to PyTorch, or runs the graph in pieces around functions of
    torch, gradients go to ``.grad`` and ``step()`` applies them; likewise those of the optimizer's parameters that are
    not the model's. Several models may have the same optimizer.

    ``torch.nn.utils.clip_grad_norm_`` and whatever else looks at ``.grad`` between backward and step finds nothing
    there, and does nothing; ``onnxtrain.optim.clip_grad_norm_`` raises.

    Args:
        optimizer: one of onnxtrain.optim, without ``max_grad_norm``.
        model: an ORTModule, some of whose parameters the optimizer holds, all on the CPU or on one CUDA device.

    Returns:
        The bond, whose ``remove()`` takes it back.

    Raises:
        TypeError: the optimizer is of another class, or has its own step(); the model is no ORTModule (pass it itself,
            not what is wrapped around it).
        ValueError: ``max_grad_norm`` is set; no parameter is shared; parameters are on several devices, or on one
            that is not CUDA; the model has an optimizer already.
        RuntimeError: torch.distributed is initialized, or horovod imported.

    What does not fit later is a RuntimeError of ``backward()`` before anything is updated: a second backward before
    ``step()``, be it of another call of the module; a ``.grad`` that is there already; hooks on a parameter or
    before the step; ``create_graph=True``; ``torch.autograd.grad`` and ``backward(inputs=...)``; memory that
    backward reads and the update writes (ValueError). ``step()`` raises where it finds out only then that updates
    were not the right ones: a parameter was used outside the module as well, a GradScaler has scaled the loss,
    hyperparameters have changed since backward. ``zero_grad()``, ``load_state_dict()`` and ``remove()`` raise
    between backward and ``step()``. Where an operator fails in the middle of backward, a note of its exception says
    which parameters were updated; ``step()`` then closes the step for these, and the others are as they were.
    """
    from onnxtrain.ortmodule import ORTModule

    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(f"step_in_backward() takes an optimizer of onnxtrain.optim, not {type(optimizer).__name__}")
    if any("step" in kind.__dict__ for kind in own_classes(optimizer)):
        raise TypeError(f"{type(optimizer).__name__} has its own step(), which step_in_backward() would not call")
    if not isinstance(model, ORTModule):
        raise TypeError(f"step_in_backward() takes an ORTModule, not {type(model).__name__}")
    if optimizer.max_grad_norm is not None:
        raise ValueError("max_grad_norm needs all gradients at once, but step_in_backward() applies and frees each "
                         "in turn")
    if not_alone():
        raise RuntimeError("step_in_backward() does not work with torch.distributed or horovod: they average "
                           "all gradients, but it applies and frees each in turn")
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    shared = [(name, param) for name, param in model.named_parameters() if id(param) in held]
    if not shared:
        raise ValueError(f"{type(optimizer).__name__} holds no parameter of the model")
    there = [f"{name} on {param.device}" for name, param in shared]
    if len({param.device for _, param in shared}) > 1 or shared[0][1].device.type not in ("cpu", "cuda"):
        raise ValueError(f"step_in_backward() is for parameters on the CPU or on one CUDA device: {listed(there)}")
    if model.__dict__.get("_in_backward") is not None:
        raise ValueError("the model already has an optimizer that steps in backward; call remove() on its handle first")
    handle = StepInBackward(optimizer, model)
    if optimizer._in_backward is None:
        optimizer._in_backward = Open(optimizer)
    optimizer._in_backward.handles.append(handle)
    model._join(handle)
    return handle
