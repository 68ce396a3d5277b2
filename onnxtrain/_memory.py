"""What a step's memory will be, from plans alone: nothing runs.

A plan is made of a graph that an ORTModule has exported already, for any sizes that the graph takes: one step of a
small batch is enough to ask about a large one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onnxtrain import _C, _report

if TYPE_CHECKING:
    from onnxtrain.ortmodule._module import ORTModule

MIB = 2**20
BUDGETS = (0.8, 0.6, 0.4, 0.25, 0.15)  # of what the level plans


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The planned memory of one training step.

    Attributes:
        slab_bytes: activations and scratch memory, one allocation a step.
        phases: bytes by phase: at most live in "forward" and "backward", "kept" between them; "outputs" and
            "gradients", which are separate tensors; "parameters" and "buffers" of the module.
        holders: (name, bytes) of what is live where the most is, largest first: modules' names, or nodes' where the
            exporter gave no module.
        levels: bytes, and by what fraction the step's work grows, of each ORTMODULE_MEMORY_OPT_LEVEL.
        budgets: the same of each of some budgets, which are fractions of slab_bytes.
        live: live bytes of each step of the program; backward begins with number `split`.
        graphs: graphs that the module has; the report is of the one with the largest slab.
    """

    slab_bytes: int
    phases: dict[str, int]
    holders: list[tuple[str, int]]
    levels: dict[int, tuple[int, float]]
    budgets: dict[float, tuple[int, float]]
    live: list[int]
    split: int
    graphs: int = 1

    def __str__(self) -> str:
        lines = [f"planned activations {self.slab_bytes / MIB:.1f} MiB"
                 + (f" (the largest of {self.graphs} graphs)" if self.graphs > 1 else "")]
        lines += [f"  {name:<12} {size / MIB:10.1f} MiB" for name, size in self.phases.items()]
        lines.append("what is live at the peak, by module:")
        lines += [f"  {size / MIB:10.1f} MiB  {name}" for name, size in self.holders[:10]]
        lines.append("with other settings (and the share of the step's work that backward recomputes):")
        lines += [f"  ORTMODULE_MEMORY_OPT_LEVEL={level:<5} {size / MIB:10.1f} MiB  {share:+6.1%}"
                  for level, (size, share) in self.levels.items()]
        lines += [f"  ORTMODULE_MEMORY_OPT_BUDGET={budget:<4.0%} {size / MIB:10.1f} MiB  {share:+6.1%}"
                  + ("" if size <= budget * self.slab_bytes else "  (more than the budget)")
                  for budget, (size, share) in self.budgets.items()]
        return "\n".join(lines)


def _programs(model: ORTModule, function: str) -> list[Any]:
    """The programs of an ORTModule that have run a training step, the latest of each schema."""
    _report.check(model, function)
    found = [programs[-1] for _, programs in model._all_programs() if programs]
    found = [program for program in found if program.first_call is not None and any(program.first_call[1])]
    if not found:
        raise RuntimeError("no training step of this model has run in the engine yet: run one step first, of any "
                           "batch size")
    return found


def _shapes(program: Any, sizes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Shapes of the graph's inputs where the user's have these sizes; those of the first call without any."""
    shapes, _ = program.first_call
    own = [i for i, source in enumerate(program.exported.inputs) if source.kind == "user"]
    if sizes and len(sizes) != len(own):
        names = ", ".join(program.exported.inputs[i].name for i in own)
        raise ValueError(f"{len(sizes)} sizes are given, but the graph has {len(own)} inputs: {names}")
    shapes = list(shapes)
    for i, size in zip(own, sizes):
        shapes[i] = tuple(size)
    return shapes


def _plan(program: Any, sizes: Sequence[Sequence[int]], level: int, budget: float) -> dict[str, Any]:
    planned: dict[str, Any] = program.planner(level, budget).plan(_shapes(program, sizes), program.first_call[1])
    return planned


def _live(plan: dict[str, Any]) -> list[int]:
    """Live bytes of each step."""
    live = [work for *_, work in plan["steps"]]
    for *_, size, first, last in plan["lifetimes"]:
        for step in range(first, last + 1):
            live[step] += size
    return live


def _holders(plan: dict[str, Any], step: int) -> list[tuple[str, int]]:
    """What is live at a step, by module."""
    held: dict[str, int] = {}
    for name, _, _, size, first, last in plan["lifetimes"]:
        if first <= step <= last:
            module = name.rpartition("/")[0] or name
            held[module] = held.get(module, 0) + size
    name, _, _, work = plan["steps"][step]
    if work:
        held[f"scratch memory of {name}"] = work
    return sorted(held.items(), key=lambda item: (-item[1], item[0]))


def bytes_of(limit: float | str) -> float:
    """A limit that is a number of bytes, or a text such as "4GB". Raises ValueError where it is neither, or below 1."""
    from onnxtrain import options

    try:
        number = options._budget(limit) if isinstance(limit, str) else float(limit)
    except (KeyError, ValueError):
        number = None
    if not number or number <= 1:
        raise ValueError(f"limit is {limit}, expected a number of bytes above 1, or a text such as '4GB'")
    return number


def memory_report(model: ORTModule, *sizes: Sequence[int]) -> MemoryReport:
    """The planned memory of a training step of an ORTModule, which does not run.

    Args:
        model: an ORTModule that has run at least one training step in the engine, of any batch.
        sizes: shapes of the tensors that its graph takes, in the order in which it takes them; those of its first step
            if none are given.

    Raises:
        TypeError: model is no ORTModule.
        RuntimeError: no training step has run.
        ValueError: sizes do not fit the graph.
        UnsupportedError: torch runs parts of the graph, or its shapes depend on the contents of inputs.
    """
    programs = _programs(model, "memory_report")
    level, budget = model._runtime.memory_optimization_level, model._runtime.memory_budget or 0.0
    plans = [_plan(program, sizes, level, budget) for program in programs]
    plan, program = max(zip(plans, programs), key=lambda pair: int(pair[0]["slab_bytes"]))
    live, split = _live(plan), plan["forward_steps"]
    peak = max(range(len(live)), key=live.__getitem__)
    kept = sum(size for *_, size, first, last in plan["lifetimes"] if first < split <= last)
    phases = {"forward": max(live[:split], default=0), "kept": kept, "backward": max(live[split:], default=0),
              "outputs": plan["output_bytes"], "gradients": plan["gradient_bytes"],
              "parameters": sum(p.nbytes for p in model.parameters()),
              "buffers": sum(b.nbytes for b in model.buffers())}
    shapes, mask = _shapes(program, sizes), program.first_call[1]

    def at(level: int, budget: float) -> tuple[int, float]:
        other = program.planner(level, budget).plan(shapes, mask)
        return other["slab_bytes"], other["recomputed_share"]

    _C.set_log_level(logging.ERROR)  # that a budget is too small is for those that the user sets
    try:
        levels = {i: at(i, 0.0) for i in (0, 1, 2)}
        budgets = {part: at(level, max(2.0, part * plan["slab_bytes"])) for part in BUDGETS}
    finally:
        _C.set_log_level(model._debug.log_level.logging_level)
    return MemoryReport(plan["slab_bytes"], phases, _holders(plan, peak), levels, budgets, live, split, len(programs))


def max_batch(model: ORTModule, limit: float | str, *sizes: Sequence[int], most: int = 1 << 20) -> int:
    """The largest batch whose training step is planned within a limit, at the model's level and budget; nothing runs.

    Args:
        model: as in memory_report().
        limit: bytes, or text such as "4GB", of activations, outputs and gradients. Parameters and an optimizer's state
            are no part of it.
        sizes: as in memory_report(); the first number of each is replaced by the batch.
        most: at most this many.

    Returns:
        The batch, 0 where not even one fits.

    Raises as memory_report() does; ValueError where a batch does not fit the graph, or the limit is no number of bytes.
    """
    limit_bytes = bytes_of(limit)
    programs = _programs(model, "max_batch")
    level, budget = model._runtime.memory_optimization_level, model._runtime.memory_budget or 0.0
    planners = [program.planner(level, budget) for program in programs]

    def fits(batch: int) -> bool:
        for program, planner in zip(programs, planners):
            shapes = _shapes(program, sizes)
            for i, source in enumerate(program.exported.inputs):
                if source.kind == "user" and shapes[i]:
                    shapes[i] = (batch, *shapes[i][1:])
            plan = planner.plan(shapes, program.first_call[1])
            if plan["slab_bytes"] + plan["output_bytes"] + plan["gradient_bytes"] > limit_bytes:
                return False
        return True

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
