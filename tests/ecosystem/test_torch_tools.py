"""torch's own training tools around a wrapped module: optimizers, schedulers, GradScaler, averages, saving,
fit loops by contract.
"""

import copy
import io

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import lr_scheduler, swa_utils

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # without a bias that the norm takes away again: its gradient is rounding, and Adam makes steps of that
        self.fc, self.norm, self.head = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.fc(x))))


@pytest.fixture(scope="module")
def wrapped():
    """One wrapped module for all that only train it: its export is made once."""
    torch.manual_seed(0)
    model = ORTModule(Net())
    model(torch.randn(5, 6))
    return model, copy.deepcopy(model.state_dict())


def pair(wrapped):
    """An eager twin and the wrapped module, both with the first weights."""
    model, state = wrapped
    plain = Net()
    plain.load_state_dict(state), model.load_state_dict(state)
    for p in model.parameters():
        p.grad = None
    return plain, model


def steps(model, optimizer, schedule=None, n=6, loss_of=None):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(n):
        x = torch.randn(8, 6, generator=generator)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        if schedule is not None:
            schedule.step(losses[-1]) if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else schedule.step()
    return losses


def same(plain, model, rtol=1e-3, atol=1e-5):
    for (name, a), b in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=rtol, atol=atol, msg=name)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}), "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}), "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}), "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}), "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}), "ASGD": (torch.optim.ASGD, {}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(wrapped, name):
    kind, options = OPTIMIZERS[name]
    plain, model = pair(wrapped)
    before = onnxtrain.stats(model)["engine_steps"]
    want, got = (steps(m, kind(m.parameters(), **options)) for m in (plain, model))
    assert got == pytest.approx(want, rel=1e-3, abs=1e-5)
    same(plain, model, 5e-3, 2e-4)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] >= before + 6 and counts["fallback_steps"] == 0 and counts["exports"] == 1


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2), "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.PolynomialLR(o)],
                                                        [2]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(wrapped, name):
    rates = []
    plain, model = pair(wrapped)
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), 0.05, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        steps(m, optimizer, schedule)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[1] == pytest.approx(rates[0])
    same(plain, model, 5e-3, 1e-4)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_grad_scaler_skips_a_step_that_overflows(wrapped):
    plain, model = pair(wrapped)
    scales = []
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), 0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        seen = []
        for step in range(5):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = m(x).square().mean() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        scales.append(seen)
    assert scales[0] == scales[1] and scales[1][2] == scales[1][1] / 2
    same(plain, model)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_averages_of_the_wrapped_module(wrapped):
    plain, model = pair(wrapped)
    averages = []
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), 0.05)
        pairs = [swa_utils.AveragedModel(m),
                 swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)]
        schedule = swa_utils.SWALR(optimizer, 0.02, anneal_epochs=2)
        for _ in range(4):
            steps(m, optimizer, schedule, 1)
            for average in pairs:
                average.update_parameters(m)
        averages.append(pairs)
    rows = torch.randn(9, 6)
    for a, b in zip(*averages, strict=True):
        assert isinstance(b.module, ORTModule) and list(a.state_dict()) == list(b.state_dict())
        torch.testing.assert_close(b(rows), a(rows), rtol=1e-3, atol=1e-5)
        assert onnxtrain.stats(b.module)["engine_steps"] == 1 and onnxtrain.stats(b.module)["fallback_steps"] == 0
    loader = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(s)),) for s in range(3)]
    for pairs in averages:
        swa_utils.update_bn(loader, pairs[0])  # batch statistics of a module in train mode under no_grad
    torch.testing.assert_close(averages[1][0].module.norm.running_var, averages[0][0].module.norm.running_var,
                               rtol=1e-4, atol=1e-5)


def test_saving_the_module_and_a_checkpoint_of_a_run():
    torch.manual_seed(0)
    model = ORTModule(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    steps(model, optimizer, n=3)
    file, whole = io.BytesIO(), io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    torch.save(model, whole)
    want = steps(model, optimizer, n=3)
    whole.seek(0), file.seek(0)
    loaded, kept = torch.load(whole, weights_only=False), torch.load(file)
    assert isinstance(loaded, ORTModule) and loaded.training
    loaded.load_state_dict(kept["model"])
    again = torch.optim.AdamW(loaded.parameters(), 1e-2)
    again.load_state_dict(kept["optimizer"])
    assert steps(loaded, again, n=3) == pytest.approx(want, rel=1e-6)
    assert onnxtrain.stats(loaded) | {"fallback_steps": 0, "engine_steps": 3} == onnxtrain.stats(loaded)
    file.seek(0)
    plain = Net()
    plain.load_state_dict(torch.load(file)["model"])


class Task(nn.Module):
    """What a fit loop in the manner of Lightning calls: training_step, validation_step, configure_optimizers, hooks."""

    def __init__(self, net):
        super().__init__()
        self.net, self.logged = net, {}

    def forward(self, x):
        return self.net(x)

    def log(self, name, value):
        self.logged.setdefault(name, []).append(value.item())

    def training_step(self, batch, index):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def on_train_epoch_start(self):
        self.train()


def fit(task, epochs=2):
    chosen = task.configure_optimizers()
    optimizer, generator = chosen["optimizer"], torch.Generator().manual_seed(4)
    for _ in range(epochs):
        task.on_train_epoch_start()
        for index in range(4):
            x = torch.randn(8, 6, generator=generator)

            def closure(x=x, index=index):
                loss = task.training_step((x, x.sum(1, keepdim=True)), index)
                optimizer.zero_grad()
                loss.backward()
                return loss

            optimizer.step(closure)
        chosen["lr_scheduler"].step()
        task.eval()
        with torch.no_grad():
            x = torch.randn(8, 6, generator=generator)
            task.validation_step((x, x.sum(1, keepdim=True)), 0)
    return task.logged


@pytest.mark.parametrize("outside", [False, True], ids=["net wrapped", "task wrapped"])
def test_a_fit_loop_by_its_contract(outside):
    torch.manual_seed(0)
    net = Net()
    plain = Task(copy.deepcopy(net))
    task = ORTModule(Task(net)) if outside else Task(ORTModule(net))
    want, got = fit(plain), fit(task)
    for name in ("train", "validation"):
        assert got[name] == pytest.approx(want[name], rel=1e-3)
    same(plain, task)
    counts = onnxtrain.stats(task if outside else task.net)
    assert counts["engine_steps"] == 10 and counts["fallback_steps"] == 0, counts["reasons"]
