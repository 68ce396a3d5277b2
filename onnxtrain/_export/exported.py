"""What an export is: the graph, where its inputs come from, what its outputs are for, and when it holds.

Made by onnxtrain/export.py, kept on disk by cache.py, run by ortmodule/_program.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch.utils import _pytree as pytree

from onnxtrain._export import attributes, filled, functions
from onnxtrain._export import guards as shape_guards
from onnxtrain._export.state import Setting


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """One input of the graph, and where its tensor comes from at each step."""

    kind: Literal["parameter", "buffer", "attribute", "constant", "user"]
    name: str  # in the graph
    target: Any  # by kind: name in the module; index among the flattened leaves of (args, kwargs); the tensor


@dataclasses.dataclass(frozen=True)
class GraphOutput:
    """One output of the graph, and what it is for. Outputs of kind "user", "attribute", "argument" and "cache" may
    receive a gradient.

    A "check" is a condition; where it is not as in `target`, forward raises, and nothing of the step holds. An
    "argument" is what an argument of the caller's holds after forward, which changes it in place, a "cache" what
    forward leaves in a cache among the arguments.
    """

    kind: Literal["user", "buffer", "attribute", "check", "argument", "cache"]
    name: str  # in the graph
    # Leaf of the user's output; name of the buffer; (assignment or cache, leaf of its value); leaf of the input.
    target: Any  # by kind: int, str, (int, int) or bool


@dataclasses.dataclass(frozen=True)
class Assignment:
    """An attribute that forward sets. Its tensors are outputs of the graph; the other leaves are in `constants`."""

    module: str  # name of the submodule
    name: str
    spec: pytree.TreeSpec
    constants: dict[int, Any]
    tensors: tuple[int, ...]  # leaves


@dataclasses.dataclass
class Exported:
    """A module as a graph.

    guards takes the tensors among the flattened leaves of (args, kwargs), in order, and answers None where this export
    holds for their sizes, else which assumption fails. Their number, dtypes, the other leaves and the module's own
    state are for the caller to compare.
    """

    model: bytes
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    out_spec: pytree.TreeSpec
    out_constants: dict[int, Any]  # leaf index of the output -> value that is no tensor
    guards: shape_guards.Guards
    assignments: tuple[Assignment, ...]
    state: attributes.State  # whether what forward read on its modules is as it was
    exporter: Literal["dynamo", "torchscript"]
    opset: int
    seconds: dict[str, float]
    notes: list[str]
    needs_verification: bool = False  # the caller must compare outputs and gradients with eager's first
    functions: tuple[functions.Call, ...] = ()  # by the keys of PythonOp nodes
    origins: dict[str, str] = dataclasses.field(default_factory=dict)  # node -> torch operator, as "aten.cross.default"
    modes: tuple[Any, ...] | None = None  # grad_modes() that this holds for; None: for all
    # Inputs that torch.cond reads, outputs that come from it.
    conditional: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    # Leaf of the output -> leaf of the input, or parameter, that it is itself.
    same: tuple[tuple[int, int | str], ...] = ()
    views: list[Any] | None = None  # results that are none of the graph's, as views.find() gives them
    # Plain values that forward gives to objects at its first call, and that change nothing of what it computes.
    settings: tuple[Setting, ...] = ()
    filled: tuple[filled.Filled, ...] = ()  # caches among the arguments that forward fills
    given: tuple[tuple[int, int], ...] = ()  # leaf of the output -> cache among the arguments that it is
    flags: tuple[tuple[str, bool], ...] = ()  # parameters whose requires_grad forward sets, and to what
    # What was read outside of the module, as values.written() gives it, or why that cannot be compared in another
    # process; None if it was not recorded.
    outside: dict[str, Any] | str | None = None

    def settle(self) -> None:
        """Does what forward would have done at its first call: gives objects those plain values."""
        for setting in self.settings:
            setting.apply()
        if self.settings:
            self.state.take()
        self.settings = ()
