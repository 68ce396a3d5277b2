"""The model of kernels' times has one for each kernel, and counts launches as the device makes them."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable
from unittest import mock

import architectures
import costs
import gpu as bench
import planned
import pytest
import test_pack_rows
import times
import torch
import torch.nn.functional as F
from planned import Node, Value
from rows import session_of
from seeds import drawn_seed
from torch import nn

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule, _runner

PUT = "float[300, 3] x, int64[4, 1] i, float[4, 3] u"
PUT_AT = [torch.zeros(300, 3), torch.tensor([[1], [2], [3], [4]]), torch.zeros(4, 3)]
# The inputs of a graph, its nodes with the result y, the tensors, and kernels that it has.
GRAPHS = {
    "ctc": ("float[40, 2, 5] x, int64[2, 3] t, int64[2] f, int64[2] l", "y = ai.onnxtrain.CTCLoss(x, t, f, l)",
            [torch.zeros(40, 2, 5), torch.tensor([[1, 2, 3], [3, 1, 2]]), torch.tensor([40, 38]), torch.tensor([3, 2])],
            {"cuda_ctc"}),
    "tuples": ("float[9, 8, 3] x, int64[40, 2] i", "y = GatherND(x, i)",
               [torch.zeros(9, 8, 3), torch.ones(40, 2, dtype=torch.int64)],
               {"cuda_index_gather", "cuda_gather_nd_grad"}),
    "elements": ("float[9, 80] x, int64[5, 80] i", "y = GatherElements(x, i)",
                 [torch.zeros(9, 80), torch.ones(5, 80, dtype=torch.int64)], {"cuda_index_gather", "cuda_scatter"}),
    "put": (PUT, "y = ScatterND(x, i, u)", PUT_AT, {"cuda_scatter"}),
    "add": (PUT, 'y = ScatterND <reduction = "add"> (x, i, u)', PUT_AT, {"cuda_scatter"}),
    "max": (PUT, 'y = ScatterND <reduction = "max"> (x, i, u)', PUT_AT, {"cuda_scatter"}),
    "products": ("float[6, 3] x", "axis = Constant <value = int64 {0}> ()  y = ai.onnxtrain.TorchCumProd(x, axis)",
                 [torch.ones(6, 3)], {"cuda_product_grad"}),
    "select": ("float[6, 30] x", "k = Constant <value_ints = [7]> ()  y, i = TopK(x, k)", [torch.zeros(6, 30)],
               {"cuda_select"}),
    "resize": ("float[1, 2, 60, 70] x", """scales = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> ()
               y = Resize <mode = "linear"> (x, , scales)""", [torch.zeros(1, 2, 60, 70)], {"cuda_resize"}),
    "sample": ("float[2, 3, 30, 20] x, float[2, 9, 8, 2] g", "y = GridSample (x, g)",
               [torch.zeros(2, 3, 30, 20), torch.zeros(2, 9, 8, 2)], {"cuda_sample", "cuda_sample_grad"}),
    "regions": ("float[1, 2, 9, 8] x, float[3, 4] r, int64[3] b",
                'y = RoiAlign <mode = "max", output_height = 2, output_width = 2> (x, r, b)',
                [torch.zeros(1, 2, 9, 8), torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)],
                {"cuda_roi", "cuda_roi_grad"}),
    "unpool": ("float[1, 2, 3, 3] x, int64[1, 2, 3, 3] i",
               "y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (x, i)",
               [torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3, dtype=torch.int64)],
               {"cuda_unpool", "cuda_unpool_grad"}),
    "fold": ("float[2, 12, 6] x", """size = Constant <value_ints = [3, 4]> ()  block = Constant <value_ints = [2, 2]> ()
             y = Col2Im (x, size, block)""", [torch.zeros(2, 12, 6)], {"cuda_col2im", "cuda_im2col"}),
    "reverse": ("float[4, 3, 2] x, int64[3] n", "y = ReverseSequence (x, n)",
                [torch.zeros(4, 3, 2), torch.tensor([4, 0, 2])], {"cuda_reverse"}),
    "determinant": ("float[5, 3, 3] x", "y = Det (x)", [torch.zeros(5, 3, 3)], {"cuda_det", "cuda_det_grad"}),
    "groups": ("float[9, 3] x, float[2, 3, 4] w, int64[2] e", "y = ai.onnxtrain.GroupedMatMul(x, w, e)",
               [torch.zeros(9, 3), torch.zeros(2, 3, 4), torch.tensor([4, 9])], {"cuda_grouped_matmul"}),
    **{cell: (f"float[6, 2, 4] x, float[1, {5 * gates}, 4] w, float[1, {5 * gates}, 5] r, int32[2] n, float[1, 2, 5] h",
              f"y, last = {cell} <hidden_size = 5{more}> (x, w, r, , n, h)",
              [torch.zeros(6, 2, 4), torch.zeros(1, 5 * gates, 4), torch.zeros(1, 5 * gates, 5),
               torch.tensor([6, 4], dtype=torch.int32), torch.zeros(1, 2, 5)],
              {"cuda_recurrent_steps", "cuda_recurrent_steps_grad"})
       for cell, gates, more in (("RNN", 1, ""), ("GRU", 3, ", linear_before_reset = 1"), ("LSTM", 4, ""))},
}


@pytest.fixture(scope="module")
def device(emulated) -> str:
    _C.open_plugin(str(emulated))
    return "emulated"


def node(kernel: str, op: str, inputs: list[Value | None], outputs: list[Value | None], **attributes: object) -> Node:
    return Node("n", op, kernel, False, tuple(inputs), tuple(outputs), attributes, {})


def value(name: str, *shape: int, dtype: str = "bfloat16") -> Value:
    return Value(name, dtype, shape)


def test_every_kernel_of_the_device_has_a_model(device):
    assert {kernel for _, _, kernels in _C.device_operators(device) for kernel in kernels} == set(costs.MODELS)


def test_a_kernel_without_a_model_is_an_error():
    with pytest.raises(KeyError, match="Fresh 'n': no model of the kernel cuda_fresh"):
        costs.cost_of(node("cuda_fresh", "Fresh", [], []))


def counter(plugin) -> Callable[[], int]:
    """How many launches of own kernels the emulation has counted so far."""
    count = ctypes.CDLL(str(plugin)).ont_emulate_launches
    count.restype = ctypes.c_long
    return lambda: count(b"")


def modelled(nodes: list[Node], keys: int = costs.PHASES) -> int:
    """Launches of own kernels, which alone the emulation counts, those that store random keys included."""
    return sum(cost.launches - cost.foreign for cost in map(costs.cost_of, nodes)) + keys * costs.KEY.launches


def launches(plugin, made, device: str) -> int:
    """Of the second step, when nothing is compared or measured any more, with GELU in the products' epilogues."""
    count = counter(plugin)
    ctypes.CDLL(str(plugin)).ont_emulate_set_slow_epilogues(0)
    with mock.patch.object(_runner, "device_of", lambda tensors: device):
        model = ORTModule(made.module)
        for _ in range(2):
            before = count()
            with torch.autocast("cpu", torch.bfloat16, enabled=made.autocast):
                loss = made.loss(model, *made.batch)
            loss.backward()
    return count() - before


def tagger(tiny: bool) -> bench.Task:
    del tiny
    return bench.Task(*architectures.lstm(), 0, 0.0, False)


@pytest.mark.parametrize("make", [bench.gpt2, bench.llama, bench.bert, tagger])
def test_launches_are_as_many_as_the_device_makes(emulated, device, make):
    """Of the small sizes, with dropout where the model has it."""
    torch.manual_seed(0)
    made = launches(emulated, make(True), device)  # first: a run says which arithmetic the layers may use
    nodes, _ = planned.planned(lambda: make(True), device)
    assert made == modelled(nodes)


@pytest.mark.parametrize("name", GRAPHS)
def test_launches_of_kernels_that_few_models_have(emulated, device, name):
    inputs, body, tensors, kernels = GRAPHS[name]
    session, count = session_of(f"g ({inputs}) => (y) {{ {body} }}", device), counter(emulated)
    before = count()
    (y,), run = session.forward(tensors, bytes(t.is_floating_point() for t in tensors))
    run.backward([tensors[i] for i in run.saved_inputs] + [y for _ in run.saved_outputs], [torch.ones_like(y)])
    made, nodes = count() - before, planned.nodes_of(session)
    assert kernels <= {each.kernel for each in nodes}
    assert made == modelled(nodes)


def test_launches_of_a_count_that_decides_a_shape(emulated, device):
    """The count is a program of its own, before the one that has its result as a size."""
    session, count = session_of("g (float[6, 30] x) => (y) { y = NonZero(x) }", device), counter(emulated)
    before = count()
    session.forward([torch.eye(6, 30)], b"\0")
    made, nodes = count() - before, planned.nodes_of(session)
    nodes.append(node("cuda_count_nonzero", "CountNonZero", [nodes[0].inputs[0]], [value("n", dtype="int64")]))
    assert [each.kernel for each in nodes] == ["cuda_nonzero", "cuda_count_nonzero"]
    assert made == modelled(nodes, 2)  # a key for each program


def test_launches_of_rows_that_labels_leave_out(emulated, device, monkeypatch):
    """Marks and their count are a program of their own, before the one of as many rows."""
    monkeypatch.setattr(test_pack_rows, "DEVICE", device)
    tensors, count = test_pack_rows.tensors_of("float32"), counter(emulated)
    _C.disable_passes(["+pack_rows"])
    try:
        session = test_pack_rows.session([*test_pack_rows.layer(), *test_pack_rows.loss()], tensors,
                                         constants=test_pack_rows.constants())
        before = count()
        test_pack_rows.run(session, tensors)
    finally:
        _C.disable_passes([])
    made, nodes = count() - before, planned.nodes_of(session)
    assert {"cuda_select_rows", "cuda_copy_rows", "cuda_row_dropout"} <= {each.kernel for each in nodes}
    marks = value("marks", test_pack_rows.BATCH * test_pack_rows.LENGTH, dtype="bool")
    nodes += [*(node("cuda_elementwise", name, [marks], [marks]) for name in ("Equal", "Not")),
              node("cuda_count_rows", "CountRows", [marks], [value("n", dtype="int64")])]
    assert made == modelled(nodes, 3)


def test_tables_have_every_node(device, capsys, emulated):
    nodes, parameters = planned.planned(lambda: bench.TASKS["gpt2"](True), device)
    rows = times.rows_of(nodes, parameters)
    assert sum(row.count for row in rows) == len(nodes) + 1 + costs.PHASES
    sums = times.by_part(rows)
    assert set(sums) == set(times.PARTS) and sums["optimizer"][2] == 28 * sum(p.numel() for p in parameters)
    assert sum(s[0] for s in sums.values()) == pytest.approx(
        sum(row.seconds + row.launches * costs.C["launch"] for row in rows))
    assert times.main([str(emulated), "gpt2", "--tiny", "--rows", "3"]) == 0
    printed = capsys.readouterr().out
    assert "a model, not a measurement" in printed and "| the others |" in printed
    assert all(f"| {part} |" in printed for part in times.PARTS)
    with mock.patch.dict(times.BEST["gpt2"], step=(1e-3, "planted")):
        assert times.main([str(emulated), "gpt2", "--tiny"]) == 1
    assert "gpt2: the model is above the best known step" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "most"), [("gpt2", 36.0), ("llama", 150.0)])
def test_models_of_full_steps_are_within_the_goals(emulated, capsys, name, most):
    """docs/performance/cuda_model.md. A plan that gets another pass or a kernel that takes longer is seen here."""
    assert times.BEST[name]["step"][0] == most
    assert times.main([str(emulated), name, "--rows", "5"]) == 0, capsys.readouterr().out


def test_products_take_no_less_than_at_the_peak():
    """And a large square one not much more."""
    draw = random.Random(drawn_seed())
    for _ in range(50):
        m, n, k = (draw.randrange(1, 5000) for _ in range(3))
        batch = draw.randrange(1, 9)
        assert costs.product_seconds(m, n, k, batch, 790e12) > 2.0 * m * n * k * batch / 790e12
    assert costs.product_seconds(8192, 8192, 8192, 1, 790e12) < 1.2 * 2.0 * 8192**3 / 790e12


def test_sizes_of_products():
    x, w = value("x", 4, 8, 16), value("w", 32, 16)
    y = value("y", 4, 8, 32)
    assert costs.sizes_of_product(node("", "FusedMatMul", [x, w], [y], transB=1)) == (32, 32, 16, 1)
    dw = value("dw", 16, 32)
    flat, dy = value("f", 32, 16), value("dy", 32, 32)
    assert costs.sizes_of_product(node("", "FusedMatMul", [flat, dy], [dw], transA=1)) == (16, 32, 32, 1)
    q, k = value("q", 2, 3, 5, 7), value("k", 2, 3, 7, 6)
    assert costs.sizes_of_product(node("", "MatMul", [q, k], [value("s", 2, 3, 5, 6)])) == (5, 6, 7, 6)
    vector = value("v", 7)
    assert costs.sizes_of_product(node("", "MatMul", [vector, value("b", 7, 6)], [value("s", 6)])) == (1, 6, 7, 1)


def test_a_matrix_that_is_added_is_another_launch():
    x, w, y = value("x", 8, 16), value("w", 16, 32), value("y", 8, 32)
    plain, bias, matrix = (costs.product(node("", "Gemm", [x, w, *more], [y]))
                           for more in ([], [value("b", 32)], [value("c", 8, 32)]))
    assert (plain.launches, bias.launches, matrix.launches) == (1, 1, 2)
    assert matrix.nbytes - plain.nbytes == 3 * y.nbytes and bias.nbytes - plain.nbytes == 64


def test_float32_convolutions_in_channels_last_are_on_tensor_cores():
    x, w, y = (value(name, 2, 64, 64, 64, dtype="float") for name in "xwy")
    halves = [value(name, 2, 64, 64, 64) for name in "xwy"]
    single, plain = (costs.convolution(node(kernel, "Conv", [x, w], [y]))
                     for kernel in ("cuda_conv_graph", "cuda_conv"))
    half = costs.convolution(node("cuda_conv_graph", "Conv", halves[:2], halves[2:]))
    assert plain.busy > single.busy == 2 * half.busy


def vgg() -> bench.Task:
    """VGG's first two blocks and a classifier, in sizes for which evict.c looks for what to recompute."""
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]

    module = nn.Sequential(*block(3, 64), *block(64, 64), nn.MaxPool2d(2), *block(64, 128), *block(128, 128),
                           nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(6272, 10))
    x, y = torch.randn(8, 3, 112, 112), torch.randint(0, 10, (8,))
    return bench.Task(module, (x, y), lambda m, x, y: F.cross_entropy(m(x), y), 8, 0.0, True)


def test_a_relu_behind_a_convolution_is_no_launch(device):
    nodes, _ = planned.planned(vgg, device)
    convolutions = [each for each in nodes if each.op == "Conv"]
    assert [(each.attributes.get("relu"), costs.cost_of(each).launches) for each in convolutions] == [(1, 1)] * 4
    assert not [each for each in nodes if "Relu" in (each.op, *each.attributes.get("formula", b"").decode().split())]


def test_a_group_norm_reads_twice_for_its_gradient():
    x, scale = value("x", 2, 8, 10), value("s", 8, dtype="float")
    others = [value(name, 2, 4, dtype="float") for name in ("m", "v")]
    dy, dx, ds = value("dy", 2, 8, 10), value("dx", 2, 8, 10), value("ds", 8, dtype="float")
    found = [costs.cost_of(node("cuda_groupnorm_grad", "GroupNormGrad", [x, scale, *others, dy], outputs))
             for outputs in ([dx, ds, None], [dx, None, None])]
    assert [cost.launches for cost in found] == [3, 2]
    assert found[0].nbytes == 5 * x.nbytes + 2 * 32 + 2 * 32 and found[1].nbytes == found[0].nbytes - 32


def test_steps_of_a_recurrence_are_not_one_product():
    """One step after another: a product over all steps at once takes less."""
    x, r, y = (value(name, *shape, dtype="float") for name, shape in
               (("x", (30, 8, 512)), ("r", (512, 128)), ("y", (30, 8, 128))))
    cost = costs.cost_of(node("cuda_recurrent_steps", "RecurrentSteps", [x, r], [y], cell=3))
    assert cost.flops == 2 * 30 * 8 * 512 * 128
    assert cost.busy > 5 * costs.product_seconds(30 * 8, 512, 128, 1, costs.C["float32"])


def test_outputs_are_read_from_text():
    line = '  float[2,3] a, , bool[] "b, = c" = ai.onnxtrain.Op <n = 1> (x, y)'
    assert planned.outputs_of(line) == [("float", (2, 3)), None, ("bool", ())]
    with pytest.raises(ValueError, match="no outputs"):
        planned.outputs_of("  # backward")


def test_a_causal_attention_counts_half_of_the_scores():
    sizes = {"sizes": [1024, 1024, 64, 64], "batch_dims": [16, 12]}
    full, causal = (costs.attention_of(node("", "FusedAttention", [], [], causal=c, **sizes)) for c in (0, 1))
    assert causal.flops == full.flops / 2 == 16 * 12 * 1024 * 1024 * 64 * 2
    assert costs.published(causal, True) == pytest.approx(348e12 * 288 / 373)
    assert math.isclose(costs.published(full, False), 373e12)


def test_a_mask_that_heads_share_is_looked_through():
    """For tiles that it hides: two kernels, forward and for the gradient."""
    q, mask = value("q", 2, 3, 64, 64), value("m", 2, 1, 64, 64)
    sizes = {"sizes": [64, 64, 64, 64], "batch_dims": [2, 3], "bias": [0, 4096, 0, 64, 1]}
    of = lambda inputs, **more: costs.attention_own(  # noqa: E731
        node("", "FusedAttention", inputs, [q], **{**sizes, **more})).launches
    assert [of([q, q, q]), of([q, q, q, mask]), of([q, q, q, mask], bias=[0, 4096, 4096, 64, 1])] == [1, 3, 1]
    assert of([q, q, q, mask], bias=[0, 64, 64, 0, 1]) == 3 and of([q, q, q, mask], sizes=[64, 32, 64, 64]) == 1
    given = [q, q, q, None, mask]
    assert [of(given, mask=[0, 4096, 0, 64, 1], mask_value=x) for x in (-1e9, -1e38)] == [1, 3]
