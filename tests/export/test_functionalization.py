"""Changes in place and casts, written as plain operators before the translation: results, gradients, arguments and
buffers are eager's, and torch need not trace the program again where no view is involved.
"""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain._export import functionalization, retrace
from onnxtrain.ortmodule import ORTModule


def changed_twice(m, x):
    y = m.fc(x)
    y.add_(1).mul_(2)
    return y.relu_()


def another_name(m, x):
    y = m.fc(x)
    z = y.mul_(2)
    y.add_(1)
    return z


def view_before(m, x):
    y = m.fc(x)
    row = y[0]
    y.mul_(2)
    return row, y


def by_a_view(m, x):
    y = m.fc(x)
    y.view(-1).mul_(2)
    return y


def broadcast_view(m, x):
    y = m.fc(x)
    other, _ = torch.broadcast_tensors(y, x)
    y.mul_(2)
    return other


def into_slices(m, x):
    y = m.fc(x)
    y[1:, :2] = x[:-1, 2:]
    y[0] = 3
    y[-1, 1:].mul_(2)
    y[:, 0] = y[:, 1] * 2
    y[2].mul_(2).add_(1)
    return y


def shifted_tokens(m, x):
    tokens = x.long()
    shifted = tokens.new_zeros(tokens.shape)
    shifted[:, 1:] = tokens[:, :-1].clone()
    shifted[:, 0] = 7
    shifted.masked_fill_(shifted == -1, 5)
    return shifted, x * shifted


def into_a_slice_that_is_read(m, x):
    y = m.fc(x)
    row = y[0]
    row.add_(1)
    return row * 2, y


def into_a_slice_of_a_slice_that_is_read(m, x):
    y = m.fc(x)
    rows = y[1:]
    rows[:, 0].fill_(3)
    return rows * 2, y


def broadcast_into_a_slice(m, x):
    y = m.fc(x)
    y[1:] = x[0]
    y[:, :2] = x.double()[:, 2:]
    return y


def overlapping_slices(m, x):
    y = m.fc(x)
    y[:, 2:] = y[:, :2]
    return y


def into_a_slice_of_an_argument(m, x):
    h = x * 1
    m.mean[1:] = x.detach()[0, 1:]
    h[0] = m.mean
    return h


def normalised_choice(m, x):
    best, chosen = m.fc(x).topk(2, -1)
    best /= best.sum(-1, keepdim=True)
    return best, chosen, best.clone().index_put_((torch.tensor([0]), torch.tensor([1])), torch.ones(()))


def parts(m, x):
    return *m.fc(x).chunk(2, -1), *x.chunk(3, 1), x.T @ x, F.adaptive_avg_pool1d(x[None], 1)


def dropout_in_eval(m, x):
    y = m.fc(x)
    same = F.dropout(y, 0.5, False)
    y.add_(1)
    return same


def of_another_dtype(m, x):
    y = m.fc(x)
    return y.mul_(torch.tensor(2.5, dtype=torch.float64)).add_(torch.arange(4))


def counted(m, x):
    m.count += 1
    m.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
    return m.fc(x) * m.count + m.mean


def argument(m, x):
    h = x * 1
    h.masked_fill_(h > 0, 0.5)
    return h.to(torch.float64).to(torch.float64), x.to(torch.float32), (h > 0) & (x > 0)


def differences(m, x):
    y = m.fc(x)
    return y.diff(dim=0), y.diff(prepend=x[:, :1], append=y[:, :2]), (y > 0).diff(), y.diff(2)


def numbers(m, x):
    n = x.long()
    return (n & 3) | (n ^ 1), torch.min(m.fc(x), x), torch.max(x, 2 * x)


def pooled(m, x):
    y = m.fc(x).view(1, 3, 2, 2)
    return F.adaptive_avg_pool2d(y, 1), F.adaptive_avg_pool2d(y, (2, 1))


def casts_that_copy(m, x):
    y = m.fc(x)
    image = (x * 1).view(1, 3, 2, 2)
    last, same, other = image.to(memory_format=torch.channels_last), y.float(), y.to(torch.float32, copy=True)
    image.add_(1)
    y.add_(1)
    return last, same, other


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


PLAIN = [changed_twice, another_name, counted, argument, numbers, pooled, into_slices, shifted_tokens,
         into_a_slice_that_is_read, into_a_slice_of_an_argument, normalised_choice, parts]
WITH_VIEWS = [into_a_slice_of_a_slice_that_is_read, broadcast_into_a_slice, overlapping_slices, differences, casts_that_copy, view_before, by_a_view, broadcast_view, dropout_in_eval, of_another_dtype]


@pytest.mark.parametrize("function", PLAIN + WITH_VIEWS, ids=lambda f: f.__name__)
def test_equals_eager(function, monkeypatch):
    asked, final = retrace.is_final, []
    monkeypatch.setattr(retrace, "is_final", lambda *args: final.append(asked(*args)) or final[-1])
    torch.manual_seed(0)
    eager = Of(function)
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(2):
        given = torch.randn(3, 4)
        results = []
        for module in (eager, ours):
            module.zero_grad()
            x = given.clone().requires_grad_(True)
            out = module(x)
            out = out if isinstance(out, tuple) else (out,)
            sum((o * torch.arange(o.numel()).view(o.shape)).sum() for o in out if o.requires_grad).backward()
            results.append([*out, x.grad, *(p.grad for p in module.parameters()), *module.buffers()])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a)
    counts = onnxtrain.stats(ours)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (2, 0), counts["reasons"]
    assert final[-1] or function not in PLAIN


@pytest.mark.parametrize("change", [lambda cache: cache.add_(1), lambda cache: cache[0].mul_(2).add_(1)])
def test_a_tensor_that_is_no_buffer_is_changed_once(change):
    """By PyTorch, or by Dynamo's graph; an export leaves it as it was."""
    def forward(m, x):
        y = m.fc(x) + m.cache
        change(m.cache)
        return y

    torch.manual_seed(0)
    eager = Of(forward)
    eager.cache = torch.ones(4)
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x), eager(x))
        torch.testing.assert_close(ours.cache, eager.cache)


def test_a_float_minus_whole_numbers_is_exported_once():
    ours = ORTModule(Of(lambda m, x: m.fc(x) * (1.0 - (x * 3).long())))
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        result = ours(x)
        result.sum().backward()
        expected = ours.fc(x) * (1.0 - (x * 3).long())
        torch.testing.assert_close(result, expected)
    counts = onnxtrain.stats(ours)
    assert (counts["exports"], counts["engine_steps"]) == (1, 2)


def test_an_operator_in_place_has_a_plain_form_of_the_same_arguments():
    aten = torch.ops.aten
    pairs = {aten.mul_.Tensor: aten.mul.Tensor, aten.hardswish_.default: aten.hardswish.default,
             aten.copy_.default: aten.copy.default, aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
             aten.pow_.Scalar: None,  # pow.Scalar is the power of a number
             aten.normal_.default: None, aten.detach_.default: None, aten.t_.default: None, aten.mul.Tensor: None}
    assert {func: functionalization._plain_form(func) for func in pairs} == pairs
