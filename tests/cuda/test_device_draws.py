"""Random numbers of whole modules on the emulated device, and counts beyond 32 bits."""

from __future__ import annotations

import draws
import pytest
import torch
from onnx import TensorProto
from test_emulated import run

from onnxtrain import _C


def test_modules_draw_on_the_device(emulated):
    """In forward, in backward, where something is computed again, and in each replay of a graph."""
    report = run("draws.py", emulated)
    assert report["passed"] == len(draws.CHECKS) and not report["failed"], report["failed"]
    assert {"RandomNormal:cuda_random_fill", "RandomUniform:cuda_random_fill", "Bernoulli:cuda_random_fill",
            "Multinomial:cuda_multinomial"} <= set(report["ran"])


MANY = 2**31 + 5


@pytest.mark.parametrize(("operator", "x", "attributes"), [
    ("RandomUniform", None, {"shape": [MANY]}), ("RandomNormal", None, {"shape": [2, MANY], "dtype": TensorProto.FLOAT16}),
    ("RandomNormalLike", [MANY], {"dtype": TensorProto.FLOAT}), ("Bernoulli", [MANY], {"dtype": TensorProto.BOOL}),
    ("Multinomial", [3, MANY], {"sample_size": 2})])
def test_more_elements_than_32_bits_count(emulated, operator, x, attributes):
    """Such a program is built; there is no memory here to run it."""
    _C.open_plugin(str(emulated))
    inputs = () if x is None else ("x",)
    given = None if x is None else torch.empty(1, dtype=torch.float16).expand(x)
    session = _C.Session(draws.model_of(draws.node(operator, inputs, **attributes), x=given), 16, "emulated")
    plan = session.plan([] if x is None else [x], bytes(len(inputs)))
    assert [step[1] for step in plan["steps"]] == [operator.removesuffix("Like")]
