"""onnxtrain: trains PyTorch modules by running their exported ONNX graph, forward and backward, in a C runtime."""

import torch  # noqa: F401  first: the core shares its libgomp and finds its BLAS in the process

from onnxtrain._C import UnsupportedError, __version__
from onnxtrain._memory import MemoryReport, max_batch, memory_report
from onnxtrain._profile import profile
from onnxtrain._report import explain, stats

__all__ = ["MemoryReport", "UnsupportedError", "__version__", "explain", "max_batch", "memory_report", "profile",
           "stats"]
