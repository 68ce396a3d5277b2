"""Every operator in every type that the specification gives its inputs: the result is the reference evaluator's, or the
type is refused by name.

A node of the operator, from the backend suite of the `onnx` wheel, is run with each type variable of its inputs in turn
set to each of its types. Where the evaluator cannot compute in a type, it computes in float64 or int64 on the same
values.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from seeds import fixed_seed

from onnxtrain import _C, backend

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("operators_tool", ROOT / "tools" / "operators.py")
tool = importlib.util.module_from_spec(SPEC)
sys.modules["operators_tool"] = tool
SPEC.loader.exec_module(tool)

SEED = fixed_seed()
SLOW = os.environ.get("ONNXTRAIN_SLOW") == "1"
TOLERANCE = {"double": 1e-6, "float": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# Drawn at random; or a result of which the specification leaves the rest open.
NOT_COMPARED = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli",
                "Dropout"}
# (operator, variable, type): refused, with the reason.
REFUSED = {
    ("Col2Im", "T", "bool"): "sums of bools", **{("GridSample", "T1", t): "interpolates between integers"
                                                 for t in (*tool.INTS, "bool")}}


@functools.cache
def examples() -> dict[str, list[tuple[onnx.ModelProto, list[Any]]]]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = {name: [e for e in every if usable(e)] for name, every in tool.examples().items()}
    # A node with a body is given the types that its body was written for.
    return {name: every for name, every in found.items() if every and name not in ("If", "Loop", "Scan")}


def usable(example: tuple[onnx.ModelProto, list[Any]]) -> bool:
    """Tensors of numbers in and out: sequences and optionals hold tensors of any type and compute nothing."""
    model, inputs = example
    values = [*model.graph.input, *model.graph.output]
    return (all(v.type.HasField("tensor_type") for v in values)
            and all(isinstance(a, np.ndarray) and a.dtype.kind not in "OUSc" for a in inputs))


def size(example: tuple[onnx.ModelProto, list[Any]]) -> tuple[int, int]:
    model, inputs = example
    return len(model.graph.node[0].attribute), sum(np.size(a) for a in inputs if isinstance(a, np.ndarray))


def schema_of(model: onnx.ModelProto) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(model.graph.node[0].op_type,
                                max(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")))


def variables(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Type variables of the node's present tensor inputs, with their types."""
    schema = schema_of(model)
    constrained = {t.type_param_str for t in schema.type_constraints}
    names = {schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i, name in enumerate(model.graph.node[0].input)
             if name}
    return {name: [t for t in tool.allowed(schema, name) if t in tool.ORDER] for name in sorted(names & constrained)}


def targets() -> list[tuple[str, str, str]]:
    """(operator, variable, type) for everything in the registry that has an example."""
    found = []
    for name in sorted({op["name"] for op in _C.operators() if op["domain"] == ""} & set(examples())):
        types: dict[str, set[str]] = {}
        for model, _ in examples()[name]:
            for variable, allowed in variables(model).items():
                types.setdefault(variable, set()).update(allowed)
        found += [(name, variable, t) for variable in sorted(types) for t in tool.ORDER if t in types[variable]]
    return found


def reference(model: onnx.ModelProto, inputs: list[Any]) -> list[Any] | None:
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            names = [i.name for i in model.graph.input]
            return onnx.reference.ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    except Exception:  # whatever the evaluator's own code stumbles over
        return None


def compare(got: Any, want: Any, tolerance: float, what: str) -> None:
    if isinstance(want, list):
        assert len(got) == len(want), f"{what}: {len(got)} items, expected {len(want)}"
        for g, w in zip(got, want):
            compare(g, w, tolerance, what)
        return
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if got.dtype.kind in "biu":
        assert np.array_equal(got, want.astype(got.dtype)), f"{what}:\n{got}\nexpected\n{want}"
        return
    g, w = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(w) & np.isfinite(g)
    assert np.array_equal(np.isnan(g), np.isnan(w)), f"{what}: NaN elsewhere\n{got}\nexpected\n{want}"
    scale = max(1.0, np.abs(w[finite]).max(initial=0))
    error = np.abs(g - w)[finite].max(initial=0)
    assert error <= tolerance * scale, f"{what}: error {error:.3g}, largest {scale:.3g}"


def check(name: str, variable: str, dtype: str) -> str:
    """"compared", "runs" (nothing to compare with) or what it was refused with."""
    refusal = ""
    number = tool.number_of(dtype)
    for example in sorted(examples()[name], key=size):
        model, inputs = example
        if dtype not in variables(model).get(variable, []):
            continue
        schema = schema_of(model)
        together = {v for v, allowed in variables(model).items() if dtype in allowed
                    and v.rstrip("0123456789") == variable.rstrip("0123456789")}
        for chosen in ({variable}, together) if together != {variable} else ({variable},):
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                if dtype.startswith("uint"):
                    inputs = [np.abs(a) if a.dtype.kind in "fi" else a for a in inputs]
                changed, arrays = tool.with_dtype(model, inputs, schema, chosen, number)
                try:
                    got = backend.OnnxtrainBackendRep(changed).run(arrays)
                except (NotImplementedError, ValueError, TypeError, IndexError) as error:
                    refusal = refusal or f"{type(error).__name__}: {error}"
                    continue
                if name in NOT_COMPARED:
                    return "runs"
                want = reference(changed, arrays)
                tolerance = max([TOLERANCE["float"], TOLERANCE.get(dtype, 0)])
                if want is None or not agree(got, want, tolerance):
                    wide_type = "double" if dtype in TOLERANCE else "int64"
                    if wide_type not in variables(model)[variable]:
                        wide_type = "float"
                    wide, more = tool.with_dtype(model, [np.asarray(b) if isinstance(b, np.ndarray) else a
                                                         for a, b in zip(inputs, arrays)], schema, chosen,
                                                 tool.number_of(wide_type))
                    precise = reference(wide, more)
                    want = precise if precise is not None else want
                if want is None:
                    return "runs"
                for k, (g, w) in enumerate(zip(got, want, strict=True)):
                    compare(g, w, tolerance, f"{name} with {variable} = {dtype}, output {k}")
                return "compared"
    return refusal


def agree(got: Any, want: Any, tolerance: float) -> bool:
    try:
        for g, w in zip(got, want, strict=True):
            compare(g, w, tolerance, "")
    except (AssertionError, ValueError):
        return False
    return True


def sampled() -> list[Any]:
    every = targets()
    chosen = every if SLOW else random.Random(SEED).sample(every, 500)
    return [pytest.param(*target, id=f"seed{SEED}-" + "-".join(target)) for target in chosen]


@pytest.mark.parametrize("name, variable, dtype", sampled())
def test_type(name, variable, dtype):
    outcome = check(name, variable, dtype)
    if (name, variable, dtype) in REFUSED:
        assert (outcome.startswith("UnsupportedError")
                and name in outcome), f"{name} now takes {variable} = {dtype}: {outcome}"
    else:
        assert outcome in ("compared", "runs"), f"{name} with {variable} = {dtype}: {outcome}"


def test_most_are_compared():
    """Few operators have no reference: those that draw, and those that the evaluator computes in no type."""
    names = {name for name, _, _ in targets()}
    assert len(names) > 150 and len(targets()) > 1300
    silent = {n for n in names - NOT_COMPARED
              if all(check(*t) == "runs" for t in targets() if t[0] == n and t[2] == "float")}
    assert silent <= {"GlobalLpPool", "MaxRoiPool", "Scatter", "MeanVarianceNormalization", "ConstantOfShape",
                      "Where"} | {
n for n in names if not any(t[2] == "float" for t in targets() if t[0] == n)}, silent
