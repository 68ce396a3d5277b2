"""What an export is: the graph, where its inputs come from, what its outputs are for, and when it holds.

Made by onnxtrain/export.py, kept on disk by cache.py, run by ortmodule/_program.py.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, NamedTuple

import torch

from onnxtrain._export import autograd_functions
from onnxtrain._export import guards as shape_guards

PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
OPSETS = (18, 22)  # the oldest and the newest that torch.onnx writes for a program of torch.export


@dataclasses.dataclass(frozen=True)
class GraphInput:
    """One input of the graph, and where its tensor comes from at each step."""

    kind: Literal["parameter", "buffer", "constant", "user"]
    name: str  # in the graph
    target: Any  # str: name in the module; int: index among the arguments; Tensor: the constant


@dataclasses.dataclass(frozen=True)
class GraphOutput:
    """One output of the graph, and what it is for. Outputs of kind "user" and "argument" may receive a gradient.

    A "check" is a condition; where it does not hold, forward raises, and nothing of the step holds. An "argument" is
    what an argument of the caller's holds after forward, which changes it in place; a "buffer" is what a buffer or a
    frozen parameter holds then.
    """

    kind: Literal["user", "buffer", "check", "argument"]
    name: str  # in the graph
    target: Any  # int: index among the results, or the arguments; str: name of the buffer


class Origin(NamedTuple):
    """Where a node comes from."""

    operator: str  # torch's, as "aten.cross.default"; empty where that is not known
    line: str  # the user's, as messages.line() has it


@dataclasses.dataclass
class Exported:
    """A module as a graph.

    guards takes the tensors among the arguments, in order, and answers None where this export holds for their sizes,
    else which assumption fails. Their number, dtypes and the other arguments are for the caller to compare.
    """

    model: bytes
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    results: int  # how many forward has
    guards: shape_guards.Guards
    opset: int
    seconds: dict[str, float]
    notes: list[str]
    needs_verification: bool = False  # the caller must compare outputs and gradients with eager's first
    functions: tuple[autograd_functions.Call, ...] = ()  # by the keys of PythonOp nodes
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)  # of the nodes
    views: list[Any] | None = None  # results that are none of the graph's, as views.find() gives them

    def named_by(self, error: Exception) -> list[Origin]:
        """Where the nodes come from whose names are in a message."""
        return [self.origins[name] for name in re.findall(r"'([^']+)'", str(error)) if name in self.origins]

    def line(self, error: Exception) -> str:
        """The user's line of the first node that a message names, as messages.line() has it."""
        return next((origin.line for origin in self.named_by(error)), "")
