"""Complex numbers in forward, as arguments, weights and results: results and gradients are eager's, in the engine."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Spectral(nn.Module):
    """A spectrum of (2, 3, 9) complex numbers, and weights of (3, 3, 4)."""

    def __init__(self, compute):
        super().__init__()
        self.layer, self.compute = nn.Linear(16, 16), compute
        self.weight = nn.Parameter(torch.complex(drawn(3, 3, 4), drawn(3, 3, 4, seed=1)) / 3)
        self.register_buffer("turn", torch.polar(torch.ones(9), drawn(9, seed=2)))
        with torch.no_grad():
            self.layer.weight.copy_(drawn(16, 16, seed=3) / 4)
            self.layer.bias.zero_()

    def forward(self, x):
        return self.compute(self, torch.fft.rfft(self.layer(x)))


def written(m, f):
    o = torch.zeros(2, 3, 9, dtype=torch.cfloat)
    o[:, :, :4] = f[:, :, :4] * m.weight[0]
    o[..., -1] = 2 + 1j
    o[0, 1] = f[0, 2]
    return torch.fft.irfft(o, n=16)


def fourier_layer(m, f):
    o = torch.zeros_like(f)
    o[:, :, :4] = torch.einsum("bix,iox->box", f[:, :, :4], m.weight)
    return torch.fft.irfft(o, n=16)


def turned(m, f):
    """Rotary positions, as complex numbers."""
    x = torch.view_as_complex(torch.view_as_real(f).reshape(2, 3, 9, 2).contiguous())
    return torch.view_as_real(x * m.turn.view(1, 1, -1)).flatten(2)


def matrices(m, f):
    a, b = f[:, :, :4] @ m.weight[0].T, torch.bmm(f, f.transpose(1, 2).conj())
    return torch.view_as_real(a).sum() + torch.view_as_real(b).square().mean()


def joined(m, f):
    g = torch.cat([f, f.real.to(f.dtype), torch.stack([f, f.flip(-1)])[0]], dim=1).roll(1, 0)
    first, second = g.unsqueeze(1).repeat(1, 2, 1, 1).permute(2, 0, 1, 3).split([4, 5])
    return torch.view_as_real(first.sum((0, 1)) - second.mean(0).squeeze(0).sum(0).cumsum(0)[-1])


REAL = {
    "a Fourier layer": fourier_layer,
    "broadcast product": lambda m, f: torch.fft.irfft((f[:, :, None, :4] * m.weight[None]).sum(1), n=16),
    "written": written,
    "rotary positions": turned,
    "matrices": matrices,
    "joined and split": joined,
    "absolute value": lambda m, f: f.abs() + F.pad(f[..., 1:-1].angle(), (1, 1)),  # whose imaginary parts are not 0
    "absolute value at 0": lambda m, f: (f * 0).abs() + f.abs(),
    "parts": lambda m, f: f.real * 2 - f.imag.square() + f.conj().imag,
    "norms": lambda m, f: (f - 1).norm(dim=-1, p=2) + torch.linalg.vector_norm(f, 1, dim=-1)
    + torch.linalg.norm(f, dim=-1),
    "quotients": lambda m, f: torch.view_as_real(f / (f.abs() + 1) + 1 / (f + 9) + m.turn / (2 - 1j) + f / 3),
    "quotients of small and large numbers": lambda m, f: torch.view_as_real(
        (f + 3) * 1e-22 / ((f + 9) * 1e-22) + (f + 3) * 1e20 / ((f + 9) * 1e20)),
    "differences": lambda m, f: torch.view_as_real(torch.diff(f, prepend=f.real[..., :1]) - torch.diff(f, append=f)[..., :9]),
    "arithmetic with numbers": lambda m, f: torch.view_as_real((2 - f) * (1 + 2j) + 0.5 - f * 3 - 1j),
    "exponentials": lambda m, f: torch.view_as_real(torch.exp(f * 0.1j) + torch.polar(f.abs(), f.imag) ** 2),
    "padding": lambda m, f: torch.view_as_real(F.pad(f, (2, 1)) + F.pad(f, (1, 2), value=1.5)),
    "a mask": lambda m, f: torch.view_as_real(torch.where(f.real > 0, f, f.conj()).masked_fill(f.imag > 1, 0)),
    "an index": lambda m, f: torch.view_as_real(f[:, torch.tensor([2, 0, 0])] + f.index_select(1, torch.tensor([1, 1, 0]))),
    "new tensors": lambda m, f: torch.view_as_real(
        f + torch.ones(9, dtype=f.dtype) + f.new_zeros(3, 1) + torch.full((9,), 1 - 2j) + torch.zeros_like(f)),
    "of parts": lambda m, f: torch.view_as_real(torch.complex(f.real, f.imag * 2) - torch.view_as_complex(
        torch.stack([f.real, f.imag], -1))),
    "transforms": lambda m, f: torch.view_as_real(torch.fft.ifft(torch.fft.fft(f, n=12), n=7)),
    "of two axes": lambda m, f: torch.fft.irfft2(torch.fft.fft2(f), s=(3, 16)),
    "a window": lambda m, f: torch.stft(torch.fft.irfft(f, n=16).flatten(1), 16, 4, window=torch.hann_window(16),
                                        return_complex=True).abs(),
    "a branch of no gradient": lambda m, f: torch.fft.irfft(f * f.detach().conj(), n=16),
}


def equal(ours, eager, args, steps=3):
    """Outputs and gradients of a few steps of AdamW."""
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (ours, eager)]
    for _ in range(steps):
        results = []
        for module, optimizer in zip((ours, eager), optimizers, strict=True):
            optimizer.zero_grad()
            given = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
            out = module(*given)
            loss = torch.view_as_real(out.resolve_conj()).square().sum() if out.is_complex() else out.square().sum()
            loss.backward()
            results.append([out.detach(), *(x.grad for x in given), *(p.grad for p in module.parameters())])
        for got, want in zip(*results, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                scale = want.abs().max().item()
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(scale, 1e-3))
        for optimizer in optimizers:
            optimizer.step()


def whole(model, steps=3):
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["graph_breaks"]) == (steps, 0, []), counts["reasons"]


@pytest.mark.parametrize("name", REAL)
def test_computed(name):
    eager = Spectral(REAL[name])
    model = ORTModule(copy.deepcopy(eager))
    equal(model, eager, [drawn(2, 3, 16, seed=5).requires_grad_()])
    whole(model)


@pytest.mark.parametrize("compute", [
    lambda m, f: f * m.turn, lambda m, f: f.transpose(1, 2), lambda m, f: (f * 2).conj(), lambda m, f: f[:, 0, ::2]])
def test_a_result(compute):
    eager = Spectral(compute)
    model = ORTModule(copy.deepcopy(eager))
    equal(model, eager, [drawn(2, 3, 16, seed=5).requires_grad_()])
    whole(model)
    ours, want = model(drawn(2, 3, 16)), eager(drawn(2, 3, 16))
    assert (ours.dtype, ours.shape) == (want.dtype, want.shape)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_an_argument_whose_size_changes(dtype):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.complex(drawn(4), drawn(4, seed=1)).to(dtype))

        def forward(self, z, scale):
            return (z * self.weight).sum(-1) * scale, z.abs() ** 2

    eager = Takes()
    model = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5, 2):
        z = torch.complex(drawn(rows, 4), drawn(rows, 4, seed=2)).to(dtype)
        results = []
        for module in (model, eager):
            module.zero_grad()
            given = z.clone().requires_grad_()
            product, size = module(given, 2.0)
            (product.real.sum() + product.imag.square().sum() + size.sum()).backward()
            results.append((product.detach(), size.detach(), given.grad, next(module.parameters()).grad.clone()))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert onnxtrain.stats(model)["fallback_steps"] == 0 and onnxtrain.stats(model)["exports"] <= 2
    conjugate = z.conj()
    torch.testing.assert_close(model(conjugate, 2.0)[0], eager(conjugate, 2.0)[0], rtol=1e-4, atol=1e-4)


class Operator(nn.Module):
    """A layer of a Fourier neural operator over lines or images, of any size."""

    def __init__(self, axes):
        super().__init__()
        self.axes, conv = axes, (nn.Conv1d, nn.Conv2d)[axes - 1]
        self.lift, self.skip = conv(1, 4, 1), conv(4, 4, 1)
        self.weight = nn.Parameter(torch.complex(drawn(4, 4, *[3] * axes), drawn(4, 4, *[3] * axes, seed=1)) / 9)

    def forward(self, x):
        x = self.lift(x)
        sizes, letters = x.shape[2:], "xy"[:self.axes]
        spectrum, low = torch.fft.rfftn(x, dim=tuple(range(-self.axes, 0))), (..., *[slice(3)] * self.axes)
        kept = torch.zeros(*x.shape[:-1], sizes[-1] // 2 + 1, dtype=torch.cfloat)
        kept[low] = torch.einsum(f"bi{letters},io{letters}->bo{letters}", spectrum[low], self.weight)
        return F.gelu(torch.fft.irfftn(kept, s=sizes) + self.skip(x))


@pytest.mark.parametrize("axes", [1, 2])
def test_a_fourier_neural_operator(axes):
    torch.manual_seed(0)
    eager = Operator(axes)
    model = ORTModule(copy.deepcopy(eager))
    for rows, size in ((2, 16), (3, 16), (2, 20)):
        equal(model, eager, [drawn(rows, 1, *[size] * axes)], steps=1)
    whole(model)


def test_between_two_graphs():
    """A complex value goes from one to the next."""
    def cut(m, f):
        g = f * m.turn
        torch._dynamo.graph_break()
        return torch.fft.irfft(g, n=16)

    eager = Spectral(cut)
    model = ORTModule(copy.deepcopy(eager))
    equal(model, eager, [drawn(2, 3, 16, seed=5)])
    assert onnxtrain.stats(model)["reasons"] == []


@pytest.mark.parametrize("name, compute", [
    ("aten.add", lambda m, f: torch.view_as_real(torch.add(f, f.conj(), alpha=2j))),
    ("aten.linalg_norm", lambda m, f: torch.linalg.norm(f[0], 2)), ("aten.pow", lambda m, f: (f ** 3).abs())])
def test_what_has_no_form_is_pytorchs(name, compute):
    eager = Spectral(compute)
    model = ORTModule(copy.deepcopy(eager))
    equal(model, eager, [drawn(2, 3, 16, seed=5)])
    assert f"calls {name} with complex numbers" in onnxtrain.stats(model)["reasons"][0]


def test_a_buffer_that_is_written_is_pytorchs(caplog):
    class Keeps(Spectral):
        def forward(self, x):
            f = torch.fft.rfft(self.layer(x))
            with torch.no_grad():
                self.turn.copy_(f[0, 0])
            return f.abs()

    eager = Keeps(None)
    model = ORTModule(copy.deepcopy(eager))
    equal(model, eager, [drawn(2, 3, 16, seed=5)])
    torch.testing.assert_close(model.turn, eager.turn)
    assert "complex64" in onnxtrain.stats(model)["reasons"][0]
