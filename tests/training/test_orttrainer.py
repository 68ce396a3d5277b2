"""ORTTrainer on a torch.nn.Module: losses against eager PyTorch with the same rules, and each option's effect."""

import collections
import copy
import math
import threading

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_training import CPU, DESCRIPTION, Eager, batches, cross_entropy, net, options, trainer_of

import onnxtrain
from onnxtrain.training import ORTTrainer, ORTTrainerOptions, TrainStepInfo, optim


@pytest.mark.parametrize("make", [
    lambda: optim.ConstantWarmupLRScheduler(10, 0.5), lambda: optim.CosineWarmupLRScheduler(10, 0.5, 0.5),
    lambda: optim.LinearWarmupLRScheduler(10, 0.5), lambda: optim.PolyWarmupLRScheduler(10, 1e-7, 1.0, 0.5)])
def test_schedulers(make):
    config, module, own = optim.AdamConfig(lr=0.01), net(), make()
    eager = Eager(module, config, lr=lambda k: make().get_lr(TrainStepInfo(config, optimization_step=k))[0])
    trainer = trainer_of(module, config, lr_scheduler=own)
    for x, label in batches(10):
        assert trainer.train_step(x, label)[0].item() == pytest.approx(eager.step(x, label).item(), rel=2e-6)
    assert own.get_last_lr() == make().get_lr(TrainStepInfo(config, optimization_step=9))


def test_weights_are_the_modules_and_mode_and_random_state_too():
    """A step drops out as the module itself would, by the same random state."""
    module, other = net(dropout=0.5), net(dropout=0.5)
    module.eval()
    trainer = trainer_of(module, optim.SGDConfig(lr=0.1))
    weight = module.first.weight
    (x, label), = batches(1)
    torch.manual_seed(3)
    first = trainer.train_step(x, label)[0]
    assert module.training and module.first.weight is weight
    torch.manual_seed(3)
    again = trainer_of(other, optim.SGDConfig(lr=0.1)).train_step(x, label)[0]
    assert first == again and torch.equal(weight, other.first.weight)
    module.norm.eval()
    evaluated = trainer.eval_step(x, label)
    assert module.training and not module.norm.training and module.last.training
    want = module.eval()(x)
    torch.testing.assert_close(evaluated[1], want)
    torch.testing.assert_close(evaluated[0], F.cross_entropy(want, label))
    assert trainer._train_step_info.step == 1


def test_frozen_weights():
    module = net()
    module.norm.bias.requires_grad_(False)
    trainer = trainer_of(module, optim.LambConfig(lr=0.1), utils={"frozen_weights": ["first.weight", "last.bias"]})
    before = copy.deepcopy(module.state_dict())
    for x, label in batches(3):
        trainer.train_step(x, label)
    same = {key for key, value in module.state_dict().items() if torch.equal(value, before[key])}
    assert same == {"first.weight", "last.bias", "norm.bias"}
    state = trainer._training_session.get_state()
    assert not same & set(state) and "Moment_1_first.bias" in state and "Step" in state
    assert set(trainer.state_dict()["model"]["full_precision"]) == set(before)
    with pytest.raises(RuntimeError, match=r"\['nothing'\] params from 'frozen_weights' not found in the ONNX model"):
        trainer_of(net(), optim.SGDConfig(), utils={"frozen_weights": ["nothing"]}).train_step(x, label)
    with pytest.raises(RuntimeError, match=r"\['nothing'\] params from 'optim_config' not found"):
        trainer_of(net(), optim.AdamConfig([{"params": ["nothing"], "alpha": 0.1}])).train_step(x, label)


class ByName(nn.Module):
    """forward has its arguments in another order than the description, and one more."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 4)
        self.lock = threading.Lock()  # cannot be copied

    def forward(self, y=None, x=None):
        return self.linear(x) + (1 if y is None else y)


SMALL = {"inputs": [("x", ["n", 2]), ("label", ["n"])], "outputs": [("loss", [1], True), ("output", ["n", 4])]}


def test_inputs_by_name_and_the_described_shape():
    torch.manual_seed(0)
    module = ByName()
    trainer = ORTTrainer(module, SMALL, optim.SGDConfig(), loss_fn=cross_entropy, options=options())
    x, label = torch.randn(3, 2), torch.tensor([0, 1, 2])
    want = F.cross_entropy(module.linear(x) + 1, label).item()
    for args, kwargs in (((x, label), {}), (([x, label],), {}), ((x,), {"label": label}), ((), {"label": label, "x": x})):
        loss, output = trainer.eval_step(*args, **kwargs)
        assert loss.shape == (1,) and loss.item() == pytest.approx(want, rel=1e-6) and output.shape == (3, 4)
    for args, kwargs in (((x,), {}), ((x, label, label), {}), ((x, label), {"label": label}), ((x,), {"labels": label})):
        with pytest.raises(AssertionError, match="the description has inputs"):
            trainer.train_step(*args, **kwargs)
    with pytest.raises(AssertionError, match="Mismatch in dynamic shape n"):
        trainer.eval_step(x, torch.tensor([0, 1]), )
    assert trainer._train_step_info.step == 0


def test_fetches():
    module = net()
    trainer = trainer_of(module, optim.SGDConfig(lr=0.1), batch={"gradient_accumulation_steps": 2})
    (x, label), = batches(1)
    trainer._train_step_info.fetches = ["scores", "loss"]
    scores, loss = trainer.train_step(x, label)
    assert scores.shape == (6, 4) and loss.shape == () and trainer._train_step_info.optimization_step == 0
    assert trainer.eval_step(x, label)[0].shape == ()  # in the description's order
    trainer._train_step_info.fetches = ["scores"]
    torch.testing.assert_close(trainer.eval_step(x), module(x))  # without the label
    trainer._train_step_info.fetches = ["loss"]
    with pytest.raises(RuntimeError, match=r"outputs \['loss'\] need all inputs of the model"):
        trainer.eval_step(x)
    trainer._train_step_info.fetches = ["losses"]
    with pytest.raises(RuntimeError, match="The specified fetches list contains invalid output names"):
        trainer.train_step(x, label)


def test_outputs_without_a_fetch_are_not_computed():
    module = net()
    eager, trainer = Eager(module, optim.SGDConfig(lr=0.1)), trainer_of(module, optim.SGDConfig(lr=0.1))
    trainer._train_step_info.fetches = ["loss"]
    for x, label in batches(8):
        torch.testing.assert_close(trainer.train_step(x, label), eager.step(x, label))
    assert [len(program.exported.outputs) for _, programs in trainer._trained.model.ort_module._all_programs()
            for program in programs] == [1]
    trainer._train_step_info.fetches = []
    want = module(x)
    torch.testing.assert_close(trainer.train_step(x, label)[1], want)


def test_sizes_change():
    module = net()
    eager, trainer = Eager(module, optim.LambConfig(lr=0.01)), trainer_of(module, optim.LambConfig(lr=0.01))
    for size in (6, 3, 9, 2):
        (x, label), = batches(1, size=size)
        loss, scores = trainer.train_step(x, label)
        assert loss.item() == pytest.approx(eager.step(x, label).item(), rel=1e-6) and scores.shape == (size, 4)
    assert onnxtrain.stats(trainer._trained.model.ort_module)["exports"] == 1


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x, label):
        scores = self.bn(self.fc(x))
        return {"loss": F.cross_entropy(scores, label), "scores": scores}


def test_a_module_that_gives_its_loss_and_has_buffers():
    torch.manual_seed(0)
    module = Buffers()
    eager = copy.deepcopy(module)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    trainer = ORTTrainer(module, DESCRIPTION, optim.SGDConfig(lr=0.1), options=options())
    for x, label in batches(5):
        optimizer.zero_grad()
        want = eager(x, label)["loss"]
        want.backward()
        optimizer.step()
        assert trainer.train_step(x, label)[0].item() == pytest.approx(want.item(), rel=2e-6)
    torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))
    state = trainer.state_dict()["model"]["full_precision"]
    assert state["bn.num_batches_tracked"] == 5
    np.testing.assert_array_equal(state["bn.running_mean"], module.bn.running_mean.numpy())


@pytest.mark.parametrize("make", [lambda: trainer_of(net(), optim.SGDConfig(lr=0.1)), lambda: ORTTrainer(
    Buffers(), DESCRIPTION, optim.SGDConfig(lr=0.1), options=options())], ids=["loss outside", "loss inside"])
def test_only_the_loss_has_a_gradient(make):
    """Else the engine would add zeros for the gradient of the scores, which no step gives."""
    trainer = make()
    (x, label), = batches(1)
    trainer.train_step(x, label)
    program = trainer._trained.model.latest().session.text("program")
    assert "%grad_output_0" in program and "%grad_output_1" not in program


def test_deterministic_compute_and_recomputation_and_saved_graphs(tmp_path):
    paths = {name: str(tmp_path / name) for name in (
        "model_after_graph_transforms_path", "model_with_gradient_graph_path", "model_with_training_graph_path",
        "model_with_training_graph_after_optimization_path")}
    weights = []
    for more in ({}, {"graph_transformer": {"transformer_layer_recompute": True}}):
        module = net()
        trainer = trainer_of(module, optim.AdamConfig(), **more, debug={
            "deterministic_compute": True, "check_model_export": True, "graph_save_paths": paths})
        for x, label in batches(2):
            trainer.train_step(x, label)
        assert not torch.are_deterministic_algorithms_enabled()
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*weights)
    assert trainer._trained.model.ort_module._runtime.memory_optimization_level == 1
    import onnx

    kinds = [collections.Counter(node.op_type for node in onnx.load(path).graph.node) for path in paths.values()]
    assert [any(name.endswith("Grad") for name in each) for each in kinds] == [False, True, True, True]
    assert [each["AdamOptimizer"] for each in kinds] == [0, 0, 6, 6]  # one for each weight


def test_graphs_are_written_in_a_run_that_goes_on(tmp_path):
    first, path = trainer_of(net(), optim.SGDConfig()), tmp_path / "graph.onnx"
    first.train_step(*batches(1)[0])
    second = trainer_of(net(), optim.SGDConfig(), debug={"graph_save_paths": {"model_with_training_graph_path": str(path)}})
    second.load_state_dict(first.state_dict())
    second.eval_step(*batches(1)[0])
    assert not path.exists()
    second.train_step(*batches(1)[0])
    assert path.exists() and second._train_step_info.step == 2


def test_check_model_export_finds_a_difference():
    module = net()
    trainer = trainer_of(module, optim.SGDConfig(), debug={"check_model_export": True})
    trainer._init_session()
    trainer._trained.model.eager = lambda inputs: [tensor + 1 for tensor in trainer._trained.model.evaluate(inputs)]
    (x, label), = batches(1)
    with pytest.raises(AssertionError, match="check_model_export: output loss"):
        trainer._check_export([x, label])


def test_nothing_to_train():
    """A model without weights runs; a loss that has lost its weights does not."""

    class Mean(nn.Module):
        def forward(self, x, y):
            return x.mean()

    described = {"inputs": [("x", [1]), ("y", [1])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(Mean(), described, optim.LambConfig())
    assert trainer.train_step(torch.ones(1), torch.ones(1)) == 1
    lost = ORTTrainer(net(), DESCRIPTION, optim.LambConfig(), options=options(),
                      loss_fn=lambda scores, label: F.cross_entropy(scores.detach(), label))
    with pytest.raises(RuntimeError, match="the loss depends on no weight that is trained"):
        lost.train_step(*batches(1)[0])


def test_a_graph_that_cannot_be_written_is_said(tmp_path, caplog):
    trainer = trainer_of(net(), optim.SGDConfig(), debug={
        "graph_save_paths": {"model_with_gradient_graph_path": str(tmp_path)}})
    trainer.train_step(*batches(1)[0])
    assert f"ORTTrainer did not write {tmp_path}: " in caplog.text and trainer._train_step_info.optimization_step == 1


class Cut(nn.Module):
    """Python between two graphs."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.net(x)


def test_a_graph_of_a_module_that_is_cut_is_said_to_be_a_part(tmp_path, caplog):
    path = tmp_path / "graph.onnx"
    trainer = trainer_of(Cut(), optim.SGDConfig(lr=0.1), debug={
        "graph_save_paths": {"model_with_gradient_graph_path": str(path)}})
    trainer.train_step(*batches(1)[0])
    assert path.exists() and "holds one of several graphs, because Dynamo cut the module" in caplog.text


def test_options_without_effect_are_said(caplog):
    trainer_of(net(), optim.SGDConfig(), device={"id": "cpu", "mem_limit": 9}).train_step(*batches(1)[0])
    assert "device.mem_limit has no effect" in caplog.text


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given, name", [
    ({"distributed": {"world_size": 3, "enable_adasum": True}}, "Adasum needs 2, 4, 8"),
    ({"distributed": {"horizontal_parallel_size": 2}}, "distributed.horizontal_parallel_size is 2"),
    ({"distributed": {"pipeline_parallel": {"pipeline_parallel_size": 3}}}, "pipeline_parallel_size is 3"),
])
def test_options_that_are_not_there(given, name):
    module = net()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(onnxtrain.UnsupportedError, match=name):
        trainer_of(module, optim.SGDConfig(), **given).train_step(*batches(1)[0])
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_without_a_device_of_cuda_the_default_is_the_cpu(caplog):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with caplog.at_level("INFO", "onnxtrain"):
        trainer = ORTTrainer(net(), DESCRIPTION, optim.SGDConfig(), loss_fn=cross_entropy)
    assert "device.id is not given, and torch has no CUDA device here: the trainer runs on the CPU" in caplog.text
    trainer.train_step(*batches(1)[0])
    assert trainer._trained.device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="the trainer's device is 'cuda', and torch has no CUDA device"):
        trainer_of(net(), optim.SGDConfig(), device={"id": "cuda"}).train_step(*batches(1)[0])


@pytest.mark.parametrize("change, error, message", [
    ({"model": None}, AssertionError, "'model' is required"),
    ({"model": 3}, ValueError, "'model' must be either"),
    ({"model_desc": []}, AssertionError, "'model_desc' must be a 'dict'"),
    ({"optim_config": "Adam"}, AssertionError, "'optim_config'"),
    ({"loss_fn": lambda x: x}, AssertionError, "'loss_fn' must be a callable of 2 parameters"),
    ({"loss_fn": 3}, AssertionError, "'loss_fn' must be a callable of 2 parameters"),
    ({"options": {}}, AssertionError, "'options' must be ORTTrainerOptions"),
])
def test_wrong_arguments(change, error, message):
    given = {"model": net(), "model_desc": DESCRIPTION, "optim_config": optim.SGDConfig(), "loss_fn": cross_entropy,
             "options": ORTTrainerOptions(CPU), **change}
    with pytest.raises(error, match=message):
        ORTTrainer(**given)


def test_descriptions_that_do_not_fit():
    (x, label), = batches(1)

    def step(inputs, outputs):
        ORTTrainer(net(), {"inputs": inputs, "outputs": outputs}, optim.SGDConfig(), loss_fn=cross_entropy,
                   options=options()).train_step(x, label)

    with pytest.raises(AssertionError, match="no output has is_loss"):
        step(DESCRIPTION["inputs"], [("loss", [])])
    with pytest.raises(ValueError, match=r"names inputs \['data'\], but forward of Net takes \['x'\]"):
        step([("data", ["n", 8]), ("label", ["n"])], DESCRIPTION["outputs"])
    with pytest.raises(RuntimeError, match=r"output scores has the shape \[6, 4\], but \[6, 5\] is described"):
        step(DESCRIPTION["inputs"], [("loss", [], True), ("scores", ["batch", 5])])
    with pytest.raises(KeyError, match="other"):
        step(DESCRIPTION["inputs"], [("loss", [], True), ("scores", ["other", 4])])
    with pytest.raises(RuntimeError, match="the model has 2 outputs, but 3 are described"):
        step(DESCRIPTION["inputs"], [("loss", [], True), ("scores", ["batch", 4]), ("more", [])])
    with pytest.raises(RuntimeError, match="output 1 is the loss, which must be a float tensor of one element"):
        step(DESCRIPTION["inputs"], [("loss", []), ("scores", ["batch", 4], True)])
    assert not math.isnan(x.sum())
