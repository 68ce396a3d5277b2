"""What torch says about the precision of float32 products, by both of its interfaces, reaches the engine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from onnxtrain.ortmodule import _device

STEP = """
import torch
from torch import nn
from onnxtrain.ortmodule import ORTModule, _device
told = []
_device._C.set_tf32 = lambda products, convolutions: told.append((products, convolutions))
model = ORTModule(nn.Linear(4, 3))
{setting}
_device.configure()
x = torch.randn(2, 4)
model(x).sum().backward()
print(_device.matmul_precision(), *told)
"""


def after(setting: str) -> str:
    """What a process prints that has made the setting before its first step: torch keeps such settings for good."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", STEP.format(setting=setting)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("setting, printed", [
    ("", "highest (False, True)"),
    ("torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = False", "highest (True, False)"),
    ("torch.set_float32_matmul_precision('medium')", "medium (True, True)"),
    ("torch.set_float32_matmul_precision('high')", "high (True, True)"),
    ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "highest (True, True)"),
    ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "highest (False, False)"),
    ("torch.backends.fp32_precision = 'tf32'", "high (True, True)"),
    ("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", "medium (False, True)"),
])
def test_settings_of_both_interfaces(setting, printed):
    assert after(setting) == printed


def test_the_engine_is_told_of_changes_alone(monkeypatch):
    told = []
    monkeypatch.setattr(_device._C, "set_tf32", lambda *flags: told.append(flags))
    monkeypatch.setattr(_device, "_tf32", None)
    before = torch.backends.cuda.matmul.allow_tf32
    for value in (False, False, True, True, False):
        torch.backends.cuda.matmul.allow_tf32 = value
        _device.tell_tf32()
    torch.backends.cuda.matmul.allow_tf32 = before
    assert [flags[0] for flags in told] == [False, True, False]
