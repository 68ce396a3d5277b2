"""torch.utils.checkpoint while a module is exported: what it is around is traced, and marked as a recompute region.

A region is a note at the traced program's nodes, then metadata of the graph's nodes, by which the core keeps
only what leaves it (csrc/passes/recompute_regions.c): the names of the regions that a node is in, outermost first, each
with a "/" behind it.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import re
from collections.abc import Iterator

import onnx
import torch
import torch.fx.traceback
from torch.utils import _pytree as pytree

from onnxtrain._export.segments import is_python_op

REGION = "onnxtrain.region"
_notes: list[str] | None = None  # of the export that is under way
_count = itertools.count(1)


@contextlib.contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """Within, this thread traces a graph; `notes` is filled with a sentence for each region."""
    global _notes, _count
    before = _notes, _count
    _notes, _count = notes, itertools.count(1)
    try:
        yield
    finally:
        _notes, _count = before


@contextlib.contextmanager
def region(part: torch.fx.GraphModule) -> Iterator[None]:
    """Within, what is traced is in a region: Dynamo's graph of what a checkpoint is around."""
    assert _notes is not None
    name = _name(part)
    note = (f"torch.utils.checkpoint around {name} is a recompute region: backward keeps its inputs and "
            "outputs, and recomputes the rest.")
    if note not in _notes:
        _notes.append(note)
    outer = torch.fx.traceback.get_current_meta().get("custom", {}).get(REGION, "")
    path = f"{outer}{next(_count)} {name.replace('/', '|')}/"
    with torch.fx.traceback.annotate({REGION: path}):
        yield


def without_gradient(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Dynamo's nodes through which no gradient flows: reentrant checkpoints none of whose inputs wants one, where
    PyTorch warns and gives the weights none, and what follows from such nodes alone.
    """
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        wanting = [each for each in node.all_input_nodes if each not in found and _wants_gradient(each)]
        if node.target is torch.ops.higher_order.tag_activation_checkpoint and node.kwargs.get("use_reentrant", True):
            wanting = [each for each in wanting if not isinstance(each.meta.get("example_value"), torch.nn.Parameter)]
            follows = True
        else:
            follows = any(each in found for each in node.all_input_nodes)
        if follows and not wanting:
            found.add(node)
        elif node.target is operator.setitem or str(getattr(node.target, "__name__", node.target)).endswith("_"):
            found.difference_update(node.all_input_nodes)  # it may have written a value with a gradient
    return found


def _wants_gradient(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return node.op != "get_attr" and (value is None or any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in pytree.tree_leaves(value)))


def _name(part: torch.fx.GraphModule) -> str:
    """The path of the module whose operations these are, which know the modules that they were called in."""
    stacks = [[path for path, _ in node.meta["nn_module_stack"].values()] for node in part.graph.nodes
              if node.meta.get("nn_module_stack")]
    shared = os.path.commonprefix(stacks) if stacks else []
    path = re.sub(r"L\['\w+'\]|[\['\"\]]|_modules", "", shared[-1]) if shared else ""
    return path.removeprefix("module").strip(".") or "the module"


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
