"""Training steps of whole models on a device against the CPU: MLP, CNN, ResNet, GPT-2, BERT, Llama-style, the sample
and those of architectures.py, small.

    python tests/cuda/models.py PLUGIN DEVICE ["NAME,NAME bf16,..." or part/parts]

Each is exported as ORTModule exports it and trained for steps on both, with and without bfloat16 autocast where that is
how it is used; losses, gradients and parameters must agree. Prints what checks.py says, and `nodes`, per model: how many
steps its programs have and which operators.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable

import conv_graph
import gpu as bench
import torch
import torch.nn.functional as F
import workloads
from architectures import ARCHITECTURES, Model
from checks import Report, every_nth
from torch import nn

from onnxtrain import _C, _report
from onnxtrain.ortmodule import ORTModule, _runner


def images(module: nn.Module, *shape: int) -> Model:
    return module, (torch.randn(*shape), torch.randint(0, 10, shape[:1])), lambda m, x, y: F.cross_entropy(m(x), y)


def mlp() -> Model:
    return images(nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 10)), 8, 20)


def cnn() -> Model:
    return images(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(),
                                nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10)), 3, 1,
                  8, 8)


def vgg() -> Model:
    """VGG's convolutions, with bias and Relu and without normalization, and its classifier."""
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True)]

    return images(nn.Sequential(*block(3, 4), *block(4, 4), nn.MaxPool2d(2), *block(4, 6), *block(6, 6),
                                nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(54, 16),
                                nn.ReLU(inplace=True), nn.Linear(16, 10)), 2, 3, 14, 14)


def resnet() -> Model:
    """ResNet-18's stem, a plain block, one that halves, and its head."""
    return images(nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
                                nn.MaxPool2d(3, 2, 1), workloads.Residual(4, 4, 1), workloads.Residual(4, 6, 2),
                                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10)), 2, 3, 16, 16)


def task(name: str) -> Callable[[], Model]:
    """A model of the benchmark without dropout, whose numbers are the device's own."""

    def make() -> Model:
        made = bench.TASKS[name](True)
        for module in made.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        return made.module, made.batch, made.loss

    return make


MODELS = {"mlp": mlp, "cnn": cnn, "vgg": vgg, "resnet": resnet, **{name: task(name) for name in bench.TASKS},
          **ARCHITECTURES}
HALVES = ("cnn", "vgg", "resnet", "gpt2", "bert", "llama", "unet", "mixtral")  # under bfloat16 autocast as well
EVERY = [*MODELS, *(f"{name} bf16" for name in HALVES if name in MODELS)]


def train(model: nn.Module, batch: tuple[torch.Tensor, ...], loss: Callable[..., torch.Tensor],
          half: bool) -> tuple[list, list, list, torch.dtype]:
    """Losses of two steps, gradients of the first, parameters, and the dtype of the loss; under autocast of one step,
    since roundings differ more after each.
    """
    optimizer, losses, grads = torch.optim.SGD(model.parameters(), 0.05), [], []
    for _ in range(1 if half else 2):
        optimizer.zero_grad()
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=half):
            value = loss(model, *batch)
        value.backward()
        grads = grads or [None if p.grad is None else p.grad.detach().cpu().clone() for p in model.parameters()]
        optimizer.step()
        losses.append(value.item())
    after = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return losses, grads, [p.detach().cpu() for p in after], value.dtype


def assert_gradients(want: list, got: list) -> None:
    """Each in relation to its own largest element; what is zero but for roundings may differ by roundings."""
    for k, (a, b) in enumerate(zip(want, got, strict=True)):
        assert (a is None) == (b is None), f"gradient {k} is there on one side only"
        if a is not None:
            far, size = (a - b).abs().max().item(), a.abs().max().item()
            assert far <= 1e-3 * size + 1e-6, f"gradient {k}: {far} of {size}"


def compare(name: str, half: bool, device: str) -> tuple[set[str], dict[str, int]]:
    """Trains on the CPU and on the device; the kernels that the device used, and its operators with their counts."""
    place = device if device.startswith("cuda") else "cpu"
    torch.manual_seed(0)
    module, batch, loss = MODELS[name]()
    _runner.device_of = lambda tensors: "cpu"
    losses, want_grads, want, _ = train(ORTModule(copy.deepcopy(module)), batch, loss, half)
    _runner.device_of = lambda tensors: device
    model = ORTModule(copy.deepcopy(module).to(place))
    batch = tuple(t.to(place) for t in batch)
    got_losses, grads, got, dtype = train(model, batch, loss, half)
    assert not _report.stats(model)["fallback_steps"], _report.stats(model)["reasons"]
    assert all(len(program.sessions) == 1 for _, programs in model._all_programs() for program in programs)
    assert dtype == train(module.to(place), batch, loss, half)[-1]  # of eager
    tol = 3e-2 if half else 2e-4
    assert max(abs(a - b) for a, b in zip(losses, got_losses, strict=True)) < tol, (losses, got_losses)
    if not half:
        assert_gradients(want_grads, grads)
    for k, (a, b) in enumerate(zip(want, got, strict=True)):
        far = (a - b).abs().max().item()
        assert far <= tol * max(1.0, a.abs().max().item()), f"parameter {k}: {far}"
    steps = [(op, kernel) for _, programs in model._all_programs() for program in programs
             for session in program.sessions
             for _, op, kernel, *_ in session.timeline()]
    if name == "gpt2":  # its GELU is in the products, both ways
        assert {"GeluMatMul", "GeluMatMulGrad"} <= {op for op, _ in steps}, sorted({op for op, _ in steps})
    if name == "bert":  # batch-first, around attention that reads and writes through strides
        assert "Transpose" not in {op for op, _ in steps}, steps
    if name == "resnet":  # with its residual or Relu in the same kernel, in bfloat16 too
        assert Counter(op for op, _ in steps)["FusedBatchNorm"] == 5, steps
    if device == "emulated" and name in ("cnn", "vgg"):  # the classifier's Relu; cuDNN computes the others
        assert sum(conv_graph.relus(session) for session in conv_graph.sessions(model)) == 1, steps
    if name == "warped":
        assert {"GridSample", "GridSampleGrad", "Col2Im"} <= {op for op, _ in steps}, sorted({op for op, _ in steps})
    if device == "emulated":  # where cuDNN takes every one of these
        assert {kernel for op, kernel in steps if op in conv_graph.CONVOLUTIONS} <= {conv_graph.GRAPH}, steps
    if half and any(op == "SoftmaxCrossEntropyLoss" for op, _ in steps):  # it reads the logits in bfloat16
        assert any("stash_type" in session.text("program") for _, programs in model._all_programs()
                   for program in programs for session in program.sessions)
    return {f"{op}:{kernel}" for op, kernel in steps}, dict(Counter(op for op, _ in steps))


def main(plugin: str, device: str, which: str = "0/1") -> None:
    _C.open_plugin(plugin or None)
    _C.set_log_level(logging.ERROR)
    torch.backends.cudnn.allow_tf32 = not device.startswith("cuda")  # gradients agree to fewer digits than it leaves
    if not device.startswith("cuda"):  # exported once: places and guards are the same
        os.environ["ORTMODULE_CACHE_DIR"] = os.environ.get("ORTMODULE_CACHE_DIR") or tempfile.mkdtemp()
    report = Report()
    nodes: dict[str, dict[str, int]] = {}
    for what in every_nth(EVERY, which) if "/" in which else which.split(","):
        report.begin(what)
        try:
            used, nodes[what] = compare(what.split()[0], what.endswith("bf16"), device)
            report.passes(what, used)
        except Exception as error:  # noqa: BLE001 - reported
            report.raised(what, error)
    report.finish(nodes=nodes)


if __name__ == "__main__":
    main(*sys.argv[1:])
