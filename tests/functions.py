"""Classes of torch.autograd.Function that several test files call from a module's forward."""

import torch


class Doubled(torch.autograd.Function):
    """A function that the engine calls back, between two pieces of the graph."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Cubed(torch.autograd.Function):
    """Its backward saves tensors and computes with them, so that it can be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x ** 2 * grad
