"""Every node of the backend suite under each older opset that its operator has a version in, where the checker accepts
it there.

The result is the evaluator's under that opset; where that has none, the evaluator's of the version that the suite was
written for, which is the same unless the specification changed its meaning: for those operators, what it was stands
here.
"""

from __future__ import annotations

import functools
import os
import random
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from seeds import fixed_seed
from test_type_variables import NOT_COMPARED, agree, compare, examples, reference

from onnxtrain import _C, backend

SEED = fixed_seed()
SLOW = os.environ.get("ONNXTRAIN_SLOW") == "1"
# Refusals that are right: before opset 7 operands broadcast only where an attribute says so, and batch normalisation
# trained with its running statistics as outputs.
REFUSALS = ("the operands differ in shape and broadcast is 0", "C has another shape than the result and broadcast is 0",
            "PRelu", "is_test is 0, which means training")
# Before opset 13 these normalised all dims from the axis on, by default from 1, together.
FLATTENING = ("Softmax", "LogSoftmax", "Hardmax")


@functools.cache
def versions() -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            found.setdefault(schema.name, set()).add(schema.since_version)
    return {name: sorted(v) for name, v in found.items()}


def at_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto | None:
    """The model under another opset; None where the node is no node of it, or its types are not."""
    older = onnx.ModelProto()
    older.CopyFrom(model)
    del older.opset_import[:]
    older.opset_import.append(helper.make_opsetid("", opset))
    for output in older.graph.output:  # their sizes are the later opset's
        for k, dim in enumerate(output.type.tensor_type.shape.dim):
            dim.dim_param = f"{output.name}_{k}"
    try:
        onnx.checker.check_model(older)
        schema = onnx.defs.get_schema(older.graph.node[0].op_type, opset)
        elem = {v.name: v.type.tensor_type.elem_type for v in [*older.graph.input, *older.graph.output]}
        for formals, names in ((schema.inputs, older.graph.node[0].input),
                               (schema.outputs, older.graph.node[0].output)):
            for i, name in enumerate(names):
                if (name and f"tensor({onnx.TensorProto.DataType.Name(elem[name]).lower()})" not
                    in formals[min(i, len(formals) - 1)].types):
                    return None
        onnx.shape_inference.infer_shapes(older, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, KeyError, IndexError):
        return None
    return older


def targets() -> list[tuple[str, int, int]]:
    """(operator, index of the example, opset)."""
    have = {op["name"] for op in _C.operators() if op["domain"] == ""}
    found = []
    for name in sorted(have & set(examples())):
        for i, (model, _) in enumerate(examples()[name]):
            own = model.opset_import[0].version
            found += [(name, i, opset)
                      for opset in {max(v, 1) for v in versions()[name]} | {v - 1 for v in versions()[name] if v > 1}
                      if opset < own]
    return sorted(found)


def flattened(model: onnx.ModelProto, inputs: list[Any]) -> list[Any]:
    """Of two dims: those before the axis, and the rest."""
    (x,) = inputs
    axis = next((a.i for a in model.graph.node[0].attribute if a.name == "axis"), 1) % x.ndim
    node = helper.make_node(model.graph.node[0].op_type, ["x"], ["y"], axis=1)
    rows = x.reshape(int(np.prod(x.shape[:axis], dtype=int)), -1)
    values = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), rows.shape) for n in "xy"]
    two = helper.make_model(helper.make_graph([node], "rows", values[:1], values[1:]),
                            opset_imports=[helper.make_opsetid("", 13)])
    return [reference(two, [rows])[0].reshape(x.shape)]


def check(name: str, index: int, opset: int) -> str:
    model, inputs = examples()[name][index]
    older = at_opset(model, opset)
    if older is None:
        return "no node of that opset"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            got = backend.OnnxtrainBackendRep(older).run(inputs)
        except (ValueError, _C.UnsupportedError) as error:
            assert opset < 7 and any(r in str(error) for r in REFUSALS), f"{name} at opset {opset}: {error}"
            return "refused"
        want = flattened(model, inputs) if name in FLATTENING and opset < 13 else reference(older, inputs)
        if want is None or name not in FLATTENING and not agree(got, want, 2e-4):
            want = reference(model, inputs)
    if want is None or name in NOT_COMPARED:
        return "runs"
    for k, (g, w) in enumerate(zip(got, want)):
        compare(g, w, 2e-4 if np.asarray(w).dtype != np.float16 else 2e-2, f"{name} at opset {opset}, output {k}")
    return "compared"


@functools.cache
def sampled() -> list[Any]:
    every = targets()
    chosen = every if SLOW else random.Random(SEED).sample(every, 700)
    return [pytest.param(*target,
                         id=f"seed{SEED}-{target[0]}-{target[2]}-{examples()[target[0]][target[1]][0].graph.name}")
            for target in chosen]


@pytest.mark.parametrize("name, index, opset", sampled())
def test_older(name, index, opset):
    assert check(name, index, opset) in ("compared", "runs", "refused", "no node of that opset")


@pytest.mark.parametrize("name, opset", [("Softmax", 11), ("Softmax", 12), ("PRelu", 7), ("PRelu", 8), ("Add", 7),
                                         ("BatchNormalization", 9)])
def test_older_meanings_are_compared(name, opset):
    """Not everything is "no node of that opset"."""
    assert "compared" in [check(name, i, opset) for i in range(len(examples()[name]))]
