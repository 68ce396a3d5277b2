"""One case class drives every check of an operator; tests/ops/test_<family>.py hold the cases as data.

    CASES = [Case("Add", [R(2, 3), R(3)], torch=torch.add), Case("Relu", [R(4)], torch=torch.relu)]

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_op(case):
        run_case(case)

`run_case` builds a one-node model and checks: results against the ONNX reference evaluator (or `reference=`, or torch
in float64), inferred against real shapes, strided inputs, gradients of every subset of inputs against torch autograd
and finite differences in float64, float32 gradients, every kernel of every operator in the program against the others,
and that a failing allocation gives MemoryError and leaks nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
import zlib
from typing import Any, Callable, Sequence, TypeVar

import numpy as np
import onnx
import onnx.reference
import torch
from onnx import helper, numpy_helper

from onnxtrain import _C

T = TypeVar("T")

OURS = "ai.onnxtrain"
HALF_KERNELS = [f"{op}_half{own}" for op in ("matmul", "gemm") for own in ("", "_native")]  # of 16-bit products
FLOATS = (np.float32, np.float64)
# Relative to max(1, |expected|): accumulated rounding of a one-node graph.
TOLERANCE = {np.dtype(np.float32): 2e-5, np.dtype(np.float64): 1e-11, np.dtype(np.float16): 2e-3}


_counts = itertools.cycle([int(n) for n in os.environ.get("ONNXTRAIN_TEST_TURNS", "").split(",") if n])


def turn_threads() -> None:
    """Another number of threads from here on, where ONNXTRAIN_TEST_TURNS lists some (tests/threads.py)."""
    if (count := next(_counts, None)) is not None:
        torch.set_num_threads(count)


class R:
    """Random input: uniform in [low, high] for "float" (each float dtype of the case in turn),
    integers in [low, high).
    """

    def __init__(self, *shape: int, low: float = -2.0, high: float = 2.0, dtype: Any = "float", apart: float = 0.0,
                 const: bool = False, values: Sequence | None = None):
        self.shape, self.low, self.high, self.dtype, self.const = shape, low, high, dtype, const
        self.apart = apart  # keeps this distance from zero: for kinks and poles
        self.values = values

    @property
    def is_float(self) -> bool:
        return self.dtype == "float"

    def make(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        if self.values is not None:
            return np.array(self.values, np.float64 if self.is_float else self.dtype)
        if self.is_float:
            x = np.asarray(rng.uniform(self.low, self.high, self.shape))
            return (x if not self.apart
                    else np.asarray(np.where(np.abs(x) < self.apart, np.where(x < 0, -1, 1) * self.apart, x)))
        if np.dtype(self.dtype) == np.bool_:
            return np.asarray(rng.integers(0, 2, self.shape)).astype(np.bool_)
        if np.issubdtype(np.dtype(self.dtype), np.floating):
            return np.asarray(rng.uniform(self.low, self.high, self.shape)).astype(self.dtype)
        return np.asarray(rng.integers(int(self.low), int(self.high), self.shape)).astype(self.dtype)


def C(values: Any, dtype: Any = np.int64) -> R:
    """A constant input (an initializer): shapes, axes, ratios. dtype "float" follows the case's float dtype."""
    array = np.array(values, np.float64 if dtype == "float" else dtype)
    return R(*array.shape, dtype=dtype, values=array, const=True)


def V(values: Any, dtype: Any = "float") -> R:
    """A run-time input with these contents."""
    array = np.array(values, np.float64 if dtype == "float" else dtype)
    return R(*array.shape, dtype=dtype, values=array)


@dataclasses.dataclass
class Case:
    op_type: str
    inputs: Sequence[Any]  # R, C(...), V(...), numpy array (taken as it stands, a run-time input) or None (left out)
    attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    n_outputs: int = 1
    opset: int = 20
    domain: str = ""
    grad: bool | Sequence[int] = True  # indices of inputs to differentiate; True: every float run-time input
    torch: Callable | None = None  # of the present inputs as tensors; a tensor or a tuple like the outputs
    reference: Callable | None = None  # of the inputs as numpy arrays, in place of the reference evaluator
    dtypes: Sequence[Any] = FLOATS  # what "float" inputs become, one after the other
    fd: bool | None = None  # finite differences; None: only where torch= is not given
    tol: float | None = None  # in place of TOLERANCE for float32; float64 keeps its own
    tol64: float | None = None
    no_grad_outputs: Sequence[int] = ()  # outputs whose gradients are left out (masks, saved statistics)
    kernels: bool = True
    alloc: bool = True
    name: str = ""

    def __str__(self) -> str:
        if self.name:
            return f"{self.op_type}-{self.name}"
        shapes = "_".join("none" if i is None else "x".join(map(str, i.shape)) or "scalar" for i in self.inputs)
        kinds = {str(np.dtype(i.dtype)) for i in self.inputs if i is not None and not getattr(i, "is_float", False)}
        attrs = ",".join(f"{k}={v}" for k, v in self.attrs.items())
        return "-".join(filter(None, [self.op_type, shapes, ",".join(sorted(kinds)), attrs, "" if self.opset == 20
                                      else f"v{self.opset}"]))


def flat(op_type: str, *inputs: Any, **more: Any) -> Case:
    """A case without gradient."""
    return Case(op_type, list(inputs), grad=False, **more)


def of_run_time_inputs(case: Case) -> Case:
    """torch= of these cases takes the run-time inputs alone: shapes and axes stand in its text."""
    n = sum(not getattr(i, "const", False) for i in case.inputs)
    f = case.torch
    return dataclasses.replace(case, torch=f and (lambda *inputs: f(*inputs[:n])))


# ---- model and call ------------------------------------------------------------------------------------------------


def _arrays(case: Case, dtype: Any) -> list[np.ndarray | None]:
    result: list[np.ndarray | None] = []
    for index, spec in enumerate(case.inputs):
        if isinstance(spec, R):
            array = spec.make(zlib.crc32(f"{case.op_type} {index}".encode()))
            result.append(array.astype(dtype) if spec.is_float else array)
        else:
            result.append(spec)
    return result


def _is_const(case: Case, index: int) -> bool:
    return isinstance(case.inputs[index], R) and case.inputs[index].const


def model_of(case: Case, arrays: Sequence[np.ndarray | None]) -> bytes:
    """ModelProto bytes with constant inputs as initializers."""
    names = ["" if a is None else f"x{i}" for i, a in enumerate(arrays)]
    node = helper.make_node(case.op_type, names, [f"y{i}" for i in range(case.n_outputs)], name="node",
                            domain=case.domain, **case.attrs)
    inputs, initializers = [], []
    for i, array in enumerate(arrays):
        if array is None:
            continue
        if _is_const(case, i):
            initializers.append(numpy_helper.from_array(array, names[i]))
        else:
            inputs.append(helper.make_tensor_value_info(names[i], helper.np_dtype_to_tensor_dtype(array.dtype),
                                                        array.shape))
    outputs = [onnx.ValueInfoProto(name=f"y{i}") for i in range(case.n_outputs)]  # of no stated type: it is inferred
    graph = helper.make_graph([node], "case", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", case.opset)] + ([helper.make_opsetid(case.domain, 1)] if case.domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def session_of(case: Case, arrays: Sequence[np.ndarray | None]) -> _C.Session:
    return _C.Session(model_of(case, arrays))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, order="C", copy=True))


def _run_inputs(case: Case, arrays: Sequence[np.ndarray | None]) -> list[int]:
    return [i for i, a in enumerate(arrays) if a is not None and not _is_const(case, i)]


def call(session: _C.Session, tensors: Sequence[torch.Tensor], mask: bytes, grads: Sequence[torch.Tensor | None] | None,
         seed: int = 0) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """Forward and, where `grads` is given and something is differentiable, backward."""
    outputs, run = session.forward(tensors, mask, seed)
    if grads is None or run is None:
        return outputs, (None,) * len(tensors)
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    given = [g if flag else None for g, flag in zip(grads, run.differentiable)]
    return outputs, run.backward(saved, given)


# ---- comparison ----------------------------------------------------------------------------------------------------


def assert_close(actual: Any, expected: Any, what: str, tol: float | None = None) -> None:
    """Same dtype and shape, non-finite values in the same places, the rest within tol * max(1, largest entry)."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if actual.dtype.kind not in "fc":
        assert np.array_equal(actual, expected), f"{what}: {actual!r}, expected {expected!r}"
        return
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(e)
    assert (np.array_equal(np.isnan(a), np.isnan(e))
            and np.array_equal(a[np.isinf(e)], e[np.isinf(e)])), f"{what}: {a}, expected {e}"
    tol = TOLERANCE.get(actual.dtype, 1e-2) if tol is None else tol
    error = np.abs(a[finite] - e[finite]) / np.maximum(1.0, np.abs(e[finite]))
    assert error.size == 0 or error.max() <= tol, f"{what}: error {error.max():.3g} over {tol:.3g}\n{a}\nexpected\n{e}"


def _expected(case: Case, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    if case.reference:
        result = case.reference(*arrays)
        return [np.asarray(r) for r in (result if isinstance(result, (tuple, list)) else (result,))]
    if case.domain:
        assert case.torch, "an operator of our domain needs torch= or reference="
        result = _torch_outputs(case, [None if a is None else _tensor(a) for a in arrays])
        return [r.detach().numpy() for r in result]
    model = onnx.load_model_from_string(model_of(case, arrays))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        feed = {f"x{i}": arrays[i] for i in _run_inputs(case, arrays)}
        return [np.asarray(r) for r in onnx.reference.ReferenceEvaluator(model).run(None, feed)]


def _torch_outputs(case: Case, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    result = case.torch(*[t for t in tensors if t is not None])
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


# ---- checks --------------------------------------------------------------------------------------------------------


def _tol(case: Case, dtype: Any) -> float | None:
    return case.tol if dtype is np.float32 else case.tol64


def check_forward(case: Case, dtype: Any) -> None:
    arrays = _arrays(case, dtype)
    run = _run_inputs(case, arrays)
    session = session_of(case, arrays)
    outputs, _ = call(session, [_tensor(arrays[i]) for i in run], bytes(len(run)), None)
    expected = _expected(case, arrays)
    # The reference evaluator computes some operators (Erf, Gelu, HardSwish) with float32 constants or functions even in
    # float64: there it only catches gross errors, and torch in float64 is the exact one.
    exact = case.torch is not None and dtype is np.float64 and not case.reference and not case.domain
    for k, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(got.numpy(), want, f"{case} output {k} ({np.dtype(dtype)})", 1e-6 if exact else _tol(case, dtype))
    if exact:
        precise = _torch_outputs(case, [None if a is None else _tensor(a) for a in arrays])
        for k, (got, want) in enumerate(zip(outputs, precise, strict=False)):
            assert_close(got.numpy(), want.detach().numpy(), f"{case} output {k} against torch", _tol(case, dtype))
    for how, strided in (("transposed", _transposed), ("offset", _offset), ("expanded", _expanded)):
        tensors = [strided(_tensor(arrays[i])) for i in run]
        plain, _ = call(session, [t.contiguous() for t in tensors], bytes(len(run)), None)
        again, _ = call(session, tensors, bytes(len(run)), None)
        for k, (got, want) in enumerate(zip(again, plain, strict=True)):
            assert_close(got.numpy(), want.numpy(), f"{case} output {k} with {how} inputs", 0.0)


def _transposed(t: torch.Tensor) -> torch.Tensor:
    backwards = tuple(reversed(range(t.dim())))
    return t.permute(backwards).contiguous().permute(backwards)


def _offset(t: torch.Tensor) -> torch.Tensor:
    """The same contents at an odd offset and with a gap after each row."""
    base = torch.zeros([1 + d for d in t.shape] or [2], dtype=t.dtype)
    view = base[tuple(slice(1, None) for _ in t.shape)] if t.dim() else base[1]
    return view.copy_(t)


def _expanded(t: torch.Tensor) -> torch.Tensor:
    """Every entry of dim 0 is the first: stride 0."""
    return t[:1].expand(t.shape) if t.dim() and t.shape[0] else t


def _grad_inputs(case: Case, arrays: Sequence[np.ndarray | None]) -> list[int]:
    if case.grad is False:
        return []
    floats = [i for i in _run_inputs(case, arrays) if arrays[i].dtype.kind == "f"]
    return floats if case.grad is True else [i for i in floats if i in case.grad]


def _output_grads(case: Case, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    rng = np.random.default_rng(7)
    return [torch.from_numpy(np.asarray(rng.uniform(-1, 1, tuple(o.shape)))).to(o.dtype)
            if o.is_floating_point() and k not in case.no_grad_outputs else None for k, o in enumerate(outputs)]


def _torch_grads(case: Case, arrays: Sequence[np.ndarray | None], wanted: Sequence[int],
                 out_grads: Sequence[torch.Tensor | None]) -> dict[int, np.ndarray]:
    tensors = [None if a is None else _tensor(a) for a in arrays]
    tensors = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
    for i in wanted:
        tensors[i].requires_grad_(True)
    outputs = _torch_outputs(case, tensors)
    pairs = [(o, g.double()) for o, g in zip(outputs, out_grads) if g is not None and o.requires_grad]
    grads = (torch.autograd.grad([o for o, _ in pairs], [tensors[i] for i in wanted], [g for _, g in pairs],
                                 allow_unused=True) if pairs else [None] * len(wanted))
    return {i: (np.zeros_like(arrays[i], np.float64) if g is None else g.numpy()) for i, g in zip(wanted, grads)}


def _finite_differences(case: Case, arrays: Sequence[np.ndarray | None], wanted: Sequence[int],
                        out_grads: Sequence[torch.Tensor | None]) -> dict[int, np.ndarray]:
    """Central differences of our own float64 forward."""
    run = _run_inputs(case, arrays)
    session = session_of(case, arrays)
    mask = bytes(i in wanted for i in run)

    def value(changed: Sequence[np.ndarray | None]) -> float:
        outputs, open_run = session.forward([_tensor(changed[i]) for i in run], mask)
        if open_run is not None:
            open_run.release()
        return sum(float((o.double() * g.double()).sum()) for o, g in zip(outputs, out_grads) if g is not None)

    grads = {}
    for i in wanted:
        grad = np.zeros(arrays[i].shape)
        for at in np.ndindex(*arrays[i].shape):
            sides = []
            for step in (1e-5, -1e-5):
                changed = list(arrays)
                changed[i] = arrays[i].copy()
                changed[i][at] += step
                sides.append(value(changed))
            grad[at] = (sides[0] - sides[1]) / 2e-5
        grads[i] = grad
    return grads


def _subsets(indices: Sequence[int]) -> list[tuple[int, ...]]:
    if len(indices) <= 3:
        return [s for n in range(len(indices), 0, -1) for s in itertools.combinations(indices, n)]
    return [tuple(indices), *((i,) for i in indices)]


def check_gradients(case: Case, dtype: Any) -> None:
    arrays = _arrays(case, dtype)
    inputs = _grad_inputs(case, arrays)
    if not inputs:
        return
    run = _run_inputs(case, arrays)
    tensors = [_tensor(arrays[i]) for i in run]
    session = session_of(case, arrays)
    outputs, _ = call(session, tensors, bytes(len(run)), None)
    out_grads = _output_grads(case, outputs)
    exact = dtype is np.float64
    want = _torch_grads(case, arrays, inputs, out_grads) if case.torch else None
    if exact and (case.fd or (case.fd is None and not case.torch)):
        differences = _finite_differences(case, arrays, inputs, out_grads)
        for i in inputs if want else ():
            assert_close(want[i], differences[i], f"{case} torch's gradient of input {i} against differences", 1e-5)
        want = want or differences
    if want is None:  # float32 of a case without torch=: our float64 gradient was checked by differences
        wide = _arrays(case, np.float64)
        _, grads = call(session_of(case, wide), [_tensor(wide[i]) for i in run], bytes(i in inputs for i in run),
                        [None if g is None else g.double() for g in out_grads])
        want = {i: grads[run.index(i)].numpy() for i in inputs}
    tol = _tol(case, dtype) or (1e-5 if exact and not case.torch else 5e-5 if not exact else None)
    for subset in _subsets(inputs):
        _, grads = call(session, tensors, bytes(i in subset for i in run), out_grads)
        for position, i in enumerate(run):
            got = grads[position]
            if i not in subset:
                assert got is None, f"{case}: a gradient of input {i} that nobody asked for"
                continue
            got = np.zeros_like(arrays[i]) if got is None and not want[i].any() else got
            assert got is not None, f"{case}: no gradient of input {i} (asked for {subset})"
            assert_close(np.asarray(got), want[i].astype(arrays[i].dtype),
                         f"{case} gradient of input {i} of {subset} ({np.dtype(dtype)})", tol)


def _program_operators(case: Case, session: _C.Session) -> list[dict[str, Any]]:
    """Operators of the latest program that have a choice of kernels.
    Nodes that a pass makes are named <operator>_<id>.
    """
    used = {(case.op_type if node == "node" else node.rpartition("/")[2].rpartition("_")[0], kernel)
            for node, kernel, _ in session.kernels()}
    found = {pair: op for op in _C.operators() for pair in used if op["name"] == pair[0] and pair[1] in op["kernels"]}
    assert set(found) == used, f"{case}: of no operator: {used - set(found)}"
    return [op for op in found.values() if len(op["kernels"]) > 1]


def check_kernels(case: Case, dtype: Any) -> None:
    """Every other kernel of every operator in the program, forward and backward, gives what the first choice gave."""
    arrays = _arrays(case, dtype)
    run = _run_inputs(case, arrays)
    inputs = _grad_inputs(case, arrays)
    tensors = [_tensor(arrays[i]) for i in run]
    mask = bytes(i in inputs for i in run)

    def compute() -> tuple[_C.Session, list[np.ndarray | None]]:
        session = session_of(case, arrays)
        outputs, _ = call(session, tensors, bytes(len(run)), None)
        grads = _output_grads(case, outputs)
        outputs, in_grads = call(session, tensors, mask, grads)
        return session, [None if t is None else t.numpy() for t in (*outputs, *in_grads)]

    session, first = compute()
    for op in _program_operators(case, session):
        for kernel in op["kernels"]:
            _C.disable_kernels([f"{op['name']}:{k}" for k in op["kernels"] if k != kernel])
            try:
                _, other = compute()
            except _C.UnsupportedError:
                continue  # this kernel declines the case
            finally:
                _C.disable_kernels([])
            for k, (got, want) in enumerate(zip(other, first, strict=True)):
                assert (got is None) == (want is None)
                if got is not None:
                    assert_close(got, want, f"{case} result {k} with kernel {kernel}", _tol(case, dtype))


def failing_allocations(run: Callable[[], T], what: object = "", limit: int = 4000) -> T:
    """The k-th allocation of a run fails, for every k until it passes: MemoryError, nothing leaked, nothing broken.

    Returns:
        What the run gives without a failure.
    """
    live = _C.live_blocks()
    for countdown in range(limit):
        failed = True
        _C.fail_allocation_after(countdown)
        try:
            result = run()
            failed = False
        except MemoryError:
            pass
        finally:
            fired = _C.fail_allocation_after(-1)
        assert failed or not fired, f"{what}: allocation {countdown} failed unnoticed"
        if not failed:
            return result
        leaked = _C.live_blocks() - live
        assert not leaked, f"{what}: {leaked} blocks leaked after allocation {countdown} failed"
    raise AssertionError(f"{what}: more than {limit} allocations")


def check_allocation_failures(case: Case) -> None:
    """failing_allocations() of one case, forward and backward."""
    arrays = _arrays(case, case.dtypes[0])
    run = _run_inputs(case, arrays)
    inputs = _grad_inputs(case, arrays)
    model = model_of(case, arrays)
    tensors = [_tensor(arrays[i]) for i in run]
    mask = bytes(i in inputs for i in run)
    outputs, _ = call(_C.Session(model), tensors, bytes(len(run)), None)
    grads = _output_grads(case, outputs)
    del outputs
    live = _C.live_blocks()
    failing_allocations(lambda: call(_C.Session(model), tensors, mask, grads), case)
    assert _C.live_blocks() == live


def run_case(case: Case) -> None:
    """All checks; float cases once per dtype."""
    dtypes = case.dtypes if any(isinstance(i, R) and i.is_float for i in case.inputs) else case.dtypes[:1]
    for dtype in dtypes:
        check_forward(case, dtype)
        check_gradients(case, dtype)
        if case.kernels:
            check_kernels(case, dtype)
    if case.alloc:
        check_allocation_failures(case)


def expect_error(case: Case, error: type[Exception] | tuple[type[Exception], ...], match: str) -> None:
    """Building or running the case raises `error`, whose message has `match` in it."""
    try:
        arrays = _arrays(case, case.dtypes[0])
        run = _run_inputs(case, arrays)
        call(session_of(case, arrays), [_tensor(arrays[i]) for i in run], bytes(len(run)), None)
    except error as raised:
        assert match in str(raised), f"{case}: message {str(raised)!r} does not contain {match!r}"
        return
    raise AssertionError(f"{case}: no {error}")


ELEM = {torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.uint16: 4, torch.int16: 5, torch.int32: 6, torch.int64: 7,
        torch.bool: 9, torch.float16: 10, torch.float64: 11, torch.uint32: 12, torch.uint64: 13, torch.bfloat16: 16}


def chain(x, *nodes):
    """A session of y = ...(x), node by node: (operator, attributes)."""
    names = ["x", *(f"t{i}" for i in range(1, len(nodes))), "y"]
    made = [helper.make_node(op_type, [names[i]], [names[i + 1]], **attrs) for i, (op_type, attrs) in enumerate(nodes)]
    graph = helper.make_graph(made, "g", [helper.make_tensor_value_info("x", ELEM[x.dtype], x.shape)],
                              [onnx.ValueInfoProto(name="y")])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                        ir_version=10).SerializeToString())
