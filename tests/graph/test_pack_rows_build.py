"""The graph packs the rows that its readers read, and has every node over packed rows."""

import numpy as np
from onnx import helper
from test_pack_rows import (
    BATCH,
    CLASSES,
    LENGTH,
    constants,
    every_graph_is_large_enough,  # noqa: F401
    layer,
    loss,
    run,
    same,
    session,
    tensors_of,
)


def test_text():
    """Before: the product of every row. After: rows packed in front of it, and labels as they are."""
    tensors = {name: value for name, value in tensors_of(np.float32).items() if name in ("x", "head", "labels")}
    nodes = [helper.make_node("MatMul", ["x", "head"], ["s"]), *loss()]
    made, plain = session(nodes, tensors, constants=constants()), session(nodes, tensors, constants=constants(), rows=0)
    run(made, tensors), run(plain, tensors)
    assert made.stats()["packed_nodes"] == 2
    count = int((tensors["labels"] != -100).sum())
    lines = [line.strip() for line in made.text("program").splitlines()]
    assert [line.split(" = ")[1].split(" ")[0] for line in lines if "ai.onnxtrain." in line and "Rows" in line] == [
        "ai.onnxtrain.SelectRows", "ai.onnxtrain.PackRows", "ai.onnxtrain.PackRows", "ai.onnxtrain.UnpackRows"]
    assert any(line.startswith(f"float[{count},1,{CLASSES}]") and "MatMul" in line for line in lines)
    assert f"[{BATCH},{LENGTH},{CLASSES}]" in plain.text("program")
    assert f"[{BATCH},{LENGTH},{CLASSES}]" not in made.text("program")


def test_two_readers_read_the_union():
    tensors = tensors_of()
    nodes = [*layer(), *loss(), helper.make_node("Gather", ["s", "i"], ["z"], axis=1)]
    made = same(nodes, tensors, 1e-12, outputs=("y", "z"), constants=constants(i=np.array(0)))
    rows = tensors["labels"] != -100
    rows[:, 0] = True
    assert made.stats()["label_rows"] == rows.sum()
