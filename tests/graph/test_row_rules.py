"""Rules of operators say which rows are read; without a rule all are."""

import numpy as np
from onnx import helper
from test_pack_rows import (
    BATCH,
    LENGTH,
    WIDTH,
    constants,
    every_graph_is_large_enough,  # noqa: F401
    layer,
    loss,
    same,
    tensors_of,
)


def test_no_rule_reads_all():
    """A sum along the rows: each row of its result depends on rows before."""
    tensors = tensors_of()
    nodes = layer()
    nodes[-1].output[0] = "before"
    nodes += [helper.make_node("CumSum", ["before", "axis"], ["s"]), *loss()]
    made = same(nodes, tensors, 1e-12, constants=constants(axis=np.array(1)))
    assert not made.stats()["packed_nodes"]


def test_broadcast_operands():
    """Positions (1, length, width) and a factor of each sequence (batch, 1, 1): entries by row."""
    tensors = tensors_of()
    rng = np.random.default_rng(2)
    tensors |= {"position": rng.normal(size=(1, LENGTH, WIDTH)), "factor": rng.normal(size=(BATCH, 1, 1)),
                "length_width": rng.normal(size=(LENGTH, WIDTH))}
    nodes = [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Add", ["position", "t"], ["t1"]),
             helper.make_node("Mul", ["t1", "factor"], ["t2"]), helper.make_node("Add", ["t2", "length_width"], ["t3"]),
             helper.make_node("MatMul", ["t3", "head"], ["s"]), *loss()]
    made = same(nodes, tensors, 1e-12, constants=constants())
    assert made.stats()["packed_nodes"] >= 6


def test_layout_operators():
    """Reshape, Transpose, Split, Concat, reductions behind the rows."""
    tensors = tensors_of()
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]),
             helper.make_node("Split", ["p"], ["a", "b"], axis=2, num_outputs=2),
             helper.make_node("Concat", ["b", "a"], ["c"], axis=-1), helper.make_node("Reshape", ["c", "four"], ["d"]),
             helper.make_node("Transpose", ["d"], ["e"], perm=[0, 1, 3, 2]),
             helper.make_node("Reshape", ["e", "three"], ["f"]),
             helper.make_node("ReduceMean", ["f", "last"], ["m"]), helper.make_node("Sub", ["f", "m"], ["h"]),
             helper.make_node("Softmax", ["h"], ["k"], axis=2),
             helper.make_node("MatMul", ["k", "head"], ["s"]), *loss()]
    made = same(nodes, tensors, 1e-12, constants=constants(four=np.array([BATCH, LENGTH, 4, 2]), last=np.array([-1]),
                                                           three=np.array([BATCH, LENGTH, WIDTH])))
    assert made.stats()["packed_nodes"] >= 11
