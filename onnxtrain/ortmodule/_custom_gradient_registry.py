"""register_gradient(), for scripts that import it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from onnxtrain import UnsupportedError

_log = logging.getLogger("onnxtrain")
_Function = TypeVar("_Function", bound=Callable[..., object])


def register_gradient(domain: str, name: str, *attributes: str) -> Callable[[_Function], _Function]:
    """A decorator that says what it cannot do. Onnxruntime-training takes gradients of ATen operators by it; here
    PyTorch runs the operators that the engine does not have, and computes their gradients: one line says that such a
    registration has no effect.

    Raises:
        UnsupportedError: the operator is one of ONNX, whose gradient is the engine's; the message says what to use.
    """
    operator = ", ".join(map(repr, (domain, name, *attributes)))
    if not attributes and domain != "org.pytorch.aten":
        raise UnsupportedError(f"register_gradient({operator}) is not supported: the engine has the gradients of "
                               "ONNX's operators. For another gradient, call a torch.autograd.Function in forward")
    _log.warning("register_gradient(%s) has no effect in onnxtrain: an exported graph has no ATen nodes. PyTorch runs "
                 "the operators that the engine does not have, and computes their gradients.", operator)
    return lambda function: function
