"""The model of kernels' times has one for each kernel, and counts launches as the device makes them."""

from __future__ import annotations

import ctypes
import math
import random
from functools import partial
from unittest import mock

import architectures
import gpu as bench
import planned
import pytest
import times
import torch
import torch.nn.functional as F
from planned import Node, Value
from seeds import drawn_seed
from torch import nn

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule, _module

# Launches of libraries and of cudaMemset, which the emulation does not count.
UNCOUNTED = {"cuda_matmul": 1, "cuda_gelu_matmul": 1, "cuda_attention_dnn": 1, "cuda_attention_grad_dnn": 3,
             "cuda_gather_grad": 1, "cuda_gather_nd_grad": 1, "cuda_scatter": 1}


@pytest.fixture(scope="module")
def device(emulated) -> str:
    _C.open_plugin(str(emulated))
    return "emulated"


def node(kernel: str, op: str, inputs: list[Value | None], outputs: list[Value | None], **attributes: object) -> Node:
    return Node("n", op, kernel, False, tuple(inputs), tuple(outputs), attributes, {})


def value(name: str, *shape: int, dtype: str = "bfloat16") -> Value:
    return Value(name, dtype, shape)


def test_every_kernel_of_the_device_has_a_model(device):
    assert {kernel for _, _, kernels in _C.device_operators(device) for kernel in kernels} == set(times.MODELS)


def test_a_kernel_without_a_model_is_an_error():
    with pytest.raises(KeyError, match="Fresh 'n': no model of the kernel cuda_fresh"):
        times.cost_of(node("cuda_fresh", "Fresh", [], []))


def launches(plugin, made, device: str) -> int:
    """That the emulation counts in the second step, when nothing is compared or measured any more."""
    count = ctypes.CDLL(str(plugin)).ont_emulate_launches
    count.restype = ctypes.c_long
    with mock.patch.object(_module, "device_of", lambda tensors: device):
        model = ORTModule(made.module)
        for _ in range(2):
            before = count(b"")
            with torch.autocast("cpu", torch.bfloat16, enabled=made.autocast):
                loss = made.loss(model, *made.batch)
            loss.backward()
    return count(b"") - before


def counted(each: Node) -> int:
    """Of the launches of a node's model, those that the emulation counts."""
    if each.kernel.startswith("cuda_rnn_dnn"):  # copies of weights, and of the results of two directions
        return (1 + (times.layer_of(each).directions == 2)) * (2 if each.kernel.endswith("grad") else 1)
    return times.cost_of(each).launches - UNCOUNTED.get(each.kernel, 0) - (each.op == "PutSlice")


class Indices(nn.Module):
    """Positions and indices: TopK of few and of many, gathers, each kind of scatter, a resized plane."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 40))

    def forward(self, index: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        w = self.weight
        (few, _), (many, at) = w.topk(3), w.topk(20)
        sums = [few.sum(), w.gather(1, index).sum(), torch.zeros_like(w).scatter_add(1, at, many).square().sum(),
                w.scatter(1, index, many[:, :5]).square().sum(), w.index_put((labels,), w[:2]).square().sum(),
                w.scatter_reduce(1, index, many[:, :5].detach(), "amax").sum(), (w + 1).cumprod(1).mean(),
                (w * w.argmax(1, keepdim=True)).sum()]
        plane = F.interpolate(w.view(1, 6, 5, 8), scale_factor=2, mode="bilinear").square().sum()
        return torch.stack([*sums, plane])


def indices() -> bench.Task:
    return bench.Task(Indices(), (torch.randint(0, 40, (6, 5)), torch.tensor([1, 3])),
                      lambda m, index, labels: m(index, labels).square().sum(), 0, 0.0, False)


def tagger() -> bench.Task:
    return bench.Task(*architectures.lstm(), 0, 0.0, False)


TASKS = {**{name: partial(bench.TASKS[name], True) for name in ("gpt2", "llama", "bert")}, "indices": indices,
         "tagger": tagger}


@pytest.mark.parametrize("name", TASKS)
def test_launches_are_as_many_as_the_device_makes(emulated, device, name):
    """Of the small sizes, with dropout where the model has it."""
    torch.manual_seed(0)
    nodes, _ = planned.planned(TASKS[name], device)
    modelled = sum(map(counted, nodes)) + times.PHASES * times.KEY.launches
    assert launches(emulated, TASKS[name](), device) == modelled


def test_tables_have_every_node(device, capsys, emulated):
    nodes, parameters = planned.planned(lambda: bench.TASKS["gpt2"](True), device)
    rows = times.rows_of(nodes, parameters)
    assert sum(row.count for row in rows) == len(nodes) + 1 + times.PHASES
    sums = times.by_part(rows)
    assert set(sums) == set(times.PARTS) and sums["optimizer"][2] == 28 * sum(p.numel() for p in parameters)
    assert sum(s[0] for s in sums.values()) == pytest.approx(
        sum(row.seconds + row.launches * times.C["launch"] for row in rows))
    times.main([str(emulated), "gpt2", "--tiny", "--rows", "3"])
    printed = capsys.readouterr().out
    assert "a model, not a measurement" in printed and "| the others |" in printed
    assert all(f"| {part} |" in printed for part in times.PARTS)


def test_products_take_no_less_than_at_the_peak():
    """And a large square one not much more."""
    draw = random.Random(drawn_seed())
    for _ in range(50):
        m, n, k = (draw.randrange(1, 5000) for _ in range(3))
        batch = draw.randrange(1, 9)
        assert times.product_seconds(m, n, k, batch, 790e12) > 2.0 * m * n * k * batch / 790e12
    assert times.product_seconds(8192, 8192, 8192, 1, 790e12) < 1.2 * 2.0 * 8192**3 / 790e12


def test_sizes_of_products():
    x, w = value("x", 4, 8, 16), value("w", 32, 16)
    y = value("y", 4, 8, 32)
    assert times.sizes_of_product(node("", "FusedMatMul", [x, w], [y], transB=1)) == (32, 32, 16, 1)
    dw = value("dw", 16, 32)
    flat, dy = value("f", 32, 16), value("dy", 32, 32)
    assert times.sizes_of_product(node("", "FusedMatMul", [flat, dy], [dw], transA=1)) == (16, 32, 32, 1)
    q, k = value("q", 2, 3, 5, 7), value("k", 2, 3, 7, 6)
    assert times.sizes_of_product(node("", "MatMul", [q, k], [value("s", 2, 3, 5, 6)])) == (5, 6, 7, 6)
    vector = value("v", 7)
    assert times.sizes_of_product(node("", "MatMul", [vector, value("b", 7, 6)], [value("s", 6)])) == (1, 6, 7, 1)


def test_a_matrix_that_is_added_is_another_launch():
    x, w, y = value("x", 8, 16), value("w", 16, 32), value("y", 8, 32)
    plain, bias, matrix = (times.product(node("", "Gemm", [x, w, *more], [y]))
                           for more in ([], [value("b", 32)], [value("c", 8, 32)]))
    assert (plain.launches, bias.launches, matrix.launches) == (1, 1, 2)
    assert matrix.nbytes - plain.nbytes == 3 * y.nbytes and bias.nbytes - plain.nbytes == 64


def test_float32_convolutions_in_channels_last_are_on_tensor_cores():
    x, w, y = (value(name, 2, 64, 64, 64, dtype="float") for name in "xwy")
    halves = [value(name, 2, 64, 64, 64) for name in "xwy"]
    single, plain = (times.convolution(node(kernel, "Conv", [x, w], [y]))
                     for kernel in ("cuda_conv_graph", "cuda_conv"))
    half = times.convolution(node("cuda_conv_graph", "Conv", halves[:2], halves[2:]))
    assert plain.busy > single.busy == 2 * half.busy


def test_a_group_norm_reads_twice_for_its_gradient():
    x, scale = value("x", 2, 8, 10), value("s", 8, dtype="float")
    others = [value(name, 2, 4, dtype="float") for name in ("m", "v")]
    dy, dx, ds = value("dy", 2, 8, 10), value("dx", 2, 8, 10), value("ds", 8, dtype="float")
    costs = [times.cost_of(node("cuda_groupnorm_grad", "GroupNormGrad", [x, scale, *others, dy], outputs))
             for outputs in ([dx, ds, None], [dx, None, None])]
    assert [cost.launches for cost in costs] == [3, 2]
    assert costs[0].nbytes == 5 * x.nbytes + 2 * 32 + 2 * 32 and costs[1].nbytes == costs[0].nbytes - 32


def test_a_path_of_ctc_waits_for_each_step():
    """Whose gradient goes through the steps once more, and has another kernel."""
    x, labels = value("x", 50, 4, 10, dtype="float"), value("l", 4, 7, dtype="int64")
    loss, grad = (times.cost_of(node("cuda_ctc", op, [x, labels], [value("y", *shape, dtype="float")]))
                  for op, shape in (("CTCLoss", (4,)), ("CTCLossGrad", (50, 4, 10))))
    assert (loss.launches, grad.launches) == (1, 2)
    assert grad.busy == 2 * loss.busy and grad.seconds > loss.seconds == 50 * times.C["dependent"]


def test_steps_of_a_recurrence_are_not_one_product():
    """In float32, one step after another: a product over all steps at once takes less."""
    x, r, y = (value(name, *shape, dtype="float") for name, shape in
               (("x", (30, 8, 512)), ("r", (512, 128)), ("y", (30, 8, 128))))
    forward = times.cost_of(node("cuda_recurrent_steps", "RecurrentSteps", [x, r], [y], cell=3))
    assert forward.launches == 2 + 2 * 30 and forward.flops == 2 * 30 * 8 * 512 * 128
    assert forward.busy > 5 * times.product_seconds(30 * 8, 512, 128, 1, times.C["float32"])
    sizes = {"cell": 3, "steps": 30, "batch": 8}
    grads = [times.cost_of(node("cuda_recurrent_steps_grad", "RecurrentStepsGrad", [y, r], outputs, **sizes))
             for outputs in ([x, r], [x, None])]
    assert [g.launches for g in grads] == [3 + 2 * 30 + 1, 3 + 2 * 30] and grads[0].flops == 2 * grads[1].flops


def test_outputs_are_read_from_text():
    line = '  float[2,3] a, , bool[] "b, = c" = ai.onnxtrain.Op <n = 1> (x, y)'
    assert planned.outputs_of(line) == [("float", (2, 3)), None, ("bool", ())]
    with pytest.raises(ValueError, match="no outputs"):
        planned.outputs_of("  # backward")


def test_a_causal_attention_counts_half_of_the_scores():
    sizes = {"sizes": [1024, 1024, 64, 64], "batch_dims": [16, 12]}
    full, causal = (times.attention_of(node("", "FusedAttention", [], [], causal=c, **sizes)) for c in (0, 1))
    assert causal.flops == full.flops / 2 == 16 * 12 * 1024 * 1024 * 64 * 2
    assert times.published(causal, True) == pytest.approx(348e12 * 288 / 373)
    assert math.isclose(times.published(full, False), 373e12)
