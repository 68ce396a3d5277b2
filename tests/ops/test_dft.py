"""DFT, STFT and MelWeightMatrix: against torch.fft, and the mel filters against their definition."""


import numpy as np
import pytest
import torch
from harness import C, Case, R, expect_error, run_case

from onnxtrain import UnsupportedError


def dft(n=None, axis=-2, inverse=0, onesided=0):
    def run(x, *_):
        a = axis % x.dim()
        x = torch.complex(x[..., 0], x[..., 1] if x.shape[-1] == 2 else torch.zeros_like(x[..., 0]))
        if inverse and onesided:
            return torch.fft.irfft(x, n or 2 * (x.shape[a] - 1), a)[..., None]
        y = (torch.fft.ifft if inverse else torch.fft.fft)(x, n, a)
        y = y.narrow(a, 0, y.shape[a] // 2 + 1) if onesided else y
        return torch.view_as_real(y)

    return run


def case(name, shape, n=None, axis=None, opset=20, alloc=False, **attrs):
    run = dft(n, (1 if opset < 20 else -2) if axis is None else axis, **attrs)
    length = None if n is None else C(n)
    inputs = [R(*shape), length] + ([C(axis)] if opset >= 20 and axis is not None else [])
    if opset < 20 and axis is not None:
        attrs["axis"] = axis
    while inputs[-1] is None:
        inputs.pop()
    reference = lambda *a: run(torch.from_numpy(a[0]).double()).numpy().astype(a[0].dtype)  # noqa: E731
    return Case("DFT", inputs, attrs, opset=opset, torch=run, reference=reference, name=name, alloc=alloc)


def stft(step, window=None, length=None, onesided=1):
    def run(x, *rest):
        w = next((t for t in rest if t.is_floating_point()), None)
        n = length or (w.shape[0] if w is not None else x.shape[1])
        x = torch.complex(x[..., 0], x[..., 1] if x.shape[-1] == 2 else torch.zeros_like(x[..., 0]))
        frames = x.unfold(1, n, step)
        y = torch.fft.fft(frames * w if w is not None else frames)
        return torch.view_as_real(y[..., : n // 2 + 1] if onesided else y)

    return run


CASES = [
    case("real", (2, 5, 1), alloc=True), case("complex", (2, 6, 2)), case("one-sided", (2, 6, 1), onesided=1),
    case("one-sided odd", (5, 1), onesided=1), case("padded", (2, 3, 2), n=5), case("cut", (2, 6, 2), n=4),
    case("axis 0", (4, 3, 2), axis=0), case("axis -3", (2, 4, 3, 1), axis=-3), case("inverse", (2, 5, 2), inverse=1),
    case("inverse padded", (2, 5, 2), n=7, inverse=1, axis=1), case("irfft", (2, 4, 2), inverse=1, onesided=1),
    case("irfft odd", (2, 4, 2), n=7, inverse=1, onesided=1), case("irfft padded", (3, 2), n=9, inverse=1, onesided=1),
    case("v17", (2, 4, 3, 2), opset=17), case("v17 axis", (2, 4, 3, 1), opset=17, axis=2, onesided=1),
    case("one", (1, 1, 2)),
    Case("STFT", [R(2, 16, 1), C(3), R(6), C(6)], opset=17, torch=stft(3, length=6)),
    Case("STFT", [R(1, 9, 1), C(2), None, C(4)], {"onesided": 0}, opset=17, torch=stft(2, length=4, onesided=0),
         name="no window"),
    Case("STFT", [R(2, 9, 2), C(2), R(4)], {"onesided": 0}, opset=17, torch=stft(2, onesided=0), name="complex"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_transforms(case):
    run_case(case)


@pytest.mark.parametrize("arguments", [(8, 16, 8192, 0.0, 4096.0), (20, 200, 16000, 20.0, 7600.0),
                                       (3, 7, 100, 5.0, 40.0)])
def test_mel(arguments):
    dtypes = [np.int64] * 3 + [np.float32] * 2
    run_case(Case("MelWeightMatrix", [C(v, d) for v, d in zip(arguments, dtypes)], opset=17, grad=False))


ERRORS = [
    (Case("DFT", [R(2, 3, 3)]), ValueError, "last dim is 3"),
    (Case("DFT", [R(2, 3, 2), None, C(2)]), ValueError, "axis"),
    (Case("DFT", [R(2, 3, 1)], {"inverse": 1, "onesided": 1}), ValueError, "complex"),
    (Case("DFT", [R(1, 9000, 2)]), UnsupportedError, "its matrix"),
    (Case("DFT", [R(1, 0, 1), C(2**40)]), UnsupportedError, "its matrix"),  # lengths without memory behind them
    (Case("STFT", [R(0, 2**40, 1), C(1), None, C(2)]), UnsupportedError, "frames of 2 samples have together more"),
    (Case("STFT", [R(2, 4, 1), C(3), R(6)]), ValueError, "frames of 6"),
    (Case("STFT", [R(2, 9, 2), C(3), R(6)]), ValueError, "one-sided"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
