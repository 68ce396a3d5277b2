"""ORTModule against eager PyTorch: steps, modes, inputs and outputs, autograd's rules, delegation, fallback."""

import copy
import gc
import logging
import pickle
import random
import threading
from collections import namedtuple

import export_models as models
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException


def steps_in_engine(model):
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    return counts["engine_steps"]


def train_both(module, batches, loss, steps, lr=0.1, tolerance=1e-5):
    """Steps of eager and of ORTModule on the same data: losses, gradients, parameters and buffers stay equal."""
    eager, ours = module, ORTModule(copy.deepcopy(module))
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr) for m in (eager, ours)]
    for step in range(steps):
        args = batches(step)
        losses = []
        for model, optimizer in zip((eager, ours), optimizers):
            optimizer.zero_grad()
            value = loss(model, *args)
            value.backward()
            losses.append(value.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        for (name, p), q in zip(eager.named_parameters(), ours.parameters()):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                scale = max(p.grad.abs().max().item(), 1e-4)  # a bias before a normalisation has none: rounding only
                assert (p.grad - q.grad).abs().max().item() <= tolerance * scale + 1e-7, (step, name)
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(eager.named_buffers(), ours.buffers()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=name)
    assert steps_in_engine(ours) == steps
    return ours


def test_mlp_with_loss_outside():
    torch.manual_seed(0)
    data = lambda step: (torch.randn(4 + step % 3, 12), torch.randint(0, 5, (4 + step % 3,)))  # noqa: E731
    ours = train_both(models.MLP(), data, lambda m, x, y: F.cross_entropy(m(x), y), 6)
    assert onnxtrain.stats(ours)["exports"] == 1, "a new batch size is specialised, not exported"


def test_transformer_with_a_mask_cached_in_forward():
    torch.manual_seed(0)
    data = lambda step: (torch.randint(0, 50, (7, 3)), torch.randint(0, 50, (21,)))  # noqa: E731
    train_both(models.Seq2SeqTransformer(dropout=0.0), data, lambda m, x, y: F.cross_entropy(m(x).view(-1, 50), y), 4)


def test_gpt2_with_tied_weights_and_loss_inside():
    torch.manual_seed(0)
    data = lambda step: (torch.randint(0, 61, (2, 8)), torch.randint(0, 61, (2, 8)))  # noqa: E731
    train_both(models.GPT2(dropout=0.0), data, lambda m, x, y: m(x, y)["loss"], 3, tolerance=1e-4)


def test_cnn_with_batch_normalisation():
    torch.manual_seed(0)
    data = lambda step: (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))  # noqa: E731
    train_both(models.CNN(), data, lambda m, x, y: F.cross_entropy(m(x), y), 3, tolerance=1e-3)


def test_dropout_is_real_seeded_and_off_in_eval():
    model = ORTModule(nn.Sequential(nn.Linear(8, 1000), nn.Dropout(0.25)))
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    first = model(x)
    torch.manual_seed(3)
    again, other = model(x), model(x)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0.2 < (first == 0).float().mean() < 0.3
    model.eval()
    torch.testing.assert_close(model(x), model.module[0](x))
    steps_in_engine(model)


def test_eval_no_grad_and_back():
    torch.manual_seed(0)
    module = models.MLP()
    model = ORTModule(module)
    x = torch.randn(3, 12)
    with torch.no_grad():
        assert not model(x).requires_grad
    model.eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), module(x))
    model.train()
    model(x).sum().backward()
    assert module.fc1.weight.grad is not None
    assert steps_in_engine(model) == 3


def test_gradient_of_inputs_and_frozen_parameters():
    torch.manual_seed(0)
    module = models.MLP()
    model = ORTModule(module)
    module.fc1.requires_grad_(False)
    x = torch.randn(3, 12, requires_grad=True)
    (model(x).square().sum()).backward()
    got = x.grad.clone()
    assert module.fc1.weight.grad is None and module.fc2.weight.grad is not None
    x.grad = None
    module(x).square().sum().backward()
    torch.testing.assert_close(got, x.grad)
    module.fc1.requires_grad_(True)
    model(x).sum().backward()
    assert module.fc1.weight.grad is not None
    steps_in_engine(model)


@pytest.mark.parametrize("forward", [
    lambda self, x, y: (self.fc(x).view(y.shape) * 2, self.fc(x) * y),
    lambda self, x, y: (self.fc(x) * (y > 0), self.fc(x) * y),
    lambda self, x, y: (self.fc(x) + y.argmax(), y * 2)], ids=["shape", "comparison", "index"])
def test_an_output_that_reads_no_value_gives_no_gradient(forward):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

    Two.forward = forward
    found = []
    module = Two()
    for model in (module, ORTModule(copy.deepcopy(module))):
        x, y = (torch.ones(3, 4, requires_grad=True) for _ in range(2))
        model(x, y)[0].sum().backward()
        found.append((x.grad, y.grad))
    assert found[0][1] is None and found[1][1] is None
    torch.testing.assert_close(found[1][0], found[0][0])


def test_several_forwards_before_their_backwards():
    torch.manual_seed(0)
    module = models.MLP()
    model = ORTModule(module)
    batches = [torch.randn(n, 12) for n in (3, 5, 3, 4)]
    outputs = [model(x) for x in batches]
    sum(y.square().mean() for y in reversed(outputs)).backward()
    got = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    sum(module(x).square().mean() for x in batches).backward()
    for a, p in zip(got, module.parameters()):
        torch.testing.assert_close(a, p.grad)


def test_gradient_accumulation():
    torch.manual_seed(0)
    module = models.MLP()
    model, x = ORTModule(module), torch.randn(3, 12)
    model(x).sum().backward()
    once = module.fc1.weight.grad.clone()
    model(x).sum().backward()
    torch.testing.assert_close(module.fc1.weight.grad, 2 * once)


def test_strided_inputs_and_expanded_gradients():
    torch.manual_seed(0)
    module = models.MLP()
    model, x = ORTModule(module), torch.randn(12, 6).t()[::2]
    assert not x.is_contiguous()
    torch.testing.assert_close(model(x), module(x))
    model(x).sum().backward()


Point = namedtuple("Point", "x y")


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, point, *, scale: float = 1.0, extra=None, flag=True):
        y = self.fc(point.x) * scale
        if flag and extra is not None:
            y = y + extra["bias"]
        return {"sum": y + point.y, "same": point.y, "none": None, "number": 3, "pair": (y, y > 0)}


def test_structures_constants_and_unused_parameters():
    torch.manual_seed(0)
    module = Structured()
    model = ORTModule(module)
    point = Point(torch.randn(3, 4), torch.randn(3, 4))
    extra = {"bias": torch.randn(4)}
    for kwargs in ({}, {"scale": 2.0}, {"extra": extra}, {"extra": extra, "flag": False}):
        ours, eager = model(point, **kwargs), module(point, **kwargs)
        assert list(ours) == list(eager) and ours["none"] is None and ours["number"] == 3
        torch.testing.assert_close(ours["sum"], eager["sum"])
        assert torch.equal(ours["same"], point.y)
        assert torch.equal(ours["pair"][1], eager["pair"][1]) and not ours["pair"][1].requires_grad
    ours["sum"].sum().backward()
    assert module.fc.weight.grad is not None and module.unused.weight.grad is None
    steps_in_engine(model)


def test_a_new_size_of_a_dynamic_dim_is_specialised_and_timed():
    model = ORTModule(models.MLP())
    for size, count in ((3, 1), (5, 2), (3, 2), (2, 3)):
        model(torch.randn(size, 12))
        counts = onnxtrain.stats(model)
        assert counts["specialisations"] == count and counts["exports"] == 1
        assert 0 < counts["last_specialise_seconds"] <= counts["specialise_seconds"] < 1
    assert onnxtrain.stats()["specialisations"] >= 3
    assert "programs: 3, of them 2 for new sizes, built in" in onnxtrain.explain(model)


def test_saved_output_changed_in_place_is_detected():
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()))
    y = model(torch.randn(2, 3))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weight_changed_in_place_before_backward_is_detected():
    model = ORTModule(models.MLP())
    loss = model(torch.randn(2, 12)).sum()
    with torch.no_grad():
        model.fc2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("other", [lambda t: t * 2, lambda t: t.double()])
def test_data_assigned_before_backward_is_detected(other):
    """Eager has the gradient of the old values or of the new ones, as the operator may be; no counter shows it."""
    model = ORTModule(models.MLP())
    loss = model(torch.randn(2, 12)).sum()
    model.fc2.weight.data = other(model.fc2.weight.data)
    with pytest.raises(RuntimeError, match="`.data` of 'fc2.weight' was assigned in between"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_data_assigned_before_a_second_backward_is_detected():
    model = ORTModule(models.MLP())
    loss = model(torch.randn(2, 12)).sum()
    loss.backward(retain_graph=True)
    model.fc1.weight.data = model.fc1.weight.data * 2
    with pytest.raises(RuntimeError, match="fc1.weight"):
        loss.backward()


def test_data_assigned_and_put_back_or_kept_by_a_hook():
    def back(model, x):
        loss = model(x).sum()
        data = model.fc2.weight.data
        model.fc2.weight.data = data * 2
        model.fc2.weight.data = data
        loss.backward()

    def kept(model, x):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            loss = model(x).sum()
        model.fc2.weight.data = model.fc2.weight.data * 2
        loss.backward()

    torch.manual_seed(0)
    x, eager = torch.randn(2, 12), models.MLP()
    eager(x).sum().backward()
    for use in (back, kept):
        ours = copy.deepcopy(eager)
        ours.zero_grad()
        use(ORTModule(ours), x)
        for p, q in zip(eager.parameters(), ours.parameters()):
            torch.testing.assert_close(q.grad, p.grad)


def test_tensors_dropped_in_every_order():
    torch._dynamo.reset()  # What other tests' graphs hold would go at some point of this test.
    gc.collect()
    torch.manual_seed(0)
    live = None
    for order in ("run first", "output first", "module first"):
        for repeat in range(3):
            model = ORTModule(models.MLP())
            y = model(torch.randn(2, 12))
            loss = y.sum()
            if order == "run first":
                del loss, y, model
            elif order == "output first":
                y = None
                loss.backward()
                del loss, model, y
            else:
                del model
                gc.collect()
                loss.backward()
                assert torch.isfinite(y).all()
                del loss, y
            gc.collect()
            if live is None:
                live = _C.live_blocks()
            assert _C.live_blocks() == live, (order, repeat)


def test_a_kept_gradient_outlives_everything():
    model = ORTModule(models.MLP())
    model(torch.ones(2, 12)).sum().backward()
    kept = model.fc2.bias.grad
    del model
    gc.collect()
    assert kept.tolist() == [2.0] * 5


def test_no_growth_over_1000_steps():
    model = ORTModule(models.MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 12)

    def step():
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    for _ in range(5):
        step()
    gc.collect()
    before = _C.live_blocks()
    for _ in range(1000):
        step()
    gc.collect()
    assert _C.live_blocks() == before
    assert steps_in_engine(model) == 1005


def test_threads_share_a_module():
    torch.manual_seed(0)
    module = models.MLP()
    model = ORTModule(module)
    x = [torch.randn(3, 12) for _ in range(4)]
    expected = [module(v) for v in x]
    model(x[0])
    errors = []

    def work(i):
        try:
            for _ in range(20):
                torch.testing.assert_close(model(x[i]), expected[i])
        except Exception as error:  # noqa: BLE001  reported by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_delegation():
    module = models.MLP()
    model = ORTModule(module)
    assert model.module is module and list(model.state_dict()) == list(module.state_dict())
    assert [id(p) for p in model.parameters()] == [id(p) for p in module.parameters()]
    assert model.fc1 is module.fc1 and "fc1.weight" in dict(model.named_parameters())
    model.load_state_dict(models.MLP().state_dict())
    model.note = 3
    assert module.note == 3
    with pytest.raises(AttributeError):
        _ = model.nothing
    with pytest.raises(ORTModuleTorchModelException):
        model.add_module("x", nn.Linear(1, 1))
    with pytest.raises(ORTModuleTorchModelException):
        ORTModule(model)
    with pytest.raises(TypeError):
        ORTModule(3)
    assert model.eval() is model and not module.training and not model.training


def test_deepcopy_and_pickle_rebuild():
    torch.manual_seed(0)
    model, x = ORTModule(models.MLP()), torch.randn(2, 12)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(x), expected)
        copied.fc1.weight.data.zero_()
        assert steps_in_engine(copied) == 1
    torch.testing.assert_close(model(x), expected)


def test_dtype_change_and_replaced_parameter():
    torch.manual_seed(0)
    module = models.MLP()
    model, x = ORTModule(module), torch.randn(2, 12)
    model(x)
    module.fc2.weight = nn.Parameter(torch.zeros(5, 16))
    torch.testing.assert_close(model(x), module.fc2.bias.expand(2, 5))
    model.double()
    torch.testing.assert_close(model(x.double()), module(x.double()))
    steps_in_engine(model)


class Branching(nn.Module):
    """Dynamo does not follow the generator."""

    def __init__(self):
        super().__init__()
        self.random = random.Random(0)

    def forward(self, x):
        return x * 2 if x.sum() > 0 else x * 3


def test_fallback_is_said_once_and_counted(caplog):
    model = ORTModule(Branching())
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(3):
            assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
        assert torch.equal(model(-torch.ones(2)), torch.full((2,), -3.0))
    assert caplog.text.count("runs in PyTorch, not in the onnxtrain engine") == 1
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 4 and counts["engine_steps"] == 0 and counts["reasons"]
    assert "in PyTorch because" in onnxtrain.explain(model)


def test_fallback_disabled_raises(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException, match="random.Random"):
        ORTModule(Branching())(torch.ones(2))


def test_out_of_range_index_is_an_index_error():
    model = ORTModule(nn.Embedding(5, 3))
    model(torch.tensor([1, 4]))
    with pytest.raises(IndexError, match="index out of range in self"):  # PyTorch's own
        model(torch.tensor([1, 5]))
    assert model(torch.tensor([0, 1])).shape == (2, 3)
