"""The gradient cases of all test files here, and further ones made of them: empty, rank 0, broadcast,
and one value given twice; and their check against torch, of which a run takes a sample.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import os
import random
import re
from pathlib import Path
from typing import Iterator, Sequence

import numpy as np
import pytest
from harness import (
    C,
    Case,
    R,
    V,
    _arrays,
    _grad_inputs,
    _is_const,
    _run_inputs,
    _tensor,
    _tol,
    _torch_outputs,
    assert_close,
    call,
    check_gradients,
    session_of,
)
from seeds import fixed_seed

from onnxtrain import _C

SHAPES = [(), (1,), (4,), (3, 1), (3, 4), (1, 4), (2, 1, 4), (2, 3, 1), (2, 3, 4), (0, 1), (2, 0, 1), (0,)]
#: Operators whose inputs broadcast against each other.
BROADCAST = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Sum", "Mean", "Where", "PRelu", "BitShift")

SEED = fixed_seed()
SLOW = os.environ.get("ONNXTRAIN_SLOW") == "1"

# What shapes that torch's function accepts may be refused with: the specification asks for more than the function does.
REFUSALS = [re.compile(p) for p in (
    r"axis -?\d+ is out of range for rank 0", r"axis -?\d+ is out of range: B has rank \d and A has rank \d",
    r"must have \d+ entries of", r"does not fit", r"do not fit", r"differ in shape",
    r"the batch sizes of Q, K and V differ", r"broadcast is 0", r"would be broadcast",
    r"does not broadcast to the input's", r"must be a vector",
    r"input \d is .*\], expected", r"updates are .*(the data|expected)", r"hidden_size is \d+, R has 0",
    r"kernel_shape differs from the shape of the weight", r"the time axis has 0",
    r"axis \d has 0 entries, not 1", r"must have rank 3",
    r"rotary_embedding_dim is \d+, an even number of at most 0 is expected",
    r"must have one entry per head", r"past_state must have the shape", r"update is .*the cache",
    r"\d+ repeats, the input has rank 0", r"\d+ entries for 0 axes",
    r"the input has rank 0, expected", r"axis \d of the input is empty, but the result would have \d",
    # Means, norms and windows of nothing: PyTorch gives NaN, or refuses too.
    r"planes of the input are empty", r"kernel dim \d is 0", r"has 0 cells, the kernel \d",
    r"end \d+ of group 0 is outside 0 to 0", r"0 matrices, \d+ ends",  # groups of rows or of matrices that are gone
    r"Expand 'node': shapes .* do not broadcast",  # to a constant shape, where the case's function takes the input's
)]
# Where torch's result for empty operands has a wrong shape or no gradient (torch 2.13): (operator, part of its
# variant's name).
TORCH_IS_WRONG = [("Conv", "empty"), ("SpaceToDepth", "empty"), ("DepthToSpace", "empty"),
                  ("AdaptiveAveragePool", "empty"),
                  # Its gradient of the scale is NaN, that of InstanceNormalization 0.
                  *(("GroupNormalization", f"empty_0.{k}") for k in (2, 3, 4))]
# The case's function does not broadcast what the operator does.
FUNCTION_DIFFERS = [("Expand", "scalar"), ("Sub", "scalar")]


@functools.cache
def gradient_cases() -> tuple[tuple[str, Case], ...]:
    """(name of the file, case) of every case with a gradient and torch's function, cases of errors left out."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if "CASES" not in (text := path.read_text()) and "Case(" not in text:
            continue
        module = importlib.import_module(path.stem)
        for name, value in vars(module).items():
            if name != "ERRORS" and isinstance(value, list):
                found += [(path.stem[5:], case) for case in value if isinstance(case, Case) and case.torch and
                          _grad_inputs(case, _arrays(case, case.dtypes[-1]))]
    return tuple(found)


def descriptor(case: Case) -> tuple[str, str, int]:
    """(domain, name, since) of what the registry has for the operator of the case."""
    return max((op["domain"], op["name"], op["since"]) for op in _C.operators()
               if (op["domain"], op["name"]) == (case.domain, case.op_type)
               and (case.domain or op["since"] <= case.opset))


def with_arrays(case: Case, arrays: Sequence[np.ndarray | None], kind: str) -> Case:
    """The case with these contents; inputs that were constants stay so."""
    inputs = []
    for i, (spec, array) in enumerate(zip(case.inputs, arrays, strict=True)):
        floats = "float" if isinstance(spec, R) and spec.is_float else None if array is None else array.dtype
        inputs.append(None if array is None else C(array, floats) if _is_const(case, i) else V(array, floats))
    return dataclasses.replace(case, inputs=inputs, name=f"{case.name}-{kind}")


def defined(case: Case) -> bool:
    """Whether torch computes the case."""
    try:
        _torch_outputs(case, [None if a is None else _tensor(a) for a in _arrays(case, np.float64)])
    except Exception:  # whatever an unfit shape raises, in torch or in the case's own formula
        return False
    return True


def emptied(arrays: Sequence[np.ndarray | None], marked: set[tuple[int, int]]) -> list[np.ndarray | None]:
    """The arrays with the (array, dim) pairs of `marked` cut to 0."""
    return [a if a is None else a[tuple(slice(0) if (i, k) in marked else slice(None) for k in range(a.ndim))]
            for i, a in enumerate(arrays)]


def empty(case: Case) -> Iterator[Case]:
    """Each dim of each float input as 0, together with as few dims of that size elsewhere as torch accepts."""
    arrays = _arrays(case, np.float64)
    axes = [(i, k) for i in _run_inputs(case, arrays) for k in range(arrays[i].ndim)]
    seen: set[frozenset] = set()
    for i, k in axes:
        n, rank = arrays[i].shape[k], arrays[i].ndim
        if n == 0 or not arrays[i].dtype.kind == "f":
            continue
        same = {(j, m) for j, m in axes if arrays[j].shape[m] == n}
        for marked in ({(i, k)}, {(j, m) for j, m in same if m == k},
                       {(j, m) for j, m in same if m - arrays[j].ndim == k - rank}, same):
            marked = marked | {(i, k)}
            made = with_arrays(case, emptied(arrays, marked), "empty" + "".join(f"_{j}.{m}" for j, m in sorted(marked)))
            if defined(made):
                if frozenset(marked) not in seen:
                    seen.add(frozenset(marked))
                    yield made
                break


def scalar(case: Case) -> Iterator[Case]:
    """Each float input, and all of them, of rank 0."""
    arrays = _arrays(case, np.float64)
    floats = [i for i in _run_inputs(case, arrays) if arrays[i].dtype.kind == "f" and arrays[i].size and arrays[i].ndim]
    for chosen in [*([tuple(floats)] if len(floats) > 1 else []), *((i,) for i in floats)]:
        made = with_arrays(case, [a.reshape(-1)[0] * np.ones(()) if i in chosen else a for i, a in enumerate(arrays)],
                           f"scalar{chosen}")
        if defined(made):
            yield made


def plain(case: Case) -> tuple:
    """What cases have in common that differ in shapes alone."""
    return descriptor(case), str(case.attrs), case.n_outputs, tuple(i and isinstance(i, R) and (i.const, i.is_float)
                                                                    for i in case.inputs)


def broadcast(case: Case) -> Iterator[Case]:
    """Every combination of shapes that broadcast, for operators that do."""
    arrays = _arrays(case, np.float64)
    if (case.op_type not in BROADCAST or case.opset < 7 or any(a is None or not a.size for a in arrays)
        or len(arrays) > 3):
        return
    varied = [i for i in range(len(arrays)) if not _is_const(case, i)]
    for shapes in itertools.product(SHAPES, repeat=len(varied)):
        made = list(arrays)
        for i, shape in zip(varied, shapes):
            made[i] = np.resize(arrays[i], shape).astype(arrays[i].dtype)
        made_case = with_arrays(case, made, f"broadcast{shapes}")
        if defined(made_case):
            yield made_case


def repeated(case: Case) -> Iterator[tuple[Case, int, int]]:
    """(case, i, j): the contents of input i as input j as well, where torch accepts them there."""
    arrays = _arrays(case, np.float64)
    run = [i for i in _run_inputs(case, arrays) if arrays[i].dtype.kind == "f"]
    for i, j in itertools.permutations(run, 2):
        if arrays[i].ndim != arrays[j].ndim or arrays[i].dtype != arrays[j].dtype:
            continue  # the rank decides what attributes say
        made = with_arrays(case, [arrays[i] if k == j else a for k, a in enumerate(arrays)], f"repeated{i}_{j}")
        if defined(made):
            yield made, i, j


def every_case() -> list[tuple[str, Case]]:
    """(name of the file, case) of every case in the test files here, those without gradient included."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if "Case(" in path.read_text():
            module = importlib.import_module(path.stem)
            for name, value in vars(module).items():
                if name != "ERRORS" and isinstance(value, list):
                    found += [(path.stem[5:], case) for case in value if isinstance(case, Case)]
    return found


def excused(variant) -> bool:
    return any(variant.op_type == op and part in variant.name for op, part in TORCH_IS_WRONG + FUNCTION_DIFFERS)


def check(variant) -> None:
    """Forward and gradients against torch; or a refusal that stands in REFUSALS."""
    dtype = variant.dtypes[-1]
    arrays = _arrays(variant, dtype)
    run = _run_inputs(variant, arrays)
    try:
        outputs, _ = call(session_of(variant, arrays), [_tensor(arrays[i]) for i in run], bytes(len(run)), None)
    except (ValueError, IndexError, _C.UnsupportedError) as error:
        assert any(p.search(str(error)) for p in REFUSALS), f"{variant}: refused with {error}"
        return
    wanted = _torch_outputs(variant, [None if a is None else _tensor(a) for a in arrays])
    if any(g.shape != w.shape for g, w in zip(outputs, wanted)):
        shapes, theirs = [tuple(o.shape) for o in outputs], [tuple(w.shape) for w in wanted]
        assert excused(variant), f"{variant}: shapes {shapes}, torch's {theirs}"
        return
    for k, (got, want) in enumerate(zip(outputs, wanted)):
        assert_close(got.numpy(), want.detach().to(got.dtype).numpy(), f"{variant} output {k}", _tol(variant, dtype))
    if (any(variant.op_type == op and part in variant.name for op, part in TORCH_IS_WRONG)
        and not all(o.numel() for o in outputs)):
        return  # nor can torch differentiate these
    check_gradients(variant, dtype)


def sampled(cases, count):
    chosen = cases if SLOW else random.Random(SEED).sample(cases, min(count, len(cases)))
    return [pytest.param(case, id=f"seed{SEED}-{file}-{case}") for file, case in chosen]


def one_of_each(cases):
    seen = {}
    for file, case in cases:
        seen.setdefault(plain(case), (file, case))
    return list(seen.values())
