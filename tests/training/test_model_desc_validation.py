"""A description of inputs and outputs becomes named tuples, and wrong ones are named."""

import pytest
import torch

from onnxtrain.training import model_desc_validation as described

BOTH = "{{'inputs': [{{0: ['{0}']}}], 'outputs': [{{0: ['{0}']}}]}}"


@pytest.mark.parametrize("inputs, outputs, errors", [
    ([(True, [])], [(True, [])], BOTH.format("the first element of the tuple (aka name) must be a string")),
    ([("a", None)], [("a", None)], BOTH.format("the second element of the tuple (aka shape) must be a list")),
    ([("a", [True])], [("a", [1.5])], BOTH.format("each shape must be either a string or integer")),
    ([("a", [])], [("a", [], None)],
     "{'outputs': [{0: ['the third element of the tuple (aka is_loss) must be a boolean']}]}"),
    ([("a", [])], [("a", [], True), ("b", [], True)], "{'outputs': [{1: ['only one is_loss can bet set to True']}]}"),
    ([("a",)], [("a",)], "{'inputs': [{0: ['must be a tuple with size 2']}], "
                         "'outputs': [{0: ['must be a tuple with size 2 or 3']}]}"),
    ([], [("a", [])], "{'inputs': ['min length is 1']}"),
    ("a", [("a", [])], "{'inputs': ['must be of list type']}"),
])
def test_description_errors(inputs, outputs, errors):
    with pytest.raises(ValueError) as error:
        described._ORTTrainerModelDesc({"inputs": inputs, "outputs": outputs})
    assert str(error.value) == f"Invalid model_desc: {errors}"


def test_description_keys():
    with pytest.raises(ValueError) as error:
        described._ORTTrainerModelDesc({"inputz": [("a", [])], "outputs": [("a", [])]})
    assert str(error.value) == "Invalid model_desc: {'inputs': ['required field'], 'inputz': ['unknown field']}"


def test_description():
    made = described._ORTTrainerModelDesc({"inputs": [("a", ["n", 2])], "outputs": [("l", [], True), ("o", [1])]})
    assert made.inputs == [("a", ["n", 2])] and made.outputs == [("l", [], True), ("o", [1], False)] and made.loss == 0
    assert made.learning_rate == ("__learning_rate", [1], torch.float32)
    made.add_type_to_input_description(0, torch.int64)
    made.add_type_to_output_description(1, torch.float32, torch.float16)
    assert made.inputs[0].dtype == torch.int64 and isinstance(made.inputs[0], made._InputDescriptionTyped)
    assert made.outputs[1] == ("o", [1], False, torch.float32, torch.float16)
    made.all_finite, made.loss_scale_input, made.gradient_accumulation = "f", "s", "g"
    assert made.all_finite == ("f", [1], torch.bool) and made.gradient_accumulation == ("g", [1], torch.bool)
    assert made.loss_scale_input == ("s", [], torch.float32)
    with pytest.raises(AssertionError, match="no output has is_loss"):
        _ = described._ORTTrainerModelDesc({"inputs": [("a", [])], "outputs": [("o", [])]}).loss
