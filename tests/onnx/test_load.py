"""The loader and the writer: what is refused and how it is named, functions, round trips, failing allocations.

Most tests run loader_check.c, which is the loader under sanitizers; the rest goes through onnxtrain._C.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import loader_build
import loader_models
import numpy as np
import onnx
import pytest
from loader_models import model, value
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import _C


@pytest.fixture(scope="session")
def check() -> Path:
    return loader_build.build(loader_build.ROOT / "build/loader_check")


def run(check: Path, *arguments) -> str:
    result = subprocess.run([check, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def answers(check: Path, models: list[bytes]) -> list[str]:
    """One line of "STATUS message" a model, after load, write, load and write."""
    data = b"".join(len(m).to_bytes(8, "little") + m for m in models)
    result = subprocess.run([check, "stream"], input=data, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    lines = result.stdout.decode().splitlines()
    assert len(lines) == len(models), lines
    return lines


def text(check: Path, tmp_path: Path, m: onnx.ModelProto) -> str:
    path = tmp_path / "model.onnx"
    path.write_bytes(m.SerializeToString())
    return run(check, "text", path)


# ---- what is read ----


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


def test_initializer_listed_as_input(check, tmp_path):
    m = model([helper.make_node("Add", ["x", "w"], ["y"])], [value("x", [2]), value("w", [2])], [value("y", [2])],
              [numpy_helper.from_array(np.ones(2, np.float32), "w")])
    assert text(check, tmp_path, m).startswith("g (float[2] x) =>")


def test_bools_are_zero_or_one(check, tmp_path):
    t = helper.make_tensor("w", TensorProto.BOOL, [3], b"\x00\x02\xff", raw=True)
    m = model([helper.make_node("Not", ["w"], ["y"])], [], [value("y", [3], TensorProto.BOOL)], [t])
    assert "bool[3] w = {0, 1, 1}" in text(check, tmp_path, m)


# ---- what is refused ----


def relu() -> onnx.ModelProto:
    m = model([helper.make_node("Relu", ["x"], ["h"], name="first"),
               helper.make_node("Neg", ["h"], ["y"], name="second")],
              [value("x", ["n", 2])], [value("y", ["n", 2])])
    return m


def initializer(**fields) -> onnx.ModelProto:
    m = relu()
    t = m.graph.initializer.add(name="w", data_type=TensorProto.FLOAT)
    for key, content in fields.items():
        if isinstance(content, list):
            getattr(t, key).extend(content)
        else:
            setattr(t, key, content)
    return m


def edited(edit) -> onnx.ModelProto:
    m = relu()
    edit(m)
    return m


def function(edit) -> onnx.ModelProto:
    m = loader_models.functions()
    edit(m)
    return m


def attribute(**fields) -> onnx.ModelProto:
    return edited(lambda m: m.graph.node[0].attribute.append(onnx.AttributeProto(name="a", **fields)))


def deep(levels: int) -> bytes:
    """A model whose subgraphs nest, as wire bytes, since Python refuses to make it."""

    def field(number: int, content: bytes) -> bytes:
        size, header = len(content), bytes([number << 3 | 2])
        while size > 127:
            header += bytes([size & 127 | 128])
            size >>= 7
        return header + bytes([size]) + content

    content = b""
    for _ in range(levels):
        content = field(1, field(5, field(6, content)))  # graph.node.attribute.g
    return field(7, content)


REFUSED = {
    "cycle": (lambda: edited(lambda m: m.graph.node[0].input.__setitem__(0, "y")), "EINVAL", "node 0 (Relu 'first')",
              "'y'"),
    "wrong order": (lambda: edited(lambda m: m.graph.node.append(m.graph.node.pop(0))), "EINVAL",
                    "node 0 (Neg 'second')", "'h'"),
    "unknown name": (lambda: edited(lambda m: m.graph.node[1].input.__setitem__(0, "q")), "EINVAL", "node 1", "'q'"),
    "node output twice": (lambda: edited(lambda m: m.graph.node[1].output.__setitem__(0, "h")), "EINVAL", "node 1",
                          "'h'"),
    "node output is input": (lambda: edited(lambda m: m.graph.node[0].output.__setitem__(0, "x")), "EINVAL", "node 0",
                             "'x'"),
    "one node, same output": (lambda: edited(lambda m: m.graph.node[0].output.append("h")), "EINVAL", "node 0", "'h'"),
    "no node outputs": (lambda: edited(lambda m: m.graph.node[1].ClearField("output")), "EINVAL", "node 1",
                        "no outputs"),
    "input twice": (lambda: edited(lambda m: m.graph.input.append(m.graph.input[0])), "EINVAL", "input 'x'", "twice"),
    "initializer twice": (lambda: edited(lambda m: m.graph.initializer.extend(
        [numpy_helper.from_array(np.ones(1, np.float32), "w")] * 2)), "EINVAL", "'w'", "twice"),
    "missing output": (lambda: edited(lambda m: m.graph.output.append(value("q", [1]))), "EINVAL", "output 'q'",
                       "not computed"),
    "no outputs": (lambda: edited(lambda m: m.graph.ClearField("output")), "EINVAL", "no outputs"),
    "no graph": (lambda: b"", "EINVAL", "no graph"),
    "negative input dim": (lambda: edited(lambda m: m.graph.input[0].CopyFrom(value("x", [-3]))), "EINVAL",
                           "input 'x'", "-3"),
    "huge input": (lambda: edited(lambda m: m.graph.input[0].CopyFrom(value("x", [2**40] * 3))), "EINVAL", "input 'x'",
                   "overflow"),
    "input without type": (lambda: edited(lambda m: m.graph.input[0].ClearField("type")), "EUNSUPPORTED", "input 'x'"),
    "input of strings": (lambda: edited(lambda m: m.graph.input[0].CopyFrom(value("x", [1], 8))), "EUNSUPPORTED",
                         "input 'x'", "8"),
    "unknown input dtype": (lambda: edited(lambda m: m.graph.input[0].CopyFrom(value("x", [1], 99))), "EINVAL",
                            "input 'x'", "99"),
    "rank 13": (lambda: edited(lambda m: m.graph.input[0].CopyFrom(value("x", [1] * 13))), "EUNSUPPORTED", "input 'x'",
                "13"),
    "negative dim": (lambda: initializer(dims=[-1, 2]), "EINVAL", "initializer 'w'", "negative"),
    "overflowing dims": (lambda: initializer(dims=[2**62, 2**62], raw_data=b""), "EINVAL", "initializer 'w'",
                         "overflow"),
    "overflow hidden by zero": (lambda: initializer(dims=[0, 2**62, 2**62]), "EINVAL", "initializer 'w'", "overflow"),
    "absurd count": (lambda: initializer(dims=[2**40]), "EINVAL", "initializer 'w'", str(2**40)),
    "short raw_data": (lambda: initializer(dims=[2], raw_data=b"1234567"), "EINVAL", "initializer 'w'", "7 bytes", "8"),
    "long raw_data": (lambda: initializer(dims=[2], raw_data=b"123456789"), "EINVAL", "initializer 'w'", "9 bytes",
                      "8"),
    "short float_data": (lambda: initializer(dims=[3], float_data=[1.0, 2.0]), "EINVAL", "initializer 'w'",
                         "2 entries", "3"),
    "wrong typed field": (lambda: initializer(dims=[1], int32_data=[1]), "EINVAL", "initializer 'w'", "float_data"),
    "unknown dtype": (lambda: initializer(dims=[1], data_type=77), "EINVAL", "initializer 'w'", "77"),
    "strings": (lambda: initializer(dims=[1], data_type=8), "EUNSUPPORTED", "initializer 'w'", "8"),
    "nameless initializer": (lambda: initializer(name="", dims=[1], float_data=[1.0]), "EINVAL", "initializer",
                             "no name"),
    "external data": (lambda: initializer(dims=[1], data_location=1), "EUNSUPPORTED", "initializer 'w'", "external"),
    "sparse initializer": (lambda: edited(lambda m: m.graph.sparse_initializer.add().values.CopyFrom(
        TensorProto(name="sp"))), "EUNSUPPORTED", "'sp'", "sparse"),
    "no opset": (lambda: edited(lambda m: m.ClearField("opset_import")), "EINVAL", "node 0", "opset"),
    "opset 0": (lambda: edited(lambda m: setattr(m.opset_import[0], "version", 0)), "EINVAL", "node 0", "version 0"),
    "later opset": (lambda: edited(lambda m: setattr(m.opset_import[0], "version", 1000)), "EUNSUPPORTED", "1000"),
    "opset twice": (lambda: edited(lambda m: m.opset_import.add(domain="ai.onnx", version=12)), "EINVAL",
                    "imported twice"),
    "domain not imported": (lambda: edited(lambda m: setattr(m.graph.node[0], "domain", "d")), "EINVAL", "node 0",
                            "'d'"),
    "no operator type": (lambda: edited(lambda m: m.graph.node[0].ClearField("op_type")), "EINVAL", "node 0"),
    "attribute twice": (lambda: edited(lambda m: m.graph.node[0].attribute.extend(
        [helper.make_attribute("a", 1), helper.make_attribute("a", 2.0)])), "EINVAL", "node 0", "'a'", "twice"),
    "attribute without name": (lambda: edited(lambda m: m.graph.node[0].attribute.add(type=2)), "EINVAL", "node 0",
                               "no name"),
    "attribute without type": (lambda: attribute(i=1), "EINVAL", "node 0", "'a'", "no type"),
    "tensor attribute without tensor": (lambda: attribute(type=4), "EINVAL", "node 0", "'a'", "no tensor"),
    "subgraph": (lambda: attribute(type=5), "EINVAL", "node 0", "a: ", "has no graph"),
    "sparse attribute": (lambda: attribute(type=11), "EUNSUPPORTED", "node 0", "'a'", "sparse"),
    "reference outside a function": (lambda: attribute(type=2, ref_attr_name="r"), "EINVAL", "node 0", "'r'"),
    "too many attributes": (lambda: edited(lambda m: m.graph.node[0].attribute.extend(
        helper.make_attribute(f"a{i}", i) for i in range(2000))), "EINVAL", "node 0", "2000"),
    "string constant": (lambda: edited(lambda m: m.graph.node.insert(0, helper.make_node(
        "Constant", [], ["c"], value_string="s"))), "EUNSUPPORTED", "node 0", "value_string"),
    "constant of wrong kind": (lambda: edited(lambda m: m.graph.node.insert(0, helper.make_node(
        "Constant", [], ["c"], value_int=1.5))), "EINVAL", "node 0", "value_int"),
    "empty constant": (lambda: edited(lambda m: m.graph.node.insert(0, helper.make_node("Constant", [], ["c"]))),
                       "EINVAL", "node 0", "one attribute"),
    "recursive function": (lambda: function(lambda m: m.functions[0].node.add().CopyFrom(helper.make_node(
        "Outer", ["a"], ["q"], domain="own")) or m.functions[0].opset_import.add(domain="own", version=1)),
        "EINVAL", "'Outer'", "calls itself"),
    "function twice": (lambda: function(lambda m: m.functions.append(m.functions[0])), "EINVAL", "'Inner'", "twice"),
    "too many inputs of a call": (lambda: function(lambda m: m.graph.node[0].input.extend(["x"])), "EINVAL", "node 0",
                                  "2 inputs"),
    "undeclared attribute of a call": (lambda: function(lambda m: m.graph.node[0].attribute.append(
        helper.make_attribute("q", 1))), "EINVAL", "node 0", "attributes"),
    "reference to nothing": (lambda: function(lambda m: setattr(
        m.functions[0].node[0].attribute[0], "ref_attr_name", "q")), "EINVAL", "function 'Inner'", "'q'"),
    "reference of another kind": (lambda: function(lambda m: m.graph.node[0].attribute[0].CopyFrom(
        helper.make_attribute(m.graph.node[0].attribute[0].name, 1))), "EINVAL", "node 0"),
    "function output not computed": (lambda: function(lambda m: m.functions[1].output.__setitem__(0, "q")), "EINVAL",
                                     "'q'"),
    "deep nesting": (lambda: deep(2500), "EINVAL", "nested deeper than 64"),
    "nesting over the limit": (lambda: deep(21), "EINVAL", "nested deeper than 64"),
    "not UTF-8": (lambda: relu().SerializeToString().replace(b"first", b"fi\xffst"), "EINVAL", "UTF-8"),
    "NUL in a name": (lambda: relu().SerializeToString().replace(b"first", b"fi\0st"), "EINVAL", "UTF-8"),
    "bad tag": (lambda: b"\x07", "EINVAL", "byte"),
    "group": (lambda: b"\x0b\x0c", "EINVAL", "byte"),
    "endless varint": (lambda: b"\x08" + b"\xff" * 12, "EINVAL", "byte"),
    "length past the end": (lambda: b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "EINVAL", "longer than what is left"),
}


def bytes_of(name: str) -> bytes:
    made = REFUSED[name][0]()
    return made if isinstance(made, bytes) else made.SerializeToString()


def test_refused(check):
    assert len(bytes_of("deep nesting")) > 20000
    lines = answers(check, [bytes_of(name) for name in REFUSED])
    for (name, (_, status, *parts)), line in zip(REFUSED.items(), lines, strict=True):
        assert line.split()[0] == status, f"{name}: {line}"
        assert all(part in line for part in parts), f"{name}: {line}"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_python(name):
    """The same through the extension: ValueError or UnsupportedError, with the place in its text."""
    _, status, *parts = REFUSED[name]
    with pytest.raises(_C.UnsupportedError if status == "EUNSUPPORTED" else ValueError) as caught:
        _C.Session(bytes_of(name))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert not isinstance(caught.value, UnicodeError)


def test_text_that_is_no_utf8():
    """Bytes of a string attribute that are no text, and a message that is cut within a character."""
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.DOUBLE)
    node.attribute.append(onnx.AttributeProto(name="round_mode", type=onnx.AttributeProto.STRING, s=b"a\x80b"))
    session = _C.Session(model([node], [value("x", [1])], [value("y", [1], TensorProto.DOUBLE)],
                               opset=24).SerializeToString())
    assert "a\ufffdb" in session.text()
    for shift in "", "x":
        name = shift + "\u00e9" * 4000
        with pytest.raises(ValueError, match="\u00e9\u00e9") as caught:
            _C.Session(model([helper.make_node("Relu", [name], ["y"])], [value("x", [1])],
                             [value("y", [1])]).SerializeToString())
        assert not isinstance(caught.value, UnicodeError)


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


def test_counts_are_limited(check):
    """What is searched in a list is limited, so that no model of a few MB takes minutes."""
    dims = model([helper.make_node("Relu", ["x0"], ["y"])],
                 [value(f"x{i}", [f"s{i}_{j}" for j in range(12)]) for i in range(400)], [value("y", [1])])
    opsets = relu()
    opsets.opset_import.extend(helper.make_opsetid(f"d{i}", 1) for i in range(300))
    lines = answers(check, [dims.SerializeToString(), opsets.SerializeToString()])
    assert lines[0] == "EINVAL model: input 'x341': more than 4096 symbolic dims"
    assert lines[1] == "EINVAL model: 301 opset imports, at most 256"


@pytest.mark.parametrize("name", ["mlp", "functions", "everything"])
def test_truncated(check, name):
    """Cut at any length, a model is refused or, where the cut falls between fields, read without what follows."""
    data = loader_models.ALL[name]().SerializeToString()
    cuts = [data[:n] for n in range(0, len(data), 1 + len(data) // 400)]
    for n, line in zip(range(len(cuts)), answers(check, cuts), strict=True):
        assert line.split()[0] in ("EINVAL", "EUNSUPPORTED"), (n, line)


def test_truncated_in_python():
    data = loader_models.mlp().SerializeToString()
    for n in range(0, len(data), 5):
        with pytest.raises((ValueError, _C.UnsupportedError)):
            _C.Session(data[:n])


# ---- failing allocations ----


@pytest.mark.parametrize("name", loader_models.ALL)
def test_allocation_sweep(check, tmp_path, name):
    path = tmp_path / "model.onnx"
    path.write_bytes(loader_models.ALL[name]().SerializeToString())
    assert int(run(check, "sweep", path).split()[0]) > 50


def test_allocation_sweep_in_python():
    """Each allocation of Session() fails in turn: MemoryError and nothing left, until it succeeds."""
    data = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", ["n", 2])],
                 [value("y", ["n", 2])]).SerializeToString()
    before = _C.live_blocks()
    for n in range(100000):
        _C.fail_allocation_after(n)
        try:
            session = _C.Session(data)
        except MemoryError:
            assert _C.fail_allocation_after(-1)
            assert _C.live_blocks() == before
            continue
        except BaseException:
            _C.fail_allocation_after(-1)
            raise
        assert not _C.fail_allocation_after(-1)
        del session
        break
    assert n > 30 and _C.live_blocks() == before
