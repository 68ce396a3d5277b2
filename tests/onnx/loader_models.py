"""Small models that the loader's tests and the fuzz start from. Each exercises a part of the format."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def model(nodes, inputs, outputs, initializers=(), functions=(), opset=18, imports=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in imports)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=10)


def value(name, shape, dtype=FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def mlp():
    return model(
        [helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="fc1", transB=1),
         helper.make_node("Relu", ["h"], ["r"]),
         helper.make_node("MatMul", ["r", "w2"], ["m"]),
         helper.make_node("Add", ["m", "b2"], ["y"])],
        [value("x", ["batch", 3]), value("w1", [4, 3]), value("b1", [4]),
         value("w2", [4, 2])], [value("y", ["batch", 2])],
        [numpy_helper.from_array(np.array([0.5, -0.5], np.float32), "b2")])


def elementwise():
    return model(
        [helper.make_node("Mul", ["x", "s"], ["a"]), helper.make_node("Tanh", ["a"], ["b"]),
         helper.make_node("Constant", [], ["c"], value_float=2.0), helper.make_node("Pow", ["b", "c"], ["d"]),
         helper.make_node("LeakyRelu", ["d"], ["e"], alpha=0.1), helper.make_node("Dropout", ["e", "p", "t"], ["f"]),
         helper.make_node("Sub", ["f", "x"], ["y"])],
        [value("x", ["n", 4]), value("s", [4])], [value("y", ["n", 4])],
        [numpy_helper.from_array(np.array(0.2, np.float32), "p"), numpy_helper.from_array(np.array(True), "t")])


def shapes():
    """A model that computes its own shapes, as exporters write it."""
    ints = lambda name, *v: numpy_helper.from_array(np.array(v, np.int64), name)  # noqa: E731
    return model(
        [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
         helper.make_node("Concat", ["n", "rest"], ["to"], axis=0), helper.make_node("Reshape", ["x", "to"], ["r"]),
         helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1]), helper.make_node("Unsqueeze", ["t", "one"],
                                                                                       ["u"]),
         helper.make_node("Slice", ["u", "zero", "two", "three"], ["v"]),
         helper.make_node("ReduceSum", ["v", "one"], ["w"], keepdims=0), helper.make_node("Expand", ["w", "big"],
                                                                                          ["y"])],
        [value("x", ["n", 6])], [value("y", [2, "n", 3, 2])],
        [ints("zero", 0), ints("one", 1), ints("two", 2), ints("three", 3), ints("rest", 2, 3),
         ints("big", 2, 1, 1, 1)])


def functions():
    """Two nested functions with attribute references, a default, an optional input and an input handed through."""
    ref = helper.make_node("LeakyRelu", ["a"], ["l"])
    ref.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    inner = helper.make_function("own", "Inner", ["a", "unused"], ["l", "a"], [ref], [helper.make_opsetid("", 18)],
                                 ["slope"])
    call = helper.make_node("Inner", ["x", ""], ["i", "j"], domain="own", name="in")
    call.attribute.append(onnx.AttributeProto(name="slope", ref_attr_name="s", type=onnx.AttributeProto.FLOAT))
    scale = helper.make_node("Constant", [], ["k"])
    scale.attribute.append(onnx.AttributeProto(name="value_float", ref_attr_name="k", type=onnx.AttributeProto.FLOAT))
    outer = helper.make_function(
        "own", "Outer", ["x"], ["z"], [call, scale, helper.make_node("Mul", ["i", "k"], ["m"]),
                                       helper.make_node("Add", ["m", "j"], ["z"])],
        [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)], ["s"], [helper.make_attribute("k", 3.0)])
    return model([helper.make_node("Outer", ["x"], ["h"], domain="own", name="first", s=0.1),
                  helper.make_node("Outer", ["h"], ["y"], domain="own", name="second", s=0.2, k=0.5)],
                 [value("x", ["n", 2])], [value("y", ["n", 2])], functions=[inner, outer], imports=["own"])


def conv():
    return model(
        [helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1]),
         helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n", "m2", "v2"], training_mode=1),
         helper.make_node("MaxPool", ["n"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
         helper.make_node("Flatten", ["p"], ["f"]), helper.make_node("LogSoftmax", ["f"], ["y"], axis=-1)],
        [value("x", ["n", 1, 4, 4]), value("w", [2, 1, 3, 3]), *(value(k, [2]) for k in "gbmv")],
        [value("y", ["n", 8]), value("m2", [2]), value("v2", [2])])


def attention():
    return model(
        [helper.make_node("Gather", ["table", "ids"], ["e"]),
         helper.make_node("LayerNormalization", ["e", "g", "b"], ["l"], axis=-1, epsilon=1e-5),
         helper.make_node("Transpose", ["l"], ["t"], perm=[0, 2, 1]), helper.make_node("MatMul", ["l", "t"], ["q"]),
         helper.make_node("Softmax", ["q"], ["p"], axis=-1), helper.make_node("MatMul", ["p", "l"], ["o"]),
         helper.make_node("Cast", ["o"], ["d"], to=TensorProto.DOUBLE), helper.make_node("ReduceMean", ["d"], ["y"],
                                                                                         keepdims=0)],
        [value("ids", ["b", "t"], TensorProto.INT64), value("table", [5, 4]), value("g", [4]),
         value("b", [4])], [value("y", [])])


def everything():
    """Every dtype and both places of a tensor's contents; every kind of attribute, on an operator that nobody has."""
    dtypes = ["FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "BOOL", "FLOAT16", "DOUBLE", "UINT32",
              "UINT64",
              "BFLOAT16", "COMPLEX64", "COMPLEX128"]
    typed = [helper.make_tensor(f"typed_{d}", getattr(TensorProto, d), [2], [1, 0]) for d in dtypes]
    raw = []
    for t in typed:
        raw.append(numpy_helper.from_array(numpy_helper.to_array(t), t.name.replace("typed", "raw")))
        raw[-1].data_type = t.data_type
    names = [t.name for t in typed + raw]
    node = helper.make_node("Everything", ["x", *names, "", "x"], ["y", "", "z"], domain="nobody", name="all", i=-5,
                            f=0.25,
                            s="text", ints=[1, -2], floats=[1.0, 2.0], strings=["a", "b"],
                            t=numpy_helper.from_array(np.arange(3)))
    return model([node], [value("x", [1])], [value("y", [None, None]), value("z", ["k", 3])], typed + raw,
                 imports=["nobody"])


def control():
    """Subgraphs: a loop over a sequence, with a branch inside that reads values from all around."""
    branch = lambda name, op: helper.make_graph([helper.make_node(op, ["row", "w"], ["p"])], name, [],  # noqa: E731
                                                [onnx.ValueInfoProto(name="p")])
    body = helper.make_graph(
        [helper.make_node("Gather", ["x", "i"], ["row"]), helper.make_node("Identity", ["c"], ["c2"]),
         helper.make_node("If", ["flag"], ["v"], then_branch=branch("yes", "Mul"), else_branch=branch("no", "Add")),
         helper.make_node("SequenceInsert", ["s", "v"], ["s2"]), helper.make_node("Sin", ["v"], ["out"])],
        "body", [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), onnx.ValueInfoProto(name="s")],
        [value("c2", [], TensorProto.BOOL), onnx.ValueInfoProto(name="s2"), value("out", [3])])
    return model(
        [helper.make_node("SequenceEmpty", [], ["e"]),
         helper.make_node("Loop", ["n", "", "e"], ["all", "y"], body=body),
         helper.make_node("ConcatFromSequence", ["all"], ["z"], axis=0)],
        [value("x", [4, 3]), value("w", [3]), value("flag", [], TensorProto.BOOL)],
        [value("y", ["k", 3]), value("z", ["m"])], [numpy_helper.from_array(np.array(2, np.int64), "n")])


ALL = {f.__name__: f for f in (control, mlp, elementwise, shapes, functions, conv, attention, everything)}
