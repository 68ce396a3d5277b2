"""Switches of a wrapped module from a JSON file."""

from onnxtrain.ortmodule.experimental.json_config._load import load_from_json

__all__ = ["load_from_json"]
