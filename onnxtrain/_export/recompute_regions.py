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
from collections.abc import Iterator

import onnx
import torch
import torch.fx.traceback
from torch.nn import Parameter

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


def loses_gradients(graph: torch.fx.Graph) -> bool:
    """Whether Dynamo's graph has a reentrant checkpoint that may give its weights no gradient: where no input wants one
    PyTorch warns and gives none. The node does not tell a parameter among the inputs from a weight that is read inside.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        given = [each.meta.get("example_value") for each in node.all_input_nodes]
        wanting = [value for value in given if isinstance(value, torch.Tensor) and value.requires_grad]
        if node.kwargs.get("use_reentrant", True) and wanting and all(isinstance(each, Parameter) for each in wanting):
            return True
    return False


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
