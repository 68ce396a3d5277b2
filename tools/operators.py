"""Writes docs/operators.md from the operator registry: `python tools/operators.py` (or `--check`, which only compares).

Name, first opset and gradient come from the registry. The dtypes are found by trial: a node of the operator, taken from
the backend suite that the `onnx` wheel ships, is run with its main type variable set to every type that the
specification allows.
"""

from __future__ import annotations

import pathlib
import re
import sys
import warnings
from typing import Any, Iterator

import numpy as np
import onnx
import onnx.backend.test.loader as loader
from onnx import helper, numpy_helper

from onnxtrain import _C, backend

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operators.md"
ORDER = ["double", "float", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
         "uint8", "bool"]
INTS = ORDER[4:12]
OUT_OF_SCOPE = ("string", "complex64", "complex128")
HEAD = """# Operators

`python tools/operators.py` makes this page from the registry of the build; a test compares it with the code.

- **Opset**: the first opset that is supported. Later opsets up to {opset} are supported too, as long as the operator keeps its
  meaning. An operator with two lines has another meaning in older opsets.
- **Gradient**: *rule*: the operator has a gradient rule; *parts*: the operator is built from others, or passes its inputs
  on, and has their gradients; *none*: no gradient flows, as in PyTorch (indices, comparisons). The gradient of a rounding
  is zero.
- **Dtypes**: the supported types of its main type variable. Without a kernel for them, 16-bit floats are computed in float32
  and small integers in larger ones. *not*: types of the specification that are not supported. Strings and complex numbers
  are not listed, since no operator supports them.
- **CUDA**: *kernel*: `cuda/table.c` has kernels for floats, which are compared with the CPU on an emulated device;
  *parts*: supported if its parts are; *view*: no computation; *none left*: removed before a program runs. PyTorch runs a
  module with any other operator.

"""


def examples() -> dict[str, list[onnx.ModelProto]]:
    """Operator -> (model, inputs) of node tests that are that operator alone, small ones first."""
    found: dict[str, list[Any]] = {}
    for case in loader.load_model_tests(kind="node"):
        nodes = case.model.graph.node
        if len(nodes) == 1 and not nodes[0].domain and case.data_sets:
            found.setdefault(nodes[0].op_type,
                             []).append((case.model, [numpy_helper.to_array(a) if isinstance(a, onnx.TensorProto)
                                                      else a for a in case.data_sets[0][0]]))
    for op_type, (inputs, attrs) in MORE.items():
        if op_type in found:
            continue
        names = [f"x{i}" for i in range(len(inputs))]
        graph = helper.make_graph([helper.make_node(op_type, names, ["y"], **attrs)], "example",
                                  [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                                   for n, a in zip(names, inputs)],
                                  [onnx.ValueInfoProto(name="y")])
        found[op_type] = [(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)]), inputs)]
    return found


#: Operators that the suite has no node test of: inputs and attributes.
MORE: dict[str, tuple[list[np.ndarray], dict[str, Any]]] = {
    "RandomNormal": ([], {"shape": [3]}),
    "RandomUniform": ([], {"shape": [3]}),
    "RandomNormalLike": ([np.zeros(3, np.float32)], {"dtype": 1}),
    "RandomUniformLike": ([np.zeros(3, np.float32)], {"dtype": 1}),
    "Multinomial": ([np.zeros((1, 3), np.float32)], {}),
    "GlobalLpPool": ([np.ones((1, 2, 3, 3), np.float32)], {}),
    "MaxRoiPool": ([np.ones((1, 1, 4, 4), np.float32), np.array([[0, 0, 0, 3, 3]], np.float32)],
                   {"pooled_shape": [2, 2]}),
    "Size": ([np.ones((2, 3), np.float32)], {}),
}


#: Operators whose types a change of one input alone does not show.
NOTES = {
    "If": "any, in containers as well",
    "Loop": "any, in containers as well",
    "Scan": "any",
    "NonMaxSuppression": "float",
    "BitCast": "all, to a type of the same size",
    "RandomNormal": "double, float, float16, bfloat16",
    "RandomUniform": "double, float, float16, bfloat16",
}


def with_dtype(model: onnx.ModelProto, inputs: list[Any], schema: onnx.defs.OpSchema, variables: set[str],
               dtype: int) -> tuple[Any, list[Any]]:
    """The example with every input of the type variables turned into `dtype`."""
    changed, arrays = onnx.ModelProto(), list(inputs)
    changed.CopyFrom(model)
    node, by_name = changed.graph.node[0], {v.name: i for i, v in enumerate(changed.graph.input)}
    for position, name in enumerate(node.input):
        formal = schema.inputs[min(position, len(schema.inputs) - 1)]
        if formal.type_str not in variables or name not in by_name:
            continue
        i = by_name[name]
        changed.graph.input[i].type.tensor_type.elem_type = dtype
        arrays[i] = np.asarray(arrays[i]).astype(helper.tensor_dtype_to_np_dtype(dtype))
    outputs = [onnx.ValueInfoProto(name=o.name) for o in changed.graph.output]
    del changed.graph.output[:]
    changed.graph.output.extend(outputs)
    return changed, arrays


def allowed(schema: onnx.defs.OpSchema, variable: str) -> list[str]:
    """Types of a type variable, but for strings and complex numbers."""
    names = next(t.allowed_type_strs for t in schema.type_constraints if t.type_param_str == variable)
    return [t[7:-1] for t in names if t.startswith("tensor(") and t[7:-1] not in OUT_OF_SCOPE]


def number_of(name: str) -> int:
    return onnx.TensorProto.DataType.Value(name.upper())


def opset(model: onnx.ModelProto) -> int:
    return max(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))


def runs(model: onnx.ModelProto, inputs: list[Any]) -> bool:
    try:
        backend.OnnxtrainBackendRep(model).run(inputs)
    except (NotImplementedError, ValueError, TypeError, IndexError):
        return False
    return True


def dtypes(name: str, candidates: list[Any]) -> tuple[list[str], list[str]] | None:
    """Types that run and types of the specification that do not; None where no example runs at all."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for model, inputs in sorted(candidates, key=lambda c: (-opset(c[0]), len(c[0].graph.node[0].attribute),
                                                               sum(np.size(a) for a in c[1]
                                                                   if isinstance(a, np.ndarray)))):
            if not runs(model, inputs):
                continue
            schema = onnx.defs.get_schema(name, opset(model))
            variables = [i.type_str for i in schema.inputs
                         if any(t.type_param_str == i.type_str for t in schema.type_constraints)]
            if not variables:
                return [], []
            # The first variable alone, or all those that may be of that type together.
            good = [t for t in allowed(schema, variables[0])
                    if any(runs(*with_dtype(model, inputs, schema, v, number_of(t))) for v in (
{variables[0]}, {v for v in variables if t in allowed(schema, v)}))]
            return good, [t for t in allowed(schema, variables[0]) if t not in good]
    return None


def brief(types: list[str]) -> str:
    """A sorted list, with "integers" for all eight of them and "float8" and smaller ones together."""
    rest = [t for t in ORDER if t in types]
    if all(t in rest for t in INTS):
        at = rest.index(INTS[0])
        rest = [t for t in rest if t not in INTS]
        rest.insert(at, "integers")
    narrow = [t for t in types if t not in ORDER]
    eight = [t for t in narrow if t.startswith("float8")]
    rest += ["float8"] if len(eight) >= 4 else sorted(eight)
    return ", ".join(rest + sorted(t for t in narrow if t not in eight))


def gradient(op: dict[str, Any]) -> str:
    if op["no_grad"]:
        return "none"
    if op["expands"] and not op["kernels"]:
        return "parts"  # a recurrent layer has a rule for a device's kernel
    return "rule" if op["grad"] else "parts" if op["expands"] or op["containers"] else "refused"


def on_cuda() -> dict[str, int]:
    """Operators of cuda/table.c, and the first opset of each; read from the source, as a build may be without CUDA."""
    lines = (ROOT / "cuda" / "table.c").read_text(encoding="utf-8").split("ont_cuda_lists[]")[1]
    listed = re.findall(r'(?:ONE|TWO|THREE)\("", "(\w+)", (\d+),', lines)
    return {name: int(since) for name, since in listed} | dict.fromkeys(re.findall(r"\b(?:EW|COPY|REDUCE|POOL)\((\w+)\)", lines), 1)


def cuda(op: dict[str, Any], listed: dict[str, int]) -> str:
    if op["name"] in listed:
        return "kernel" if listed[op["name"]] <= op["since"] else "parts" if op["expands"] else ""
    return "view" if op["view"] else "parts" if op["expands"] else "" if op["kernels"] else "none left"


#: Of onnxruntime's domain: dtypes, and what a reader of its specification must know.
MICROSOFT = {
    "MatMulBnb4": ("double, float, float16, bfloat16; codes uint8, scales float or as A",
                   "The weight and its scales get no gradient. Two attributes are ours: the weight is rounded to "
                   "`weight_dtype`, by default A's, and for the gradient to `grad_weight_dtype`. `training_mode` "
                   "has no effect."),
}


def microsoft() -> list[str]:
    """The table of operators of com.microsoft."""
    ours = sorted((op for op in _C.operators() if op["domain"] == "com.microsoft"), key=lambda op: op["name"])
    return [f"Of the domain com.microsoft ({len(ours)}), on the CPU:", "", "| Operator | Version | Gradient | Dtypes | Notes |",
            "| --- | --- | --- | --- | --- |",
            *(f"| {op['name']} | {op['since']} | {gradient(op)} | {' | '.join(MICROSOFT[op['name']])} |" for op in ours)]


def rows() -> Iterator[str]:
    found, listed = examples(), on_cuda()
    ours = sorted((op for op in _C.operators() if op["domain"] == ""),
                  key=lambda op: (op["name"].lower(), -op["since"]))
    newest: set[str] = set()
    for op in ours:
        cell = "as in later opsets" if op["name"] in newest else NOTES.get(op["name"], "")
        if not cell:
            tried = dtypes(op["name"], found.get(op["name"], []))
            cell = "" if tried is None else brief(tried[0]) + (f"; *not* {brief(tried[1])}" if tried[1] else "")
        cell = cell or ("sequences and optionals of any tensors" if op["containers"] else "")
        newest.add(op["name"])
        yield f"| {op['name']} | {op['since']} | {gradient(op)} | {cell} | {cuda(op, listed)} |"


def passes() -> list[str]:
    """The table of operators that passes look for, read from the source: ONT_IS(node, name)."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "csrc" / "passes").glob("*.c"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"\bont_is_matmul(_or_gemm)?\(", text):
            for name in ("MatMul", "FusedMatMul", *["Gemm"] * ("ont_is_matmul_or_gemm(" in text)):
                found.setdefault(name, set()).add(path.stem)
        for name in re.findall(r"\bONT_IS\([^,()]+(?:\([^()]*\))?[^,()]*, (\w+)\)", text):
            found.setdefault(name, set()).add(path.stem)
    return ["## Passes", "", "Which passes look for an operator by its name, as files of `csrc/passes`. Elementwise operators,",
            "reductions and views are also met by their kind.", "", "| Operator | Passes |", "| --- | --- |",
            *(f"| {name} | {', '.join(sorted(found[name]))} |" for name in sorted(found, key=str.lower))]


def page() -> str:
    table = list(rows())
    names = {line.split("|")[1] for line in table}
    return HEAD.format(opset=onnx.defs.onnx_opset_version()) + "\n".join(
        [f"{len(names)} operators of the domain ai.onnx.", "", "| Operator | Opset | Gradient | Dtypes | CUDA |",
         "| --- | --- | --- | --- | --- |", *table, "", *microsoft(), "", *passes(), ""])


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == text else f"{PAGE.name} is not current: python tools/operators.py")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
