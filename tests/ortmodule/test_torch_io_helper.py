"""Nested data becomes a list of tensors and a schema, and is whole again afterwards."""

import pytest
import torch


def test_nested_data_and_back():
    from onnxtrain.utils import extract_data_and_schema, unflatten_data_using_schema

    data = {"a": [torch.ones(2), 1, None], "b": (2.5, {"c": torch.zeros(3, dtype=torch.int64)}, "s", True)}
    tensors, schema = extract_data_and_schema(data)
    assert ([t.shape for t in tensors] == [(2,), (3,)] and schema["a"][0].name == "a_0"
            and schema["b"][1]["c"].shape_dims == 1)
    back = unflatten_data_using_schema(tensors, schema)
    assert back["b"][0] == 2.5 and back["b"][1]["c"] is data["b"][1]["c"] and back["a"][1:] == [1, None]
    tensors, schema = extract_data_and_schema(data, constant_as_tensor=True)
    assert len(tensors) == 5 and unflatten_data_using_schema(tensors, schema)["b"][3].item() is True
    with pytest.raises(TypeError, match="Unsupported flatten data type"):
        extract_data_and_schema(object())
