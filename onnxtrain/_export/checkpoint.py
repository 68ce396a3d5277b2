"""torch.utils.checkpoint while a module is exported: what it is around is traced, and marked as a recompute region.

A region is a note at the traced program's nodes, then metadata of the graph's nodes, by which the core keeps
only what leaves it (csrc/passes/recompute_regions.c): the names of the regions that a node is in, outermost first, each
with a "/" behind it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import torch
import torch.fx.traceback

from onnxtrain._export.segments import is_python_op

REGION = "onnxtrain.region"
LOST = "No recompute region: "  # how the note of a checkpoint begins that the exporter cannot mark


class Checkpoints:
    """The checkpoints of one export.

    Args:
        notes: filled with a sentence for each.
        marked: whether the exporter keeps what is noted at the traced program's nodes.
    """

    def __init__(self, notes: list[str], marked: bool) -> None:
        self._notes, self._marked = notes, marked
        self._count = itertools.count(1)

    @contextlib.contextmanager
    def region(self, run: Any) -> Iterator[None]:
        """Within, what is traced is in a region of `run`, which a checkpoint is around."""
        name = _name(run)
        if self._marked:
            note = (f"torch.utils.checkpoint around {name} is a recompute region: backward keeps its inputs and "
                    "outputs, and recomputes the rest.")
        else:
            note = (f"{LOST}TorchScript's exporter does not mark torch.utils.checkpoint around {name}. Results are the "
                    "same. ORTMODULE_MEMORY_OPT_LEVEL=1 or above, or ORTMODULE_MEMORY_OPT_BUDGET, chooses for the "
                    "whole step what backward recomputes.")
        if note not in self._notes:
            self._notes.append(note)
        outer = torch.fx.traceback.get_current_meta().get("custom", {}).get(REGION, "")
        path = f"{outer}{next(self._count)} {name.replace('/', '|')}/"
        with torch.fx.traceback.annotate({REGION: path}):
            yield

    def inlined(self) -> Callable[..., Iterator[None]]:
        """checkpoint() advances this generator before and after the call that it makes."""

        def generator(run: Any, *_args: Any, **_kwargs: Any) -> Iterator[None]:
            with self.region(run):
                yield

        return generator


def _name(run: Any) -> str:
    """What a checkpoint is around: a module's path or class, or a function's name."""
    owner = getattr(run, "__self__", run)
    if isinstance(owner, torch.fx.GraphModule):  # Dynamo's: its operations know the modules that they were called in
        stacks = [[path for path, _ in node.meta["nn_module_stack"].values()] for node in owner.graph.nodes
                  if node.meta.get("nn_module_stack")]
        shared = os.path.commonprefix(stacks) if stacks else []
        lines = [node.meta["stack_trace"].strip().splitlines()[-1].strip() for node in owner.graph.nodes
                 if node.meta.get("stack_trace")]
        path = re.sub(r"L\['\w+'\]|[\['\"\]]|_modules", "", shared[-1]) if shared else ""
        path = path.removeprefix("module").strip(".")
        return f"{path or 'the module'} ({lines[0]})" if lines else path or "the module"
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return str(getattr(run, "__qualname__", type(run).__name__))


def regions_of(program: torch.export.ExportedProgram) -> dict[str, str]:
    """The region of each node of a traced program that is in one, by the node's name."""
    noted = {node.name: node.meta.get("custom", {}).get(REGION) for node in program.graph.nodes}
    return {name: region for name, region in noted.items() if region}


def cut(model: bytes) -> list[str]:
    """A warning for each region with a PythonOp inside, which torch runs between two segments of the engine."""
    regions = {entry.value for node in onnx.load_model_from_string(model).graph.node if is_python_op(node)
               for entry in node.metadata_props if entry.key == REGION}
    names = sorted({path.split("/")[-2].partition(" ")[2] for path in regions})
    return [f"torch.utils.checkpoint around {name} is a recompute region in parts: PyTorch runs a function inside it "
            "once, in forward. Its inputs, its results and what it saves are kept until backward, which recomputes the "
            "rest of the region." for name in names]
