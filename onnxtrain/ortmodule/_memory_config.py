"""ORTMODULE_MEMORY_OPT_CONFIG: subgraphs that backward runs again, spelled as onnxruntime-training spells them.

A plan is "Op+Op+:type:count". The engine compares its text with those of the subgraphs that it finds itself
(csrc/passes/recompute_subgraphs.c); here names of operators that onnxruntime fuses become the engine's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "ORTMODULE_MEMORY_OPT_CONFIG"
Plan = tuple[str, bool, int]  # subgraph, compromise, count, as _C.Session takes it
NONE, RECOMPUTE, COMPROMISE = range(3)
BEST = 10  # subgraphs in the table, beside those that are applied
# The bias is part of a product in the engine, and a residual is a node of its own. Views are not named.
_HERE = {
    **dict.fromkeys(("Gemm", "FusedMatMul", "TransposeMatMul"), ("MatMul",)),
    **dict.fromkeys(("BiasGelu", "FastGelu"), ("Gelu",)),
    **dict.fromkeys(("BiasDropout", "BitmaskDropout", "BitmaskBiasDropout"), ("Dropout",)),
    "BiasSoftmax": ("Softmax",), "BiasSoftmaxDropout": ("Softmax", "Dropout"),
    "SkipLayerNormalization": ("LayerNormalization",),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"), ()),
}


def parse(text: str) -> list[Plan]:
    """The plans of a setting.

    Args:
        text: the path of a JSON list of strings, or that list itself, or plans joined by commas.

    Returns:
        One plan for each subgraph; of two for the same subgraph the later one. Type 0 is left out.

    Raises:
        ValueError: the file cannot be read, or a plan is malformed; the message names the variable and the plan.
    """
    plans: dict[str, Plan | None] = {}
    for entry in ",".join(_strings(text.strip())).split(","):
        if not entry.strip():
            continue
        subgraph, kind, count = _plan(entry.strip())
        plans[subgraph] = None if kind == NONE else (subgraph, kind == COMPROMISE, count)
    return [plan for plan in plans.values() if plan is not None]


def _strings(text: str) -> list[str]:
    if not text.startswith("[") and (":" in text and not text.endswith(".json") or not text):
        return [text]
    try:
        found = json.loads(text if text.startswith("[") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={text} is neither a list of plans nor a JSON file with one: {error}") from error
    if not isinstance(found, list) or not all([isinstance(item, str) for item in found]):
        raise ValueError(f"{VARIABLE}={text} is {found!r}, expected a list of strings")
    return found


def _plan(entry: str) -> tuple[str, int, int]:
    def refuse(why: str) -> ValueError:
        return ValueError(f"{VARIABLE}: {entry!r} {why}, expected \"Op+Op+:type:count\" with type 0 (none), 1 "
                          "(recompute) or 2 (compromise), and count -1 (all) or the first so many")

    parts = entry.split(":")
    if len(parts) != 3:
        raise refuse(f"has {len(parts)} parts")
    names = [name.strip() for name in parts[0].strip().removesuffix("+").split("+")]
    if not all([name.isidentifier() for name in names]):
        raise refuse("names no operator" if names == [""] else "has a malformed name of an operator")
    try:
        kind, count = int(parts[1]), int(parts[2])
    except ValueError:
        raise refuse("has a type or count that is not a number") from None
    if kind not in (NONE, RECOMPUTE, COMPROMISE):
        raise refuse(f"has the type {kind}")
    if count < -1:
        raise refuse(f"has the count {count}")
    return "".join(f"{name}+" for each in names for name in _HERE.get(each, (each,))), kind, count


def announce(log: Callable[..., None], plans: Sequence[Plan], sessions: Iterable[Any]) -> None:
    """Logs what the latest programs could run again: a table at INFO, and at WARNING each plan that matches nothing.

    Args:
        log: (level, format, arguments).
        sessions: of one module's graph.
    """
    found: dict[tuple[str, bool], list[int]] = {}
    for session in sessions:
        for subgraph, compromise, *numbers in session.subgraphs():
            old = found.get((subgraph, compromise), [0, 0, 0])
            found[subgraph, compromise] = [a + b for a, b in zip(old, numbers, strict=True)]
    for subgraph, compromise, _ in plans:
        if (subgraph, compromise) not in found:
            log(logging.WARNING, "%s: the graph has no subgraph %s of type %d; ORTMODULE_LOG_LEVEL=INFO logs a "
                "table of those that it has", VARIABLE, subgraph, RECOMPUTE + compromise)
    ranked = sorted(found.items(), key=lambda item: -item[1][2])
    rows = [row for rank, row in enumerate(ranked) if rank < BEST or row[1][1]]  # row[1][1]: how often it is applied
    if rows:
        plans_of = [f"{subgraph}:{RECOMPUTE + compromise}:{applied if 0 < applied < frequency else -1}"
                    for (subgraph, compromise), (frequency, applied, _) in rows]
        width = max(map(len, plans_of))
        lines = [f"  - Plan {number:<3} : {'ON' if applied else 'OFF':<3} : {plan:<{width}} {frequency:>6} {size:>18,}"
                 for number, (plan, (_, (frequency, applied, size))) in enumerate(zip(plans_of, rows), 1)]
        log(logging.INFO, "ORTModule: %d of %d subgraphs that %s can name, those that save the most, how often each "
            "occurs, and how many bytes are saved if backward runs all of them again\n%s", len(rows), len(ranked),
            VARIABLE, "\n".join(lines))
