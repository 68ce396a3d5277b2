"""Functions that change the graph of a module before it is trained, evaluated and saved."""

import collections
import copy

import numpy as np
import onnx
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_training import batches
from onnx import helper
from test_opset import MODELS, evaluated, newer, older

import onnxtrain


class Layers(nn.Module):
    """Dropout, a batch norm and a ReLU, which the functions below make a Tanh."""

    def __init__(self, act=torch.relu, norm=True):
        super().__init__()
        self.hidden, self.out, self.act = nn.Linear(8, 32), nn.Linear(32, 4), act
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()

    def forward(self, x):
        return self.out(F.dropout(self.act(self.norm(self.hidden(x))), 0.1, self.training))


def relu_to_tanh(model):
    """In place."""
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "Tanh"


def relu_to_tanh_of_a_copy(model):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    relu_to_tanh(changed)
    return changed


@pytest.mark.parametrize("form, opset, change", [
    (older, None, relu_to_tanh), (newer, 14, relu_to_tanh_of_a_copy), (older, 12, relu_to_tanh), (newer, None, relu_to_tanh)])
def test_the_graph_that_is_trained_is_the_changed_one(form, opset, change, tmp_path):
    torch.manual_seed(0)
    module = Layers(norm=opset != 12)
    twin = copy.deepcopy(module)
    twin.act = torch.tanh
    (trainer, step), (other, other_step) = form(module, MODELS["linear"][2], opset, change), form(twin, MODELS["linear"][2])
    for size in (16, 16, 5, 16):
        for x, label in batches(2, seed=size, size=size):
            state = torch.get_rng_state()
            got = step(x, label)
            torch.set_rng_state(state)
            torch.testing.assert_close(got, other_step(x, label))
    for (name, got), want in zip(module.state_dict().items(), twin.state_dict().values()):
        torch.testing.assert_close(got, want, msg=name)
    engine = getattr(trainer, "_trainer", trainer)._trained  # the older form is a face of the newer one
    assert engine.model.parameters()["out.weight"] is module.out.weight
    for each in (module, twin):
        each.norm.eval()
    x, label = batches(1, size=16)[0]  # sizes that it knows, in another mode of a submodule
    state = torch.get_rng_state()
    got = step(x, label)
    torch.set_rng_state(state)
    torch.testing.assert_close(got, other_step(x, label))
    x, label = batches(1, size=3)[0]
    wanted = other.eval_step(x, label)
    torch.testing.assert_close(trainer.eval_step(x, label), wanted)
    trainer.save_as_onnx(str(tmp_path / "model.onnx"))
    model = onnx.load(tmp_path / "model.onnx")
    assert collections.Counter(node.op_type for node in model.graph.node)["Tanh"] == 1
    assert model.opset_import[0].version == (opset or 20)
    if opset != 14:  # onnx's reference evaluator computes an older BatchNormalization as in training
        for got, want in zip(evaluated(model, {"x": x.numpy(), "label": label.numpy()}), wanted):
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
    assert onnxtrain.stats(engine.model.ort_module)["fallback_steps"] == 0


def test_what_the_function_gets():
    """Standard names and weights; once for each graph."""
    seen = []
    module = Layers(norm=False)
    trainer, step = older(module, MODELS["linear"][2], 12, seen.append)
    for _ in range(3):
        step(*batches(1)[0])
    model, = seen
    assert [value.name for value in model.graph.input] == ["x", "label"]
    assert [value.name for value in model.graph.output][:2] == ["loss", "scores"]
    assert {name for name, _ in module.named_parameters()} <= {tensor.name for tensor in model.graph.initializer}
    assert model.opset_import[0].version == 12
    trainer.eval_step(*batches(1)[0])
    trainer.eval_step(*batches(1)[0])
    assert len(seen) == 2 and trainer.onnx_model_ is seen[2]


def unheard(model):
    model.graph.node.append(helper.make_node("Unheard", ["x"], ["q"]))


def zero(model):
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "out.weight")
    tensor.raw_data = bytes(len(tensor.raw_data))


@pytest.mark.parametrize("change, error, message", [
    (lambda model: 3, AssertionError, "'extra_postprocess' must give an onnx.ModelProto"),
    (zero, ValueError, "gave out.weight another value"),
    (lambda model: setattr(model.graph.input[0], "name", "z"), ValueError, "took away, or added, z"),
    (unheard, onnxtrain.UnsupportedError, "Unheard"),
])
def test_what_a_function_may_not_do(change, error, message):
    module = Layers()
    before = copy.deepcopy(module.state_dict())
    trainer, step = newer(module, MODELS["linear"][2], None, change)
    with pytest.raises(error, match=message):
        step(*batches(1)[0])
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_batch_norm_in_training_needs_opset_14():
    _, step = older(Layers(), MODELS["linear"][2], 12, relu_to_tanh)
    with pytest.raises(onnxtrain.UnsupportedError, match="opset 12 of ONNX has no form of BatchNormalization .with train"):
        step(*batches(1)[0])


class Choice(nn.Module):
    """Only one of the layers has a gradient that is not zero."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(torch.cond(x.sum() > 0, lambda x: torch.relu(self.up(x)), lambda x: self.down(x), (x,)))


def test_a_module_with_branches():
    torch.manual_seed(0)
    module = Choice()
    twin = copy.deepcopy(module)
    (_, step), (_, other_step) = newer(module, MODELS["linear"][2], None, lambda model: None), newer(twin, MODELS["linear"][2])
    for x, label in batches(4, size=6):
        torch.testing.assert_close(step(x, label), other_step(x, label))
    for got, want in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, want)
