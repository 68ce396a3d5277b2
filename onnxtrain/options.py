"""The environment variables that ORTModule reads: one list, from which the parser, the documentation and a test are made.

Only what has an effect stands here. A value out of range is one warning that names variable, value and choices, and the
default is used.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("onnxtrain")


def _integer(text: str) -> int:
    return int(text)


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "on"):
        return True
    if text.lower() in ("0", "false", "off", ""):
        return False
    raise ValueError(text)


@dataclasses.dataclass(frozen=True)
class Variable:
    """One ORTMODULE_* variable: `parse` raises ValueError or KeyError for a value that is none of `choices`."""

    name: str
    default: Any
    parse: Callable[[str], Any]
    choices: str
    effect: str

    def read(self) -> Any:
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text.strip())
        except (ValueError, KeyError):
            _log.warning("%s=%s is none of: %s; using %s", self.name, text, self.choices, self.default)
            return self.default


def _level(text: str) -> str:
    if text.upper() not in ("VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"):
        raise ValueError(text)
    return text.upper()


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _policy(text: str) -> Any:
    from onnxtrain.ortmodule._fallback import FallbackPolicy

    return FallbackPolicy.parse(text)


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable("ORTMODULE_ONNX_OPSET_VERSION", 20, _integer, "a number; 18 to 22 are used as they are",
                 "opset of the export"),
        Variable("ORTMODULE_LOG_LEVEL", None, _level, "VERBOSE, DEVINFO, INFO, WARNING, ERROR, FATAL",
                 "overrides DebugOptions.log_level"),
        Variable("ORTMODULE_SAVE_ONNX_PATH", "", str, "a folder", "where DebugOptions(save_onnx=True) writes"),
        Variable("ORTMODULE_FALLBACK_POLICY", None, _policy, "FALLBACK_* names joined by |", "what may run in PyTorch"),
        Variable("ONNXTRAIN_EXPORTER", "auto", _one_of("auto", "dynamo", "torchscript"), "auto, dynamo, torchscript",
                 "auto tries torch's default exporter, then the TorchScript one"),
        Variable("ORTMODULE_FALLBACK_RETRY", False, _boolean, "0, 1", "after a fallback, try the engine again each step"),
    )
}


def read(name: str) -> Any:
    """The value of one variable of the list, parsed, or its default."""
    return VARIABLES[name].read()
