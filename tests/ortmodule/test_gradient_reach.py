"""Backward from some outputs leaves the gradients of others as eager leaves them, none and not zero."""

import torch
import torch.nn as nn
from agree import X, Y, both, in_engine, module


def test_backward_from_some_outputs_only():
    """Parameters of the other outputs have no gradient, which is not the same to an optimizer as zeros."""

    def forward(self, x):
        h = self.fc(x)
        return h, self.two(x), h.sum() + self.two(x).detach().sum(), self.third(x)

    def use(model):
        seen = []
        for which in ((1,), (2,), (0, 3), (0, 1, 2, 3), (2,)):
            outputs = model(X)
            sum(outputs[i].sum() for i in which).backward()
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            model.zero_grad()
        torch.autograd.grad(model(X)[2], model.fc.bias)
        return seen

    in_engine(both(module(forward, two=lambda: nn.Linear(4, 4), third=lambda: nn.Linear(4, 2)), use), 6)


def test_a_head_that_is_not_used_is_left_alone_by_the_optimizer():
    made = module(lambda self, x: (self.fc(x), self.two(x)), two=lambda: nn.Linear(4, 4))

    def use(model):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
        for which in (0, 1, 0, 0):
            optimizer.zero_grad()
            model(Y)[which].square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    in_engine(both(made, use, 1e-4), 4)
