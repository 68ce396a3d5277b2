"""The sample through ORTModule: the wrap is all that differs from train.py."""

from loop import train

from onnxtrain.ortmodule import ORTModule

if __name__ == "__main__":
    train(lambda model: ORTModule(model), "onnxtrain")
