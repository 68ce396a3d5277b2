"""Steps in one call of the core: equal bit by bit to the same steps by autograd, and left to it where code looks on."""

import copy

import onnx
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_training import DESCRIPTION, batches, cross_entropy, net, options, trainer_of
from onnx import TensorProto, helper

from onnxtrain import optim
from onnxtrain.training import ORTTrainer, _whole_step, amp
from onnxtrain.training import optim as configs

ADAM = configs.AdamConfig(lr=1e-2)


@pytest.fixture
def whole(monkeypatch):
    """The programs of the steps that were one call, in their order."""
    found = []

    def run(self, program, tensors, mask, original=_whole_step.WholeStep.run):
        outputs = original(self, program, tensors, mask)
        if outputs is not None:
            found.append(program)
        return outputs

    monkeypatch.setattr(_whole_step.WholeStep, "run", run)
    return found


def both(monkeypatch, make, steps=6, data=batches):
    """Outputs, weights, buffers, gradients and optimizer's state of steps in one call, and of steps by autograd."""
    found = []
    for disabled in ("", "whole_step"):
        monkeypatch.setenv("ONNXTRAIN_DISABLE", disabled)
        torch.manual_seed(0)
        trainer = make()
        outputs = [trainer.train_step(*batch) for batch in data(steps)]
        engine = trainer._trained
        assert (engine._whole is None) == bool(disabled)
        gradients = {name: weight.grad for name, weight in engine.weights().items()}
        state = {f"{name} {key}": value for name, held in engine.update.state().items() for key, value in held.items()}
        found.append((outputs, {**engine.everything(), **state}, gradients))
    return found


def assert_same(one, other):
    for a, b in zip(*[[t for pair in outputs for t in (pair if isinstance(pair, list) else [pair])]
                      for outputs in (one[0], other[0])], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for ours, theirs in zip(one[1:], other[1:]):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value is theirs[name] is None or torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("config", [ADAM, configs.SGDConfig(lr=0.1), configs.LambConfig(lr=1e-2),
                                    configs.AdamConfig(lr=1e-2, max_norm_clip=0.01)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_equal_to_steps_by_autograd(monkeypatch, whole, config, accumulation):
    assert_same(*both(monkeypatch, lambda: trainer_of(net(), config, batch={
        "gradient_accumulation_steps": accumulation})))
    assert len(whole) == 5  # the first shows what there is


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.drop, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


def test_dropout_buffers_and_frozen_weights(monkeypatch, whole):
    assert_same(*both(monkeypatch, lambda: trainer_of(Normed(), ADAM, utils={"frozen_weights": ["first.weight"]})))
    assert len(whole) == 5


def test_an_overflow_leaves_everything_as_it_is(monkeypatch, whole):
    def large(steps):
        for i, (x, label) in enumerate(batches(steps)):
            yield x * (3e38 if i in (0, 3) else 1), label

    def make():
        return trainer_of(net(), ADAM, mixed_precision={"enabled": True, "loss_scaler": amp.DynamicLossScaler()})

    one, other = both(monkeypatch, make, data=large)
    assert_same(one, other)
    assert len(whole) == 5
    trainer = make()
    monkeypatch.setenv("ONNXTRAIN_DISABLE", "")
    for i, (x, label) in enumerate(large(5)):
        before = copy.deepcopy(trainer._torch_model.state_dict())
        trainer.train_step(x, label)
        same = all(torch.equal(value, before[name]) for name, value in trainer._torch_model.state_dict().items())
        assert same == (i in (0, 3)) and trainer._train_step_info.all_finite != same
    assert trainer._train_step_info.optimization_step == 3


def test_functions_that_wait_for_a_gradient_are_called(whole):
    module, seen = net(), []
    trainer = trainer_of(module, ADAM)
    data = list(batches(6))
    for x, label in data[:3]:
        trainer.train_step(x, label)
    assert len(whole) == 2
    handle = module.last.weight.register_hook(lambda gradient: seen.append(gradient) or torch.zeros_like(gradient))
    before = module.last.weight.clone()
    trainer.train_step(*data[3])
    handle.remove()
    assert len(whole) == 2 and len(seen) == 1 and not torch.equal(module.last.weight, before)
    other = module.last.bias.register_post_accumulate_grad_hook(seen.append)
    trainer.train_step(*data[4])
    other.remove()
    assert len(whole) == 2 and seen[1] is module.last.bias
    trainer.train_step(*data[5])
    assert len(whole) == 3


def test_a_gradient_goes_on_behind_an_input(whole):
    """What made an input is trained outside: its gradient is for autograd."""
    module, scale = net(), torch.ones(8, requires_grad=True)
    trainer = trainer_of(module, ADAM)
    for step, (x, label) in enumerate(batches(4), 1):
        trainer.train_step((x * scale) if step > 2 else x.clone().requires_grad_(), label)
        assert (scale.grad is not None) == (step > 2)
    assert not whole


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


def test_a_module_in_two_graphs_is_never_one_call(monkeypatch, whole):
    assert_same(*both(monkeypatch, lambda: trainer_of(Cut(), ADAM)))
    assert not whole


def test_new_sizes_are_looked_at_before_anything_is_updated(whole):
    module = net()
    trainer = ORTTrainer(module, {"inputs": [("x", ["batch", 8]), ("label", ["batch"])],
                                  "outputs": [("loss", [], True), ("scores", [6, 4])]}, ADAM, cross_entropy, options())
    data = list(batches(5))
    for x, label in data[:4]:
        trainer.train_step(x, label)
    assert len(whole) == 3
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match=r"output scores has the shape \[3, 4\]"):
        trainer.train_step(data[4][0][:3], data[4][1][:3])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert trainer._train_step_info.step == 4
    trainer.train_step(*data[4])
    assert len(whole) == 4


def test_outputs_that_fetches_do_not_name(monkeypatch, whole):
    """They are in no graph; where they are named later, another graph has to show what it is first."""
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 50000)

        def forward(self, x):
            return self.last(self.first(x))

    def make():
        trainer = ORTTrainer(Wide(), {**DESCRIPTION, "outputs": [("loss", [], True), ("scores", ["batch", 50000])]},
                             ADAM, cross_entropy, options())
        trainer._train_step_info.fetches = ["loss"]
        return trainer

    assert_same(*both(monkeypatch, make, steps=8))
    assert len(whole) == 7
    monkeypatch.setenv("ONNXTRAIN_DISABLE", "")
    trainer = make()
    for x, label in batches(2):
        trainer.train_step(x, label)
    trainer._train_step_info.fetches = []
    want = trainer._torch_model(x)
    torch.testing.assert_close(trainer.train_step(x, label)[1], want)
    assert len(whole) == 8


def test_an_onnx_model(monkeypatch, whole):
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["scores"]),
         helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "label"], ["loss"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 8]),
         helper.make_tensor_value_info("label", TensorProto.INT64, [6])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
         helper.make_tensor_value_info("scores", TensorProto.FLOAT, [6, 4])],
        [onnx.numpy_helper.from_array(torch.linspace(-1, 1, 32).reshape(8, 4).numpy(), "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert_same(*both(monkeypatch, lambda: ORTTrainer(model, DESCRIPTION, ADAM, options=options())))
    assert len(whole) == 5


def test_the_optimizers_of_their_own_clip_as_torch_does():
    """The trainer's limit / norm is not theirs: torch adds 1e-6 to the norm."""
    ours = nn.Parameter(torch.zeros(4))
    ours.grad = torch.full((4,), 1e-6)
    optimizer = optim.SGD([ours], lr=1.0, max_grad_norm=1e-6)
    assert optimizer.step().item() == pytest.approx(2e-6)
    assert torch.allclose(ours.detach(), torch.full((4,), -1e-6 / 3), atol=0)
