"""For which GPUs a build has kernels: machine code runs on its major version, PTX of the last one on later ones."""

from __future__ import annotations

import ctypes
import types

import pytest

from onnxtrain import UnsupportedError
from onnxtrain.ortmodule import _device


@pytest.mark.parametrize(("architectures", "runs", "does_not"), [
    ("80 90 100", (80, 86, 89, 90, 100, 103, 110, 120), (50, 70, 75)),
    ("80", (80, 86, 90, 100, 120), (70, 75)),
    ("90", (90, 100, 120), (75, 80, 89)),
    ("80 100", (80, 89, 100, 120), (75, 90)),  # neither sm_80's code nor compute_100's PTX runs on 9.0
    ("86 90", (86, 89, 90, 100), (80,)),
    ("80 90a", (80, 86, 90), (75, 100)),
    ("", (), (80, 90)),
])
def test_gpus_that_a_build_runs_on(emulated, architectures, runs, does_not):
    library = ctypes.CDLL(str(emulated))
    library.ont_emulate_images_run_on.restype = ctypes.c_bool
    for capability in (*runs, *does_not):
        assert library.ont_emulate_images_run_on(architectures.encode(), capability) == (capability in runs), capability


def test_a_gpu_that_the_build_has_no_kernels_for_is_named(monkeypatch):
    """Its modules run in PyTorch; those of another GPU of the machine run in the engine."""
    reason = "cuda:0 has compute capability 7.0, and this build has kernels for 80 90"
    monkeypatch.setattr(_device._C, "open_plugin", lambda: {"left_out": reason, "devices": ["cuda:1"]})
    with pytest.raises(UnsupportedError, match=f"a tensor is on cuda:0: {reason}"):
        _device.device_of([types.SimpleNamespace(device="cuda:0")])
    assert _device.device_of([types.SimpleNamespace(device="cuda:1")]) == "cuda:1"
