"""Every operator's cases once more in float16 and bfloat16, forward and backward,
against our own float64 of the same inputs.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Case, R, _arrays, _grad_inputs, _is_const, _run_inputs, call
from onnx import ValueInfoProto, helper, numpy_helper

from onnxtrain import _C

# Where a rounding of the input decides (a kink, a tie, a step) or a sum cancels, 16 bits say something else than 64.
ROUGH = {"Mod", "TopK", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "QuantizeLinear"}
WIDE = {"StreamedCrossEntropy"}  # its loss of 16-bit operands is float32


def cases():
    """CASES of all test files here that take float inputs of any dtype."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.stem in (Path(__file__).stem, "test_random", "test_random_fill"):
            continue
        for case in getattr(importlib.import_module(path.stem), "CASES", []):
            if (isinstance(case, Case) and case.op_type not in ROUGH | WIDE and "dtype" not in case.attrs
                and case.dtypes == Case("", []).dtypes):
                if any(isinstance(i, R) and i.is_float for i in case.inputs):
                    found.append(pytest.param(case, id=f"{path.stem[5:]}-{case}"))
    return found


def compute(case, arrays, dtype):
    """Outputs and gradients in float64 of the case with its float inputs as `dtype`."""
    run = _run_inputs(case, arrays)
    wanted = _grad_inputs(case, arrays)
    is_float = [isinstance(s, R) and s.is_float for s in case.inputs]
    values = [None if a is None else torch.from_numpy(np.array(a, order="C")) for a in arrays]
    values = [v.to(dtype) if v is not None and f else v for v, f in zip(values, is_float)]
    elem = {torch.float16: 10, torch.bfloat16: 16, torch.float64: 11}[dtype]
    names = ["" if v is None else f"x{i}" for i, v in enumerate(values)]
    constants = [helper.make_tensor(names[i], elem, list(arrays[i].shape), values[i].double().flatten().tolist())
                 if is_float[i]
                 else numpy_helper.from_array(arrays[i], names[i]) for i in range(len(values)) if _is_const(case, i)]
    inputs = [helper.make_tensor_value_info(names[i], elem if is_float[i]
                                            else helper.np_dtype_to_tensor_dtype(arrays[i].dtype),
                                            arrays[i].shape) for i in run]
    node = helper.make_node(case.op_type, names, [f"y{i}" for i in range(case.n_outputs)], domain=case.domain,
                            **case.attrs)
    graph = helper.make_graph([node], "half", inputs, [ValueInfoProto(name=o) for o in node.output], constants)
    opsets = [helper.make_opsetid("", case.opset)] + ([helper.make_opsetid(case.domain, 1)] if case.domain else [])
    session = _C.Session(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    tensors = [values[i] for i in run]
    outputs, _ = call(session, tensors, bytes(len(run)), None)
    rng = np.random.default_rng(7)
    grads = [torch.from_numpy(np.asarray(rng.uniform(-1, 1, tuple(o.shape)))).bfloat16().to(o.dtype)
             if o.is_floating_point() and
             k not in case.no_grad_outputs else None for k, o in enumerate(outputs)]
    outputs, in_grads = call(session, tensors, bytes(i in wanted for i in run), grads)
    return [*outputs, *in_grads]


@pytest.mark.parametrize("dtype, tol", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=["f16", "bf16"])
@pytest.mark.parametrize("case", cases())
def test_half(case, dtype, tol):
    arrays = _arrays(case, np.float32)
    rounded = [torch.from_numpy(np.array(a, order="C")).to(dtype).double().numpy() if isinstance(s, R) and s.is_float
               else a
               for s, a in zip(case.inputs, arrays)]
    got, want = compute(case, arrays, dtype), compute(case, rounded, torch.float64)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g is None) == (w is None)
        if g is None:
            continue
        assert g.dtype == (dtype if w.dtype == torch.float64 else w.dtype), f"result {k} is {g.dtype}"
        g, w = g.double(), w.double()
        finite = w.isfinite() & (w.abs() < 6e4)
        scale = float(w[finite].abs().max()) if finite.any() else 1.0
        error = float((g - w)[finite].abs().max()) if finite.any() else 0.0
        assert error <= tol * max(1.0, scale), f"{case} result {k}: error {error:.3g}, largest {scale:.3g}"


@pytest.mark.parametrize("dtype, elem", [(torch.float16, 10), (torch.bfloat16, 16)], ids=["f16", "bf16"])
def test_a_known_base_is_read_as_what_it_is(dtype, elem):
    """When the node is widened, its constant still has 16 bits."""
    node = helper.make_node("Pow", ["two", "x"], ["y"])
    graph = helper.make_graph([node], "half", [helper.make_tensor_value_info("x", elem, [3])], [ValueInfoProto(name="y")],
                              [helper.make_tensor("two", elem, [], [2.0])])
    session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                           ir_version=10).SerializeToString())
    (y,), _ = call(session, [torch.tensor([0.5, 3.0, -1.0]).to(dtype)], bytes(1), None)
    assert torch.equal(y, torch.tensor([2.0**0.5, 8.0, 0.5]).to(dtype))
    assert "pow_of_two" in [kernel for _, kernel, _ in session.kernels()]
