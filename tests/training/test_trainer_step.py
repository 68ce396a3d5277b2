"""A step of a trainer accumulates, scales, skips overflows and leaves the gradients of others alone."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager_training import Eager, batches, net, trainer_of
from test_update import CONFIGS, engine_only

from onnxtrain.training import amp, optim


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_accumulation(name, steps):
    config, module = CONFIGS[name](), net()
    eager = Eager(module, config, accumulation=steps)
    trainer = trainer_of(module, config, batch={"gradient_accumulation_steps": steps})
    for count, (x, label) in enumerate(batches(2 * steps + 2), 1):
        before = copy.deepcopy(module.state_dict())
        assert trainer.train_step(x, label)[0].item() == pytest.approx(eager.step(x, label).item(), rel=2e-6)
        changed = any(not torch.equal(value, before[key]) for key, value in module.state_dict().items())
        assert changed == (count % steps == 0)
    assert (trainer._train_step_info.step, trainer._train_step_info.optimization_step) == (2 * steps + 2, count // steps)


def test_gradients_of_somebody_else_do_not_count():
    module = net()
    eager, trainer = Eager(module, optim.SGDConfig(lr=0.1)), trainer_of(module, optim.SGDConfig(lr=0.1))
    for x, label in batches(3):
        (module(x).sum() * 100).backward()
        assert trainer.train_step(x, label)[0].item() == pytest.approx(eager.step(x, label).item(), rel=1e-6)


def test_float16_with_a_scaler():
    """Against eager under the same autocast, to float16's rounding; the loss is returned as it is, in float32."""
    module, config = net(), optim.AdamConfig(lr=1e-2)
    scaler = amp.DynamicLossScaler(up_scale_window=4)
    eager = Eager(module, config)
    trainer = trainer_of(module, config, mixed_precision={"enabled": True, "loss_scaler": scaler})
    for x, label in batches(8):
        loss, scores = trainer.train_step(x, label)
        with torch.autocast("cpu", torch.float16):
            scores_eager = eager.module(x)
        want = F.cross_entropy(scores_eager.float(), label)
        want.backward()
        eager.update()
        assert loss.dtype == torch.float32 and scores.dtype == torch.float16
        assert loss.item() == pytest.approx(want.item(), rel=5e-3)
    engine_only(trainer)
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert scaler.loss_scale == 2.0**18 and trainer._train_step_info.optimization_step == 8
    assert trainer.model_desc.outputs[1].dtype_amp == torch.float16


def test_an_overflow_changes_nothing():
    module = net()
    scaler = amp.DynamicLossScaler(loss_scale=2.0**24, max_loss_scale=2.0**30)
    trainer = trainer_of(module, optim.LambConfig(), mixed_precision={"enabled": True, "loss_scaler": scaler})
    (x, label), = batches(1)
    x = x * 1000
    before, state = copy.deepcopy(module.state_dict()), None
    skipped = 0
    for _ in range(30):
        trainer.train_step(x, label)
        info = trainer._train_step_info
        if info.all_finite:
            break
        skipped += 1
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
        state = trainer._training_session.get_optimizer_state()
        assert state["shared_optimizer_state"]["Step"] == 1 and not state["first.weight"]["Moment_1"].any()
    assert skipped and info.optimization_step == 1 and info.step == skipped + 1
    assert scaler.loss_scale == 2.0 ** (24 - skipped)


def test_mixed_precision_has_a_scaler_unless_given():
    trainer = trainer_of(net(), optim.SGDConfig(), mixed_precision={"enabled": True})
    trainer.train_step(*batches(1)[0])
    assert isinstance(trainer.options.mixed_precision.loss_scaler, amp.DynamicLossScaler)
    session, weight = trainer._training_session, trainer._torch_model.first.weight.detach()
    half = session.get_model_state(include_mixed_precision_weights=True)["mixed_precision"]["first.weight"]
    assert torch.equal(torch.from_numpy(half), weight.half()) and "mixed_precision" not in session.get_model_state()
    np.testing.assert_array_equal(session.get_state()["first.weight_fp16"], half)
    with pytest.raises(ValueError, match="Loss Scaler cannot be specified when Mixed Precision is not enabled"):
        trainer_of(net(), optim.SGDConfig(), mixed_precision={"loss_scaler": amp.DynamicLossScaler()}).train_step(
            *batches(1)[0])


def test_bfloat16_by_autocast_around_a_step():
    module = net()
    trainer = trainer_of(module, optim.SGDConfig(lr=0.1))
    (x, label), = batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        want = module(x)
        loss, scores = trainer.train_step(x, label)
    assert scores.dtype == torch.bfloat16 and trainer.options.mixed_precision.loss_scaler is None
    torch.testing.assert_close(scores, want, rtol=0.02, atol=0.02)
    engine_only(trainer)
