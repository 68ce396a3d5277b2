"""onnxtrain: trains PyTorch modules by running their exported ONNX graph, forward and backward, in a C runtime."""

import torch  # noqa: F401  first: the core shares its libgomp and finds its BLAS in the process

from onnxtrain import _C
from onnxtrain._C import UnsupportedError
from onnxtrain._report import explain, stats

__all__ = ["UnsupportedError", "__version__", "explain", "stats"]
__version__ = _C.build_info()["version"]
