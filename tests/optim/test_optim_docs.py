"""The examples of docs/optimizers.md run, and it names every public class, option and refusal."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import onnxtrain.optim
from onnxtrain.optim import FusedAdam

TEXT = (Path(__file__).resolve().parents[2] / "docs/optimizers.md").read_text()


def test_examples():
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) >= 7
    for block in blocks:
        exec(compile(block, "docs/optimizers.md", "exec"), namespace)


def test_everything_is_named():
    for name in onnxtrain.optim.__all__:
        assert f"`{name}" in TEXT, name
    for option in ("max_grad_norm", "amsgrad", "maximize", "master_weights", "stochastic_rounding", "state_dtype",
                   "bias_correction"):
        assert option in inspect.signature(FusedAdam).parameters and option in TEXT, option
