"""Writes docs/models.md: every model of tests/models/transformers_zoo.py against eager PyTorch (`python tools/models.py`).

`--check` only tells whether the table has a line for every case; names of models run those alone and print what they gave.
Takes ten minutes on two cores. Needs transformers.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import sys
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests" / "models"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch  # noqa: E402
import transformers  # noqa: E402

import against_eager as against  # noqa: E402
from transformers_zoo import CASES, UNDROPPED  # noqa: E402

COLUMNS = {
    "float32, labels inside": functools.partial(against.three_steps, where="inside"),
    "float32, loss outside": functools.partial(against.three_steps, where="outside"),
    "bfloat16, labels inside": functools.partial(against.bfloat16, where="inside"),
    "bfloat16, loss outside": functools.partial(against.bfloat16, where="outside"),
    "dropout": against.dropped,
}
HEAD = """# Models of transformers

Made by `python tools/models.py`; transformers {transformers}, torch {torch}, CPU. Random weights, small sizes, train mode,
every step through `ORTModule` and in the engine.

- **float32**: three optimizer steps without dropout; the largest difference of loss, outputs, gradients and buffers from
  eager PyTorch, over the tensor's largest entry. *inside*: labels are arguments of the model, which computes its loss;
  *outside*: the loss is made of the model's output.
- **bfloat16**: three steps under autocast; the largest difference of a gradient from eager float32's. Each step is within
  twice the distance that eager bfloat16 has.
- **dropout**: over {draws} draws, how many standard errors the means of the loss, and of the gradients' norm, are from
  eager's. Backward is also held against differences of forwards that draw the same masks.

| Model | Attention | {columns} |
| --- | --- | {rule} |
"""


def cell(column: str, name: str, attention: str) -> tuple[str, list[str]]:
    """Text of one field, and what is wrong."""
    if column == "dropout" and name in UNDROPPED:
        return "has none", []
    try:
        result = COLUMNS[column](name, attention)
    except Exception as error:  # a line of the table, too
        return type(error).__name__, [f"{type(error).__name__}: {error}"]
    if result.problems:
        return "**differs**", result.problems
    if column == "dropout":
        return f"{max(result.worst['loss'], result.worst['gradients']):.1f}", []
    return f"{result.worst['gradients'] if column.startswith('b') else max(result.worst.values()):.0e}", []


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        lines = PAGE.read_text().splitlines()
        missing = [case for case in CASES if not any(line.startswith(f"| {case[0]} | {case[1]} |") for line in lines)]
        return print(f"{PAGE.name} lacks {missing}", file=sys.stderr) or 1 if missing else 0
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    failures, rows = 0, []
    for name, attention in CASES:
        if arguments and name not in arguments:
            continue
        start, cells = time.time(), []
        for column in COLUMNS:
            text, problems = cell(column, name, attention)
            cells.append(text)
            failures += bool(problems)
            for problem in problems:
                print(f"  {name}, {attention}, {column}: {problem}", flush=True)
        rows.append(f"| {name} | {attention} | {' | '.join(cells)} |")
        print(rows[-1], f"{time.time() - start:.0f} s", flush=True)
    if not arguments:
        head = HEAD.format(transformers=transformers.__version__, torch=torch.__version__.split("+")[0], draws=80,
                           columns=" | ".join(COLUMNS), rule=" | ".join("---" for _ in COLUMNS))
        PAGE.write_text(head + "\n".join(rows) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
