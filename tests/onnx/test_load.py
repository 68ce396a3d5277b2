"""The loader refuses what is wrong, by its name, and survives failing allocations.

Most tests run loader_check.c, which is the loader under sanitizers; the rest goes through onnxtrain._C.
"""

from __future__ import annotations

import loader_models
import numpy as np
import onnx
import pytest
from loader_build import answers, run, text
from loader_models import model, value
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import _C

# ---- what is read ----


def test_initializer_listed_as_input(check, tmp_path):
    m = model([helper.make_node("Add", ["x", "w"], ["y"])], [value("x", [2]), value("w", [2])], [value("y", [2])],
              [numpy_helper.from_array(np.ones(2, np.float32), "w")])
    assert text(check, tmp_path, m).startswith("g (float[2] x) =>")


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


def test_counts_are_limited(check):
    """What is searched in a list is limited, so that no model of a few MB takes minutes."""
    dims = model([helper.make_node("Relu", ["x0"], ["y"])],
                 [value(f"x{i}", [f"s{i}_{j}" for j in range(12)]) for i in range(400)], [value("y", [1])])
    opsets = relu()
    opsets.opset_import.extend(helper.make_opsetid(f"d{i}", 1) for i in range(300))
    lines = answers(check, [dims.SerializeToString(), opsets.SerializeToString()])
    assert lines[0] == "EINVAL model: input 'x341': more than 4096 symbolic dims"
    assert lines[1] == "EINVAL model: 301 opset imports, at most 256"


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
