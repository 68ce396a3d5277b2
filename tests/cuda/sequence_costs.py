"""For costs.py: what kernels cost whose steps follow one another, CTC and recurrent layers."""

from __future__ import annotations

from typing import NamedTuple

from h100 import C, Cost, all_bytes, product_seconds, rate_of
from planned import Node


def ctc(node: Node) -> Cost:
    """A block for each sample goes through the steps, and for the gradient through those of the other direction too;
    another kernel writes the gradient.
    """
    x, gradient = node.inputs[0], node.op.endswith("Grad")
    states = 2 * node.inputs[1].shape[-1] + 1
    cells = 4.0 * x.shape[0] * x.shape[1] * states
    passes = 2 if gradient else 1
    return Cost("loss", passes, all_bytes(node) + 2.0 * passes * cells, passes * x.shape[0] * C["dependent"],
                share=C["loss"])


class Layer(NamedTuple):
    """Of a recurrent network."""

    steps: int
    batch: int
    width: int  # of the input; 0 where its product is a node of its own
    hidden: int
    gates: int
    directions: int

    def step_seconds(self, rate: float) -> float:
        """The product of one direction."""
        return product_seconds(self.batch, self.gates * self.hidden, self.hidden, 1, rate)

    def whole_seconds(self, width: int, rate: float) -> float:
        """A product over all steps."""
        return product_seconds(self.steps * self.batch, self.directions * self.gates * self.hidden, width, 1, rate)

    @property
    def flops(self) -> float:
        """Of the products of a pass."""
        return (2.0 * self.directions * self.steps * self.batch * self.gates * self.hidden
                * (self.hidden + self.width))


GATES = {0: 1, 1: 1, 2: 3, 3: 4}  # by the attribute `cell`: two kinds of RNN, GRU, LSTM


def recurrent_steps(node: Node) -> Cost:
    """States, and for each step a product in float32 and the cells."""
    x, r = node.inputs[:2]
    gates = GATES[node.attributes.get("cell", 0)]
    layer = Layer(x.shape[0], x.shape[1], 0, r.shape[1], gates, 1)
    states = 1 + (gates == 4)
    return Cost("products", states + 2 * layer.steps, all_bytes(node), layer.steps * layer.step_seconds(C["float32"]),
                layer.flops, foreign=states + layer.steps)


def recurrent_steps_grad(node: Node) -> Cost:
    """The same for each step; then the weight's gradient, the sums of a bias and the first state's gradient."""
    r, cell = node.inputs[1], node.attributes.get("cell", 0)
    layer = Layer(node.attributes["steps"], node.attributes["batch"], 0, r.shape[1], GATES[cell], 1)
    weight = node.output(1) is not None
    after = weight + (cell == 2 and node.output(3) is not None) + (node.output(2) is not None)
    states = 2 + (cell == 3)
    busy = layer.steps * layer.step_seconds(C["float32"]) + weight * layer.whole_seconds(r.shape[1], C["float32"])
    return Cost("products", states + 2 * layer.steps + after, all_bytes(node), busy, (1 + weight) * layer.flops,
                foreign=states + layer.steps + weight)


def layer_of(node: Node) -> Layer:
    x, w, r = node.inputs[:3]
    return Layer(*x.shape, r.shape[2], w.shape[1] // r.shape[2], w.shape[0])


def copies_of_layer(node: Node) -> tuple[int, float]:
    """Own launches, and bytes, of what is copied for cuDNN, and back: weights, their gradients, and what forward has
    saved, which backward overwrites; in both directions, results and their gradients.
    """
    weights = sum(v.nbytes for v in node.inputs[1:3])
    both = layer_of(node).directions == 2
    if node.op != "RecurrentGrad":
        return 1 + both, 2.0 * (weights + both * node.outputs[0].nbytes)
    results, saved, dy = (node.input(i) for i in (6, 7, 8))
    nbytes = 3 * weights + saved.nbytes + both * sum(v.nbytes for v in (results, dy) if v is not None)
    return 2 + 2 * both, 2.0 * nbytes


def recurrent_layer(node: Node) -> Cost:
    """cuDNN's standard algorithm: a product of all inputs, and for each step and direction a product and the cells,
    assumed; the directions at once.
    """
    layer, rate = layer_of(node), rate_of(node.inputs[0])
    copies, nbytes = copies_of_layer(node)
    by_cudnn = 1 + 2 * layer.steps * layer.directions
    return Cost("products", copies + by_cudnn, all_bytes(node) + nbytes,
                layer.steps * layer.step_seconds(rate) + layer.whole_seconds(layer.width, rate), layer.flops,
                foreign=by_cudnn)


def recurrent_layer_grad(node: Node) -> Cost:
    """The steps; a product for the gradient of the input, and two for each direction's weights. The runtime copies what
    forward has saved, and writes zeros.
    """
    layer, rate = layer_of(node), rate_of(node.inputs[0])
    copies, nbytes = copies_of_layer(node)
    after = 2 * layer.whole_seconds(layer.width, rate) + layer.whole_seconds(layer.hidden, rate)
    foreign = 2 + 1 + 2 * layer.directions * (layer.steps + 1)
    return Cost("products", copies + foreign, all_bytes(node) + nbytes, layer.steps * layer.step_seconds(rate) + after,
                2 * layer.flops, foreign=foreign)
