"""What runs in PyTorch when the engine cannot: the policies and the exceptions they are keyed on."""

from __future__ import annotations

import enum

from onnxtrain import options


class ORTModuleTorchModelException(Exception):
    """The module cannot be wrapped, or is used in a way that ORTModule does not support."""


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
        return (cls.FALLBACK_UNSUPPORTED_DEVICE | cls.FALLBACK_UNSUPPORTED_DATA | cls.FALLBACK_UNSUPPORTED_TORCH_MODEL
                | cls.FALLBACK_UNSUPPORTED_ONNX_MODEL)

    @classmethod
    def parse(cls, text: str) -> FallbackPolicy:
        """Names joined by |. KeyError for a name that does not exist."""
        policy = cls(0)
        for name in text.split("|"):
            policy |= cls[name.strip()]
        return policy


class Fallback:
    """One module's policy, and whether it has fallen back for good."""

    def __init__(self) -> None:
        policy = options.read("ORTMODULE_FALLBACK_POLICY")
        self.policy: FallbackPolicy = FallbackPolicy.default() if policy is None else policy
        self.retry: bool = options.read("ORTMODULE_FALLBACK_RETRY")

    def allows(self, reason: FallbackPolicy) -> bool:
        return not self.policy & FallbackPolicy.FALLBACK_DISABLE and bool(self.policy & reason)

    @property
    def forced(self) -> bool:
        force = FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD | FallbackPolicy.FALLBACK_FORCE_TORCH_BACKWARD
        return bool(self.policy & force)
