"""Writes in place, against eager: every in-place operator of OpInfo on every kind of memory, equal or in PyTorch by name.

    python tests/ortmodule/in_place.py 2> /dev/null            # all cases; prints what differs, and the totals
    python tests/ortmodule/in_place.py --kind core --part 0/8 # of one kind, every eighth group
    python tests/ortmodule/in_place.py --only mul_ --reasons  # cases by a part of their name; and why PyTorch ran them

A case writes into a tensor (TARGETS: whose memory it is, and which view of it), in a mode, and reads the memory
afterwards in one of several ways. Some cases are one module, so that they are exported once. Where the module is not
equal in the engine as a whole, its halves are judged apart. A case that eager refuses is left out. Needs expecttest, as
torch's lists of samples do. test_in_place_sweep.py runs a part of it, another one for each tree.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import linecache
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from in_place_cases import FUNCTIONS, KINDS, Case
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import onnxtrain
from onnxtrain import _report
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

GROUP = 16  # cases of one module
ROUTES = ("ORTModule", "compile")
DYNAMO = "Dynamo's"
OWNED = "Trying to resize storage that is not resizable"  # PyTorch's error, at a result in the engine's memory
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


# ---- a module of some cases ----


def lowered(tensor: Tensor) -> Tensor:
    """The same numbers by an operator that autocast runs in 16 bits."""
    return (tensor.reshape(-1, 1) @ torch.ones(1, 1, dtype=tensor.dtype)).reshape(tensor.shape)


class Group(nn.Module):
    """forward returns the results of each case; what is no state of the module is an argument."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.cases = len(cases)
        lines, calls, at = [], [], 0
        for k, each in enumerate(cases):
            given, names, mine = [], [], []
            for name, place, contents in each.tensors:
                if place in ("leaf", "argument"):
                    names.append(name)
                    given.append(f"args[{at}]")
                    at += 1
                    continue
                own = f"c{k}_{name}"
                self.place(own, place, contents.detach().clone())
                # An assignment to the name is one to the attribute, where the statement has `self.t`.
                mine.append((name, own))
            body = [f"{name} = self.{own}" for name, own in mine if name != "t"] + [
                _renamed(line, dict(mine)) for line in each.lines]
            results = [_renamed(text, dict(mine)) for text in each.results]
            if each.autocast:
                body = ["with torch.autocast('cpu', torch.bfloat16):", *("    " + line for line in body)]
            lines += [f"def case_{k}({', '.join(['self', *names])}):  # {each.name}", *("    " + line for line in body),
                      f"    return [{', '.join(results)}]"]
            calls.append(f"        case_{k}({', '.join(['self', *given])}),")
        lines += ["def forward(self, *args):", "    return [", *calls, "    ]"]
        self.source = "\n".join(lines) + "\n"
        path = f"<in place {id(self)}>"
        linecache.cache[path] = len(self.source), None, self.source.splitlines(True), path
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "lowered": lowered, **FUNCTIONS}
        exec(compile(self.source, path, "exec"), space)
        self.function = space["forward"]

    def place(self, name: str, place: str, contents: Tensor) -> None:
        if place == "buffer":
            self.register_buffer(name, contents)
        elif place == "attribute":
            setattr(self, name, contents)
        else:
            self.register_parameter(name, nn.Parameter(contents, requires_grad=place == "parameter"))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def _renamed(line: str, names: dict[str, str]) -> str:
    """`t` stands for an attribute, that may be assigned to."""
    own = names.get("t")
    if own is None:
        return line
    out, word = [], ""
    for char in line + " ":
        if char.isalnum() or char in "_":
            word += char
            continue
        if word == "t" and not (out and out[-1].endswith(".")):
            word = f"self.{own}"
        out += [word, char]
        word = ""
    return "".join(out)[:-1]


def seen(cases: list[Case], wrap: Callable[[nn.Module], Any]) -> list[dict[str, Any]]:
    """Runs the steps. Of each case: all that can be seen of it, by a name."""
    module = Group(cases)
    call = wrap(module)
    values: list[dict[str, Any]] = [{} for _ in cases]
    for step in range(max(each.steps for each in cases)):
        leaves, args, owners = [], [], []
        for k, each in enumerate(cases):
            for name, place, contents in each.tensors:
                if place in ("leaf", "argument"):
                    leaf = contents.detach().clone()
                    if leaf.is_floating_point():
                        leaf.mul_(1 + 0.125 * step)
                    leaf.requires_grad_(contents.requires_grad)
                    leaves.append(leaf)
                    owners.append((k, name))
                    args.append(leaf * 1 if place == "argument" and leaf.is_floating_point() else leaf)
        torch.manual_seed(step)
        module.zero_grad()
        with torch.no_grad() if cases[0].evaluated else contextlib.nullcontext():
            results = call(*args)
        total: Any = 0.0
        for k, found in enumerate(results):
            for i, result in enumerate(pytree.tree_leaves(found)):
                values[k][f"step {step} result {i}"] = _noted(result)
                if isinstance(result, Tensor) and result.requires_grad:
                    weights = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).reshape(result.shape)
                    total = total + (result.double() * weights).sum()
        for (k, name), arg in zip(owners, args):
            values[k][f"step {step} argument {name} afterwards"] = _noted(arg)
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        for (k, name), leaf in zip(owners, leaves):
            values[k][f"step {step} gradient of {name}"] = None if leaf.grad is None else _noted(leaf.grad)
        for k, each in enumerate(cases):
            for name, place, _ in each.tensors:
                if place not in ("leaf", "argument"):
                    state = getattr(module, f"c{k}_{name}")
                    values[k][f"step {step} {place} {name} afterwards"] = _noted(state)
                    values[k][f"step {step} gradient of {place} {name}"] = (
                        None if not state.is_leaf or state.grad is None else _noted(state.grad))
    return values


def _noted(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.dtype, tuple(value.shape), value.requires_grad, value.detach().clone()


def unlike(got: dict[str, Any], want: dict[str, Any], lower: bool) -> str:
    """The first thing of a case that is not eager's; empty where there is none."""
    for key, expected in want.items():
        found = got.get(key)
        if not isinstance(expected, tuple) or not isinstance(found, tuple):
            if expected is not found and expected != found:
                return f"{key}: {_short(found)} for {_short(expected)}"
            continue
        if found[:3] != expected[:3]:
            return f"{key}: {found[:3]} for {expected[:3]}"
        a, b = found[3].double(), expected[3].double()
        close = TOLERANCES.get(torch.bfloat16 if lower else expected[0], 0.0)
        scale = max(1.0, float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 1.0)
        if not torch.allclose(a, b, 0.0, close * scale, equal_nan=True):
            return f"{key}: {_short(found)} for {_short(expected)}"
    return ""


def _short(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return f"{[round(float(x), 4) for x in value[3].double().flatten()[:6]]}"


# ---- verdicts ----


@dataclasses.dataclass
class Verdict:
    """`kind`: equal; refused, where PyTorch ran it, or a part of it, with eager's results and a reason; Dynamo's, where
    torch.compile(backend="eager") is not eager either; or different.
    """

    case: str
    route: str
    kind: str
    text: str = ""


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "ORTModule": lambda module: ORTModule(module, DebugOptions(log_level=LogLevel.ERROR)),
    "compile": lambda module: torch.compile(module, backend="onnxtrain"),
    "eager": lambda module: torch.compile(module, backend="eager"),
}


def valid(cases: list[Case]) -> list[Case]:
    """Those that eager runs; with one step where it is the second that fails."""
    kept = []
    for each in cases:
        for steps in (2, 1):
            each.steps = steps
            try:
                seen([each], lambda module: module)
            except Exception:  # noqa: BLE001
                continue
            kept.append(each)
            break
    return kept


@functools.cache
def groups(kind: str) -> list[list[Case]]:
    """The cases of a kind, those of one module together: neighbours of one mode of autograd."""
    chosen = collections.defaultdict(list)
    for each in KINDS[kind]():
        chosen[each.evaluated].append(each)
    return [part[i:i + GROUP] for part in chosen.values() for i in range(0, len(part), GROUP)]


def judged(cases: list[Case], route: str) -> list[Verdict]:
    """Of cases that eager runs. Those that are not equal in the engine together are judged by halves."""
    by_steps = collections.defaultdict(list)
    for each in cases:
        by_steps[each.steps].append(each)
    if len(by_steps) > 1:
        return [verdict for part in by_steps.values() for verdict in judged(part, route)]
    differences, before, after = compared(cases, WRAPS[route])
    counts = {key: after[key] - before[key] for key in ("engine_steps", "fallback_steps")}
    whole = not counts["fallback_steps"] and not after["graph_breaks"]  # views alone need no engine
    if whole and not any(differences):
        return [Verdict(each.name, route, "equal") for each in cases]
    if len(cases) > 1:
        half = len(cases) // 2
        return judged(cases[:half], route) + judged(cases[half:], route)
    reason = " ".join("; ".join([*after["reasons"], *after["graph_breaks"]]).split())
    if not differences[0] and not reason:
        differences[0] = f"in PyTorch without a reason: {counts}"
    if not differences[0] or OWNED in differences[0]:
        return [Verdict(cases[0].name, route, "refused", differences[0] or reason)]
    if compared(cases, WRAPS["eager"])[0][0]:
        return [Verdict(cases[0].name, route, DYNAMO, f"{differences[0]} [{reason[:200]}]")]
    return [Verdict(cases[0].name, route, "different", f"{differences[0]} [{reason[:200]}]")]


def compared(cases: list[Case], wrap: Callable[[nn.Module], Any]) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """What differs of each case, and onnxtrain's counters before and after."""
    for texts in (_report.process.reasons, _report.process.graph_breaks):
        texts.clear()  # each is said once
    torch._dynamo.reset()
    want, before = seen(cases, lambda module: module), onnxtrain.stats()
    try:
        got = seen(cases, wrap)
        differences = [unlike(g, w, each.lower) for g, w, each in zip(got, want, cases)]
    except Exception as error:  # noqa: BLE001
        differences = [f"raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"] * len(cases)
    return differences, before, onnxtrain.stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--route", choices=ROUTES, action="append")
    parser.add_argument("--only", default="", help="a part of a case's name")
    parser.add_argument("--part", default="0/1", help="PLACE/COUNT: every COUNT-th group")
    parser.add_argument("--reasons", action="store_true", help="print why PyTorch ran a case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    part, parts = (int(x) for x in options.part.split("/"))
    totals, left_out = collections.Counter[str](), 0
    for kind in options.kind or KINDS:
        for i, group in enumerate(groups(kind)):
            chosen = [each for each in group if options.only in each.name]
            if i % parts != part or not chosen:
                continue
            runs = valid(chosen)
            left_out += len(chosen) - len(runs)
            for route in options.route or ROUTES:
                for verdict in judged(runs, route) if runs else ():
                    totals[verdict.kind] += 1
                    if verdict.kind == "different" or options.reasons and verdict.kind != "equal":
                        print(f"{verdict.kind}: {verdict.route}: {verdict.case}: {verdict.text}", flush=True)
    print(f"{sum(totals.values())} cases: {totals['equal']} equal, {totals['refused']} refused, "
          f"{totals[DYNAMO]} different with any backend of Dynamo's, {totals['different']} different; "
          f"eager raises in {left_out} others")
    return bool(totals["different"])


if __name__ == "__main__":
    sys.exit(main())
