"""onnxtrain: trains PyTorch modules by running their exported ONNX graph, forward and backward, in a C runtime."""

import torch  # noqa: F401  first: the core shares its libgomp and finds its BLAS in the process

try:
    from onnxtrain._C import UnsupportedError, __version__
except ModuleNotFoundError as error:
    raise ImportError(
        f"{__path__[0]} is source code of onnxtrain, and not built: Python finds it before the onnxtrain that is "
        "installed. Change to another folder (or python -P -m onnxtrain), or build it here: python setup.py build_ext "
        "--inplace") from error
from onnxtrain._memory import MemoryReport, max_batch, memory_report
from onnxtrain._profile import profile
from onnxtrain._report import explain, stats

__all__ = ["MemoryReport", "UnsupportedError", "__version__", "explain", "max_batch", "memory_report", "profile",
           "stats"]
