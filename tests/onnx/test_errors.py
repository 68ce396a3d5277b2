"""Bytes that are no UTF-8, in texts and messages of the core, reach Python as strings."""

from __future__ import annotations

import onnx
import pytest
from loader_models import model, value
from onnx import TensorProto, helper

from onnxtrain import _C


def test_text_that_is_no_utf8():
    """Bytes of a string attribute that are no text, and a message that is cut within a character."""
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.DOUBLE)
    node.attribute.append(onnx.AttributeProto(name="round_mode", type=onnx.AttributeProto.STRING, s=b"a\x80b"))
    session = _C.Session(model([node], [value("x", [1])], [value("y", [1], TensorProto.DOUBLE)],
                               opset=24).SerializeToString())
    assert "a\ufffdb" in session.text()
    for shift in "", "x":
        name = shift + "\u00e9" * 4000
        with pytest.raises(ValueError, match="\u00e9\u00e9") as caught:
            _C.Session(model([helper.make_node("Relu", [name], ["y"])], [value("x", [1])],
                             [value("y", [1])]).SerializeToString())
        assert not isinstance(caught.value, UnicodeError)
