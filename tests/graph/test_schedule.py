"""Another order of a program's steps: the same bits in a smaller slab, taken only where that is worth it (run/schedule.c).
"""

import os
import random
import re

import onnx
import pytest
import test_models
import torch
from onnx import helper
from seeds import drawn_seed
from test_fuse_elementwise import random_model
from test_recompute import run

from onnxtrain import _C
from onnxtrain.optim import FusedAdam, step_in_backward
from onnxtrain.ortmodule import ORTModule

SEED = drawn_seed()
ZOO = sorted(name for name, model in test_models.MODELS.items() if model.engine)
SAMPLE = ZOO if os.environ.get("ONNXTRAIN_SLOW") == "1" else sorted(random.Random(SEED).sample(ZOO, 5))


@pytest.fixture(autouse=True)
def passes_as_they_were():
    yield
    _C.disable_passes([])


class Towers(torch.nn.Module):
    """Wide layers side by side: all first ones, then all second ones, so that backward has every gradient of the wide
    values at once in the order of the module."""

    def __init__(self, towers=8, width=256, last=torch.tanh):
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(width, 8 * width) for _ in range(towers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(8 * width, width) for _ in range(towers))
        self.last = last

    def forward(self, x):
        wide = [torch.tanh(up(x)) for up in self.up]
        return torch.stack([self.last(down(h)) for down, h in zip(self.down, wide, strict=True)]).sum(0)


def step(module, *inputs):
    """Session, and bits of output and gradients."""
    torch.manual_seed(11)
    model = ORTModule(module)
    module.zero_grad()
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = model(*inputs)
    y.square().sum().backward()
    tensors = [y, *(x.grad for x in inputs), *(p.grad for p in module.parameters())]
    return model._all_programs()[0][1][0].session, [t.detach().clone() for t in tensors]


def test_one_tower_after_the_other():
    torch.manual_seed(0)
    module, x, slabs = Towers(), torch.randn(64, 256), {}
    for way in ("off", "on"):
        _C.disable_passes(["schedule"] if way == "off" else [])
        session, got = step(module, x)
        slabs[way] = session.stats()["slab_bytes"]
        if way == "off":
            expected = got
    wide = 64 * 8 * 256 * 4
    assert slabs["on"] <= slabs["off"] - 5 * wide  # of eight gradients of wide values, all but a few
    assert all(map(torch.equal, got, expected))
    y = module(x)
    assert torch.allclose(got[0], y, rtol=1e-5, atol=1e-5)


def test_forward_alone():
    """In evaluation nothing is kept: a wide value lives from one layer to the next."""
    torch.manual_seed(0)
    module, x, slabs, results = Towers().eval(), torch.randn(64, 256), [], []
    for way in (["schedule"], []):
        _C.disable_passes(way)
        model = ORTModule(module)
        with torch.no_grad():
            results.append(model(x))
        slabs.append(model._all_programs()[0][1][0].session.stats()["slab_bytes"])
    assert slabs[1] <= slabs[0] - 6 * 64 * 8 * 256 * 4
    assert torch.equal(*results)


def test_the_graph_is_listed_as_it_runs():
    """The printed program has the order of the steps, every value above its readers, and forward above backward."""
    torch.manual_seed(0)
    session, _ = step(Towers(), torch.randn(64, 256))
    text = session.text("program")
    lines = [line.split(" = ", 1) for line in text.splitlines() if " = " in line and line.endswith(")")]
    made = [re.findall(r"%\d+", results) for results, _ in lines]
    read = [re.findall(r"%\d+", call.rsplit("(", 1)[1]) for _, call in lines]
    for at, names in enumerate(read):
        assert not set(names) & {name for results in made[at:] for name in results}, lines[at]
    assert len(lines) > 40 and text.count("# backward") == 1


def test_what_gains_little_keeps_its_order():
    """Less than a MiB, or than a 32nd: the towers in small, and the same beside something large."""
    class Beside(Towers):
        def forward(self, x, large):
            return super().forward(x) * (large @ large).tanh().sum()

    torch.manual_seed(0)
    small, x = torch.randn(4, 32), torch.randn(64, 64)
    for module, inputs in ((Towers(width=32), (small,)), (Beside(width=64), (x, torch.randn(3000, 3000)))):
        texts, slabs = [], []
        for way in (["schedule"], [], ["+schedule"]):
            _C.disable_passes(way)
            session, _ = step(module, *inputs)
            texts.append(session.text("program"))
            slabs.append(session.stats()["slab_bytes"])
        assert texts[0] == texts[1] != texts[2]
        assert slabs[2] > slabs[0] - max(2**20, slabs[0] / 32)


@pytest.mark.parametrize("number", range(40))
def test_random_graphs(number):
    """An order of other steps than the given one, whatever it gains, has the same bits."""
    model, names = random_model(random.Random(SEED + number))
    generator = torch.Generator().manual_seed(SEED + number)
    tensors = [torch.randn(shape, generator=generator) * (0.1 if name == "w" else 1) for name, shape in names]
    results = []
    for way in (["schedule"], ["+schedule"]):
        _C.disable_passes(way)
        results.append(run(model, tensors)[2])
    assert results[0] == results[1]


@pytest.mark.parametrize("name", SAMPLE)
def test_zoo(name):
    results = []
    for way in (["schedule"], ["+schedule"]):
        _C.disable_passes(way)
        torch.manual_seed(SEED % 2**31)
        case = test_models.MODELS[name]
        module = case.make()
        model = ORTModule(module)
        loss = case.loss(model(*case.data()))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in module.parameters()), *module.buffers()])
    for got, expected in zip(*results, strict=True):
        assert (got is None) == (expected is None) and (got is None or torch.equal(got, expected))


def test_a_step_in_backward():
    """Parameters are written when nobody reads them any more, in whatever order the readers come."""
    results = []
    for way in (["schedule"], []):
        _C.disable_passes(way)
        torch.manual_seed(0)
        module, x = Towers(last=torch.sin), torch.randn(64, 256)
        model = ORTModule(module)
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        step_in_backward(optimizer, model)
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, *results))


def towers_graph(towers=6, rows=256, width=512):
    """(model, tensors) of products side by side, as the steps before the split and behind it may be ordered anew."""
    shapes = {"x": (rows, width)} | {f"{kind}{i}": (width, width) for i in range(towers) for kind in "ab"}
    nodes = [helper.make_node("MatMul", ["x", f"a{i}"], [f"h{i}"]) for i in range(towers)]
    nodes += [helper.make_node("Sin", [f"h{i}"], [f"s{i}"]) for i in range(towers)]
    nodes += [helper.make_node("MatMul", [f"s{i}", f"b{i}"], [f"y{i}"]) for i in range(towers)]
    nodes += [helper.make_node("ReduceSum", [f"y{i}"], [f"z{i}"], keepdims=0) for i in range(towers)]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name=f"z{i}") for i in range(towers)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
    generator = torch.Generator().manual_seed(SEED)
    return model, [torch.randn(shape, generator=generator) for shape in shapes.values()]


def test_allocation_failures():
    """Each allocation of a build fails once: MemoryError, or the same result."""
    model, tensors = towers_graph(towers=3, rows=128)
    _C.disable_passes(["+schedule"])
    expected = run(model, tensors)[2]
    failed = 0
    for n in range(0, 100000, 17):
        session = _C.Session(model)
        _C.fail_allocation_after(n)
        try:
            session.forward(tensors, b"\1" * len(tensors), 7)
        except MemoryError:
            failed += 1
        finally:
            fired = _C.fail_allocation_after(-1)
        if not fired:
            break
    assert failed > 5 and not fired
    assert run(model, tensors)[2] == expected
