"""When an export may be reused: torch.export's shape assumptions as one compiled Python function over sizes.

Made by export.py, called at every step, so it reads each shape once and compares integers.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Guards = Callable[[Sequence[Tensor]], str | None]


def _is_dense(*numbers: int) -> int:
    """Whether a layout of these sizes, and strides behind them, has no gaps and no element twice."""
    rank, step = len(numbers) // 2, 1
    for stride, size in sorted(zip(numbers[rank:], numbers[:rank], strict=True)):
        if size > 1:
            if stride != step:
                return 0
            step *= size
    return 1


# Names that torch's guard printer and sympy's str() use.
_NAMESPACE = {
    "torch": torch, "math": math, "Eq": operator.eq, "Ne": operator.ne, "Mod": operator.mod, "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "Max": max, "Min": min, "max": max, "min": min,
    "Not": operator.not_, "Le": operator.le, "Lt": operator.lt, "Ge": operator.ge, "Gt": operator.gt, "Abs": abs,
    "And": lambda *values: all(values), "Or": lambda *values: any(values), "True": True, "False": False,
    "IsNonOverlappingAndDenseIndicator": _is_dense,
}
_SIZE = re.compile(r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_LAYOUT = re.compile(r"L\['leaves'\](\[\d+\]\.(?:stride\(\)\[\d+\]|storage_offset\(\)))")


def _compile(ranks: Sequence[int], checks: Sequence[tuple[str, str]], symbols: Sequence[tuple[str, str]]) -> Guards:
    """checks: (python expression that must hold, sentence); symbols: (name, expression) assigned before them."""
    lines = ["def guards(t):"]
    for index, rank in enumerate(ranks):
        sizes = "".join(f"d{index}_{axis}, " for axis in range(rank))
        if rank:
            lines.append(f"    try: {sizes} = t[{index}].shape")
            lines.append(f"    except ValueError: return 'input {index} does not have {rank} dims'")
        else:
            lines.append(f"    if t[{index}].dim(): return 'input {index} does not have 0 dims'")
    lines += [f"    {name} = {source}" for name, source in symbols]
    seen = set()
    for expression, sentence in checks:
        if expression not in seen:
            seen.add(expression)
            lines.append(f"    if not ({expression}): return {sentence!r}")
    lines.append("    return None")
    namespace: dict[str, Any] = dict(_NAMESPACE)
    exec(compile("\n".join(lines), "<shape guards>", "exec"), namespace)
    namespace["guards"].source = (list(ranks), list(checks), list(symbols))  # to be written down; see cache.py
    return namespace["guards"]


def from_program(program: torch.export.ExportedProgram) -> Guards:
    """Sizes as in the placeholders, ranges of symbols, and the guards that tracing left.

    Args:
        program: exported from a module whose only argument is `*leaves`.
    """
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = [placeholders[name].meta["val"] for name in program.graph_signature.user_inputs]
    symbols: dict[str, str] = {}
    checks: list[tuple[str, str]] = []
    for index, value in enumerate(values):
        for axis, size in enumerate(value.shape):
            name, text = f"d{index}_{axis}", str(size)
            if text.isidentifier() and text not in symbols:
                symbols[text] = name
            else:
                checks.append((f"{name} == {text}", f"dimension {axis} of input {index} is not {text}"))
    for symbol, limits in program.range_constraints.items():
        name = str(symbol)
        if name not in symbols:
            continue
        lower, upper = int(limits.lower), limits.upper
        where = f"{symbols[name]}".replace("d", "size of input ", 1).replace("_", ", dimension ")
        if lower > 0:
            checks.append((f"{name} >= {lower}", f"{where}, is below {lower}"))
        if str(upper).lstrip("-").isdigit():
            checks.append((f"{name} <= {upper}", f"{where}, is above {upper}"))
    for code in program._guards_code:
        expression = _LAYOUT.sub(r"t\1", _SIZE.sub(r"d\1_\2", code))
        # A guard over anything but sizes and strides of inputs is not understood; none of them may be lost.
        understood = "L[" not in expression
        checks.append((expression if understood else "False", f"the exported graph needs sizes with {expression}"))
    order = sorted(symbols.items())
    return _compile([value.dim() for value in values], checks, order)
