"""The sample in PyTorch eager."""

from loop import parser, train

if __name__ == "__main__":
    train(lambda model: model, "eager", parser().parse_args())
