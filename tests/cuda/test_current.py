"""libs/current.c: a device becomes current as by PyTorch's guards, or by CUDA where PyTorch's functions are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A runtime and the functions of libc10_cuda.so, which note their calls.
RUNTIME = """
#include <cuda_runtime_api.h>
int device, calls[8], n;
cudaError_t cudaGetDevice(int *id) { *id = device; return cudaSuccess; }
cudaError_t cudaSetDevice(int id) { calls[n++] = id; device = id; return cudaSuccess; }
"""
TORCH = """
int target = -1, device, calls[8], n;
signed char _ZN3c104cuda14ExchangeDeviceEa(signed char to)
{
    int before = target >= 0 ? target : device;
    calls[n++] = to;
    target = -1;
    device = to;
    return before;
}
signed char _ZN3c104cuda19MaybeExchangeDeviceEa(signed char to)
{
    calls[n++] = 100 + to;
    target = to;
    return device;
}
"""
SCRIPT = """
import ctypes, sys
torch = ctypes.CDLL(sys.argv[2]) if len(sys.argv) > 2 else None
library = ctypes.CDLL(sys.argv[1])
previous = ctypes.c_int()
for target in (1, 1, 0):
    assert library.ont_current_enter(target, ctypes.byref(previous)) == 0
    assert previous.value == 0, previous.value
    library.ont_current_leave(previous)
noted = torch or library
print([(ctypes.c_int * 8).in_dll(noted, "calls")[i] for i in range(ctypes.c_int.in_dll(noted, "n").value)])
"""


def compiled(source: str, target: Path, *more: str) -> Path:
    (target.with_suffix(".c")).write_text(source, encoding="utf-8")
    subprocess.run(["cc", "-std=gnu11", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{ROOT}/cuda/emulate/include",
                    f"-I{ROOT}/cuda", str(target.with_suffix(".c")), *more,
                    f"-Wl,-soname,{target.name}", "-o", str(target), "-ldl"], check=True)
    return target


@pytest.mark.parametrize("torch", [True, False])
def test_the_device_before_comes_back(tmp_path, torch):
    runtime = compiled(RUNTIME, tmp_path / "current.so", str(ROOT / "cuda/libs/current.c"),
                       str(ROOT / "cuda/libs/symbols.c"))
    more = [str(compiled(TORCH, tmp_path / "libc10_cuda.so"))] if torch else []
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(runtime), *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # no context is asked for on the device before: PyTorch decides whether there is one
    assert done.stdout.strip() == str([1, 100, 1, 100, 0, 100] if torch else [1, 0, 1, 0, 0])
