"""Rows that nobody reads are not computed: where the pass applies, what it leaves, and that results stay the same."""

import numpy as np
import pytest
import torch
from harness import failing_allocations
from onnx import helper, numpy_helper

from onnxtrain import _C

BATCH, LENGTH, WIDTH, CLASSES = 5, 12, 8, 6
SELECTED, LABELS, KEYS = 1, 2, 4
DEVICE, PLACE = "cpu", "cpu"  # the engine's and PyTorch's; tests/cuda/packed.py runs these tests on another one


@pytest.fixture(autouse=True)
def every_graph_is_large_enough():
    _C.disable_passes(["+pack_rows"])
    yield
    _C.disable_passes([])


def session(nodes, tensors, outputs=("y",), constants=None, rows=7, programs=16):
    """One graph of the nodes; every tensor is an input."""
    codes = {np.dtype(np.float32): 1, np.dtype(np.float64): 11, np.dtype(np.int64): 7, np.dtype(np.bool_): 9}
    inputs = [helper.make_tensor_value_info(name, codes[value.dtype], value.shape) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info(name, 0, None) for name in outputs],
                              [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()])
    for value in graph.output:
        value.type.tensor_type.elem_type = codes[tensors["x"].dtype]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20),
                                                    helper.make_opsetid("ai.onnxtrain", 1)], ir_version=10)
    return _C.Session(model.SerializeToString(), programs=programs, device=DEVICE, rows=rows,
                      torch_random=DEVICE != "cpu")


def run(made, tensors, seed=7):
    """Outputs, and gradients of every float input, of the sum of the outputs."""
    given = [torch.from_numpy(value).to(PLACE) for value in tensors.values()]
    outputs, step = made.forward(given, bytes([value.is_floating_point() for value in given]), seed)
    saved = [given[i] for i in step.saved_inputs] + [outputs[i] for i in step.saved_outputs]
    return list(outputs), list(step.backward(saved, [torch.ones_like(output) for output in outputs]))


def same(nodes, tensors, tolerance, **kwargs):
    """Runs the graph with the pass and without; the session with it."""
    packed, plain = session(nodes, tensors, **kwargs), session(nodes, tensors, **{**kwargs, "rows": 0})
    for got, wanted in zip(run(packed, tensors), run(plain, tensors)):
        for a, b in zip(got, wanted):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert "Pack" not in plain.text("program")
    return packed


def layer(ratio=0.4):
    """x w + bias, dropout, residual, norm, Gelu, and the head's scores."""
    return [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "bias"], ["a"]),
            helper.make_node("Dropout", ["a", "ratio", "training"], ["d"]), helper.make_node("Add", ["d", "x"], ["r"]),
            helper.make_node("LayerNormalization", ["r", "scale"], ["n"], axis=-1),
            helper.make_node("Gelu", ["n"], ["h"]), helper.make_node("MatMul", ["h", "head"], ["s"])]


def tensors_of(dtype=np.float64, labelled=0.3, seed=1):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, (BATCH, LENGTH))
    labels[rng.random((BATCH, LENGTH)) >= labelled] = -100
    return {"x": rng.normal(size=(BATCH, LENGTH, WIDTH)).astype(dtype),
            "w": rng.normal(size=(WIDTH, WIDTH)).astype(dtype),
            "bias": rng.normal(size=WIDTH).astype(dtype), "scale": rng.normal(size=WIDTH).astype(dtype),
            "head": rng.normal(size=(WIDTH, CLASSES)).astype(dtype), "labels": labels}


def constants(dtype=np.float64, **more):
    return {"ratio": np.array(0.4, np.float32), "training": np.array(True), "flat": np.array([-1, CLASSES]),
            "vector": np.array([-1]), **more}


def loss(reduction="mean", ignored=-100):
    return [helper.make_node("Reshape", ["s", "flat"], ["rows"]),
            helper.make_node("Reshape", ["labels", "vector"], ["l"]),
            helper.make_node("SoftmaxCrossEntropyLoss", ["rows", "l"], ["y"], reduction=reduction,
                             **({} if ignored is None else {"ignore_index": ignored}))]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-6)], ids=["f64", "f32"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_labels(reduction, dtype, tolerance):
    tensors = tensors_of(dtype)
    made = same([*layer(), *loss(reduction)], tensors, tolerance, constants=constants())
    count = int((tensors["labels"] != -100).sum())
    assert (made.stats()["label_rows"], made.stats()["label_rows_of"]) == (count, BATCH * LENGTH)
    assert f"[{count},{CLASSES}]" in made.text("program")
    assert "RowDropout" in made.text("program")


@pytest.mark.parametrize("reason", ["none", "weights", "no ignore_index", "class labels"])
def test_losses_that_read_all_rows(reason):
    tensors = tensors_of()
    if reason == "class labels":
        tensors["labels"] = tensors["labels"].reshape(-1)
    if reason == "no ignore_index":
        tensors["labels"] = abs(tensors["labels"]) % CLASSES
    nodes = [*layer(), *loss("none" if reason == "none" else "mean", None if reason == "no ignore_index" else -100)]
    if reason == "weights":  # are no reason: they go with the label
        tensors["class"] = np.linspace(0.5, 2, CLASSES)
        nodes[-1].input.append("class")
    made = same(nodes, tensors, 1e-12, constants=constants())
    assert bool(made.stats()["packed_nodes"]) == (reason == "weights")


def test_rows_of_results_are_computed():
    tensors = tensors_of()
    made = same([*layer(), *loss()], tensors, 1e-12, outputs=("y", "s"), constants=constants())
    assert not made.stats()["packed_nodes"]


@pytest.mark.parametrize("labelled", [0.0, 0.95])
def test_no_label_and_nearly_all_labels(labelled):
    tensors = tensors_of(labelled=labelled)
    made, plain = (session([*layer(), *loss("sum")], tensors, constants=constants(), rows=rows) for rows in (7, 0))
    for got, wanted in zip(run(made, tensors), run(plain, tensors)):
        for a, b in zip(got, wanted):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert made.stats()["label_rows"] == (0 if labelled else 1)


def test_counts_share_programs():
    """More rows than sizes of programs: at most 64 sizes, with spare rows that change nothing."""
    tensors = tensors_of()
    big = {name: np.repeat(value, 20, axis=0) if name in ("x", "labels") else value for name, value in tensors.items()}
    rng = np.random.default_rng(3)
    made, plain = (session([*layer(), *loss()], big, constants=constants(), rows=rows, programs=64) for rows in (7, 0))
    for step in range(40):
        chosen = rng.random(big["labels"].shape) < 0.1 + 0.01 * step
        big["labels"] = np.where(chosen, abs(big["labels"]) % CLASSES, -100)
        if step % 10 == 3:
            for got, wanted in zip(run(made, big, step), run(plain, big, step)):
                for a, b in zip(got, wanted):
                    if a is not None:
                        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        else:
            run(made, big, step)
    rows = big["labels"].size
    assert made.stats()["label_rows"] % -(-rows // 64) == 0
    assert made.stats()["programs_built"] < 36 < made.stats()["probe_runs"]


SELECTIONS = {
    "first": ([helper.make_node("Gather", ["s", "i"], ["y"], axis=1)], {"i": np.array(0)}),
    "last": ([helper.make_node("Gather", ["s", "i"], ["y"], axis=1)], {"i": np.array(-1)}),
    "two": ([helper.make_node("Gather", ["s", "i"], ["y"], axis=1)], {"i": np.array([3, 3, 0])}),
    "batch": ([helper.make_node("Gather", ["s", "i"], ["y"], axis=0)], {"i": np.array([1])}),
    "slice": ([helper.make_node("Slice", ["s", "from", "to", "axes"], ["y"])],
              {"from": np.array([2]), "to": np.array([5]), "axes": np.array([1])}),
    "backwards": ([helper.make_node("Slice", ["s", "from", "to", "axes", "steps"], ["y"])],
                  {"from": np.array([-1]), "to": np.array([-1000]), "axes": np.array([1]), "steps": np.array([-4])}),
    "pairs": ([helper.make_node("GatherND", ["s", "i"], ["y"])],
              {"i": np.stack([np.arange(BATCH), np.array([3, 0, 11, 11, 2])], 1)}),
    "each": ([helper.make_node("GatherND", ["s", "i"], ["y"], batch_dims=1)],
             {"i": np.array([[3], [0], [11], [11], [2]])}),
}


@pytest.mark.parametrize("kind", SELECTIONS)
def test_selections(kind):
    nodes, more = SELECTIONS[kind]
    made = same([*layer(), *nodes], {name: v for name, v in tensors_of().items() if name != "labels"}, 1e-12,
                constants=constants(**more))
    stats = made.stats()
    assert stats["selected_rows_of"] in (BATCH * LENGTH, BATCH) and stats["packed_nodes"] >= 7
    assert not stats["probe_runs"]


def test_selected_by_data():
    """The index is an input: as many rows as it has entries, whatever they are."""
    tensors = {name: value for name, value in tensors_of().items() if name != "labels"}
    tensors["i"] = np.stack([np.arange(BATCH), np.array([3, 0, 11, 11, 2])], 1)
    made = same([*layer(), helper.make_node("GatherND", ["s", "i"], ["y"])], tensors, 1e-12, constants=constants())
    assert made.stats()["selected_rows"] == BATCH and not made.stats()["probe_runs"]
    tensors["i"][0, 1] = LENGTH
    with pytest.raises(IndexError):
        run(made, tensors)


def test_labels_behind_a_slice():
    """The shifted labels of a language model: rows of a slice, of which some have a label."""
    tensors = tensors_of()
    tensors["labels"] = tensors["labels"][:, 1:].copy()
    cut = helper.make_node("Slice", ["s", "from", "to", "axes"], ["t"])
    nodes = [*layer(), cut, *loss()]
    nodes[-3].input[0] = "t"
    made = same(nodes, tensors, 1e-12, constants=constants(**{"from": np.array([0]), "to": np.array([-1]),
                                                             "axes": np.array([1])}))
    assert f"[{BATCH},{LENGTH},{CLASSES}]" not in made.text("program")


def test_switches():
    tensors = tensors_of()
    for rows, packed in ((0, 0), (SELECTED, 0), (LABELS, 1), (KEYS, 0)):
        made = session([*layer(), *loss()], tensors, constants=constants(), rows=rows)
        run(made, tensors)
        assert bool(made.stats()["packed_nodes"]) == packed
    with pytest.raises(ValueError, match="rows is 8"):
        session([*layer(), *loss()], tensors, constants=constants(), rows=8)


def test_small_graphs_are_left_alone():
    """Counting rows costs a probe at each call."""
    _C.disable_passes([])
    tensors = tensors_of()
    made = session([*layer(), *loss()], tensors, constants=constants())
    run(made, tensors)
    assert not made.stats()["packed_nodes"] and not made.stats()["probe_runs"]


def test_overlapping_runs_of_programs_that_share_memory():
    """Batches of other counts take turns with one slab; two forwards before their backwards have one each."""
    tensors = tensors_of()
    labels = [np.where(np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) < count, 1, -100) for count in (3, 9, 20, 5)]
    made, plain = (session([*layer(), *loss()], tensors, constants=constants(), rows=rows) for rows in (7, 0))
    wanted = [run(plain, {**tensors, "labels": given})[1] for given in labels]
    for _ in range(3):
        runs = []
        for given in labels:
            inputs = [torch.from_numpy(v).to(PLACE) for v in {**tensors, "labels": given}.values()]
            runs.append((inputs, *made.forward(inputs, bytes([v.is_floating_point() for v in inputs]), 7)))
        for (inputs, outputs, step), gradients in zip(runs, wanted):
            saved = [inputs[i] for i in step.saved_inputs] + [outputs[i] for i in step.saved_outputs]
            for a, b in zip(step.backward(saved, [torch.ones_like(outputs[0])]), gradients):
                if b is not None:
                    torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-12, atol=1e-12)
    assert made.stats()["programs_built"] == 4


def test_failing_allocations():
    tensors, nodes = tensors_of(np.float32), [*layer(), *loss()]
    wanted = run(session(nodes, tensors, constants=constants()), tensors)
    got = failing_allocations(lambda: run(session(nodes, tensors, constants=constants()), tensors),
                              limit=20000)
    for a, b in zip((*got[0], *got[1]), (*wanted[0], *wanted[1]), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("threads", [3, 4, 7, 16])
def test_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        same([*layer(), *loss()], tensors_of(), 1e-12, constants=constants())
    finally:
        torch.set_num_threads(before)
