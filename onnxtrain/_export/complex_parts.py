"""Complex numbers as two real tensors, real and imaginary parts: ONNX has no arithmetic of complex numbers.

Called by export.py between torch.export and torch.onnx. Arguments and results stay what they are, and so do Fourier
transforms and convolutions, which torch.onnx translates: it writes a complex tensor as a real one whose last axis is 2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from onnxtrain._export import messages
from onnxtrain._export.errors import Untraceable
from onnxtrain._torch import OpOverload

aten = torch.ops.aten
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
Operand: TypeAlias = fx.Node | complex
Parts: TypeAlias = tuple[Operand, Operand]
Result: TypeAlias = tuple[Operand, Operand | None]  # no imaginary part: of a real value

# Operators that are the same for both parts: they move numbers, add them, or leave some out.
_LINEAR = """
    add alias cat chunk clone concat concatenate constant_pad_nd contiguous copy cumsum detach diagonal diff
    expand expand_as flatten flip gather hstack index index_add index_put index_select lift_fresh_copy mT
    masked_fill mean moveaxis movedim narrow neg pad permute repeat reshape roll rsub scatter_add select
    select_scatter slice slice_scatter split split_with_sizes squeeze stack sub sum swapaxes t tile transpose
    tril triu unbind unflatten unsqueeze _unsafe_view view vstack where zeros_like"""
_CHOOSE = ("index", "indices", "mask", "condition")  # arguments that say which numbers are meant
_TERMS = ("self", "other", "value")  # arguments that may be numbers among the operands
_STAY = ("fft_", "_fft_", "stft", "istft", "conv", "_assert")  # how the names of operators begin
_ALIKE = frozenset([operator.getitem, *(getattr(getattr(aten, name), overload) for name in _LINEAR.split()
                                        for overload in getattr(aten, name).overloads()
                                        if not overload.endswith("out") and overload != "dtype")])


def split(program: torch.export.ExportedProgram) -> None:
    """Rewrites the graphs of a program that compute with complex numbers."""
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule) and any(map(_is_complex, part.graph.nodes)):
            _Splitting(part.graph).run()
            part.recompile()


def _is_complex(value: object) -> bool:
    """Whether a number or a node is complex, or one of several."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_complex, value))
    made = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(made, (list, tuple)):
        return any(isinstance(each, Tensor) and each.is_complex() for each in made)
    return made.is_complex() if isinstance(made, Tensor) else isinstance(made, complex)


def set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """Tensor.__setitem__, which writes a complex tensor by its pairs: autograd does not follow a slice_scatter of
    complex numbers, which functionalization makes of the write.
    """
    if not tensor.is_complex():
        return _set_item(tensor, index, value)
    if any(each is Ellipsis for each in (index if isinstance(index, tuple) else (index,))):
        index = (*index, slice(None)) if isinstance(index, tuple) else (index, slice(None))
    if isinstance(value, Tensor):
        value = torch.view_as_real(value.to(tensor.dtype).resolve_conj())
    else:
        value = torch.tensor([value.real, value.imag], dtype=_REAL[tensor.dtype])
    return _set_item(torch.view_as_real(tensor), index, value)


_set_item = Tensor.__setitem__


def _refuse_unknown(node: fx.Node) -> None:
    """Raises Untraceable for an operator that torch.onnx may translate wrongly where it is given complex numbers."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if not name.partition("::")[2].startswith(_STAY) and name:
        with messages.raised_by(node):
            raise Untraceable(f"The module calls {name.replace('::', '.')} with complex numbers, which has no form in "
                              "a graph.")


def _names(target: object) -> list[str]:
    """Of an operator's arguments."""
    return [argument.name for argument in getattr(getattr(target, "_schema", None), "arguments", ())]


class _Splitting:
    """Of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._parts: dict[fx.Node, Parts] = {}
        self._wholes: dict[fx.Node, fx.Node] = {}
        self._replaced: list[fx.Node] = []
        self._mode = next(value.fake_mode for value in (node.meta.get("val") for node in graph.nodes)
                          if hasattr(value, "fake_mode"))
        self._node: Any = None  # that is replaced

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op not in ("call_function", "output") or not _is_complex([node, *node.all_input_nodes]):
                continue
            self._node = node
            with self._graph.inserting_before(node):
                parts = self._split(node) if node.op == "call_function" else None
                if parts is None:
                    _refuse_unknown(node)
                    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self.operand)
                    continue
            self._replaced.append(node)
            if _is_complex(node):
                self._parts[node] = parts
            else:
                node.replace_all_uses_with(parts[0])
        for node in reversed(self._replaced):
            self._graph.erase_node(node)

    def _split(self, node: fx.Node) -> Parts | None:
        """The parts of a result; of a real one, itself and nothing. None: no rule."""
        if node.target is operator.getitem and node.args[0] not in self._parts:
            return None  # one result of an operator that stays
        if node.target in _ALIKE:
            given = {**dict(zip(_names(node.target), node.args)), **node.kwargs}
            return None if isinstance(given.get("alpha"), complex) else self._alike(node)
        rule = _RULES.get(node.target)
        return None if rule is None else rule(self, *node.args, **node.kwargs)

    def _alike(self, node: fx.Node) -> Parts:
        names = _names(node.target) or [""] * len(node.args)
        real, imaginary = [self.call(node.target,
                                     *[self._part(name, value, place) for name, value in zip(names, node.args)],
                                     **{name: self._part(name, value, place) for name, value in node.kwargs.items()})
                           for place in (0, 1)]
        return real, imaginary

    def _part(self, name: str, value: Any, place: int) -> object:
        """An argument as the real or imaginary part has it: of a real operand, zeros for the latter."""
        if isinstance(value, (list, tuple)):
            return [self._part(name, each, place) for each in value]
        if _is_complex(value):
            return self.of(value)[place]
        if isinstance(value, torch.dtype):
            return _REAL.get(value, value)
        if place and isinstance(value, fx.Node) and isinstance(value.meta["val"], Tensor) and name not in _CHOOSE:
            return self._zeros(value)
        return 0 if place and name in _TERMS and isinstance(value, (int, float)) else value

    def _zeros(self, node: fx.Node) -> fx.Node:
        return self.call(aten.zeros_like.default, node)

    def operand(self, node: fx.Node) -> fx.Node:
        """A node for an operator that takes complex values."""
        if node not in self._parts or not _is_complex(node):
            return node
        if node not in self._wholes:
            self._wholes[node] = self.whole(self._parts[node])
        return self._wholes[node]

    def whole(self, parts: Parts) -> fx.Node:
        return self.call(aten.view_as_complex.default, self.call(aten.stack.default, parts, -1))

    def of(self, value: Operand) -> Parts:
        """The parts of a node or number."""
        if not isinstance(value, fx.Node):
            return (value.real, value.imag) if isinstance(value, complex) else (value, 0)
        if not _is_complex(value):
            return value, self._zeros(value)
        if value not in self._parts:  # an argument, or the result of an operator that stays
            pair = self.call(aten.view_as_real.default, value)
            self._parts[value] = self.call(aten.select.int, pair, -1, 0), self.call(aten.select.int, pair, -1, 1)
        return self._parts[value]

    def repeated(self, *args: Any, **kwargs: Any) -> fx.Node:
        """The operator that is rewritten, with other arguments that give the same result."""
        node = self._graph.call_function(self._node.target, args, kwargs)
        node.meta = dict(self._node.meta)
        return node

    def call(self, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        values: Any = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        with self._mode:
            node.meta = {**self._node.meta, "val": target(*values[0], **values[1])}
        node.meta.pop("tensor_meta", None)
        return node

    def multiplied(self, a: Operand, b: Operand, product: Callable[[Operand, Operand], fx.Node] | None = None) -> Parts:
        """A product, which is linear in both."""
        def multiply(x: Operand, y: Operand) -> fx.Node:
            return self.call(aten.mul.Tensor, *((x, y) if isinstance(x, fx.Node) else (y, x)))

        times = product or multiply
        if not _is_complex(a):
            return times(a, self.of(b)[0]), times(a, self.of(b)[1])
        if not _is_complex(b):
            return times(self.of(a)[0], b), times(self.of(a)[1], b)
        (ar, ai), (br, bi) = self.of(a), self.of(b)
        return (self.call(aten.sub.Tensor, times(ar, br), times(ai, bi)),
                self.call(aten.add.Tensor, times(ar, bi), times(ai, br)))

    def square(self, parts: Parts) -> fx.Node:
        """Of the absolute value, a real node."""
        return self.call(aten.add.Tensor, *[self.call(aten.mul.Tensor, part, part) for part in parts])

    def absolute(self, value: Operand) -> fx.Node:
        """A real node, whose gradient at 0 is 0, as eager's."""
        pair = self.call(aten.stack.default, self.of(value), -1)
        return self.call(aten.linalg_vector_norm.default, pair, 2, [-1])

    def divided(self, a: Operand, b: Operand) -> Parts:
        if isinstance(b, complex):
            return self.multiplied(a, 1 / b)
        if _is_complex(b):  # a times the conjugate, by the square; of b near 1, whose square is neither 0 nor infinite
            sizes = [self.call(aten.abs.default, part) for part in self.of(b)]
            scale = self.call(aten.detach.default, self.call(aten.maximum.default, *sizes))
            near = self.divided(b, scale)
            self._parts[conjugate := self.whole(near)] = near[0], self.call(aten.neg.default, near[1])
            parts, square = self.multiplied(a, conjugate), self.square(near)
            parts = self.call(aten.div.Tensor, parts[0], square), self.call(aten.div.Tensor, parts[1], square)
        else:
            parts, scale = self.of(a), b
        return self.call(aten.div.Tensor, parts[0], scale), self.call(aten.div.Tensor, parts[1], scale)

    def resized(self, parts: Any, axis: int, wanted: int) -> Parts:
        """With as many numbers along an axis, the first ones, or zeros behind them."""
        shape = parts[0].meta["val"].shape
        if not isinstance(shape[axis], int) or wanted == shape[axis]:
            return parts
        target: OpOverload = aten.narrow.default
        given: list[int | list[int]] = [axis, 0, wanted]
        if wanted > shape[axis]:
            behind = [0, 0] * (-axis - 1 if axis < 0 else len(shape) - axis - 1)
            target, given = aten.constant_pad_nd.default, [[*behind, 0, wanted - shape[axis]]]
        return self.call(target, parts[0], *given), self.call(target, parts[1], *given)

    def conjugate(self, value: Operand) -> Parts:
        real, imaginary = self.of(value)
        return real, self.call(aten.neg.default, imaginary)

    def joined(self, real: fx.Node, imaginary: fx.Node) -> Parts:
        """Both in one shape."""
        if real.meta["val"].shape == imaginary.meta["val"].shape:
            return real, imaginary
        zeros = self._zeros(real), self._zeros(imaginary)
        return self.call(aten.add.Tensor, real, zeros[1]), self.call(aten.add.Tensor, imaginary, zeros[0])

    def power(self, value: Operand, exponent: Operand) -> Parts | None:
        return self.multiplied(value, value) if exponent == 2 else None

    def polar(self, size: Operand, angle: Operand) -> Parts:
        return (self.call(aten.mul.Tensor, size, self.call(aten.cos.default, angle)),
                self.call(aten.mul.Tensor, size, self.call(aten.sin.default, angle)))

    def made(self, target: OpOverload, *args: Any, **kwargs: Any) -> Parts | None:
        """A new tensor of one number, which is the last argument, or else of those that the operator is named after."""
        like, dtype = args and isinstance(args[0], fx.Node), self._node.meta["val"].dtype
        if dtype not in _REAL:
            return None
        given = (self.of(args[0])[0], *args[1:]) if like else args
        numbers = self.of(args[-1]) if "full" in str(target) else None
        kwargs["dtype"] = _REAL[dtype]
        if numbers is None:
            return self.call(target, *given, **kwargs), self.call(_ZEROS.get(target, target), *given, **kwargs)
        real, imaginary = [self.call(target, *given[:-1], number, **kwargs) for number in numbers]
        return real, imaginary


def _norm(target: OpOverload) -> Callable[..., Result]:
    return lambda c, value, *args, **kwargs: (c.call(target, c.absolute(value), *args, **kwargs), None)


def _linalg_norm(c: _Splitting, value: Operand, ord: float | str | None = None, dim: Sequence[int] | None = None,
                 keepdim: bool = False, dtype: torch.dtype | None = None) -> Result | None:
    if ord is not None and (dim is None or len(dim) != 1):
        return None  # a matrix's
    return c.call(aten.linalg_norm.default, c.absolute(value), ord, dim, keepdim, dtype=dtype), None


def _cast(c: _Splitting, value: Operand, dtype: torch.dtype | None = None, **kwargs: Any) -> Result | None:
    real, imaginary = c.of(value)
    if dtype in _REAL:
        return (c.call(aten._to_copy.default, real, dtype=_REAL[dtype], **kwargs),
                c.call(aten._to_copy.default, imaginary, dtype=_REAL[dtype], **kwargs))
    return c.call(aten._to_copy.default, real, dtype=dtype, **kwargs), None


def _transform(target: OpOverload) -> Callable[..., Result]:
    """A Fourier transform that stays, of an operand that has as many numbers along each axis as it is asked for."""
    name = target._schema.name.removeprefix("aten::fft_")
    halves, several = name.startswith("irfft"), name.endswith(("2", "n"))

    def rule(c: _Splitting, value: fx.Node, size: Any = None, dim: Any = None, norm: str | None = None) -> Result:
        if size is not None and _is_complex(value):
            parts, sizes = c.of(value), size if several else (size,)
            axes = range(-len(sizes), 0) if dim is None else dim if several else (dim,)
            for axis, wanted in zip(axes, sizes, strict=True):
                if isinstance(wanted, int):
                    parts = c.resized(parts, axis, wanted // 2 + 1 if halves and axis == axes[-1] else wanted)
            value = c.whole(parts)
        result = c.repeated(c.operand(value), size, *(() if dim is None else (dim,)), norm=norm)
        return c.of(result) if _is_complex(result) else (result, None)

    return rule


def _einsum(c: _Splitting, equation: str, operands: Sequence[Operand], path: object = None) -> Result | None:
    if len(operands) == 1:
        real, imaginary = [c.call(aten.einsum.default, equation, [part]) for part in c.of(operands[0])]
        return real, imaginary
    if len(operands) > 2:
        return None
    return c.multiplied(operands[0], operands[1], lambda x, y: c.call(aten.einsum.default, equation, [x, y]))


def _bilinear(target: OpOverload) -> Callable[..., Result]:
    return lambda c, a, b: c.multiplied(a, b, lambda x, y: c.call(target, x, y))


def _new(target: OpOverload) -> Callable[..., Result | None]:
    return lambda c, *args, **kwargs: c.made(target, *args, **kwargs)


_ZEROS = {aten.ones.default: aten.zeros.default, aten.ones_like.default: aten.zeros_like.default,
          aten.new_ones.default: aten.new_zeros.default}
_RULES: dict[OpOverload, Callable[..., Any]] = {
    aten.view_as_real.default: lambda c, x: (c.call(aten.stack.default, c.of(x), -1), None),
    aten.view_as_complex.default: lambda c, x: (c.call(aten.select.int, x, -1, 0), c.call(aten.select.int, x, -1, 1)),
    aten.complex.default: _Splitting.joined,
    aten.polar.default: _Splitting.polar,
    aten.real.default: lambda c, x: (c.of(x)[0], None),
    aten.imag.default: lambda c, x: (c.of(x)[1], None),
    aten.abs.default: lambda c, x: (c.absolute(x), None),
    aten.angle.default: lambda c, x: (c.call(aten.atan2.default, *reversed(c.of(x))), None),
    aten.exp.default: lambda c, x: c.polar(c.call(aten.exp.default, c.of(x)[0]), c.of(x)[1]),
    aten.mul.Tensor: _Splitting.multiplied, aten.mul.Scalar: _Splitting.multiplied,
    aten.multiply.Tensor: _Splitting.multiplied, aten.square.default: lambda c, x: c.multiplied(x, x),
    aten.pow.Tensor_Scalar: _Splitting.power, aten.reciprocal.default: lambda c, x: c.divided(1, x),
    aten.div.Tensor: _Splitting.divided, aten.div.Scalar: _Splitting.divided,
    aten._to_copy.default: _cast, aten.to.dtype: lambda c, x, dtype, *_: _cast(c, x, dtype),
    aten.einsum.default: _einsum, aten.linalg_norm.default: _linalg_norm,
    aten.sym_size.int: lambda c, x, axis: (c.call(aten.sym_size.int, c.of(x)[0], axis), None),
} | dict.fromkeys((aten.conj.default, aten._conj.default, aten.conj_physical.default, aten._conj_physical.default),
                  _Splitting.conjugate)
_RULES |= dict.fromkeys((aten.resolve_conj.default, aten.resolve_neg.default), _Splitting.of)
for _makes, _targets in (
    (_transform, (aten.fft_fft.default, aten.fft_ifft.default, aten.fft_irfft.default, aten.fft_fft2.default,
                  aten.fft_ifft2.default, aten.fft_irfft2.default, aten.fft_fftn.default, aten.fft_ifftn.default,
                  aten.fft_irfftn.default)),
    (_bilinear, (aten.mm.default, aten.bmm.default, aten.matmul.default, aten.dot.default, aten.mv.default,
                 aten.outer.default)),
    (_new, (aten.zeros.default, aten.ones.default, aten.full.default, aten.new_zeros.default, aten.new_ones.default,
            aten.new_full.default, aten.ones_like.default, aten.full_like.default, aten.empty.memory_format)),
    (_norm, (aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)),
):
    _RULES |= {target: _makes(target) for target in _targets}
