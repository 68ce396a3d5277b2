"""Wrong values in nested options are named all at once, each under its key."""

import pytest

from onnxtrain.training import ORTTrainerOptions


@pytest.mark.parametrize("given, errors", [
    ({"mixed_precision": {"enabled": 1}}, "{'mixed_precision': [{'enabled': ['must be of boolean type']}]}"),
    ({"batch": {"gradient_accumulation_steps": 0}}, "{'batch': [{'gradient_accumulation_steps': ['min value is 1']}]}"),
    ({"batch": {"gradient_accumulation_steps": True}},
     "{'batch': [{'gradient_accumulation_steps': ['must be of integer type']}]}"),
    ({"distributed": {"deepspeed_zero_optimization": {"stage": 2}}},
     "{'distributed': [{'deepspeed_zero_optimization': [{'stage': ['max value is 1']}]}]}"),
    ({"device": {"id": 0, "name": "x"}}, "{'device': [{'id': ['must be of string type'], 'name': ['unknown field']}]}"),
    ({"batch": 3, "what": 1}, "{'batch': ['must be of dict type'], 'what': ['unknown field']}"),
    ({"device": None}, "{'device': ['null value not allowed']}"),
    ({"utils": {"frozen_weights": None}}, "{'utils': [{'frozen_weights': ['null value not allowed']}]}"),
    ({"lr_scheduler": 1}, "{'lr_scheduler': ['must be of lr_scheduler type']}"),
    ({"mixed_precision": {"loss_scaler": 1}}, "{'mixed_precision': [{'loss_scaler': ['must be of loss_scaler type']}]}"),
])
def test_option_errors(given, errors):
    with pytest.raises(ValueError) as error:
        ORTTrainerOptions(given)
    assert str(error.value) == f"Invalid options: {errors}"
