"""What the optimizers share: parameter groups as torch.optim has them, and one C call per step for all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsFloat, overload

import torch
from torch import Tensor

from onnxtrain import _C
from onnxtrain._torch import global_optimizer_post_hooks, global_optimizer_pre_hooks, profiler_enabled
from onnxtrain.optim._quant import pack, unpack

if TYPE_CHECKING:
    from onnxtrain.optim._in_backward import Open

MASTER, STOCHASTIC = 1, 2  # flags of a group, as csrc/py/optim.c reads them
NARROW = (torch.bfloat16, torch.float16)
EIGHT_BIT = (torch.int8, torch.uint8)
StateDtype = torch.dtype | Literal["int8"] | None
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]  # as torch.optim has them
UpdateCall = tuple[Callable[..., "float | None"], tuple[object, ...]]  # a callable and its arguments
STATE_DTYPES = (None, "int8", torch.float32, torch.float64, torch.bfloat16)  # float16 has no range for squares


class Group(Protocol):
    """What a rule reads of a parameter group."""

    @overload
    def __getitem__(self, name: Literal["lr"], /) -> float | Tensor: ...
    @overload
    def __getitem__(self, name: Literal["betas"], /) -> tuple[float, float]: ...
    @overload
    def __getitem__(self, name: Literal["momentum", "dampening", "weight_decay", "eps", "lr_decay", "adam_w_mode",
                                        "ratio_min", "ratio_max", "initial_accumulator_value", "nesterov",
                                        "bias_correction", "amsgrad", "master_weights"], /) -> float: ...
    def get(self, name: Literal["state_dtype"], /) -> StateDtype: ...


def check(name: str, value: SupportsFloat, low: float = 0.0, high: float = float("inf")) -> None:
    """Refuses a hyperparameter outside [low, high), with torch's exception.

    Raises:
        TypeError: it is no number.
        ValueError: it is outside, or is NaN.
    """
    try:
        float(value)
    except (TypeError, ValueError):
        raise TypeError(f"Invalid {name}: {value!r} is no number") from None
    if not low <= float(value) < high:
        raise ValueError(f"Invalid {name}: {value} (expected at least {low:g}"
                         + (f" and less than {high:g})" if high != float("inf") else ")"))


def number(value: float | Tensor) -> float:
    """A hyperparameter as a float; one-element tensors are read at every step."""
    return value.item() if isinstance(value, Tensor) else value


def device_of(tensor: Tensor) -> str:
    """The core's name of the device whose kernels update this parameter: "" is the CPU."""
    return f"cuda:{tensor.device.index}" if tensor.is_cuda else ""


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers here. A subclass names its rule, its state and its numbers.

    Options that all share, as keyword arguments and keys of a group:

    - ``master_weights``: bfloat16 and float16 parameters keep a float32 copy (state ``master_param``), which is
      updated; the parameter is its rounding. If other code has written the parameter, its value replaces the copy.
    - ``stochastic_rounding``: without master weights, 16-bit parameters are rounded up or down at random, so that small
      steps are not lost: the expected value is exact. Streams are keyed by ``torch.initial_seed()`` and the step.
    - ``maximize``: steps along the gradient instead of against it.
    """

    _rule: str
    _scalings: dict[str, torch.dtype] = {}  # state: torch.int8 or uint8, where state_dtype="int8" may hold it
    _step_supports_amp_scaling = True

    def __init__(self, params: Params, defaults: dict[str, object], max_grad_norm: float | None = None,
                 set_grad_none: bool = True) -> None:
        if max_grad_norm is not None:
            check("max_grad_norm", max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | Tensor | None = None
        self.next_unscale: float | Tensor = 1.0  # the next step multiplies gradients by this
        self._set_grad_none = set_grad_none
        self._steps = 0
        self._setup()
        super().__init__(params, defaults)

    # ---- for subclasses ----

    def _hyper(self, group: Group) -> tuple[float, ...]:
        """The rule's numbers, in the order of csrc/optim/rules.c."""
        raise NotImplementedError

    def _state_names(self, group: Group) -> tuple[str, ...]:
        """The tensors that the group's parameters keep, besides ``step`` and ``master_param``."""
        raise NotImplementedError

    def _has_step(self) -> bool:
        return True

    def _first_value(self, group: Group, name: str) -> float:
        """What a new state tensor is filled with."""
        return 0.0

    # ---- the step ----

    _norm_epsilon = 1e-6  # clipping multiplies by max_grad_norm / (norm + epsilon), as torch.nn.utils.clip_grad_norm_
    _only_finite = False  # with a limit of the norm: a step whose norm is not finite does nothing
    _in_backward: Open | None = None  # updates that the engine's backward has done since the last step

    @staticmethod
    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        """torch's wrapper of ``step``, called only where a hook or a profiler waits: it takes as long as the update of
        a small model.
        """
        wrapped = torch.optim.Optimizer.profile_hook_step(step)

        @functools.wraps(step)
        def hooked(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
            waiting = (self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or global_optimizer_pre_hooks
                       or global_optimizer_post_hooks or profiler_enabled())
            return wrapped(self, *args, **kwargs) if waiting else step(self, *args, **kwargs)

        return hooked

    def _setup(self) -> None:
        self._updater = _C.Updater(self._rule, type(self).__name__)
        self._fresh: list[tuple[Tensor, str]] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient, in one call of the core.

        Args:
            closure: computes the loss again, with gradients enabled, before the update.

        Returns:
            The closure's loss; without a closure, the norm of all gradients before clipping (0-dim float32) where
            ``max_grad_norm`` is set, else None. ``grad_norm`` holds the norm as a float, and on CUDA as that tensor.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError, ValueError: a tensor is not dense, of a supported dtype and on the device of the others (the CPU
                or one of CUDA), or shares memory with another; the message names the parameter. Nothing has been
                updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.close(self)
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        first = next((p for group in self.param_groups for p in group["params"] if p.grad is not None), None)
        if first is not None and (place := device_of(first)):
            norm = self._step_on(place, first, found_inf, scale)
            return norm if loss is None else loss
        if found_inf is not None and float(found_inf):
            self.grad_norm, self.next_unscale = None, 1.0
            return loss
        limit = -1.0 if self.max_grad_norm is None else float(self.max_grad_norm)
        unscale, self.next_unscale = number(self.next_unscale), 1.0
        if scale is not None:
            unscale /= float(scale)
        self.grad_norm = self._run(limit, unscale)
        if loss is None and self.grad_norm is not None:
            return torch.tensor(self.grad_norm, dtype=torch.float32)
        return loss

    @torch.no_grad()
    def _step_on(self, place: str, param: Tensor, found_inf: Tensor | None, scale: Tensor | None) -> Tensor | None:
        """The step on a CUDA device: a few launches on torch's current stream, and nothing that waits for them.

        Rates that are tensors there, ``found_inf`` and ``grad_scale`` are read by the kernels, so that a step can be
        captured in a CUDA graph once the gradients' addresses repeat. ``grad_norm`` is a tensor, float32.

        Args:
            place: the device's name.
            param: a parameter there.
            found_inf, scale: GradScaler's, or None.
        """
        def number_there(value: float | Tensor) -> Tensor:
            return torch.as_tensor(value, dtype=torch.float32, device=param.device)

        if found_inf is not None and any(group.get("dampening") for group in self.param_groups) and float(found_inf):
            return None  # a first step that is skipped would count: the momentum of the next one is its gradient alone
        unscale, self.next_unscale = self.next_unscale, 1.0
        inverse = number_there(unscale) if isinstance(unscale, Tensor) or unscale != 1.0 or scale is not None else None
        if scale is not None:
            inverse = number_there(unscale) / number_there(scale)
        limit = -1.0 if self.max_grad_norm is None else float(self.max_grad_norm)
        norm = torch.zeros((), dtype=torch.float32, device=param.device) if limit >= 0 else None
        rates = [lr.float() if isinstance(lr, Tensor) and lr.device == param.device else None
                 for lr in (group["lr"] for group in self.param_groups)]
        found = None if found_inf is None else number_there(found_inf)
        self._run(limit, 1.0, place, (found, inverse, norm, *rates))
        self.grad_norm = norm
        return norm

    def _run(self, limit: float, unscale: float, place: str = "",
             scalars: tuple[Tensor | None, ...] = (None, None, None),
             within: Callable[[UpdateCall], float | None] | None = None) -> float | None:
        """One step; its norm, or None.

        Args:
            limit: of the norm; below 0: none.
            unscale: multiplies the gradients.
            place, scalars: see Updater.step().
            within: is given the update as a callable and its arguments, and calls it as a part of a larger call.
        """
        groups = self.param_groups
        hyper = self._hypers(scalars[3:] or (None,) * len(groups))
        clip = limit, self._norm_epsilon, self._only_finite
        arguments = groups, hyper, self.state, self._prepare, clip, unscale, self._seed(), place, scalars
        skipped = True
        try:
            norm = self._updater.step(*arguments) if within is None else within((self._updater.step, arguments))
            skipped = self._only_finite and norm is not None and not math.isfinite(norm)
        finally:
            if skipped:
                self._drop_fresh()
            self._fresh.clear()
        self._steps += not skipped
        return norm

    def _hypers(self, rates: Sequence[Tensor | None] = ()) -> list[tuple[float, ...]]:
        """For each group its sign, flags and the rule's numbers; the rate is 0 where there is a tensor of it."""
        groups = self.param_groups
        return [(-1.0 if group["maximize"] else 1.0,
                 MASTER * group["master_weights"] + STOCHASTIC * group["stochastic_rounding"],
                 *self._hyper(group if rate is None else group | {"lr": 0.0}))
                for group, rate in zip(groups, rates or (None,) * len(groups))]

    def _seed(self) -> int:
        """Of this step's stochastic rounding; 0 without any."""
        if not any([group["stochastic_rounding"] for group in self.param_groups]):
            return 0
        return (torch.initial_seed() + 0x9E3779B97F4A7C15 * self._steps) & (2**64 - 1)

    def _drop_fresh(self, kept: Container[int] = ()) -> None:
        """As if a step had not been tried: without the state that it has made, but for parameters of these ids."""
        for param, name in self._fresh:
            if id(param) in kept:
                continue
            del self.state[param][name]
            if not self.state[param]:
                del self.state[param]

    @torch.no_grad()
    def _prepare(self, param: Tensor, index: int) -> bool:
        """Completes a parameter's state; called by the core where something is missing.

        Returns:
            Whether it had none before.
        """
        group, state = self.param_groups[index], self.state[param]
        had = any(name in state for name in self._state_names(group))
        if self._has_step() and not isinstance(state.get("step"), Tensor):
            if "step" not in state:
                self._fresh.append((param, "step"))
            state["step"] = torch.tensor(float(state.get("step", 0.0)), dtype=torch.float32, device=param.device)
        for name in self._state_names(group):
            if not isinstance(state.get(name), Tensor):
                if name not in state:
                    self._fresh.append((param, name))
                state[name] = self._new_state(param, group, name, state)
        if group["master_weights"] and param.dtype in NARROW and "master_param" not in state:
            self._fresh.append((param, "master_param"))
            state["master_param"] = param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
        return not had

    def _dtype_of(self, param: Tensor, group: Group, name: str) -> torch.dtype:
        """The dtype in which the group keeps a state tensor; int8 and uint8 have scales beside them."""
        if name == "master_param":
            return torch.float32
        dtype = group.get("state_dtype")
        if dtype == "int8" and name in self._scalings and param.dtype != torch.float64:
            return self._scalings[name]
        if dtype is None or dtype == "int8":
            wide = param.dtype == torch.float16 or (group["master_weights"] and param.dtype in NARROW)
            return torch.float32 if wide else param.dtype
        return dtype

    def _new_state(self, param: Tensor, group: Group, name: str, state: dict[str, Tensor]) -> Tensor:
        dtype, first = self._dtype_of(param, group, name), self._first_value(group, name)
        value = torch.full_like(param, first, dtype=dtype if dtype not in EIGHT_BIT else torch.float32,
                                memory_format=torch.preserve_format)
        if dtype not in EIGHT_BIT:
            return value
        scale = f"{name}_scale"
        if scale not in state:
            self._fresh.append((param, scale))
        packed = torch.zeros_like(value, dtype=dtype, memory_format=torch.preserve_format)
        state[scale] = pack(value, packed)
        return packed

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, or fills them with zeros where ``set_to_none`` (default: ``set_grad_none``) is False."""
        to_none = self._set_grad_none if set_to_none is None else set_to_none
        if self._in_backward is not None:
            self._in_backward.refuse(f"{type(self).__name__}.zero_grad() cannot undo applied gradients")
        if not to_none or profiler_enabled():
            super().zero_grad(to_none)
            return
        for group in self.param_groups:  # without the profiler's record, half of the time of a small step's call
            for parameter in group["params"]:
                parameter.grad = None

    # ---- saving, loading, copying ----

    def __getstate__(self) -> dict[str, object]:
        own = ("max_grad_norm", "grad_norm", "next_unscale", "_set_grad_none", "_steps")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        earlier = getattr(self, "param_groups", None) or [{}] * len(state["param_groups"])
        super().__setstate__(state)
        self._setup()
        for group, before in zip(self.param_groups, earlier):
            self._adopt(group)
            for name, value in self.defaults.items():
                if name != "differentiable":
                    group.setdefault(name, before.get(name, value))

    def _adopt(self, group: dict[str, Any]) -> None:
        """Understands a group that another optimizer or an older version has saved, before defaults fill it.

        Raises:
            ValueError: the group asks for what there is not here.
        """
        if group.get("differentiable"):
            raise ValueError(f"{type(self).__name__} does not support differentiable=True")
        step = group.pop("step", None)  # onnxruntime-training counts per group
        if not self._has_step():
            return
        for param in group["params"]:
            held = self.state.get(param)
            if held and not isinstance(held.get("step"), Tensor):
                count = held.get("step", 0.0 if step is None else step)
                held["step"] = torch.tensor(float(count), dtype=torch.float32, device=param.device)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's, and for the class of the same rule there: 8-bit state comes out as float32.

        Returns:
            ``{"state": {index: {name: tensor}}, "param_groups": [...]}``. Tensors other than 8-bit state are the
            optimizer's own, not copies.
        """
        result = super().state_dict()
        for key, held in result["state"].items():
            if isinstance(held, dict) and any(f"{name}_scale" in held for name in self._scalings):
                held = dict(held)
                for name in self._scalings:
                    if f"{name}_scale" in held:
                        held[name] = unpack(held[name], held.pop(f"{name}_scale"))
                result["state"][key] = held
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` here, of the torch.optim class of the same rule, or of onnxruntime-training gave.

        Options of a group that the dict does not have stay what they were. State is copied, and converted to the dtype
        that the group keeps it in from what was saved: torch.optim would share it, or round it to the parameter's.

        Raises:
            ValueError: the groups do not fit; or they ask for an option that there is not here.
        """
        if self._in_backward is not None:
            self._in_backward.refuse(f"{type(self).__name__}.load_state_dict()")
        seen: list[dict[str, Any]] = []
        before = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
        after = self.register_load_state_dict_post_hook(lambda _: self._take_saved(seen[-1]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _take_saved(self, saved: dict[str, Any]) -> None:
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        places = [(param, group) for group in self.param_groups for param in group["params"]]
        for key, (param, group) in zip(keys, places):
            own = (*self._state_names(group), "master_param")
            for name, value in saved["state"].get(key, {}).items():
                if name in own and isinstance(value, Tensor):
                    self._take_tensor(param, group, name, value.detach())
                elif name == "step" and isinstance(value, Tensor):
                    on_cpu = not device_of(param)  # which takes float64 counts as well
                    self.state[param][name] = value.detach().to(param.device, None if on_cpu else torch.float32,
                                                                copy=True)

    def _take_tensor(self, param: Tensor, group: Group, name: str, value: Tensor) -> None:
        held, dtype = self.state[param], self._dtype_of(param, group, name)
        if dtype not in EIGHT_BIT:
            held[name] = value.to(device=param.device, dtype=dtype, copy=True, memory_format=torch.preserve_format)
            return
        packed = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        held[f"{name}_scale"] = pack(value.to(param.device), packed)
        held[name] = packed


LABELS = {"lr": "learning rate", "eps": "epsilon"}  # torch's words


def make_defaults(numbers: dict[str, Any], *, state_dtype: StateDtype, maximize: bool, master_weights: bool,
                  stochastic_rounding: bool) -> dict[str, object]:
    """A group's defaults from the rule's numbers, none of which may be negative, and the options that all rules have.

    Raises:
        ValueError: a number is out of range, or two options contradict each other.
    """
    for name, value in numbers.items():
        if name == "betas":
            check("beta at index 0", value[0], high=1.0)
            check("beta at index 1", value[1], high=1.0)
        else:
            check(LABELS.get(name, name), value)
    if master_weights and stochastic_rounding:
        raise ValueError("stochastic_rounding is for 16-bit parameters without master_weights: set one of the two")
    defaults = {name: tuple(value) if name == "betas" else value for name, value in numbers.items()}
    return {**defaults, "state_dtype": check_state_dtype(state_dtype), "maximize": bool(maximize),
            "master_weights": bool(master_weights), "stochastic_rounding": bool(stochastic_rounding)}


def check_state_dtype(state_dtype: StateDtype) -> StateDtype:
    """Refuses a state dtype that the core does not have.

    Raises:
        ValueError: it is none of STATE_DTYPES.
    """
    if isinstance(state_dtype, torch.dtype) and state_dtype is torch.int8:
        state_dtype = "int8"
    if not any(state_dtype is known or (isinstance(known, str) and state_dtype == known) for known in STATE_DTYPES):
        raise ValueError(f"Invalid state_dtype: {state_dtype!r} (expected one of {', '.join(map(str, STATE_DTYPES))})")
    return state_dtype
