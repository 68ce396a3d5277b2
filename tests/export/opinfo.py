"""torch's own samples of its operators (OpInfo) through ORTModule: equal to eager, or run in PyTorch by name.

    python tests/export/opinfo.py                    # every operator in float32; prints a table and what differs
    python tests/export/opinfo.py --dtype int64 lerp # operators by name, in another dtype
    python tests/export/opinfo.py --jobs 2 --samples 5 --out report.json

A sample is a module of one function. Its results (structure, dtypes, shapes, values, requires_grad) and the gradients
of its tensors are compared with eager's; an error input has to raise what eager raises. Needs the package expecttest,
which torch's lists of samples import. tests/export/test_opinfo.py runs a part of it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import logging
import multiprocessing
import signal
import sys
import time
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

import onnxtrain
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

#: Results are not determined by the arguments: memory as it was found.
UNDETERMINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
                "resize_as_"}
#: The engine draws from a stream of its own, where all others have eager's numbers for the same seed.
OWN_NUMBERS = {"nn.functional.dropout", "nn.functional.multi_head_attention_forward",
               "nn.functional.scaled_dot_product_attention"}
TOLERANCES = {torch.float64: (1e-6, 1e-7), torch.float32: (2e-4, 2e-5), torch.bfloat16: (3e-2, 3e-2),
              torch.float16: (3e-3, 3e-3)}


@dataclasses.dataclass
class Result:
    """Of one sample: "engine" (equal, and run there), "torch" (said so), "different", "skipped"."""

    name: str
    kind: str
    sample: int
    outcome: str
    text: str = ""
    seconds: float = 0.0


class Function(torch.nn.Module):
    """One call of an operator."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def copied(value: Any) -> Any:
    """Arguments of one's own: leaves that want a gradient where these do."""
    def copy(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return pytree.tree_map(copy, value)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def run(module: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor | None]]:
    """The result, and the gradients of the arguments' tensors of a sum with unlike weights."""
    args, kwargs = copied((args, kwargs))
    torch.manual_seed(0)
    result = module(*args, **kwargs)
    total: Any = 0.0
    for x in tensors(result):
        if x.requires_grad and x.is_floating_point():
            weights = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape).to(x.dtype)
            total = total + (x * weights).sum()
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    return result, [x.grad for x in tensors((args, kwargs))]


def unlike(got: Any, want: Any, values: bool) -> str | None:
    """What differs between two results; None where nothing does."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    if len(got_leaves) != len(want_leaves):
        return f"{len(got_leaves)} leaves for {len(want_leaves)}"
    for i, (g, w) in enumerate(zip(got_leaves, want_leaves)):
        if not isinstance(w, torch.Tensor):
            if type(g) is not type(w) or g != w and g == g:
                return f"result {i} is {g!r} for {w!r}"
            continue
        if not isinstance(g, torch.Tensor):
            return f"result {i} is {type(g).__name__} for a tensor"
        for what in ("dtype", "shape", "requires_grad"):
            if getattr(g, what) != getattr(w, what):
                return f"result {i}: {what} {getattr(g, what)} for {getattr(w, what)}"
        if values and (text := _unequal(g, w)):
            return f"result {i}: {text}"
    return None


def _unequal(got: torch.Tensor, want: torch.Tensor) -> str | None:
    rtol, atol = TOLERANCES.get(want.dtype.to_real() if want.is_complex() else want.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(got.detach(), want.detach(), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        first = " ".join(str(error).split())[:160]
        if want.numel() <= 12:
            first += f" {got.detach().flatten().tolist()} for {want.detach().flatten().tolist()}"
        return first[:300]
    return None


def unlike_gradients(got: list[Any], want: list[Any], values: bool) -> str | None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if (g is None) != (w is None):
            return f"gradient {i} is {'None' if g is None else 'there'}, eager's {'None' if w is None else 'there'}"
        if g is None:
            continue
        if g.dtype != w.dtype or g.shape != w.shape:
            return f"gradient {i}: {g.dtype} {tuple(g.shape)} for {w.dtype} {tuple(w.shape)}"
        if values and not g.is_sparse and (text := _unequal(g, w)):
            return f"gradient {i}: {text}"
    return None


def drawn(function: Any, args: Any, kwargs: Any) -> Any:
    """The result from other random numbers."""
    def draw(*a: Any, **k: Any) -> Any:
        torch.manual_seed(1)
        return function(*a, **k)

    return run(draw, args, kwargs)[0]


def wrapped(function: Any) -> ORTModule:
    return ORTModule(Function(function), DebugOptions(log_level=LogLevel.ERROR))


def outcome(model: ORTModule, text: str | None) -> tuple[str, str]:
    counts = onnxtrain.stats(model)
    if text is not None:
        return "different", f"{text} [{'torch' if counts['fallback_steps'] else 'engine'}]"
    if counts["fallback_steps"]:
        return ("torch", counts["reasons"][0]) if counts["reasons"] else ("different", "in PyTorch, without a reason")
    return "engine", ""


def compare(function: Any, args: Any, kwargs: Any) -> tuple[str, str]:
    """Runs one valid sample both ways."""
    try:
        want, want_grads = run(function, args, kwargs)
        values = function.name not in OWN_NUMBERS or unlike(drawn(function, args, kwargs), want, True) is None
    except Exception as error:  # noqa: BLE001
        return "skipped", f"eager raises {type(error).__name__}: {str(error)[:200]}"
    model = wrapped(function)
    try:
        got, got_grads = run(model, args, kwargs)
    except Exception as error:  # noqa: BLE001
        return outcome(model, f"raises {type(error).__name__}: {' '.join(str(error).split())[:250]}")
    text = unlike(got, want, values) or unlike_gradients(got_grads, want_grads, values)
    return outcome(model, None if text and values and nearer(function, args, kwargs, got, got_grads) else text)


def nearer(function: Any, args: Any, kwargs: Any, got: Any, got_grads: list[Any]) -> bool:
    """Whether float32 results are those of eager in float64, so that it is eager's float32 that is far off."""
    def wide(x: Any) -> Any:
        is_float = isinstance(x, torch.Tensor) and x.dtype == torch.float32
        return x.detach().double().requires_grad_(x.requires_grad) if is_float else x

    def narrow(x: Any) -> Any:
        return x.detach().float() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x

    try:
        true, true_grads = run(function, *pytree.tree_map(wide, (args, kwargs)))
    except Exception:  # noqa: BLE001
        return False
    true, true_grads = pytree.tree_map(narrow, (true, true_grads))
    return not unlike(pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, got), true, True) \
        and not unlike_gradients(got_grads, true_grads, True)


def compare_errors(function: Any, args: Any, kwargs: Any) -> tuple[str, str]:
    """Runs one error input both ways: the same exception, or no exception in either."""
    raised = []
    model = wrapped(function)
    for each in (function, model):
        try:
            torch.manual_seed(0)
            each(*copied(args), **copied(kwargs))
            raised.append(None)
        except Exception as error:  # noqa: BLE001
            raised.append(error)
    want, got = raised
    if want is None:
        return "skipped", "eager does not raise"
    if got is None:
        return "different", f"no error for {type(want).__name__}: {' '.join(str(want).split())[:160]}"
    if type(got) is not type(want) or str(got) != str(want):
        return "different", f"{type(got).__name__}: {str(got)[:120]} for {type(want).__name__}: {str(want)[:120]}"
    return "engine", ""


class Timeout(Exception):
    pass


def _alarm(*_: Any) -> None:
    raise Timeout


def spread(items: list[Any], count: int) -> list[tuple[int, Any]]:
    """`count` of them, the first and the last among them."""
    if len(items) <= count or not count:
        return list(enumerate(items))[:count]
    places = sorted({round(i * (len(items) - 1) / max(count - 1, 1)) for i in range(count)})
    return [(i, items[i]) for i in places]


def of_operator(op: Any, dtype: torch.dtype, samples: int, errors: int, limit: int = 90) -> list[Result]:
    """All results of one OpInfo."""
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    found: list[Result] = []
    plans: list[tuple[str, int, Any]] = []
    torch.manual_seed(0)
    try:
        if dtype in op.dtypes:
            grad = dtype.is_floating_point and op.supports_autograd
            given = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
            plans += [("sample", i, s) for i, s in spread(given, samples)]
        if errors and op.error_inputs_func is not None:
            plans += [("error", i, s.sample_input) for i, s in spread(list(op.error_inputs("cpu")), errors)]
    except Exception as error:  # noqa: BLE001
        return [Result(name, "sample", 0, "skipped", f"no samples: {type(error).__name__}: {str(error)[:100]}")]
    for kind, i, sample in plans:
        start = time.perf_counter()
        signal.alarm(limit)
        try:
            args, kwargs = (sample.input, *sample.args), sample.kwargs
            given = tensors((args, kwargs))
            if "out" in kwargs or not given or any(x.layout != torch.strided or x.is_complex() for x in given):
                continue
            verdict = compare(op, args, kwargs) if kind == "sample" else compare_errors(op, args, kwargs)
        except Timeout:
            verdict = ("different", f"more than {limit} s")
        except Exception as error:  # noqa: BLE001
            verdict = ("different", f"the comparison raises {type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.alarm(0)
        found.append(Result(name, kind, i, *verdict, time.perf_counter() - start))
    return found


def operators(names: list[str]) -> list[Any]:
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db

    # Samples of what draws numbers set a seed within the function, which is then left to PyTorch.
    common_methods_invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    for op in op_db:
        # PyTorch Geometric, once imported, has functions of its own in the place of torch.index_select and torch.select.
        if getattr(op.op, "__module__", None) and op.op.__module__.startswith("torch_geometric"):
            op.op = getattr(torch._C._VariableFunctions, op.name)
    chosen = [op for op in op_db if op.name not in UNDETERMINED and not op.name.startswith(("sparse.", "jiterator"))]
    return [op for op in chosen if not names or op.name in names or f"{op.name}.{op.variant_test_name}" in names]


def _work(job: tuple[str, int, str, int, int]) -> list[dict[str, Any]]:
    name, index, dtype, samples, errors = job
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _alarm)
    torch.set_num_threads(1)
    op = operators([])[index]
    return [dataclasses.asdict(r) for r in of_operator(op, getattr(torch, dtype), samples, errors)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--errors", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--out")
    options = parser.parse_args()
    everything, wanted = operators([]), {id(op) for op in operators(options.names)}
    part, parts = (int(x) for x in options.shard.split("/"))
    jobs = [(op.name, i, options.dtype, options.samples, options.errors) for i, op in enumerate(everything)
            if id(op) in wanted][part::parts]
    results: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=60) as pool:
        for found in pool.imap_unordered(_work, jobs):
            results += found
            for r in found:
                if r["outcome"] == "different":
                    print(f"{r['name']} {r['kind']} {r['sample']}: {r['text']}", flush=True)
            if options.out:
                with open(options.out, "w") as file:
                    json.dump(results, file)
    report(results)
    return any(r["outcome"] == "different" for r in results)


def report(results: list[dict[str, Any]]) -> None:
    by_name: dict[str, set[str]] = collections.defaultdict(set)
    for r in results:
        by_name[r["name"]].add(r["outcome"])
    worst = collections.Counter(next(o for o in ("different", "torch", "engine", "skipped") if o in outcomes)
                                for outcomes in by_name.values())
    print(f"{len(by_name)} operators: {worst['engine']} right in the engine, {worst['torch']} at times in PyTorch by "
          f"name, {worst['different']} different, {worst['skipped']} without a sample; {len(results)} samples: "
          f"{dict(collections.Counter(r['outcome'] for r in results))}")


if __name__ == "__main__":
    sys.exit(main())
