"""save_as_onnx writes a trained module for other runtimes, which evaluate it as PyTorch does."""

import warnings

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
import torch.nn as nn
from eager_training import DESCRIPTION, batches, cross_entropy, net, options, trainer_of
from onnx import numpy_helper

import onnxtrain
from onnxtrain.export import ExportError
from onnxtrain.training import ORTTrainer, optim


def saved(trainer, tmp_path):
    path = str(tmp_path / "model.onnx")
    trainer.save_as_onnx(path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert all(node.domain != "ai.onnxtrain" for node in model.graph.node)
    return model


def evaluated(model, **inputs):
    return onnx.reference.ReferenceEvaluator(model).run(None, {name: x.numpy() for name, x in inputs.items()})


def test_a_module_as_a_file(tmp_path):
    """In evaluation, with the weights of now, under the names of the description and of the module."""
    module = net(dropout=0.5)
    trainer = trainer_of(module, optim.AdamConfig(lr=0.01))
    for x, label in batches(3):
        trainer.train_step(x, label)
    model = saved(trainer, tmp_path)
    x, label = batches(1, seed=9, size=5)[0]
    for ours, theirs in zip(trainer.eval_step(x, label), evaluated(model, x=x, label=label)):
        np.testing.assert_allclose(theirs, ours.numpy(), rtol=1e-5, atol=1e-6)
    assert [value.name for value in model.graph.input] == ["x", "label"]
    assert [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == ["batch", 8]
    assert [value.name for value in model.graph.output] == ["loss", "scores"]
    own = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name, weight in module.named_parameters():
        np.testing.assert_array_equal(own[name], weight.detach().numpy())


def test_a_trainer_of_the_file_goes_on(tmp_path):
    module = net()
    trainer = trainer_of(module, optim.AdamConfig(lr=0.01))
    for x, label in batches(2):
        trainer.train_step(x, label)
    model = saved(trainer, tmp_path)
    other = ORTTrainer(model, DESCRIPTION, optim.AdamConfig(lr=0.01), options=options())
    assert other._onnx_model == trainer._onnx_model and other._onnx_model is not trainer._onnx_model
    other.load_state_dict(trainer.state_dict())
    for x, label in batches(5, seed=4):
        (loss, scores), (want, want_scores) = other.train_step(x, label), trainer.train_step(x, label)
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        torch.testing.assert_close(scores, want_scores)
    saved(other, tmp_path)


class Attention(nn.Module):
    """What PyTorch's own layers export: attention, embedding, masks, a detached value, a batch norm."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(16, 20)

    def forward(self, tokens):
        hidden = self.layer(self.table(tokens))
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return self.out(hidden + hidden.detach().mean()).transpose(1, 2)


@pytest.mark.parametrize("shape", [(3, 7), (1, 7)])
def test_a_transformer_as_a_file(shape, tmp_path):
    """Sizes that have names stay open, whatever the first batch has."""
    torch.manual_seed(0)
    described = {"inputs": [("tokens", ["batch", "length"]), ("label", ["batch", "length"])],
                 "outputs": [("loss", [], True), ("scores", ["batch", 20, "length"])]}
    trainer = ORTTrainer(Attention(), described, optim.LambConfig(lr=0.01), loss_fn=cross_entropy, options=options())
    tokens = torch.randint(0, 20, shape)
    for _ in range(2):
        trainer.train_step(tokens, tokens)
    assert onnxtrain.stats(trainer._trained.model.ort_module)["fallback_steps"] == 0
    model = saved(trainer, tmp_path)
    tokens = torch.randint(0, 20, (2, 5))
    for ours, theirs in zip(trainer.eval_step(tokens, tokens), evaluated(model, tokens=tokens, label=tokens)):
        np.testing.assert_allclose(theirs, ours.numpy(), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_saved(tmp_path):
    class Sorts(nn.Module):
        def __init__(self, cut=False):
            super().__init__()
            self.fc, self.cut = nn.Linear(8, 4), cut
            self.register_buffer("bounds", torch.tensor([-0.5, 0.0, 0.5]))

        def forward(self, x):
            y = self.fc(x)
            if self.cut:
                return y if y.sum() > 0 else -y
            return y + torch.bucketize(y, self.bounds)

    trainer = trainer_of(Sorts(), optim.SGDConfig())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_as_onnx(str(tmp_path / "a.onnx"))
        trainer.train_step(*batches(1)[0])
        trainer.save_as_onnx(str(tmp_path / "no" / "a.onnx"))
    assert ["not initialized" in str(caught[0].message), "does not exist" in str(caught[-1].message)] == [True, True]
    with pytest.raises(AssertionError, match="'path' must be a valid path string"):
        trainer.save_as_onnx(tmp_path / "a.onnx")
    with pytest.raises(onnxtrain.UnsupportedError, match="operators that ONNX does not have: SearchSorted"):
        trainer.save_as_onnx(str(tmp_path / "a.onnx"))
    trainer = trainer_of(Sorts(cut=True), optim.SGDConfig())
    trainer.train_step(*batches(1)[0])
    with pytest.raises(ExportError, match="Dynamo does not capture the module as one graph"):
        trainer.save_as_onnx(str(tmp_path / "a.onnx"))
    assert not list(tmp_path.iterdir())


class Tenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 10

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_a_function_is_saved_as_what_its_forward_computes(tmp_path):
    class Calls(nn.Linear):
        def forward(self, x):
            return Tenfold.apply(super().forward(x))

    trainer = trainer_of(Calls(8, 4), optim.SGDConfig())
    for x, label in batches(3):
        trainer.train_step(x, label)
    for ours, theirs in zip(trainer.eval_step(x, label), evaluated(saved(trainer, tmp_path), x=x, label=label)):
        np.testing.assert_allclose(theirs, ours.numpy(), rtol=1e-4, atol=1e-5)


def test_functions_of_the_engine_become_functions_of_the_file(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            y = self.fc(x)
            return torch.expm1(y) + torch.log1p(y.square()) + torch.remainder(y, 0.3)

    trainer = trainer_of(Odd(), optim.SGDConfig())
    x, label = batches(1)[0]
    trainer.train_step(x, label)
    trainer.save_as_onnx(str(tmp_path / "a.onnx"))
    model = onnx.load(tmp_path / "a.onnx")
    onnx.checker.check_model(model)
    for ours, theirs in zip(trainer.eval_step(x, label), evaluated(model, x=x, label=label)):
        np.testing.assert_allclose(theirs, ours.numpy(), rtol=1e-4, atol=1e-5)
