"""A TrainStepInfo has its defaults, and refuses wrong values."""


import pytest

from onnxtrain.training import TrainStepInfo, optim


def test_step_info():
    info = TrainStepInfo(optim.SGDConfig())
    assert (info.all_finite, info.fetches, info.optimization_step, info.step) == (True, [], 0, 0)
    for wrong in (-1, "Hello", None):
        with pytest.raises(AssertionError):
            TrainStepInfo(wrong)
        for name in ("all_finite", "optimization_step", "step"):
            with pytest.raises(AssertionError):
                TrainStepInfo(optim.SGDConfig(), **{name: wrong})
    with pytest.raises(AssertionError):
        TrainStepInfo(optim.SGDConfig(), fetches="loss")
