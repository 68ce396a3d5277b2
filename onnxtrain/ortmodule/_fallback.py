"""What runs in PyTorch when the engine cannot: the policies, the exceptions they are keyed on, and how it is said."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import Any

from onnxtrain import UnsupportedError, _report, _timing, options
from onnxtrain._export import exclusive
from onnxtrain._export.errors import ExportError
from onnxtrain.ortmodule._key import is_transformed, torch_modes
from onnxtrain.ortmodule._running import is_cut


class ORTModuleFallbackException(Exception):
    """Why a module cannot run in the engine; raised where the policy forbids running it in PyTorch."""


class ORTModuleTorchModelException(ORTModuleFallbackException):
    """The module cannot be wrapped, or be exported, or is used in a way that ORTModule does not support."""


class ORTModuleDeviceException(ORTModuleFallbackException):
    """A tensor is on a device that this build does not run on."""


class ORTModuleIOError(ORTModuleFallbackException, TypeError):
    """An argument is of a kind that no graph can take."""


class ORTModuleInitException(ORTModuleFallbackException):
    """Wrapping the module failed."""


class ORTModuleONNXModelException(ORTModuleFallbackException, UnsupportedError):
    """The graph holds an operator that the engine does not have; the message names it and its node."""


def named(error: Exception) -> ExportError:
    """What came up from an export, or from the graph that it made, without a name."""
    result = ExportError(f"The export stopped with {type(error).__name__}: {error}")
    result.__cause__ = error
    return result


class FallbackPolicy(enum.IntFlag):
    """Reasons for which a module may run in PyTorch instead; names as in ORTMODULE_FALLBACK_POLICY."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    @classmethod
    def default(cls) -> FallbackPolicy:
        """What stands where neither the environment nor the caller chose."""
        return (cls.FALLBACK_UNSUPPORTED_DEVICE | cls.FALLBACK_UNSUPPORTED_DATA | cls.FALLBACK_UNSUPPORTED_TORCH_MODEL
                | cls.FALLBACK_UNSUPPORTED_ONNX_MODEL)

    @classmethod
    def parse(cls, text: str) -> FallbackPolicy:
        """Names joined by |. KeyError for a name that does not exist."""
        policy = cls(0)
        for name in text.split("|"):
            policy |= cls[name.strip()]
        return policy


_FallbackPolicy = FallbackPolicy  # the name that scripts import
_TRANSFORMED = "a transform of torch.func"


class Fallback:
    """One module's policy, and what it fell back for last."""

    def __init__(self) -> None:
        self._exception: Exception | None = None  # while it lasts
        self._raised_fallback_exception = False
        policy = options.read("ORTMODULE_FALLBACK_POLICY")
        self.policy = FallbackPolicy.default() if policy is None else policy
        self.retry: bool = options.read("ORTMODULE_FALLBACK_RETRY")

    _RAISED = {
        FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE: ORTModuleDeviceException,
        FallbackPolicy.FALLBACK_UNSUPPORTED_DATA: ORTModuleIOError,
        FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL: ORTModuleTorchModelException,
        FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL: ORTModuleONNXModelException,
        FallbackPolicy.FALLBACK_BAD_INITIALIZATION: ORTModuleInitException,
    }

    def check(self, reason: FallbackPolicy, text: str, cause: Exception | None) -> None:
        """Raises the exception of `reason` where the policy forbids running in PyTorch because of it."""
        error = self._RAISED[reason](text)
        if not self.allows(reason):
            raise error from cause
        if not self.retry:
            self._exception, self._raised_fallback_exception = error, True

    def note_forced(self) -> None:
        """A call runs in PyTorch because the policy forces it there."""
        if self._exception is None and not self.retry:
            self._exception = ORTModuleFallbackException(f"{self.policy.name} forces every call into PyTorch")
            self._raised_fallback_exception = True

    def allows(self, reason: FallbackPolicy) -> bool:
        return not self.policy & FallbackPolicy.FALLBACK_DISABLE and bool(self.policy & reason)

    @property
    def policy(self) -> FallbackPolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: FallbackPolicy) -> None:
        self._policy = policy
        force = FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD | FallbackPolicy.FALLBACK_FORCE_TORCH_BACKWARD
        self.forced = self.always or bool(policy & force)  # read at every step

    always = False  # whatever the policy is set to later

    def give_up(self) -> None:
        """The module can never run in the engine; the policy has allowed that."""
        self.always = self.forced = True


class FallsBack:
    """What the engine runs, or PyTorch where the engine cannot: an ORTModule, and what runs one of its graphs.

    It says why, once for each kind of call, counts what PyTorch runs, and raises where the policy forbids that.
    """

    _module: Any
    _debug: Any
    _counters: _report.Counters
    _fallback: Fallback
    _fallen: dict[Any, str]  # by the kind of call, why PyTorch runs it
    _counted = "fallback_steps"  # what a call in PyTorch is among the counters

    def _eager(self, *given: Any) -> object:
        """The results of a call, by PyTorch."""
        raise NotImplementedError

    def _outside(self) -> Callable[..., object] | None:
        """How PyTorch runs a call now that an export, the policy or a mode of torch's asks for it; None where none
        does. Waits for another thread's export.
        """
        if exclusive.here():
            return self._eager  # a part of what is being exported
        exclusive.wait()
        if self._fallback.forced:
            self._fallback.note_forced()
            if not self._fallback.always:
                self._note(f"the policy {self._fallback.policy.name} forces every call into PyTorch")
            return self._in_torch
        if is_transformed():
            if _TRANSFORMED not in self._fallen:
                self._fall_back(_TRANSFORMED, FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL,
                                "torch.func differentiates and batches with its own interpreters, which cannot see "
                                "inside the engine", None)
            return self._in_torch
        if torch_modes() is None:
            self._note("a trace, a mode of torch's dispatcher or forward-mode differentiation is active, and must see "
                       "every operator")
            return self._in_torch
        return None

    def _by_torch(self, reason: str, *given: object) -> Any:
        """Runs a call in PyTorch that no graph can represent; warns once and notes the reason."""
        if reason not in self._counters.reasons:
            self._debug.log(logging.WARNING, "ORTModule: PyTorch runs this call of %s, because %s",
                            type(self._module).__name__, reason)
        self._note(reason)
        return self._in_torch(*given)

    def _in_torch(self, *given: object) -> Any:
        _report.count(self._counters, **{self._counted: 1})
        with _timing.span("fallback", type(self._module).__name__):
            return self._eager(*given)

    def _checked_by_torch(self, error: Exception, *given: object) -> object:
        """One call for which forward may have to raise; it does so itself."""
        self._debug.log(logging.WARNING, "ORTModule: PyTorch runs this call, because %s", error)
        self._note(f"in some calls {error}; PyTorch runs them and raises what forward would raise")
        result = self._in_torch(*given)
        self._fallback.check(FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL, f"{error}, and PyTorch did not raise.",
                             error)
        return result

    def _note(self, reason: str) -> None:
        """Notes a reason for stats() and explain(), once."""
        _report.note(self._counters, "reasons", reason)

    def _fall_back(self, key: object, reason: FallbackPolicy, text: str, cause: Exception | None) -> None:
        """Remembers that this kind of call runs in PyTorch and says so once; raises where the policy forbids it."""
        text = " ".join(text.split()).rstrip(".")
        self._fallback.check(reason, f"{text}.", cause)
        if self._fallen.get(key) != text:
            self._fallen[key] = text
            self._note(text)
            part = "a part of " if is_cut() else ""
            self._debug.log(
                logging.WARNING,
                "ORTModule: %s%s runs in PyTorch, not in the onnxtrain engine, for this kind of call: %s. Results are "
                "right, but not faster. onnxtrain.explain(model) lists what ran where. "
                "ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE makes this an error.", part, type(self._module).__name__,
                text)
