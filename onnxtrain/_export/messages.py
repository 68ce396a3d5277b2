"""What torch says of an export: kept quiet meanwhile, and told in a sentence when it stops. Called by export.py."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator

from onnxtrain._export.errors import Untraceable


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch warns of what is put right here, and prints a traced graph when it fails."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch._export", "torch.fx",
                                                    "torch._subclasses.fake_tensor", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), \
                contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def root(error: BaseException) -> BaseException:
    """The exception that torch wrapped."""
    while (inner := error.__cause__) is not None:
        error = inner
    return error


def reason(error: BaseException) -> str:
    """The one sentence of an ExportError."""
    cause = root(error)
    if isinstance(cause, Untraceable):
        return str(cause)
    text = " ".join(str(cause).split())
    text = re.sub(r"\x1b\[\d+m", "", text).split(" For more information")[0].split("Caused by:")[0]
    if type(cause).__name__ == "GuardOnDataDependentSymNode":
        text = f"Python code branches on, or reads, the value of a tensor: {text}"
    return f"The export stopped with {type(cause).__name__}: {text[:800].strip()}"
