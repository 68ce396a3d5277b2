"""Loss scalers grow and shrink by their rule, and refuse wrong values."""

import pytest

from onnxtrain.training import TrainStepInfo, amp, optim


def test_dynamic_loss_scaler():
    scaler, info = amp.DynamicLossScaler(up_scale_window=3, max_loss_scale=2.0**18), TrainStepInfo(optim.LambConfig())
    assert [scaler.update(info) for _ in range(9)] == [2.0**16] * 2 + [2.0**17] * 3 + [2.0**18] * 4
    info.all_finite = False
    assert [scaler.update(info) for _ in range(20)] == [max(1.0, 2.0 ** (17 - k)) for k in range(20)]
    scaler.reset()
    assert scaler.loss_scale == 2.0**16 and scaler._stable_steps_count == 0
    fixed = amp.DynamicLossScaler(automatic_update=False, loss_scale=3, min_loss_scale=5, max_loss_scale=10)
    assert fixed.update(info) == fixed.loss_scale == 3


@pytest.mark.parametrize("make", [
    lambda: amp.DynamicLossScaler(1), lambda: amp.DynamicLossScaler(loss_scale=0),
    lambda: amp.DynamicLossScaler(up_scale_window=0), lambda: amp.DynamicLossScaler(min_loss_scale=-1.0),
    lambda: amp.DynamicLossScaler(max_loss_scale="x"), lambda: amp.LossScaler(-1.0),
    lambda: setattr(amp.LossScaler(1.0), "input_name", "")])
def test_loss_scaler_errors(make):
    with pytest.raises(AssertionError):
        make()
