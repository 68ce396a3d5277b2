"""Second gradients have the dropout masks of their forward, or say why there are none."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import X, equal, in_engine, module
from test_double import penalty

from onnxtrain.ortmodule import ORTModule


class Dropping(nn.Module):
    """Dropout as a module, as a function, and within attention."""

    def __init__(self):
        super().__init__()
        self.layer, self.fc, self.drop = nn.TransformerEncoderLayer(4, 2, 8, 0.3, F.gelu, batch_first=True), \
            nn.Linear(4, 4), nn.Dropout(0.25)

    def forward(self, x):
        h = self.drop(torch.tanh(self.fc(self.layer(x.unsqueeze(0)))) * 1)
        return F.dropout(h, 0.4, self.training).square()


@pytest.mark.parametrize("make", [Dropping, lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())])
def test_dropout_is_the_one_of_the_forward(make):
    """Second derivatives against differences of first ones, and first ones against the engine's: of one draw."""
    model = ORTModule(make().double())
    x = X.detach().double().requires_grad_(True)
    weights = list(model.parameters())

    def gradients(**options):
        torch.manual_seed(5)
        return torch.autograd.grad(model(x).sum(), [x, *weights], **options)

    plain, graph = gradients(), gradients(create_graph=True)
    equal([g.detach() for g in graph], list(plain), 1e-8)
    vectors = [torch.linspace(-1, 1, g.numel(), dtype=g.dtype).reshape(g.shape) for g in graph]
    state = torch.get_rng_state()
    second = torch.autograd.grad(sum((g * v).sum() for g, v in zip(graph, vectors)), [x, *weights])
    assert torch.equal(torch.get_rng_state(), state)
    step, sides = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for tensor, v in zip([x, *weights], vectors):
                tensor.add_(v, alpha=sign * step)
        sides.append(gradients())
        with torch.no_grad():
            for tensor, v in zip([x, *weights], vectors):
                tensor.sub_(v, alpha=sign * step)
    equal(list(second), [(a - b) / (2 * step) for a, b in zip(*sides)], 1e-5)
    in_engine(model, 4)


def test_dropout_that_pytorch_calls_in_another_way_is_refused():
    """The mask would not reach it."""
    model = ORTModule(module(lambda self, x: torch.dropout(self.fc(x), 0.5, True).square())())
    x = X.detach().clone().requires_grad_(True)
    with pytest.raises(RuntimeError, match="could not be given the masks.*eval"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    in_engine(model)


def test_other_random_numbers_have_first_gradients_and_say_why_no_second():
    model = ORTModule(module(lambda self, x: torch.tanh(self.fc(x)) * torch.rand_like(x))())
    x = X.detach().clone().requires_grad_(True)
    torch.manual_seed(3)
    plain = torch.autograd.grad(model(x).sum(), x)
    torch.manual_seed(3)
    got = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    equal([got[0].detach()], list(plain))
    for inputs in ([x], [model.fc.weight]):  # however they are asked for
        with pytest.raises(RuntimeError, match="cut its graph into parts"):
            torch.autograd.grad(got[0].sum(), inputs, allow_unused=True, retain_graph=True)
    in_engine(model, 2)


def test_dropout_that_is_off():
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    for training, p in ((False, 0.5), (True, 0.0)):
        model.module[1].p = p
        model.train(training)
        penalty(model)
    in_engine(model, 4)
