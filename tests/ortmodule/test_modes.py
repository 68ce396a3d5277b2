"""Modes and autograd's rules: the same code on eager PyTorch and on ORTModule, results and gradients compared."""

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import Linear, X, Y, both, equal, in_engine, module, step
from torch.utils.checkpoint import checkpoint

from onnxtrain.ortmodule import ORTModule


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x):
        return self.fc(x) * self.scale


# --- modes ------------------------------------------------------------------------------------------------------------


def test_no_grad_inference_mode_and_enable_grad():
    def use(m):
        results = []
        for context in (torch.no_grad(), torch.inference_mode(), contextlib.nullcontext(), torch.no_grad()):
            with context:
                out = m(X)
                results += [out.detach().clone(), out.requires_grad]
        with torch.no_grad(), torch.enable_grad():
            results.append(m(X).requires_grad)
        with torch.inference_mode(), torch.enable_grad():
            results.append(m(X).requires_grad)
        return results

    in_engine(both(module(lambda self, x: self.fc(x), drop=lambda: nn.Dropout(0.0)), use), 6)


REGIONS = {
    "detach": lambda m, x: (m.fc(x).detach() * m.two(x)).sum(),
    "no_grad": lambda m, x: (_no_grad(m.fc, x) * m.two(x)).sum(),
    "no_grad of parameters": lambda m, x: m.two(x) * _no_grad(lambda w: w.norm(), m.fc.weight) + m.fc(x),
    "data": lambda m, x: m.two(m.fc(x).data + x),
    "enable_grad inside no_grad": lambda m, x: m.two(_nested(m.fc, x)),
    "integer path": lambda m, x: m.two(x) * (m.fc(x) > 0) + (m.fc(x) * 10).long(),
    "stop on one branch": lambda m, x: m.two(x + (m.fc(x) - x).detach()),
    "in place": lambda m, x: m.two(m.fc(x).add_(1.0).mul_(2.0).relu()),
    "grad enabled by set": lambda m, x: _set(m, x),
}


def _no_grad(function, x):
    with torch.no_grad():
        return function(x)


def _nested(function, x):
    with torch.no_grad():
        h = function(x)
        with torch.enable_grad():
            k = function(h)
    return k


def _set(m, x):
    torch.set_grad_enabled(False)
    h = m.fc(x)
    torch.set_grad_enabled(True)
    return m.two(x) + h


@pytest.mark.parametrize("name", REGIONS)
def test_gradients_stop_where_the_user_stopped_them(name):
    model = both(module(lambda self, x: REGIONS[name](self, x), two=lambda: nn.Linear(4, 4)), step(X))
    in_engine(model)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
            return self.fc(x) + 1.0

    def use(m):
        results = [m(Y).float() if inside else m(Y)]
        with torch.autocast("cpu", torch.bfloat16):
            out = m(Y)
        results += [out, m(Y)]
        out.float().sum().backward()
        return results

    both(module(forward), use, tolerance=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_and_around(reentrant):
    def forward(self, x):
        return checkpoint(lambda h: self.fc(F.gelu(h)), self.fc(x), use_reentrant=reentrant)

    in_engine(both(module(forward), step(X)))
    in_engine(both(module(lambda self, x: self.fc(x).tanh()),
                   lambda m: checkpoint(m, X, use_reentrant=reentrant).square().sum().backward()))


def test_hooks_on_the_wrapper_and_on_gradients():
    def use(m):
        seen = []
        handles = [m.register_forward_pre_hook(lambda mod, args: (args[0] * 2,)),
                   m.register_forward_hook(lambda mod, args, out: out + 1)]
        handles.append(m.fc.weight.register_hook(lambda g: g * 3))
        handles.append(m.fc.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())))
        out = m(X)
        out.register_hook(lambda g: g * 0.5)
        out.retain_grad()
        out.sum().backward()
        for handle in handles:
            handle.remove()
        return out, out.grad, seen, m(X)

    in_engine(both(Scaled, use), 2)


def test_full_backward_hook_on_the_wrapper():
    def use(m):
        seen = []
        with_hook = m.register_full_backward_hook(lambda mod, gin, gout: seen.extend([*gin, *gout]))
        x = X.detach().clone().requires_grad_(True)
        m(x).square().sum().backward()
        with_hook.remove()
        return [t.detach() for t in seen if t is not None], x.grad

    both(Scaled, use)


# --- several modules, autograd's rules --------------------------------------------------------------------------------


def test_gan_step_with_two_modules():
    class Gan(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
            self.d = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def wrapped(self):
            return self

    torch.manual_seed(0)
    gan = Gan()
    twin = copy.deepcopy(gan)
    results = []
    for g, d in ((gan.g, gan.d), (ORTModule(twin.g), ORTModule(twin.d))):
        torch.manual_seed(1)
        optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (g, d)]
        for _ in range(3):
            noise, real = torch.randn(5, 4), torch.randn(5, 4)
            optimizers[1].zero_grad()
            (F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-d(g(noise))).mean().backward()
            optimizers[0].step()
        results.append([p.detach() for p in (*g.parameters(), *d.parameters())])
    for a, b in zip(*results):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    in_engine(g), in_engine(d)


def test_one_module_many_times_in_a_step():
    def use(m):
        a = m(X)
        b = m(a)
        c = m(b + a.detach())
        (a.sum() + c.square().sum()).backward()
        return a, b, c

    in_engine(both(Linear, use), 3)


def test_inside_a_larger_eager_model():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.inner(self.first(x)).relu())

    torch.manual_seed(0)
    plain = Outer(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    mixed = copy.deepcopy(plain)
    mixed.inner = ORTModule(mixed.inner)
    for m in (plain, mixed):
        m(Y).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), mixed.parameters()):
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    in_engine(mixed.inner)


def test_saved_tensors_changed_in_place_are_an_error():
    model = ORTModule(module(lambda self, x: self.fc(x).exp())())
    out = model(Y)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    x = Y.clone().requires_grad_(True)
    out = model(x * 1)
    out = model(h := x * 1)
    h.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_functional_call():
    def use(m):
        fresh = {name: (p.detach() * 2).requires_grad_(True) for name, p in m.named_parameters()}
        out = torch.func.functional_call(m, fresh, (Y,))
        out.square().sum().backward()
        return out, [p.grad for p in fresh.values()], [p.grad for p in m.parameters()], m(Y)

    in_engine(both(Linear, use), 2)
    in_engine(both(Scaled, use), 2)


def test_batches_of_gradients_are_refused_by_name():
    model = ORTModule(Linear())
    x = Y.clone().requires_grad_(True)
    y = model(x)
    rows = torch.ones(2, *y.shape)
    for use in (lambda: torch.autograd.grad(y, x, rows, is_grads_batched=True, retain_graph=True),
                lambda: torch.func.vmap(lambda row: torch.autograd.grad(y, x, row, retain_graph=True)[0])(rows),
                lambda: torch.autograd.functional.jacobian(model, x, vectorize=True)):
        with pytest.raises(RuntimeError, match="the engine's backward does not run under vmap"):
            use()
    y.sum().backward()
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(3, 4))


def test_threads_with_their_own_modes():
    model, errors = ORTModule(Linear()), []
    want = model.module(Y).detach()

    def work(grad):
        try:
            for _ in range(20):
                with contextlib.nullcontext() if grad else torch.no_grad():
                    out = model(Y)
                assert out.requires_grad == grad
                torch.testing.assert_close(out.detach(), want)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(bool(i % 2),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    in_engine(model, 80)


class Rows(torch.utils.data.Dataset):
    """Uses a wrapped module in the worker as well."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(torch.full((1, 4), float(index)))[0]


def test_fork_in_a_data_loader():
    model = ORTModule(Linear())
    model(Y).sum().backward()
    loader = torch.utils.data.DataLoader(Rows(model), batch_size=4, num_workers=2, timeout=60,
                                         multiprocessing_context="fork")
    for batch, first in zip(loader, (0, 4)):
        want = model.module(torch.arange(first, first + 4.0).unsqueeze(1).expand(4, 4)).detach()
        torch.testing.assert_close(batch, want)
        model(batch).sum().backward()


def test_scaler_schedulers_and_averages():
    results = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        average = torch.optim.swa_utils.AveragedModel(model,
                                                      multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(6, 4)).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            average.update_parameters(model)
        results.append([p.detach() for p in model.parameters()] + [average(Y).detach()])
    equal(results[1], results[0], 1e-4)


@pytest.mark.parametrize("drop", [lambda h: F.dropout(h, 0.5, True, True), nn.Dropout(0.5, inplace=True),
                                  nn.AlphaDropout(0.5, inplace=True)], ids=["function", "module", "alpha"])
def test_a_dropout_in_place_drops(drop):
    model = ORTModule(module(lambda self, x: drop(self.fc(x) * 1) - 0)())
    x = torch.rand(64, 4)
    y, again = model(x), model(x)
    counts = in_engine(model, 2)
    assert counts["engine_steps"] == 2 and not torch.equal(y, again)
    kept = torch.isclose(y, 2 * model.module.fc(x))
    assert isinstance(drop, nn.AlphaDropout) or 0.3 < kept.float().mean() < 0.7 and torch.equal(kept, y != 0)
