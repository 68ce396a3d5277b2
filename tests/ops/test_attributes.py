"""Attributes: every descriptor's list against the specification, and what is not in it is refused by name."""

from __future__ import annotations

import numpy as np
import onnx.defs
import pytest
import torch
from harness import OURS, Case, R, call, expect_error, model_of, run_case, session_of

from onnxtrain import _C

KINDS = {"INT": "i", "FLOAT": "f", "STRING": "s", "TENSOR": "t", "GRAPH": "g", "INTS": "I", "FLOATS": "F",
         "STRINGS": "S",
         "TYPE_PROTO": "i"}  # of a type the loader keeps the element's dtype
# Of the specification, and refused: to leave it out of account would give other numbers than the model asks for.
REFUSED: dict[tuple[str, str], str] = {}
# Ours, on operators of the specification: set by the loader or by a pass.
OWN = {("BatchNormalization", "saves_statistics"), ("Dropout", "torch_layout"),
       *((op["name"], "rng_stream") for op in _C.operators() if op["random"]),
       *((name, "saved_bytes") for name in ("RNN", "GRU", "LSTM")),
       *((name, "rng_salt") for name in ("If", "Loop", "Scan", "SequenceMap"))}


def declared(op: dict) -> dict[str, str]:
    return dict(entry.split(":") for entry in op["attributes"].split())


def specified(op: dict) -> dict[str, str]:
    """Attributes, with their kinds, of every version of the operator that the descriptor stands for."""
    later = [o["since"] for o in _C.operators() if (o["domain"], o["name"]) == (op["domain"], op["name"])
             and o["since"] > op["since"]]
    end = min(later, default=1000)
    versions = sorted((s for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == ("", op["name"])),
                      key=lambda s: s.since_version)
    first = max((s.since_version for s in versions if s.since_version <= op["since"]), default=0)
    kinds = {}
    for schema in reversed([s for s in versions if first <= s.since_version < end]):  # the newest version's kind first
        for name, attribute in schema.attributes.items():
            letter = KINDS[attribute.type.name]
            kinds[name] = kinds.get(name, "") + (letter if letter not in kinds.get(name, "") else "")
    return kinds


STANDARD = [op for op in _C.operators() if op["domain"] == "" and op["attributes"] is not None]


def test_every_operator_declares_its_attributes():
    missing = [f"{op['domain']}.{op['name']}" for op in _C.operators() if op["attributes"] is None]
    assert not missing, f"no .attributes in the descriptors of {', '.join(missing)}"


@pytest.mark.parametrize("op", STANDARD, ids=lambda op: f"{op['name']}-{op['since']}")
def test_list_is_the_specification(op):
    ours, spec = declared(op), specified(op)
    assert len(ours) == len(op["attributes"].split()), "an attribute is listed twice"
    unknown = {name for name in ours if name not in spec and (op["name"], name) not in OWN}
    assert not unknown, f"not of the specification: {unknown}"
    left_out = {name for name in spec if name not in ours and (op["name"], name) not in REFUSED}
    assert not left_out, f"of the specification, neither honoured nor decided against: {left_out}"
    assert {n: k for n, k in ours.items() if n in spec} == {n: k for n, k in spec.items() if n in ours}


def test_decisions_are_of_operators_that_exist():
    names = {op["name"] for op in _C.operators()}
    assert {name for name, _ in [*REFUSED, *OWN]} <= names


X = R(2, 3)
IMAGE = R(1, 2, 4, 5, low=-1, high=1)


@pytest.mark.parametrize("case, name", [
    (Case("Relu", [X], {"slope": 0.5}), "slope"),
    (Case("Relu", [X], {"alpha": 0.5}), "alpha"),  # of LeakyRelu
    (Case("Softmax", [X], {"axis": 1, "axe": 0}), "axe"),
    (Case("ReduceSum", [X], {"keepdim": 0}), "keepdim"),  # keepdims
    (Case("Gemm", [X, R(3, 4)], {"transb": 1}), "transb"),
    (Case("MatMul", [X, R(3, 4)], {"transA": 0}), "transA"),
    (Case("StopGradient", [X], {"axis": 0}, domain=OURS), "axis"),
    (Case("GlobalMaxPool", [IMAGE], {"kernel_shape": [2, 2]}), "kernel_shape"),
], ids=str)
def test_unknown_attribute_is_refused(case, name):
    expect_error(case, _C.UnsupportedError, f"{case.op_type} 'node': attribute '{name}' is not supported")


@pytest.mark.parametrize("case, match", [
    (Case("Softmax", [X], {"axis": 1.0}), "attribute 'axis' is a float, expected an int"),
    (Case("LeakyRelu", [X], {"alpha": 1}), "attribute 'alpha' is an int, expected a float"),
    (Case("Transpose", [X], {"perm": 1}), "attribute 'perm' is an int, expected ints"),
    (Case("Gelu", [X], {"approximate": ["tanh"]}), "attribute 'approximate' is strings, expected a string"),
], ids=str)
def test_kind_is_checked(case, match):
    expect_error(case, ValueError, match)


def test_operators_of_the_engine_alone():
    """What passes build trusts its operands; a model that names it is refused by name."""
    own = {op["name"] for op in _C.operators() if op["domain"] == OURS}
    for name in sorted(own - {"StopGradient", "HardTanh", "Im2Col", "FusedMatMul", "SumTo", "GroupedMatMul",
                              "CTCLoss", "StreamedCrossEntropy", "TorchGather", "TorchGatherElements",
                              "TorchScatterElements",
                              "InRange", "AdaptiveAveragePool", "GroupNorm", "Log1p", "Expm1", "Remainder", "Atan2",
                              "Lgamma", "Digamma", "Trigamma", "Erfc", "Erfinv", "Logit", "SearchSorted",
                              "TorchCumProd", "TorchTopK"}):
        with pytest.raises(ValueError, match=f"node 0 .*{OURS}.{name} is an internal operator"):
            _C.Session(model_of(Case(name, [X, X], domain=OURS), [np.ones(3, np.float32)] * 2))
    for shape in ([2] * 13, [4, 4], [-1], [2**62, 2**62]):
        with pytest.raises(ValueError, match="SumTo 'node'"):
            call(session_of(Case("SumTo", [X], {"shape": shape}, domain=OURS), [np.ones((3, 4), np.float32)]),
                 [torch.ones(3, 4)], b"\0", None)


def test_storage_order_only_orders_indices():
    pool = {"kernel_shape": [2, 2], "storage_order": 1}
    run_case(Case("MaxPool", [IMAGE], pool, torch=lambda x: torch.nn.functional.max_pool2d(x, 2, 1)))
    expect_error(Case("MaxPool", [IMAGE], {"kernel_shape": [2, 2], "storage_order": 2}), ValueError,
                 "storage_order is 2")


def test_stash_type():
    for stash, dtype in ((1, np.float32), (1, np.float64), (11, np.float64)):
        case = Case("LayerNormalization", [X, R(3), R(3)], {"axis": -1, "stash_type": stash}, dtypes=(dtype,))
        arrays = [spec.make(0).astype(dtype) for spec in case.inputs]
        tensors = [torch.from_numpy(a) for a in arrays]
        (y,), _ = call(session_of(case, arrays), tensors, bytes(3), None)
        torch.testing.assert_close(y, torch.nn.functional.layer_norm(tensors[0], [3], tensors[1], tensors[2]))
    expect_error(Case("LayerNormalization", [X, R(3)], {"stash_type": 11}), _C.UnsupportedError, "stash_type")


def test_a_kernel_is_switched_off_for_one_operator():
    exp, tanh = (Case(name, [X]) for name in ("Exp", "Tanh"))

    def kernel_of(case: Case) -> str:
        arrays = [np.ones((2, 3), np.float32)]
        session = session_of(case, arrays)
        call(session, [torch.from_numpy(arrays[0])], bytes(1), None)
        (step,) = session.kernels()
        return step[1]

    assert kernel_of(exp) == kernel_of(tanh) == "unary_simd"
    try:
        _C.disable_kernels(["Exp:unary_simd"])
        assert kernel_of(exp) == "unary_ref" and kernel_of(tanh) == "unary_simd"
        _C.disable_kernels(["xExp:unary_simd", "Tanh:unary_sim", "anh:unary_simd", "Tanh:unary_simd2"])
        assert kernel_of(exp) == kernel_of(tanh) == "unary_simd"
        _C.disable_kernels(["Exp:unary_ref", "unary_simd"])
        assert kernel_of(tanh) == "unary_ref"
        expect_error(exp, _C.UnsupportedError, "unary_ref: disabled")
    finally:
        _C.disable_kernels([])
