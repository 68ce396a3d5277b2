"""Random graphs of operators on images or signals: convolutions, and what may stand between them, in the order of
channels or not. conv_graph.py computes each with and without the pass that keeps channels last.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

Shape = tuple[int, ...]
Value = tuple[str, Shape]
TYPES = {torch.bfloat16: TensorProto.BFLOAT16, torch.float16: TensorProto.FLOAT16, torch.float32: TensorProto.FLOAT}
UNARY = ("Relu", "Sigmoid", "Tanh", "Neg", "Elu", "LeakyRelu")
MOST = 3000  # elements of a value


class Images:
    """A random graph; equal seeds make equal ones, in any dtype.

    Args:
        seed: of the graph and of its tensors.
        dtype: of images and weights.
        spatial: dims of an image behind its channels, 1 or 2.
    """

    def __init__(self, seed: int, dtype: torch.dtype, spatial: int = 2) -> None:
        self._rng, self._dtype = random.Random(seed), dtype
        self._spatial, self._rank = spatial, spatial + 2
        self._numbers = torch.Generator().manual_seed(seed)
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._constants: list[TensorProto] = []
        self._names = 0
        self.tensors: list[torch.Tensor] = []
        shape = (self._rng.randint(1, 3), self._rng.choice([1, 3, 4, 6, 8]),
                 *(self._rng.randint(3, 8) for _ in range(spatial)))
        self._values: list[Value] = [(self._input(shape), shape)]
        makers: list[Callable[[], Value]] = [
            *[self._conv] * 6, *[self._norm] * 3, *[self._binary] * 4, *[self._unary] * 2, self._pool, self._whole,
            self._concat, self._split, self._slice, self._expand, self._turn, self._reshape, self._softmax, self._cast]
        for _ in range(self._rng.randint(4, 14)):
            name, shape = self._rng.choice(makers)()
            if math.prod(shape) <= MOST:
                self._values.append((name, shape))
        made = self._values[1:] or [self._conv()]
        self._outputs = {made[-1][0]: made[-1][1], **{n: s for n, s in made if self._rng.random() < 0.15}}

    def model(self) -> bytes:
        outputs = [helper.make_tensor_value_info(n, TYPES[self._dtype], s) for n, s in self._outputs.items()]
        graph = helper.make_graph(self._nodes, "g", self._inputs, outputs, self._constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()

    def _name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _input(self, shape: Shape, scale: float = 1.0, dtype: torch.dtype | None = None) -> str:
        """Of values that are the same in each dtype."""
        name = self._name()
        rounded = (torch.randn(shape, generator=self._numbers) * scale).bfloat16()
        self.tensors.append(rounded.to(dtype or self._dtype))
        self._inputs.append(helper.make_tensor_value_info(name, TYPES[dtype or self._dtype], shape))
        return name

    def _ints(self, *values: int) -> str:
        name = self._name()
        self._constants.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def _add(self, op: str, inputs: list[str], outputs: int = 1, **attributes: object) -> list[str]:
        names = [self._name() for _ in range(outputs)]
        self._nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names

    def _image(self) -> Value:
        return self._rng.choice([v for v in self._values if len(v[1]) == self._rank][-6:])

    def _conv(self) -> Value:
        x, s = self._image()
        groups = self._rng.choice([d for d in (1, 1, 1, 2, s[1]) if s[1] % d == 0])
        m = groups * self._rng.randint(1, 4)
        kernel = [self._rng.randint(1, min(3, size)) for size in s[2:]]
        strides, pads = ([self._rng.randint(low, low + 1) for _ in kernel] for low in (1, 0))
        weight = (m, s[1] // groups, *kernel)
        inputs = [x, self._input(weight, math.prod(weight[1:])**-0.5)]
        if self._rng.random() < 0.5:
            inputs.append(self._input((m,)))
        spatial = (((size + 2 * p - k) // step + 1) for size, p, k, step in zip(s[2:], pads, kernel, strides, strict=True))
        return self._add("Conv", inputs, strides=strides, pads=pads * 2, group=groups)[0], (s[0], m, *spatial)

    def _norm(self) -> Value:
        x, s = self._image()
        if math.prod(s) // s[1] < 6:
            return self._unary()
        channels = [self._input((s[1],), 0.5, torch.float32) for _ in range(2)]
        for value in (0.0, 1.0):
            channels.append(self._name())
            self._constants.append(helper.make_tensor(channels[-1], TensorProto.FLOAT, [s[1]], [value] * s[1]))
        return self._add("BatchNormalization", [x, *channels], 3, training_mode=1)[0], s

    def _unary(self) -> Value:
        x, s = self._image()
        return self._add(self._rng.choice(UNARY), [x])[0], s

    def _cast(self) -> Value:
        x, s = self._image()
        wide = self._add("Tanh", self._add("Cast", [x], to=TensorProto.FLOAT))
        return self._add("Cast", wide, to=TYPES[self._dtype])[0], s

    def _binary(self) -> Value:
        """With an image that may be broadcast, or with an input of any such shape."""
        x, s = self._image()
        others = [n for n, t in self._values
                  if len(t) == self._rank and all(a in (1, b) for a, b in zip(t, s, strict=True))]
        ones = (1,) * self._spatial
        shapes = [(1, s[1], *ones), (s[1], *ones), (), (1,), (s[0], 1, *s[2:]), (s[-1],)]
        other = self._rng.choice(others) if self._rng.random() < 0.6 else self._input(self._rng.choice(shapes))
        inputs = [x, other] if self._rng.random() < 0.7 else [other, x]
        return self._add(self._rng.choice(["Add", "Sub", "Mul"]), inputs)[0], s

    def _pool(self) -> Value:
        x, s = self._image()
        if min(s[2:]) < 2:
            return self._unary()
        step = self._rng.randint(1, 2)
        name = self._add(self._rng.choice(["MaxPool", "AveragePool"]), [x], kernel_shape=[2] * self._spatial,
                         strides=[step] * self._spatial)[0]
        return name, (*s[:2], *((size - 2) // step + 1 for size in s[2:]))

    def _whole(self) -> Value:
        """Dims become numbers: those of the plane, or others."""
        x, s = self._image()
        plane = tuple(range(2, self._rank))
        kind = self._rng.choice(["GlobalAveragePool", "GlobalMaxPool", plane, tuple(-1 - d for d in range(self._spatial)),
                                 (0, *plane), (2,), (self._rank - 1,), (1,), (1, *plane)])
        if isinstance(kind, str):
            return self._add(kind, [x])[0], (*s[:2], *(1 for _ in plane))
        keep, axes = self._rng.randint(0, 1), {axis % self._rank for axis in kind}
        name = self._add("ReduceMean", [x, self._ints(*kind)], keepdims=keep)[0]
        return name, tuple(1 if d in axes else size for d, size in enumerate(s) if keep or d not in axes)

    def _axis(self) -> int:
        return self._rng.choice([1, 1, 1, *range(2, self._rank)])

    def _concat(self) -> Value:
        axis = self._axis()
        x, s = self._image()
        others = [v for v in self._values
                  if len(v[1]) == self._rank and all(v[1][d] == s[d] for d in range(self._rank) if d != axis)]
        parts = [(x, s), *(self._rng.choice(others) for _ in range(self._rng.randint(1, 2)))]
        name = self._add("Concat", [n for n, _ in parts], axis=axis - self._rng.choice([0, self._rank]))[0]
        return name, tuple(sum(t[axis] for _, t in parts) if d == axis else size for d, size in enumerate(s))

    def _split(self) -> Value:
        axis = self._axis()
        x, s = self._image()
        if s[axis] < 2:
            return self._unary()
        first = self._rng.randint(1, s[axis] - 1)
        sizes = (first, s[axis] - first)
        names = self._add("Split", [x, self._ints(*sizes)], 2, axis=axis)
        left, right = ((name, (*s[:axis], size, *s[axis + 1:])) for name, size in zip(names, sizes, strict=True))
        self._values.append(left)
        return right

    def _slice(self) -> Value:
        x, s = self._image()
        axis = self._rng.randint(0, self._rank - 1)
        if s[axis] < 2:
            return self._unary()
        bounds = [self._ints(v) for v in (1, s[axis], axis - self._rng.choice([0, self._rank]), 1)]
        return self._add("Slice", [x, *bounds])[0], tuple(size - (d == axis) for d, size in enumerate(s))

    def _expand(self) -> Value:
        x, s = self._image()
        to = (*s[:2], *(size if size > 1 else 3 for size in s[2:]))
        return self._add("Expand", [x, self._ints(*to)])[0], to

    def _turn(self) -> Value:
        """Also to channels last and from there, whose shapes are those of other images."""
        x, s = self._image()
        perm = self._rng.choice([[0, 1, 3, 2], [0, 2, 3, 1], [0, 3, 1, 2]]) if self._spatial == 2 else [0, 2, 1]
        return self._add("Transpose", [x], perm=perm)[0], tuple(s[d] for d in perm)

    def _reshape(self) -> Value:
        x, s = self._image()
        to = (s[0], s[2], s[1], *s[3:])
        return self._add("Reshape", [x, self._ints(*to)])[0], to

    def _softmax(self) -> Value:
        x, s = self._image()
        return self._add("Softmax", [x], axis=self._rng.randint(1, self._rank - 1))[0], s
