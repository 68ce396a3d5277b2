"""What runs in PyTorch when the engine cannot: the policies and the exceptions they are keyed on."""

from __future__ import annotations

import enum

from onnxtrain import UnsupportedError, options
from onnxtrain._export.errors import ExportError


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
