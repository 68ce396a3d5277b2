"""Long formulas of sizes: a module whose windows nest is captured for other sizes too, and not for minutes."""

import copy

import sympy
import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import onnxtrain
from onnxtrain._export import formulas
from onnxtrain.ortmodule import ORTModule


class Windows(torch.nn.Module):
    """Means over windows of an image that is padded to whole ones, then every other row and column."""

    def __init__(self):
        super().__init__()
        self.maps = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        for linear in self.maps:
            x = F.pad(x, (0, -x.shape[3] % 3, 0, -x.shape[2] % 3))
            batch, channels, height, width = x.shape
            windows = x.view(batch, channels, height // 3, 3, width // 3, 3).permute(0, 2, 4, 3, 5, 1)
            windows = torch.tanh(linear(windows.reshape(-1, 9, channels)))
            whole = windows.view(batch, height // 3, width // 3, 3, 3, channels).permute(0, 5, 1, 3, 2, 4)
            x = whole.reshape(batch, channels, height, width)[:, :, ::2, ::2]
        return x


def test_windows_of_other_sizes(monkeypatch):
    longest, decide = [0], ShapeEnv.evaluate_expr

    def noted(self, formula, *args, **kwargs):
        if isinstance(formula, sympy.Basic) and not self.frozen:
            longest[0] = max(longest[0], len(list(sympy.preorder_traversal(self.replace(formula)))))
        return decide(self, formula, *args, **kwargs)

    monkeypatch.setattr(ShapeEnv, "evaluate_expr", noted)
    torch.manual_seed(0)
    plain = Windows()
    wrapped = ORTModule(copy.deepcopy(plain))
    for batch, size in ((2, 20), (3, 20), (2, 25), (4, 28)):
        x = torch.randn(batch, 3, size, size)
        results = [model(x) for model in (plain, wrapped)]
        torch.testing.assert_close(results[1], results[0])
        for result in results:
            result.square().sum().backward()
        for (name, a), b in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, msg=name)
    assert onnxtrain.stats(wrapped)["engine_steps"] == 4
    assert longest[0] < 2.5 * formulas.LONGEST


def test_sizes_of_one_formula_are_apart():
    """The number of elements of one tensor is a size of another; an export knows each by its tensor."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain = torch.nn.Sequential(torch.nn.Embedding(30, 16), layer, torch.nn.Linear(16, 30))

    class Padded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layer, self.head = plain

        def forward(self, x):
            return self.head(self.layer(self.words(x), src_key_padding_mask=x == 0))

    wrapped = ORTModule(Padded())
    for size in ((2, 7), (3, 9)):
        x = torch.randint(1, 30, size)
        torch.testing.assert_close(wrapped(x), Padded()(x), rtol=1e-5, atol=1e-5)
    assert onnxtrain.stats(wrapped)["engine_steps"] == 2
