"""The sample in PyTorch eager."""

from loop import train

if __name__ == "__main__":
    train(lambda model: model, "eager")
