"""A written model is one that ONNX accepts, holds what it was given, and reads as the same graph."""

from __future__ import annotations

import loader_models
import numpy as np
import onnx
import pytest
from loader_build import run
from onnx import helper, numpy_helper


@pytest.mark.parametrize("name", loader_models.ALL)
def test_round_trip(check, tmp_path, name):
    """What is written is a model that ONNX accepts, and reads as the same graph."""
    m = loader_models.ALL[name]()
    onnx.checker.check_model(m)
    path, out, again = tmp_path / "a.onnx", tmp_path / "b.onnx", tmp_path / "c.onnx"
    path.write_bytes(m.SerializeToString())
    run(check, "save", path, out)
    saved = onnx.load(out)
    onnx.checker.check_model(saved)
    assert run(check, "text", path) == run(check, "text", out)
    run(check, "save", out, again)
    assert out.read_bytes() == again.read_bytes()
    assert [i.name for i in saved.graph.input] == [i.name for i in m.graph.input]
    assert [o.SerializeToString() for o in saved.graph.output] == [o.SerializeToString() for o in m.graph.output]


def test_written_contents(check, tmp_path):
    """Every dtype from both fields, and every kind of attribute, have the values that they were given."""
    m = loader_models.everything()
    path, out = tmp_path / "a.onnx", tmp_path / "b.onnx"
    path.write_bytes(m.SerializeToString())
    run(check, "save", path, out)
    saved = onnx.load(out).graph
    given = {t.name: numpy_helper.to_array(t) for t in m.graph.initializer}
    assert {t.name for t in saved.initializer} == set(given)
    for t in saved.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(t), given[t.name])
    values = lambda node: {a.name: helper.get_attribute_value(a) for a in node.attribute}  # noqa: E731
    before, after = values(m.graph.node[0]), values(saved.node[0])
    np.testing.assert_array_equal(numpy_helper.to_array(before.pop("t")), numpy_helper.to_array(after.pop("t")))
    assert before == after
    assert list(saved.node[0].input) == list(m.graph.node[0].input)
    assert list(saved.node[0].output) == list(m.graph.node[0].output)
