"""lightning: a LightningModule whose network is wrapped, fitted by its Trainer with validation and a schedule; losses,
weights and checkpoints are those of eager's run.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

lightning = pytest.importorskip("lightning")

import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

GENERATOR = torch.Generator().manual_seed(2)
ROWS = torch.utils.data.TensorDataset(torch.randn(42, 6, generator=GENERATOR),
                                      torch.randint(0, 3, (42,), generator=GENERATOR))


class Task(lightning.LightningModule):
    def __init__(self, wrap):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
        self.model = ORTModule(net) if wrap else net
        self.losses = []

    def training_step(self, batch, _index):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _index):
        self.log("validation", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(task, folder, epochs=2, checkpoint=None, **options):
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, logger=False, default_root_dir=folder,
                                enable_progress_bar=False, enable_model_summary=False, **options)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=8)  # the last batch has two rows
    trainer.fit(task, loader, loader, ckpt_path=checkpoint, weights_only=False)
    return trainer


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
                                     {"precision": "bf16-mixed"}], ids=["plain", "accumulation", "bf16"])
def test_fit(tmp_path, options):
    plain, wrapped = Task(False), Task(True)
    want, got = (fit(task, tmp_path / name, **options) for task, name in ((plain, "eager"), (wrapped, "ours")))
    half = "precision" in options
    assert len(wrapped.losses) == 12
    assert wrapped.losses == pytest.approx(plain.losses, rel=1e-2 if half else 1e-5)
    assert got.callback_metrics["validation"].item() == pytest.approx(want.callback_metrics["validation"].item(),
                                                                      rel=1e-2 if half else 1e-5)
    for (name, a), b in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=5e-2 if half else 1e-4, atol=5e-3 if half else 1e-6, msg=name)
    counts = onnxtrain.stats(wrapped.model)
    # two batches before the first epoch, then six to learn from and six to validate with
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (26, 0, 2), counts

    path = got.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert list(saved) == [f"model.{name}" for name in plain.model.state_dict()]  # a plain task's, too
    if options:
        return
    resumed, whole = Task.load_from_checkpoint(path, weights_only=False), Task(False)
    fit(resumed, tmp_path / "resumed", epochs=3, checkpoint=path)
    fit(whole, tmp_path / "whole", epochs=3)
    assert resumed.losses == pytest.approx(whole.losses[12:], rel=1e-5)
    assert onnxtrain.stats(resumed.model)["fallback_steps"] == 0
    Task(False).load_state_dict(saved)


class Whole(Task):
    """Its steps call the task itself."""

    def forward(self, rows):
        return self.model(rows)

    def training_step(self, batch, _index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


def test_a_wrapped_task(tmp_path):
    plain, task = Whole(False), Whole(False)
    wrapped = ORTModule(task)
    fit(plain, tmp_path / "eager")
    got = fit(wrapped, tmp_path / "ours")
    assert task.losses == pytest.approx(plain.losses, rel=1e-5) and len(task.losses) == 12
    for (name, a), b in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6, msg=name)
    counts = onnxtrain.stats(wrapped)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (12, 0), counts["reasons"]
    saved = torch.load(got.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
    assert list(saved) == list(plain.state_dict())


@pytest.mark.parametrize("names", [(), ("model",)])
def test_callback(tmp_path, names):
    """The callback wraps what a plain task has; the checkpoint is a plain task's."""
    from onnxtrain.integrations import OnnxtrainCallback

    plain, task = Task(False), Task(False)
    want = fit(plain, tmp_path / "eager")
    got = fit(task, tmp_path / "ours", callbacks=[OnnxtrainCallback(*names)])
    assert task.losses == pytest.approx(plain.losses, rel=1e-5) and len(task.losses) == 12
    assert got.callback_metrics["validation"].item() == pytest.approx(want.callback_metrics["validation"].item(), rel=1e-5)
    for (name, a), b in zip(plain.named_parameters(), task.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6, msg=name)
    counts = onnxtrain.stats(task.model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (26, 0), counts["reasons"]
    wrapper, loader = task.model, torch.utils.data.DataLoader(ROWS, batch_size=8)
    got.validate(task, loader, verbose=False)
    assert task.model is wrapper and onnxtrain.stats(wrapper)["engine_steps"] == 32
    path = got.checkpoint_callback.best_model_path
    again = Task.load_from_checkpoint(path, weights_only=False)
    assert not isinstance(again.model, ORTModule)
    for a, b in zip(task.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_callback_names_what_it_does_not_find(tmp_path):
    from onnxtrain.integrations import OnnxtrainCallback

    with pytest.raises(ValueError, match="Task has no submodule 'net' at setup"):
        fit(Task(False), tmp_path, callbacks=[OnnxtrainCallback("net")])
    task = Task(False)
    task.model = nn.ModuleList([task.model])
    with pytest.raises(ValueError, match="no child of Task has parameters and a forward"):
        fit(task, tmp_path, callbacks=[OnnxtrainCallback()])
    OnnxtrainCallback("model.0").setup(None, task, "fit")
    assert isinstance(task.model[0], ORTModule)
