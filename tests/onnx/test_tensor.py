"""A tensor's elements are read as its dtype has them."""

from __future__ import annotations

from loader_build import text
from loader_models import model, value
from onnx import TensorProto, helper


def test_bools_are_zero_or_one(check, tmp_path):
    t = helper.make_tensor("w", TensorProto.BOOL, [3], b"\x00\x02\xff", raw=True)
    m = model([helper.make_node("Not", ["w"], ["y"])], [], [value("y", [3], TensorProto.BOOL)], [t])
    assert "bool[3] w = {0, 1, 1}" in text(check, tmp_path, m)
