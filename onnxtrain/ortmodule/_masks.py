"""The engine's dropout masks in PyTorch: for _double.py, which runs a module again with the masks of its forward.

The graph, with the masks as further outputs, gives them from the seed of the forward. PyTorch's dropouts come in the
order of the graph's nodes; that each has had its own mask shows in the results, which are the engine's then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onnxtrain import _C
from onnxtrain._export.instead import Instead, with_copies
from onnxtrain._export.replacements import scaled_dot_product_attention
from onnxtrain._onnx_functions import bodies_of

_TOLERANCE = 0.01  # of a result's largest entry, for rounding; another mask changes results by far more


@functools.lru_cache(maxsize=4)
def model_with(model: bytes) -> tuple[bytes, int] | None:
    """The graph with the mask of each active Dropout as an output at the end, and their number; None where it draws
    anything else."""
    import onnx

    proto = onnx.load_model_from_string(model)
    graph = proto.graph
    drawing = {(op["domain"], op["name"]) for op in _C.operators() if op["random"]}
    numbers = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    numbers |= {node.output[0]: onnx.numpy_helper.to_array(node.attribute[0].t) for node in graph.node
                if node.op_type == "Constant" and node.attribute[0].name == "value"}
    count = 0
    for node in graph.node:
        if any(bodies_of(node)):
            return None
        if (node.domain, node.op_type) not in drawing:
            continue
        ratio, training = [numbers.get(name) for name in (*node.input, "", "")[1:3]]
        if node.op_type != "Dropout" or ratio is None or training is None:
            return None
        if not ratio.any() or not training.any():
            continue
        mask = f"mask_{count}/{node.output[0]}"
        del node.output[1:]
        node.output.append(mask)
        graph.output.append(onnx.helper.make_tensor_value_info(mask, onnx.TensorProto.BOOL, None))
        count += 1
    return proto.SerializeToString(), count


class Source:
    """Of the masks of one graph; see model_with()."""

    def __init__(self, model: bytes) -> None:
        whole, self._count = model_with(model)  # type: ignore[misc]
        self._session = _C.Session(whole)

    def masks(self, inputs: Sequence[Tensor], seed: int) -> Masks:
        """Those of the forward with these inputs and this seed."""
        with torch.no_grad():
            found, _ = self._session.forward(inputs, bytes(len(inputs)), seed)
        return Masks(found[len(found) - self._count:], found[:len(found) - self._count])


class Masks:
    """While it is entered, this thread's dropouts take these masks, one after the other.

    Raises RuntimeError where they are not as many, or not of those shapes.
    """

    def __init__(self, masks: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self._masks, self._results = list(masks), results
        attention = functools.partial(scaled_dot_product_attention, dropout=self._dropout)
        self._mode = Instead(with_copies({F.dropout: self._dropout, F.scaled_dot_product_attention: attention}))

    def __enter__(self) -> Masks:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def check(self, outputs: Sequence[Tensor | None]) -> None:
        """Raises RuntimeError where PyTorch has not dropped what the engine dropped: results are others then."""
        if self._masks:
            self._refuse(f"PyTorch did not use {len(self._masks)} of the masks")
        for index, (ours, theirs) in enumerate(zip(self._results, outputs)):
            if theirs is None or not theirs.numel():
                continue
            error = (ours.double() - theirs.detach().double()).abs().max()
            if not error <= _TOLERANCE * ours.abs().max().double():
                self._refuse(f"result {index} differs by {error.item():.1e}")

    @staticmethod
    def _refuse(what: str) -> None:
        raise RuntimeError("create_graph=True runs the module again in PyTorch, which could not be given the masks of "
                           f"the engine's dropout: {what}; put such layers into eval(), or set "
                           "ORTMODULE_FALLBACK_POLICY=FALLBACK_FORCE_TORCH_FORWARD")

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        if not self._masks:
            self._refuse("PyTorch needs more masks")
        mask = self._masks.pop(0)
        if mask.shape != input.shape:
            self._refuse(f"a mask has the shape {tuple(mask.shape)}, but the input {tuple(input.shape)}")
        scaled = mask * (0.0 if p == 1 else 1 / (1 - p))
        return input.mul_(scaled) if inplace else input * scaled.to(input.dtype)
