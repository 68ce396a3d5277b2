"""`python -m onnxtrain.ortmodule.torch_cpp_extensions.install`: says that there is nothing to do."""


def build_torch_cpp_extensions() -> None:
    """Prints that no extension has to be compiled."""
    print("onnxtrain needs no compiled torch extensions: nothing to do")


if __name__ == "__main__":
    build_torch_cpp_extensions()
