"""Modules of two features each, eager against wrapped: what differs without a word.

    python tests/capture/pairs.py --wrap dynamo|eager|ortmodule [--seed 0] [--count 1000]
    python tests/capture/pairs.py --count 10000 --jobs 2    # in two processes; prints what differs, and the table
    python tests/capture/pairs.py --count 10000 --jobs 2 --log FILE    # called again, goes on behind what FILE has
    python tests/capture/pairs.py --seed N --count 1        # with the module's source
    python tests/capture/pairs.py --with "state: slots"     # every pair of one feature
    python tests/capture/pairs.py --more --count 100        # those of more.txt with others

features.txt holds the features. A seed names the pair, which of the two surrounds the other, and the steps between
which something changes. After each step outputs, gradients, buffers, all Python state that the module leads to, random
streams and exceptions are compared.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import inspect
import itertools
import json
import linecache
import logging
import os
import random
import re
import subprocess
import sys
import textwrap
import time
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle

import onnxtrain
from onnxtrain import UnsupportedError, dynamo
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._fallback import ORTModuleFallbackException

Tensor = torch.Tensor
SECTIONS = ("module", "init", "class", "params", "forward", "result", "prepare", "around", "change", "after", "undo",
            "known")
GIVEN = dict(collections=collections, contextlib=contextlib, contextvars=contextvars, dataclasses=dataclasses,
             enum=enum, functools=functools, itertools=itertools, numpy=numpy, os=os, random=random, torch=torch,
             types=types, typing=typing, nn=nn, F=F, copy=copy)
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest element, at least of 1
BLOCK = 200  # pairs that one process of many runs
WRITTEN = "modified by an inplace operation"  # eager cannot go back; within a graph there is nothing to go back over


# ---- features, and a module of two ----


def read(text: str) -> dict[str, dict[str, str]]:
    """The sections of each feature, by its name."""
    features: dict[str, dict[str, str]] = {}
    for part in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition("\n")
        section: dict[str, str] = {}
        for key, body in re.findall(r"^(\w+):((?:.*\n(?:[ \t].*\n)*))", rest, flags=re.MULTILINE):
            if key not in SECTIONS or name in features:
                raise ValueError(f"{name}: {key}")
            section[key] = textwrap.dedent(body).strip()
        features[name] = section
    return features


FEATURES = read((Path(__file__).parent / "features.txt").read_text())
NAMES = list(FEATURES)
MORE = read((Path(__file__).parent / "more.txt").read_text())
FEATURES |= MORE
KNOWN = {name for name, sections in FEATURES.items() if "known" in sections}  # different with any backend of Dynamo's


def pair(seed: int) -> tuple[str, str]:
    """The features of a seed: len(NAMES) / 2 seeds in a row have each of them once (a round-robin tournament)."""
    count = len(NAMES)  # even
    turn, place = divmod(seed, count // 2)
    turn %= count - 1
    a = count - 1 if place == 0 else (turn - place) % (count - 1)
    b = turn if place == 0 else (turn + place) % (count - 1)
    return NAMES[a], NAMES[b]


@dataclasses.dataclass
class Plan:
    """All that a seed draws."""

    seed: int
    names: tuple[str, str]
    parts: list[dict[str, str]]
    steps: int
    changes: list[list[int]]  # of each feature: the steps before which it changes
    wants: bool  # whether the argument wants a gradient
    through: bool  # whether changes are made through the wrapper
    source: str

    @property
    def least(self) -> float:
        """16-bit types lose this much, and float32 what is compared as float64 later."""
        texts = [text for part in self.parts for text in part.values()]
        if any("bfloat16" in text for text in texts):
            return TOLERANCES[torch.bfloat16]
        return TOLERANCES[torch.float32] if any(".double()" in text for text in texts) else 0.0

    @property
    def apart(self) -> tuple[str, ...]:
        """What is not compared: after a dropout the engine's place in torch's stream is another (docs/ortmodule.md)."""
        return ("streams",) if "random: dropout around a half" in self.names else ()

    @property
    def draws_twice(self) -> bool:
        """Whether other numbers may be drawn after a dropout."""
        return bool(self.apart) and all(name.startswith("random: ") for name in self.names)


def planned(seed: int, names: tuple[str, str] | None = None) -> Plan:
    rng = random.Random(seed)
    names = names or pair(seed)
    parts = [{key: text.replace("$", prefix) for key, text in FEATURES[name].items()}
             for name, prefix in zip(names, ("a_", "b_"))]
    steps = rng.randint(4, 6)
    changes = [sorted(rng.sample(range(1, steps), rng.choice((1, 1, 2)))) for _ in parts]
    inner, outer = rng.sample(parts, 2)
    if "{body}" in inner.get("forward", "") and "{body}" not in outer.get("forward", ""):
        inner, outer = outer, inner
    return Plan(seed, names, parts, steps, changes, rng.random() < 0.4, rng.random() < 0.25,
                _source(parts, outer.get("forward", ""), inner.get("forward", "")))


def _placed(outer: str, inner: str) -> str:
    """The forwards of two features: one in the place that the other has for it, or one after the other."""
    inner = inner.replace("{body}", "pass")
    if "{body}" not in outer:
        return f"{inner}\n{outer}"
    return re.sub(r"^( *)\{body\}$", lambda found: textwrap.indent(inner or "pass", found[1]), outer,
                  flags=re.MULTILINE)


def _source(parts: list[dict[str, str]], outer: str, inner: str) -> str:
    def both(section: str, depth: int) -> str:
        return textwrap.indent("\n".join(part[section] for part in parts if section in part), " " * depth)

    params = sorted((part["params"] for part in parts if "params" in part), key=lambda text: text.startswith("*"))
    if len(params) == 2 and params[1].startswith("*"):
        params = [params[1], params[0]]
    params.sort(key=lambda text: "=" in text)
    lines = [both("module", 0), "class Pair(nn.Module):", both("class", 4), "    def __init__(self):",
             "        super().__init__()", "        self.fc = nn.Linear(4, 4)", both("init", 8),
             f"    def forward({', '.join(['self', 'x', *params])}):", "        h = self.fc(x)",
             textwrap.indent(_placed(outer, inner), " " * 8), "        result = h", both("result", 8),
             "        return result"]
    return "\n".join(line for line in "\n".join(lines).split("\n") if line.strip()) + "\n"


# ---- what a user can see ----


class Seen:
    """Values as trees of plain ones, which are compared afterwards."""

    def __init__(self) -> None:
        self.met: dict[int, int] = {}
        self.kept: list[Any] = []

    def __call__(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.Size)):
            return type(value).__name__, value
        if isinstance(value, (enum.Enum, type)):
            return type(value).__name__, str(value)
        if isinstance(value, (types.BuiltinFunctionType, types.ModuleType, RemovableHandle)):
            return "name", getattr(value, "__name__", "")
        if id(value) in self.met:
            return "again", self.met[id(value)]
        self.met[id(value)] = len(self.met)
        self.kept.append(value)
        return type(value).__name__, self.inside(value)

    def inside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensor_seen(value)
        if isinstance(value, numpy.ndarray):
            return value.dtype.name, value.copy().tolist()
        if isinstance(value, dict):
            return [(repr(key), self(item)) for key, item in value.items()]
        if isinstance(value, (list, tuple, collections.deque)):
            return getattr(value, "maxlen", None), [self(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        if isinstance(value, random.Random):
            return hash(value.getstate())
        if isinstance(value, numpy.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, torch.Generator):
            return tensor_seen(value.get_state())
        if isinstance(value, contextvars.ContextVar):
            return self(value.get(None))
        if isinstance(value, itertools.count):
            return repr(value)
        if isinstance(value, types.GeneratorType):
            return {name: self(local) for name, local in inspect.getgeneratorlocals(value).items() if name != ".0"}
        if isinstance(value, functools.partial):
            return self(value.func), self(value.args), self(value.keywords)
        if isinstance(value, types.MethodType):
            return self(value.__self__), value.__func__.__name__
        if isinstance(value, types.FunctionType):
            cells = [self(cell.cell_contents) for cell in value.__closure__ or () if _is_filled(cell)]
            return value.__name__, cells, self(value.__defaults__)
        if isinstance(value, nn.Module):
            return self.module(value)
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        return {name: self(getattr(value, name)) for name in [*getattr(value, "__dict__", ()), *slots]
                if hasattr(value, name) and not name.startswith("__")}

    def module(self, module: nn.Module) -> Any:
        values = {}
        for name, value in vars(module).items():
            if name in ("_is_torch_compile", "_compile_kwargs"):
                continue  # torch.compile's own, and Lightning's note of its arguments
            if "_hooks" in name:  # numbered by a counter of the process
                values[name] = [self(hook) for hook in value.values()]
            else:
                values[name] = self(value)
        return values


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def tensor_seen(tensor: Tensor) -> Any:
    """A copy, and what torch says of a tensor."""
    if type(tensor).__name__ == "FakeTensor":
        return "fake"
    return (tensor.dtype, tuple(tensor.shape), tensor.requires_grad, tensor.is_inference(),
            tensor.detach().clone().contiguous())


def leaves(value: Any) -> Iterator[Tensor]:
    """Tensors of a result, in containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif dataclasses.is_dataclass(value):
        yield from leaves(vars(value))


def difference(a: Any, b: Any, path: str, least: float = 0.0) -> str | None:
    """Where two trees differ first, and how; floats may be off by `least` of the largest."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        close = max(least, TOLERANCES.get(a.dtype, 0.0))
        scale = max(1.0, float(a[a.isfinite()].abs().max())) if a.isfinite().any() and close else 1.0
        if a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 0.0, close * scale, equal_nan=True):
            return None
        return f"{path}: {_short(b)}, expected {_short(a)}"
    if type(a) is not type(b):
        return f"{path}: {_short(b)}, expected {_short(a)}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{path}: {list(b)}, expected {list(a)}"
        return next((d for key in a if (d := difference(a[key], b[key], f"{path}.{key}", least))), None)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        if len(a) == 5 and isinstance(a[-1], Tensor) and len(b) == 5 and a[:-1] != b[:-1]:
            return f"{path}: {_short(b)}, expected {_short(a)}"
        if len(a) != len(b):
            return f"{path}: {_short(b)}, expected {_short(a)}"
        return next((d for i, (v, w) in enumerate(zip(a, b)) if (d := difference(v, w, f"{path}[{i}]", least))), None)
    same = repr(a) == repr(b) or isinstance(a, float) and abs(a - b) <= 1e-5 * max(1, abs(a))
    return None if same else f"{path}: {b}, expected {a}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 150 else f"{text[:150]}..."


# ---- steps ----


@dataclasses.dataclass
class Step:
    """Of one step: what was raised, and what is seen after it."""

    error: type[Exception] | None = None
    message: str = ""
    seen: dict[str, Any] = dataclasses.field(default_factory=dict)


def trained(plan: Plan, wrap: Callable[[nn.Module], Callable[..., Any]]) -> list[Step]:
    """The steps of a plan; what is seen after each."""
    name = f"<pair {plan.seed} {wrap.__name__} {time.monotonic_ns()}>"
    linecache.cache[name] = len(plan.source), None, plan.source.splitlines(True), name
    sys.modules["pair"] = types.ModuleType("pair")  # dataclasses look their module up
    space = vars(sys.modules["pair"])
    space.update(GIVEN, leaves=leaves)
    torch.manual_seed(plan.seed)
    try:
        exec(compile(plan.source, name, "exec"), space)
        module = space["Pair"]()
        call = wrap(module)

        def again(x: Tensor) -> Any:
            result = call(x, *space["args"], **space["kw"])
            return sum(t.float().sum() for t in leaves(result) if t.is_floating_point())

        space.update(module=module, call=call, m=call if plan.through else module, again=again)
        return [_step(plan, step, module, call, space) for step in range(plan.steps)]
    finally:
        for part in plan.parts:
            exec(part.get("undo", ""), space)
        del linecache.cache[name], sys.modules["pair"]


def _step(plan: Plan, step: int, module: nn.Module, call: Callable[..., Any], space: dict[str, Any]) -> Step:
    done, outcome = [sum(at <= step for at in changes) for changes in plan.changes], Step()

    def user(section: str) -> None:
        for part, k in zip(plan.parts, done):
            if section in part:
                space.update(k=k, v=0.5 + 0.25 * k)
                exec(part[section], space)

    torch.manual_seed(100 + step), random.seed(step), numpy.random.seed(step)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float32) + 0.2
    space.update(x=x.requires_grad_(plan.wants), args=(), kw={}, aux=[], tensors={}, keep_gradients=False, result=None)
    try:
        for part, k, changes in zip(plan.parts, done, plan.changes):
            if step in changes and "change" in part:
                space.update(k=k, v=0.5 + 0.25 * k)
                exec(part["change"], space)
        user("prepare")
        with contextlib.ExitStack() as stack:
            for part, k in zip(plan.parts, done):
                if "around" in part:
                    space["k"] = k
                    stack.enter_context(eval(part["around"], space))
            space["result"] = call(space["x"], *space["args"], **space["kw"])
        user("after")
        outcome.seen["result"] = Seen()(space["result"])
        outcome.seen["memory"] = _shared(space, module)
        _backward(space)
    except Exception as error:  # noqa: BLE001  compared with what eager raises
        outcome.error, outcome.message = type(error), f"{error} [{_raised_at(error)}]"
    if not outcome.error:  # what is left where a step stopped is nobody's promise
        outcome.seen["streams"] = [torch.rand(2), random.random(), numpy.random.rand()]
    outcome.seen["arguments"] = Seen()([space["x"], space["x"].grad if space["x"].is_leaf else None,
                                        space["args"], {k: v for k, v in space["kw"].items() if not callable(v)}])
    outcome.seen["gradients"] = {name: None if p.grad is None else tensor_seen(p.grad)
                                 for name, p in _weights(space, module)}
    with torch.no_grad():
        for _, p in _weights(space, module):
            if p.grad is not None:
                p.sub_(0.05 * p.grad.clamp(-1, 1))
                p.grad = p.grad if space["keep_gradients"] else None
    outcome.seen["module"] = Seen()([module, {name: value for name, value in space.items() if name[:2] in ("a_", "b_")},
                                     {name: value for name, value in vars(type(module)).items()
                                      if name[:2] in ("a_", "b_") and not isinstance(value, (property, type(len)))}])
    return outcome


def _raised_at(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"


def _weights(space: dict[str, Any], module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *space["tensors"].items()]


def _backward(space: dict[str, Any]) -> None:
    total = None
    for tensor in [*leaves(space["result"]), *space["aux"]]:
        if tensor.requires_grad and tensor.is_floating_point():
            weight = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
            part = (tensor.double() * weight).sum()
            total = part if total is None else total + part
    if total is not None:
        total.backward()


def _shared(space: dict[str, Any], module: nn.Module) -> list[Any]:
    """Of each tensor among the results: the arguments, weights and earlier results that share its memory, or are it."""
    known: list[tuple[str, Tensor]] = [("x", space["x"]), *((f"argument {i}", t) for i, t in enumerate(leaves(
        [space["args"], space["kw"]]))), *module.named_parameters(), *module.named_buffers()]
    found = []
    for i, tensor in enumerate(leaves(space["result"])):
        found.append([(name, tensor is other) for name, other in known if tensor.numel() and other.numel()
                      and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()])
        known.append((f"result {i}", tensor))
    return found


# ---- verdicts ----


def dynamo_wrap(module: nn.Module) -> Callable[..., Any]:
    return torch.compile(module, backend=dynamo.backend)


def eager_wrap(module: nn.Module) -> Callable[..., Any]:
    return torch.compile(module, backend="eager")


WRAPS = {"dynamo": dynamo_wrap, "eager": eager_wrap, "ortmodule": ORTModule}
REFUSALS = UnsupportedError, ORTModuleFallbackException


class _Reasons(logging.Handler):
    """What onnxtrain has said at WARNING."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@dataclasses.dataclass
class Verdict:
    """`kind` is equal, in PyTorch (which ran a step), refused (by an exception) or different; `text` says why, or what."""

    kind: str
    text: str = ""
    raised: bool = False  # whether eager raised as well
    engine_steps: int = 0


def _itself(module: nn.Module) -> nn.Module:
    return module


def judged(plan: Plan, wrap: str) -> Verdict:
    """Eager against one wrapper."""
    handler, logger = _Reasons(), logging.getLogger("onnxtrain")
    level, spreads = logger.level, logger.propagate
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, before = trained(plan, _itself), onnxtrain.stats()
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        try:
            wrapped = trained(plan, WRAPS[wrap])
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = spreads
            torch._dynamo.reset()
    after = onnxtrain.stats()
    steps = after["engine_steps"] - before["engine_steps"]
    raised = any(step.error for step in eager)
    for i, (a, b) in enumerate(zip(eager, wrapped, strict=True)):
        if a.error is None and b.error is not None and issubclass(b.error, REFUSALS):
            return Verdict("refused", f"step {i}: {_raised(b)}", raised, steps)
        if a.error and WRITTEN in a.message and b.error is None:
            break
        if not issubclass(b.error or type(None), a.error or type(None)):
            return Verdict("different", f"step {i}: {_raised(b)}, expected {_raised(a)}", raised, steps)
        # Where sums of gradients cancel, as at a bias in front of a BatchNorm, the error is that of what is added.
        largest = max([1.0, *(float(t.abs().max()) for t in leaves(list(a.seen.get("gradients", {}).values()))
                              if t.numel() and t.is_floating_point() and bool(t.isfinite().all()))])
        found = next((d for key in a.seen if key not in plan.apart and (d := difference(
            a.seen[key], b.seen.get(key), key, plan.least * (largest if key == "gradients" else 1.0)))), None)
        if found:
            return Verdict("different", f"step {i}: {found}", raised, steps)
    fallbacks = after["fallback_steps"] - before["fallback_steps"]
    if fallbacks:
        return Verdict("in PyTorch", f"{fallbacks} steps: {'; '.join(dict.fromkeys(handler.texts))}", raised, steps)
    return Verdict("equal", "", raised, steps)


def _raised(step: Step) -> str:
    return "no exception" if step.error is None else f"{step.error.__name__} ({' '.join(step.message.split())[:300]})"


def in_processes(args: argparse.Namespace) -> int:
    """Blocks of seeds in processes of their own, so that none grows; a block that dies is said and fails the run. The
    log has a line for each block that ended: those are not run again.
    """
    start, table, failed = time.monotonic(), collections.Counter[str](), False
    command = [sys.executable, "-W", "ignore", __file__, "--wrap", args.wrap, *(["--more"] if args.more else [])]
    log = Path(args.log) if args.log else None
    ended = {tuple(block["of"]): block for block in map(json.loads, log.read_text().splitlines())} \
        if log is not None and log.exists() else {}

    def run(seed: int) -> dict[str, Any]:
        count = min(BLOCK, args.seed + args.count - seed)
        of = args.wrap, args.more, seed, count
        if of in ended:
            return ended[of]
        done = subprocess.run([*command, "--seed", str(seed), "--count", str(count)], capture_output=True, text=True)
        lines, _, counts = done.stdout.partition(" pairs by ")
        return {"of": of, "code": done.returncode, "error": "" if counts else done.stderr[-2000:],
                "different": re.findall(r"^seed \d+: different: .*", lines, re.MULTILINE),
                "counts": {found[1]: int(found[2]) for line in counts.split("\n")[1:]
                           if (found := re.fullmatch(r"(.*\S)\s+(\d+)", line))}}

    seeds = range(args.seed, args.seed + args.count, BLOCK)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for seed, block in zip(seeds, pool.map(run, seeds)):
            for line in block["different"]:
                print(line, flush=True)
            if not block["counts"]:
                print(f"the block of seed {seed} ended with {block['code']}: {block['error']}", flush=True)
            elif log is not None and tuple(block["of"]) not in ended:
                with log.open("a") as file:
                    print(json.dumps(block), file=file)
            failed = failed or block["code"] != 0
            table.update(block["counts"])
    print(f"{args.count} pairs by {args.wrap} in {args.jobs} processes, {time.monotonic() - start:.0f} s")
    for kind, count in sorted(table.items()):
        print(f"{kind:40} {count}")
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrap", choices=WRAPS, default="dynamo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=len(NAMES) // 2)
    parser.add_argument("--times", action="store_true", help="processor seconds of each")
    parser.add_argument("--more", action="store_true", help="pairs with features of more.txt")
    parser.add_argument("--with", dest="feature", help="this feature with every other")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one for a core")
    parser.add_argument("--log", help="a file that blocks of many pairs are noted in, so that a run can go on")
    args = parser.parse_args()
    if args.jobs > 1 or args.log:
        return in_processes(args)
    torch.set_num_threads(1)
    logging.disable(logging.NOTSET)
    seeds = range(args.seed, args.seed + args.count)
    plans = [planned(seed) for seed in seeds]
    if args.more:
        plans = [planned(seed, (list(MORE)[seed % len(MORE)], random.Random(seed).choice(list(FEATURES))))
                 for seed in seeds]
    if args.feature:
        plans = [planned(args.seed + i, (args.feature, other)) for i, other in enumerate(NAMES)]
    table: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    for plan in plans:
        used = time.process_time()
        verdict = judged(plan, args.wrap)
        kind, used = verdict.kind, time.process_time() - used
        if kind == "different" and args.wrap == "dynamo" and judged(plan, "eager").kind == "different":
            kind = "different, as with backend='eager'"
        elif kind == "different" and (KNOWN.intersection(plan.names) or plan.draws_twice):
            kind = "different, as docs/capture.md says"
        table[kind] += 1
        table["(eager raised in a step)"] += verdict.raised
        table["(steps in the engine)"] += verdict.engine_steps
        if args.times:
            print(f"took {plan.seed} {used:.2f} {kind}")
        if verdict.kind != "equal" or args.count == 1:
            text = " ".join(verdict.text.split())[:600]
            print(f"seed {plan.seed}: {kind}: [{plan.names[0]}] [{plan.names[1]}] {text}", flush=True)
        if args.count == 1:
            print(f"{plan.source}\n{plan.steps} steps; changes before {plan.changes}; x wants a gradient: "
                  f"{plan.wants}; changes through the wrapper: {plan.through}")
            for name, part in zip(plan.names, plan.parts):
                print(f"\n{name}")
                for key in ("prepare", "around", "change", "after"):
                    if key in part:
                        print(textwrap.indent(f"{key}: {part[key]}", "    "))
    print(f"{len(plans)} pairs by {args.wrap}, {time.monotonic() - start:.0f} s")
    for kind, count in sorted(table.items()):
        print(f"{kind:40} {count}")
    return bool(table["different"])


if __name__ == "__main__":
    sys.exit(main())
