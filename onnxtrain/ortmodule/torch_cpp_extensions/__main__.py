"""`python -m onnxtrain.ortmodule.torch_cpp_extensions`: the same as its module `install`."""

from onnxtrain.ortmodule.torch_cpp_extensions.install import build_torch_cpp_extensions

build_torch_cpp_extensions()
