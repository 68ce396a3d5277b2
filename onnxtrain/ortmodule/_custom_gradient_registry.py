"""Gradients that scripts register for operators of a graph, by the name that they import."""

from __future__ import annotations

from collections.abc import Callable

from onnxtrain._export import gradients
from onnxtrain._export.gradients import Definition


def register_gradient(domain: str, name: str, *attributes: str) -> Callable[[Definition], Definition]:
    """A decorator: the function under it gives the gradient of the operator `name` of `domain` ("" is ai.onnx).

    It returns a list of (operator or (operator, domain), inputs, outputs[, attributes]). I(n) and O(n) are the node's
    inputs and outputs, GO(n) the gradients of its outputs, GI(n) those of its inputs; an attribute is a value, or
    {"value": ..., "dtype": "int", "is_tensor": True}. Modules whose graph is made from now on use it in place of the
    engine's rule: such a node then runs by itself, between the parts of the graph before and after it.

    Where `attributes` are given, or for ATen operators, there is one line that says that it has no effect: there are no
    such nodes here.

    Raises, when a graph that has the operator is made:
        ValueError: a step has another form. UnsupportedError: the engine does not have an operator of it.
    """

    def keep(function: Definition) -> Definition:
        gradients.register(domain, name, attributes, function)
        return function

    return keep
