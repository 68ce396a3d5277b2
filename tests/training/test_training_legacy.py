"""onnxruntime.capi.ort_trainer, and trainer.step(): the same losses as ORTTrainer's, and what only they have."""

import copy

import onnx
import onnx.reference
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_training import Eager, batches, cross_entropy, net, trainer_of

import onnxtrain
import onnxtrain.compat.onnxruntime
from onnxtrain.training import TrainStepInfo, amp, optim
from onnxtrain.training.legacy import (
    IODescription,
    LossScaler,
    ModelDescription,
    ORTTrainer,
    generate_sample,
    load_checkpoint,
    save_checkpoint,
)

DESCRIPTION = ModelDescription([IODescription("x", ["batch", 8]), IODescription("label", ["batch"])],
                               [IODescription("loss", []), IODescription("scores", ["batch", 4])])
RATE = IODescription("Learning_Rate", [1], torch.float32)


def legacy(module, name="LambOptimizer", attributes=None, **more):
    loss = more.pop("loss_fn", cross_entropy)
    return ORTTrainer(module, loss, more.pop("desc", DESCRIPTION), name, attributes, RATE, "cpu", **more)


RATED = torch.tensor([0.01])
CONFIGS = {"SGDOptimizer": optim.SGDConfig, "AdamOptimizer": optim.AdamConfig, "LambOptimizer": optim.LambConfig}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_the_new_trainers(name, steps):
    new = trainer_of(net(dropout=0.2), CONFIGS[name](lr=0.01), batch={"gradient_accumulation_steps": steps})
    old = legacy(net(dropout=0.2), name, gradient_accumulation_steps=steps)
    losses = []
    for train in (new.train_step, lambda x, label: old.train_step([x, label, RATED])):
        torch.manual_seed(4)
        losses.append([train(x, label)[0].item() for x, label in batches(12)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)
    one, other = new._training_session.get_state(), old.session.get_state()
    assert list(one) == list(other) and all((one[key] == other[key]).all() for key in one)
    assert old.current_step == 12 and old.global_step_ == 12 // steps


def test_attributes_of_weights():
    config = optim.LambConfig([{"params": ["first.bias", "last.bias"], "lambda_coef": 0.0}], lr=0.01, lambda_coef=0.1,
                              epsilon=1e-4)
    module = net()
    eager = Eager(module, config)
    trainer = legacy(module, attributes=lambda name: {
        "lambda": 0.0 if name in ("first.bias", "last.bias") else 0.1, "epsilon": 1e-4, "do_bias_correction": False})
    for x, label in batches(5):
        assert trainer.train_step(x, label, RATED)[0].item() == pytest.approx(eager.step(x, label).item(), rel=1e-6)
    for attributes, message in (({"alpha": "0.9"}, "Optimizer attributes must be either float or int."),
                                ({"momentum": 0.9}, "momentum is not an attribute of LambOptimizer")):
        with pytest.raises(ValueError, match=message):
            legacy(net(), attributes=lambda name: attributes).train_step(x, label, RATED)


def test_rates():
    """By position, by name, by a function of the updates so far."""
    scheduler = optim.LinearWarmupLRScheduler(10, 0.5)
    config = optim.AdamConfig(lr=0.1)

    def rate(k):
        return scheduler.get_lr(TrainStepInfo(config, optimization_step=k))[0]

    module, asked = net(), []
    trainers = [legacy(copy.deepcopy(module), "AdamOptimizer") for _ in range(2)]
    trainers.append(legacy(copy.deepcopy(module), "AdamOptimizer",
                           get_lr_this_step=lambda k: asked.append(k) or torch.tensor([rate(k)])))
    for k, (x, label) in enumerate(batches(6)):
        given = torch.tensor([rate(k)])
        losses = [trainers[0].train_step(x, label, given)[0], trainers[1].train_step(x, label=label, Learning_Rate=given)[0],
                  trainers[2](x, label)[0]]
        assert losses[0] == losses[1] == pytest.approx(losses[2].item(), rel=1e-6)
    assert asked == list(range(6))
    for wrong in ((x, label), (x, label, given, given)):
        with pytest.raises(ValueError, match="Learning_Rate"):
            trainers[0].train_step(*wrong)
    with pytest.raises(ValueError, match="by name"):
        trainers[0].train_step(x, label, given, x=x)


def test_loss_scale_from_outside():
    trainer = legacy(net(), "AdamOptimizer", use_mixed_precision=True, gradient_accumulation_steps=2)
    name, found = trainer.loss_scale_input_name, []
    for x, label in batches(4):
        found.append(trainer.train_step(x, label, RATED, **{name: torch.tensor([64.0])}))
    assert name == "default_loss_scale_input_name" and [len(outputs) for outputs in found] == [2, 3, 2, 3]
    assert found[1][2].dtype == torch.bool and found[1][2].tolist() == [True]
    before = copy.deepcopy(trainer.torch_model_.state_dict())
    for _ in range(2):
        outputs = trainer.train_step(x * 1000, label, RATED, torch.tensor([2.0**40]))
    assert outputs[2].tolist() == [False] and trainer.global_step_ == 2
    assert all(torch.equal(value, before[key]) for key, value in trainer.torch_model_.state_dict().items())


def test_loss_scaler_is_the_new_ones():
    old, new = LossScaler("scale", True, up_scale_window=3), amp.DynamicLossScaler(up_scale_window=3)
    info = TrainStepInfo(optim.SGDConfig())
    for k in range(60):
        info.all_finite = k % 7 != 0 and k < 40
        old.update_loss_scale(info.all_finite)
        assert new.update(info) == old.loss_scale_ and new._stable_steps_count == old.stable_steps_
    old.reset()
    assert (old.loss_scale_, old.stable_steps_) == (2.0**16, 0)
    fixed = LossScaler("scale", False, 8.0)
    fixed.update_loss_scale(False)
    assert fixed.loss_scale_ == 8.0
    trainer = legacy(net(), use_mixed_precision=True, loss_scaler=LossScaler("scale", True, up_scale_window=2))
    for x, label in batches(4):
        assert len(trainer.train_step(x, label, RATED)) == 2
    assert trainer.loss_scaler_.loss_scale_ == 2.0**18 and trainer.loss_scale_input_name == "scale"


def test_modes_and_fetches(tmp_path):
    module = net(dropout=0.5)
    trainer = legacy(module)
    x, label = batches(1)[0]
    with pytest.warns(UserWarning, match="not initialized"):
        trainer.save_as_onnx(str(tmp_path / "a.onnx"))
    with pytest.warns(UserWarning, match="not initialized"):
        assert trainer.state_dict() == {}
    assert trainer.session is None and trainer.onnx_model_ is None and not list(tmp_path.iterdir())
    assert trainer.train_step(x, label, RATED, fetches=["scores"]).shape == (6, 4)
    trainer.eval()
    loss, scores = trainer(x, label)
    want = copy.deepcopy(module).eval()(x)
    torch.testing.assert_close(scores, want)
    torch.testing.assert_close(loss, F.cross_entropy(want, label))
    torch.testing.assert_close(trainer.eval_step(x, fetches=["scores"]), want)
    with pytest.raises(RuntimeError, match=r"invalid output names: \['other'\]"):
        trainer.eval_step(x, label, fetches=["other"])
    trainer.train()
    assert trainer(x, label, RATED)[0] != loss
    trainer.save_as_onnx(str(tmp_path / "a.onnx"))
    model = onnx.load(tmp_path / "a.onnx")
    got = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x.numpy(), "label": label.numpy()})
    assert got[0] == pytest.approx(trainer.eval_step(x, label)[0].item(), rel=1e-5)
    assert {tensor.name for tensor in trainer.onnx_model_.graph.initializer} >= set(dict(module.named_parameters()))


class Two(nn.Module):
    """Takes what the description calls otherwise, in this order."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, data, target):
        scores = self.fc(data) + self.shift
        return F.cross_entropy(scores, target), scores


def test_inputs_by_position_and_buffers():
    module = Two()
    trainer = legacy(module, loss_fn=None)
    x, label = batches(1)[0]
    want = module(x, label)[0].item()
    assert trainer.train_step(x, label, RATED)[0].item() == pytest.approx(want, rel=1e-6)
    state = trainer.state_dict()
    assert torch.equal(state["shift"], torch.ones(4)) and {"fc.weight", "Moment_1_fc.weight", "Step"} <= set(state)
    sgd = legacy(Two(), "SGDOptimizer", loss_fn=None, frozen_weights=["fc.bias"])
    sgd.train_step(x, label, RATED)
    assert set(sgd.state_dict()) == {"fc.weight", "fc.bias", "shift"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_goes_on_from_a_file(name, tmp_path):
    def made(seed):
        return legacy(net(seed), name, gradient_accumulation_steps=2, use_mixed_precision=True,
                      loss_scaler=LossScaler("scale", True, up_scale_window=2), get_lr_this_step=lambda k: 0.01 / (k + 1))

    first, second, data = made(0), made(3), batches(9)
    for x, label in data[:5]:
        first(x, label)
    save_checkpoint(first, tmp_path, checkpoint_state_dict={"epoch": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["ORT_checkpoint.ort.pt"]
    assert load_checkpoint(second, tmp_path, strict=True) == {"epoch": 3}
    assert [second(x, label)[0] for x, label in data[5:]] == [first(x, label)[0] for x, label in data[5:]]
    state, other = first.state_dict(), second.state_dict()
    assert list(state) == list(other) and all(torch.equal(state[key], other[key]) for key in state)
    assert second.global_step_ == 4
    del state["first.weight"]
    with pytest.raises(RuntimeError, match=r"Missing keys: \['first.weight'\]"):
        second.load_state_dict(state, strict=True)
    second.load_state_dict(state)


def test_a_file_of_an_earlier_version(tmp_path):
    """It calls the counts as the older form does."""
    first, second = [legacy(net(), get_lr_this_step=lambda k: 0.01) for _ in range(2)]
    for x, label in batches(3):
        first(x, label)
        second(x, label)
    save_checkpoint(first, tmp_path)
    path = tmp_path / "ORT_checkpoint.ort.pt"
    content = torch.load(path)
    run = content["onnxtrain_run"]
    run.update(global_step=run.pop("optimization_step") + 4, current_step=run.pop("step") + 5)
    torch.save(content, path)
    load_checkpoint(second, tmp_path)
    assert (second.global_step_, second.current_step) == (7, 8)


def test_samples():
    torch.manual_seed(0)
    tokens = generate_sample(IODescription("x", ["batch", 3], torch.int64, num_classes=5))
    assert tokens.shape == (1, 3) and tokens.dtype == torch.int64 and tokens.max() < 5
    assert generate_sample(IODescription("x", [2, 2], torch.float64), "cpu").dtype == torch.float64


@pytest.mark.parametrize("more, error, message", [
    ({"name": "Adam"}, ValueError, "training_optimizer_name is 'Adam'"),
    ({"_opset_version": 99}, ValueError, "_opset_version is 99, expected 1 to"),
])
def test_what_is_refused(more, error, message):
    with pytest.raises(error, match=message):
        legacy(net(), **more)


def test_a_proto(tmp_path):
    """Changed in place before it is trained; equal losses from both trainers."""
    from test_onnx_model import graph_of, proto_trainer

    calls = []
    new, old = proto_trainer(graph_of(), optim.AdamConfig(lr=0.01)), legacy(
        graph_of(), "AdamOptimizer", loss_fn=None, postprocess_model=lambda model: calls.append(model))
    assert len(calls) == 1 and old.session is not None and isinstance(calls[0], onnx.ModelProto)
    for x, label in batches(5):
        assert old.train_step(x, label, RATED)[0] == new.train_step(x, label)[0]
    old.save_as_onnx(str(tmp_path / "a.onnx"))
    onnx.checker.check_model(onnx.load(tmp_path / "a.onnx"))


# --- trainer.step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), cross_entropy])
def test_step(criterion):
    import onnxruntime as ort

    module = net()
    eager = copy.deepcopy(module)
    ours, theirs = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, eager)]
    trainer = ort.trainer(module, criterion, ours)
    before = onnxtrain.stats()
    for x, label in batches(10):
        theirs.zero_grad()
        want = criterion(eager(x), label)
        want.backward()
        theirs.step()
        loss, prediction = trainer.step(x, label)
        assert loss.item() == pytest.approx(want.item(), rel=2e-6)
        assert prediction.shape == (6, 4) and not prediction.requires_grad and not loss.requires_grad
    loss, _ = trainer.evaluate(x, label)
    assert loss.item() == pytest.approx(criterion(eager(x), label).item(), rel=1e-5) and module.training
    after = onnxtrain.stats()
    assert after["engine_steps"] == before["engine_steps"] + 11 and after["fallback_steps"] == before["fallback_steps"]
    for wrong in (lambda: ort.trainer(3, criterion, ours), lambda: ort.trainer(module, criterion, "Adam"),
                  lambda: trainer.step(x)):
        with pytest.raises(TypeError):
            wrong()
