"""A model's functions are inlined: they compute the same, keep names and random streams apart, and are limited."""

from __future__ import annotations

import loader_models
import numpy as np
import onnx
from loader_build import answers, run, text
from loader_models import model, value
from onnx import TensorProto, helper


def test_functions_compute_the_same(check, tmp_path):
    """Inlined, the model computes what its formula says."""
    from onnx.reference import ReferenceEvaluator

    m = loader_models.functions()
    path, out = tmp_path / "a.onnx", tmp_path / "b.onnx"
    path.write_bytes(m.SerializeToString())
    run(check, "save", path, out)
    inlined = onnx.load(out)
    assert not inlined.functions and {n.op_type for n in inlined.graph.node} == {"LeakyRelu", "Identity", "Mul", "Add"}
    x = np.array([[1.0, -2.0], [-0.5, 3.0]], np.float32)
    f = lambda v, s, k: k * np.where(v < 0, s * v, v) + v  # noqa: E731
    computed = ReferenceEvaluator(inlined).run(None, {"x": x})[0]
    np.testing.assert_allclose(computed, f(f(x, 0.1, 3.0), 0.2, 0.5), rtol=1e-6)


def test_names_stay_unique(check, tmp_path):
    """Nodes may share a name, a body's names may be taken, an output may be listed twice, output 0 may be left out."""
    body = [helper.make_node("Relu", ["a"], ["t"], name="r"), helper.make_node("Relu", ["t"], ["b"], name="r")]
    f = helper.make_function("own", "F", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    m = model([helper.make_node("Relu", ["x"], ["F/t"], name="same"),
               helper.make_node("F", ["F/t"], ["p"], domain="own"),
               helper.make_node("F", ["p"], ["y"], domain="own"), helper.make_node("Neg", ["y"], ["z"], name="same"),
               helper.make_node("Dropout", ["z"], ["", "mask"])],
              [value("x", [2])], [value("y", [2]), value("y", [2]), value("mask", [2], TensorProto.BOOL)],
              functions=[f], imports=["own"])
    printed = text(check, tmp_path, m)
    names = [part.split()[-1] for line in printed.splitlines() if " = " in line
             for part in line.split(" = ")[0].split(",") if part.strip()]
    assert len(set(names)) == len(names) == 9, printed
    assert "=> (float[2] y, float[2] y_" in printed
    assert answers(check, [m.SerializeToString()]) == ["OK "]


def test_random_streams_differ(check, tmp_path):
    f = helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("Dropout", ["a"], ["b"])],
                             [helper.make_opsetid("", 18)])
    m = model([helper.make_node("F", ["x"], ["p"], domain="own"), helper.make_node("F", ["p"], ["q"], domain="own"),
               helper.make_node("Dropout", ["q"], ["y"])],
              [value("x", [2])], [value("y", [2])], functions=[f], imports=["own"])
    printed = text(check, tmp_path, m)
    assert all(f"rng_stream = {i}>" in printed for i in range(3)), printed


def test_functions_that_multiply(check):
    """Thirty functions that each call the next one twice would be a billion nodes."""
    n, opsets = 30, [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    bodies = [[helper.make_node(f"F{i + 1}", ["a"], ["t"], domain="own"),
               helper.make_node(f"F{i + 1}", ["t"], ["b"], domain="own")]
              for i in range(n)] + [[helper.make_node("Relu", ["a"], ["b"])]]
    functions = [helper.make_function("own", f"F{i}", ["a"], ["b"], body, opsets) for i, body in enumerate(bodies)]
    wide = model([helper.make_node("F0", ["x"], ["y"], domain="own")], [value("x", [1])], [value("y", [1])],
                 functions=functions, imports=["own"])
    chain = [helper.make_function("own", f"F{i}", ["a"], ["b"],
                                  [helper.make_node(f"F{i + 1}" if i < 40 else "Relu", ["a"], ["b"],
             domain="own" if i < 40 else "")], opsets) for i in range(41)]
    long = model(wide.graph.node, wide.graph.input, wide.graph.output, functions=chain, imports=["own"])
    expands, nests = answers(check, [wide.SerializeToString(), long.SerializeToString()])
    assert expands.startswith("EINVAL") and "expand to more than" in expands[:100000]
    assert nests.startswith("EINVAL") and "nested deeper than 32" in nests
