"""Casts: every pair of dtypes, with what torch makes of numbers out of range, by each instruction set."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from harness import ELEM, chain

from onnxtrain import _C

INF, NAN = float("inf"), float("nan")
EDGES = [0.5, -0.5, -1.0, 127.9, 128.0, 200.0, 256.0, 300.0, -129.0, -200.0, 32768.0, 40000.0, 65536.0, 70000.0, -40000.0,
         2147483520.0, 2147483648.0, 3e9, 4294967296.0, 5e9, -2147483648.0, -3e9, 9.2e18, 9.3e18, 1.7e19, 1.9e19, -9.2e18,
         -9.3e18, 1e25, -1e25, INF, -INF, NAN]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch's answer there is another")
@pytest.mark.parametrize("kernel", ["simd", "ref"])
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_casts_beyond_the_range_are_those_of_torch(source, kernel):
    """On x86; ONNX leaves them open. torch has two answers of its own for uint32, by whether memory is contiguous."""
    x = torch.tensor(EDGES * 40, dtype=torch.float64).to(source)
    for target in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint64, torch.bool):
        got, want = cast(x, target, kernel), x.to(target)
        assert torch.equal(got.view(torch.int8), want.view(torch.int8)), (target, got.tolist(), want.tolist())


@pytest.mark.parametrize("kernel", ["simd", "ref"])
def test_casts_of_large_unsigned_numbers(kernel):
    x = torch.tensor([2**63, 2**63 + 2**40, 2**64 - 1, 5, 60000, 2**62] * 9, dtype=torch.uint64)
    for target in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8, torch.uint32):
        assert torch.equal(cast(x, target, kernel).view(torch.int8), x.to(target).view(torch.int8)), target


def cast(x, target, kernel):
    _C.disable_kernels([f"cast_{'ref' if kernel == 'simd' else 'simd'}"])
    try:
        (y,), _ = chain(x, ("Cast", {"to": ELEM[target]})).forward([x], b"\0")
    finally:
        _C.disable_kernels([])
    return y


def test_every_half_and_back():
    """Also denormals, infinities and NaN, whose payload may change; then floats between two halves."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    half = bits.view(torch.float16)
    wide = cast(half, torch.float32, "simd")
    assert torch.equal(wide.isnan(), half.isnan())
    assert torch.equal(wide[~half.isnan()].view(torch.int32), half.float()[~half.isnan()].view(torch.int32))
    between = torch.nextafter(wide, torch.tensor(0.0)).nan_to_num(0, INF, -INF)
    middle = ((wide + wide.roll(1)) / 2).nan_to_num(0, INF, -INF)
    for x in (wide.nan_to_num(0, INF, -INF), between, middle, middle[:13]):
        assert torch.equal(cast(x, torch.float16, "simd").view(torch.int16), x.half().view(torch.int16))
    assert cast(torch.full((19,), NAN), torch.float16, "simd").isnan().all()


@pytest.mark.parametrize("source", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_of_every_length(source):
    for n in (1, 7, 8, 16, 33, 1000):
        x = torch.randint(-2**62, 2**62, (n,)).to(source)
        for target in ELEM:
            got = cast(x, target, "simd")
            assert torch.equal(got.view(torch.int8), x.to(target).view(torch.int8)), (n, target)


@pytest.mark.parametrize("isa", ["avx2", "plain"])
def test_other_instruction_sets(isa):
    """In a process of its own: the instruction set is chosen once."""
    options = ["-q", "-p", "no:cacheprovider", __file__, "-k", "not other"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], env={**os.environ, "ONNXTRAIN_ISA": isa},
                          capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stdout[-3000:]
