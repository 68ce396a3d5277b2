"""An ORTTrainer trains an onnx.ModelProto as eager PyTorch trains the same model."""

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_training import DESCRIPTION, Eager, batches, cross_entropy, net, options, trainer_of
from onnx import TensorProto, helper, numpy_helper
from test_saved import evaluated, saved

import onnxtrain
from onnxtrain.training import ORTTrainer, amp, optim


def tensor(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def graph_of(seed=0, dropout=None, norm=False):
    """x (batch, 8) -> fc.1 -> [BatchNormalization] -> Tanh -> [Dropout] -> fc.2 -> scores; loss with label."""
    random = np.random.default_rng(seed)
    weights = [tensor("fc.1/weight", random.normal(size=(8, 16)).astype(np.float32)),
               tensor("fc.1/bias", np.zeros(16, np.float32)),
               tensor("fc.2/weight", random.normal(size=(16, 4)).astype(np.float32) / 4), tensor("axis", np.array([0]))]
    nodes = [helper.make_node("MatMul", ["x", "fc.1/weight"], ["a"]),
             helper.make_node("Add", ["a", "fc.1/bias"], ["b"])]
    last = "b"
    if norm:
        weights += [tensor(f"bn.{name}", np.full(16, fill, np.float32))
                    for name, fill in (("scale", 1), ("shift", 0), ("mean", 0), ("var", 1))]
        nodes.append(helper.make_node(
            "BatchNormalization", ["b", "bn.scale", "bn.shift", "bn.mean", "bn.var"], ["n", "new_mean", "new_var"],
            training_mode=1, momentum=0.9))
        last = "n"
    nodes.append(helper.make_node("Tanh", [last], ["t"]))
    last = "t"
    if dropout is not None:
        weights += [tensor("ratio", np.array(dropout, np.float32)), tensor("training", np.array(True))]
        nodes.append(helper.make_node("Dropout", ["t", "ratio", "training"], ["d"]))
        last = "d"
    nodes += [helper.make_node("MatMul", [last, "fc.2/weight"], ["scores"]),
              helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "label"], ["loss"])]
    graph = helper.make_graph(nodes, "g", [value("label", ["n"], TensorProto.INT64), value("x", ["n", 8])],
                              [value("scores", ["n", 4]), value("loss", [])], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def proto_trainer(model, config, **more):
    return ORTTrainer(model, DESCRIPTION, config, options=options(**more))


class Same(nn.Module):
    """The graph in PyTorch."""

    def __init__(self, model, norm=False):
        super().__init__()
        own = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
        for name in ("fc.1/weight", "fc.1/bias", "fc.2/weight"):
            self.register_parameter(name.replace(".", "_"), nn.Parameter(own[name]))
        self.bn = nn.BatchNorm1d(16) if norm else nn.Identity()

    def forward(self, x):
        own = dict(self.named_parameters())
        hidden = self.bn(x @ own["fc_1/weight"] + own["fc_1/bias"])
        return torch.tanh(hidden) @ own["fc_2/weight"]


@pytest.mark.parametrize("config", [optim.AdamConfig(lr=0.01), optim.LambConfig(lr=0.01), optim.SGDConfig(lr=0.1)],
                         ids=lambda config: config.name)
def test_losses_of_a_proto(config):
    """Outputs by name, in the description's order, whatever the graph's."""
    model = graph_of()
    given = model.SerializeToString()
    before = onnxtrain.stats()["engine_steps"]
    trainer, eager = proto_trainer(model, config), Eager(Same(model), config)
    for x, label in batches(50):
        loss, scores = trainer.train_step(x, label)
        assert loss.item() == pytest.approx(eager.step(x, label).item(), rel=2e-6) and scores.shape == (6, 4)
    assert onnxtrain.stats()["engine_steps"] == before + 50
    assert model.SerializeToString() == given
    assert set(trainer.state_dict()["model"]["full_precision"]) == {"fc.1/weight", "fc.1/bias", "fc.2/weight"}


def test_groups_and_frozen_weights_of_a_proto(tmp_path):
    config = optim.AdamConfig([{"params": ["fc.1/weight"], "lambda_coef": 0.5}], lr=0.1)
    model = graph_of()
    trainer = proto_trainer(model, config, utils={"frozen_weights": ["fc.2/weight"]})
    trainer.save_as_onnx(str(tmp_path / "before.onnx"))  # there is a session from the start
    assert onnx.load(tmp_path / "before.onnx").graph.node == model.graph.node
    for x, label in batches(3):
        trainer.train_step(x, label)
    after = {t.name: numpy_helper.to_array(t) for t in saved(trainer, tmp_path).graph.initializer}
    before = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert {name for name in after if (after[name] == before[name]).all()} == {"fc.2/weight", "axis"}
    with pytest.raises(RuntimeError, match="not found in the ONNX model"):
        proto_trainer(model, config, utils={"frozen_weights": ["fc.3"]})


def test_dropout_of_a_proto(tmp_path):
    """On in training, by torch's random state; off in evaluation and in the file."""
    trainer = proto_trainer(graph_of(dropout=0.5), optim.SGDConfig(lr=0.0))
    x, label = batches(1)[0]
    torch.manual_seed(0)
    first, second = trainer.train_step(x, label)[0], trainer.train_step(x, label)[0]
    torch.manual_seed(0)
    assert trainer.train_step(x, label)[0] == first != second
    want = F.cross_entropy(Same(graph_of())(x), label)
    torch.testing.assert_close(trainer.eval_step(x, label)[0], want)
    got = evaluated(saved(trainer, tmp_path), x=x, label=label)
    np.testing.assert_allclose(got[1], want.item(), rtol=1e-5)


def test_batch_normalization_of_a_proto(tmp_path):
    """Running statistics are no weights; a step in training updates them, one in evaluation uses them."""
    model = graph_of(norm=True)
    trainer, eager = proto_trainer(model, optim.SGDConfig(lr=0.1)), Eager(Same(model, norm=True), optim.SGDConfig(lr=0.1))
    for x, label in batches(5):
        assert trainer.train_step(x, label)[0].item() == pytest.approx(eager.step(x, label).item(), rel=2e-6)
    state, norm = trainer.state_dict(), eager.module.bn
    assert "bn.mean" not in state["optimizer"] and "bn.mean" not in trainer._training_session.get_state()
    mean = state["model"]["full_precision"]["bn.mean"]
    np.testing.assert_allclose(mean, norm.running_mean.numpy(), rtol=1e-5, atol=1e-6)
    got = evaluated(saved(trainer, tmp_path), x=x, label=label)
    np.testing.assert_allclose(got[0], trainer.eval_step(x, label)[1].numpy(), rtol=1e-4, atol=1e-5)


class Half(torch.nn.Module):
    """Net, its products in float16."""

    def __init__(self):
        super().__init__()
        self.plain = net()

    def forward(self, x):
        def product(layer, value):
            return F.linear(value.half(), layer.weight.half(), layer.bias.half()).float()

        hidden = torch.tanh(self.plain.norm(product(self.plain.first, x)))
        return product(self.plain.last, hidden)


def test_mixed_precision_of_a_proto(tmp_path):
    """Products are in float16, weights and the rest in float32; an update whose gradients overflow is left out."""
    first = trainer_of(net(), optim.SGDConfig(lr=0.1))
    first.eval_step(*batches(1)[0])
    model, eager = saved(first, tmp_path), Half()
    scaler = amp.DynamicLossScaler(loss_scale=1024.0)
    trainer = ORTTrainer(model, DESCRIPTION, optim.SGDConfig(lr=0.1),
                         options=options(mixed_precision={"enabled": True, "loss_scaler": scaler}))
    descent = torch.optim.SGD(eager.parameters(), lr=0.1)
    for x, label in batches(20):
        loss, scores = trainer.train_step(x, label)
        descent.zero_grad()
        want = cross_entropy(eager(x), label)
        (want * 1024.0).backward()
        for weight in eager.parameters():
            weight.grad /= 1024.0
        descent.step()
        assert loss.item() == pytest.approx(want.item(), rel=2e-3) and loss.dtype == scores.dtype == torch.float32
    exact = trainer_of(net(), optim.SGDConfig(lr=0.1))
    for x, label in batches(20):
        exact.train_step(x, label)
    own, plain = (t.state_dict()["model"]["full_precision"] for t in (trainer, exact))
    for name, weight in eager.plain.named_parameters():
        np.testing.assert_allclose(own[name], weight.detach().numpy(), rtol=2e-3, atol=1e-3)
    assert any((own[name] != plain[name]).any() for name in own)
    before = trainer.state_dict()["model"]["full_precision"]
    trainer.train_step(batches(1)[0][0] * 1e6, batches(1)[0][1])
    after = trainer.state_dict()["model"]["full_precision"]
    assert not trainer._train_step_info.all_finite and scaler.loss_scale == 512.0
    assert all((after[name] == before[name]).all() for name in after)
    assert all(tensor.data_type == TensorProto.FLOAT for tensor in saved(trainer, tmp_path).graph.initializer)


def test_protos_that_are_refused():
    with pytest.raises(AssertionError, match="'loss_fn' must not be specified"):
        ORTTrainer(graph_of(), DESCRIPTION, optim.SGDConfig(), loss_fn=cross_entropy, options=options())
    with pytest.raises(ValueError, match=r"the model has inputs \['label', 'x'\], but the description names \['x'\]"):
        ORTTrainer(graph_of(), {**DESCRIPTION, "inputs": [("x", [])]}, optim.SGDConfig(), options=options())
    more = [*DESCRIPTION["outputs"], ("third", [])]
    with pytest.raises(ValueError, match="the model has outputs"):
        ORTTrainer(graph_of(), {**DESCRIPTION, "outputs": more}, optim.SGDConfig(), options=options())


def test_postprocess_once():
    calls = []

    def change(model):
        calls.append(model)
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        changed.doc_string = "changed"
        return changed

    trainer = proto_trainer(graph_of(), optim.SGDConfig(), _internal_use={"extra_postprocess": change})
    trainer.train_step(*batches(1)[0])
    trainer.eval_step(*batches(1)[0])
    assert len(calls) == 1 and trainer._onnx_model.doc_string == "changed"
    with pytest.raises(AssertionError, match="'extra_postprocess' must give an onnx.ModelProto"):
        proto_trainer(graph_of(), optim.SGDConfig(), _internal_use={"extra_postprocess": lambda model: 1})
