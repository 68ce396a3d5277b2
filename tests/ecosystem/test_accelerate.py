"""Accelerate around a wrapped model: prepare, accumulate, clip, mixed precision, unwrap and state,
equal to eager's run.
"""

import copy
import inspect

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

accelerate = pytest.importorskip("accelerate")

import onnxtrain  # noqa: E402
from onnxtrain.integrations import wrap_accelerator  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(6, 24), nn.LayerNorm(24), nn.Linear(24, 3)

    def forward(self, rows, scale=1.0):
        return self.head(F.gelu(self.norm(self.fc(rows)))) * scale


def batches(n=8):
    generator = torch.Generator().manual_seed(2)
    rows, labels = torch.randn(n * 5, 6, generator=generator), torch.randint(0, 3, (n * 5,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=5)


def train(model, accelerator, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, batches(), schedule)
    losses = []
    for _ in range(epochs):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows, scale=0.5), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return model, optimizer, losses


def fresh(**options):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


OPTIONS = pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 4}, {"mixed_precision": "bf16"}],
                                  ids=["plain", "accumulation", "bf16"])


@OPTIONS
def test_training(options, tmp_path):
    torch.manual_seed(0)
    plain = Net()
    wrapped = ORTModule(copy.deepcopy(plain))
    _, _, want = train(plain, fresh(**options))
    accelerator = fresh(**options)
    model, optimizer, got = train(wrapped, accelerator)
    half = "mixed_precision" in options
    assert got == pytest.approx(want, rel=3e-2 if half else 1e-4)
    for (name, a), b in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0.2 if half else 1e-3, atol=2e-2 if half else 1e-5, msg=name)
    counts = onnxtrain.stats(wrapped)
    assert counts["engine_steps"] == len(got) == 16 and counts["fallback_steps"] == 0, counts["reasons"]
    assert list(inspect.signature(model.forward).parameters) == ["rows", "scale"]

    accelerator.save_state(str(tmp_path))
    before = [p.detach().clone() for p in wrapped.parameters()]
    with torch.no_grad():
        for p in wrapped.parameters():
            p.zero_()
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(before, wrapped.parameters(), strict=True))

    with torch.autocast("cpu", enabled=False):
        bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        rows = torch.randn(4, 6)
        torch.testing.assert_close(bare(rows), bare.module(rows), rtol=1e-4, atol=1e-5)
    assert bare is wrapped and list(accelerator.get_state_dict(model)) == list(plain.state_dict())
    assert onnxtrain.stats(wrapped)["engine_steps"] == 17


def test_a_forward_that_wraps_ours_stays_on_the_wrapper():
    model = ORTModule(Net())
    rows = torch.randn(4, 6)
    want = model(rows)

    def doubled(model):
        inner = model.forward
        return lambda *args, **kwargs: 2 * inner(*args, **kwargs)

    model.forward = doubled(model)
    torch.testing.assert_close(model(rows), 2 * want)
    torch.testing.assert_close(model.module(rows), want, rtol=1e-4, atol=1e-5)
    assert onnxtrain.stats(model)["engine_steps"] == 2
    del model.forward
    torch.testing.assert_close(model(rows), want)
    model.forward = lambda rows: model.fc(rows)  # one that does not is the module's, and is exported
    torch.testing.assert_close(model(rows), model.module.fc(rows), rtol=1e-4, atol=1e-5)
    assert onnxtrain.stats(model)["engine_steps"] == 4 and onnxtrain.stats(model)["fallback_steps"] == 0


@OPTIONS
def test_wrap_accelerator(options, tmp_path):
    """Models that are not wrapped by hand: prepare does it, and unwrap_model undoes it."""
    torch.manual_seed(0)
    plain = Net()
    ours = copy.deepcopy(plain)
    _, _, want = train(plain, fresh(**options))
    accelerator = wrap_accelerator(fresh(**options))
    model, _, got = train(ours, accelerator)
    half = "mixed_precision" in options
    assert got == pytest.approx(want, rel=3e-2 if half else 1e-4)
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0.2 if half else 1e-3, atol=2e-2 if half else 1e-5, msg=name)
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (16, 0), counts["reasons"]
    assert accelerator.unwrap_model(model) is ours and list(accelerator.get_state_dict(model)) == list(plain.state_dict())
    assert wrap_accelerator(accelerator) is accelerator and accelerator.prepare(ours) is model
    by_hand = ORTModule(Net())
    assert accelerator.prepare(by_hand) is by_hand
    accelerator.save_model(model, str(tmp_path))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == ours.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in ours.state_dict().items())


def test_wrap_accelerator_refuses_what_shards_parameters(monkeypatch):
    accelerator = fresh()
    monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType.FSDP)
    with pytest.raises(ValueError, match="whose distributed_type is FSDP"):
        wrap_accelerator(accelerator)
