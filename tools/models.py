"""Writes docs/models.md: every model of tests/models/transformers_zoo.py against eager PyTorch (`python
tools/models.py`).

With names of models it makes their lines anew and leaves the others; `--check` only tells whether the table has a line
for every case, none with a difference. All of them take ten minutes on two cores. Needs transformers.
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
import against_eager as against  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers_zoo import CASES, UNDROPPED  # noqa: E402

COLUMNS = {
    "float32, labels inside": functools.partial(against.three_steps, where="inside"),
    "float32, loss outside": functools.partial(against.three_steps, where="outside"),
    "bfloat16, labels inside": functools.partial(against.bfloat16, where="inside"),
    "bfloat16, loss outside": functools.partial(against.bfloat16, where="outside"),
    "dropout": against.dropped,
}
DIFFERS = "**differs**"
SCRIPTS = "## Scripts of other projects\n"  # from here on the page is of tests/real/run.py
HEAD = """# Models of transformers

`python tools/models.py` makes this page; transformers {transformers}, torch {torch}, CPU. Random weights, small sizes, train mode,
every step through `ORTModule` and in the engine. Smaller numbers are better. Each test run checks a sample. *not run*: this
line has not been measured yet.

- **float32**: three optimizer steps without dropout, each from eager's weights. The number is the largest difference of loss,
  outputs, gradients and buffers from eager PyTorch, relative to the tensor's largest entry. The limits are 1e-4 for
  gradients, 1e-5 for outputs and buffers, 2e-6 for the loss. *inside*: the model takes labels and computes its loss;
  *outside*: the script computes the loss from the model's output.
- **bfloat16**: three steps under autocast from eager's weights. The number is the mean difference of the gradients from eager
  float32. The limit is twice the difference of eager bfloat16 plus 0.01; for the loss it is twice plus four roundings.
- **dropout**: the distance from eager over {draws} draws, in standard errors, of the mean loss and of the mean logarithm of the
  gradient norm. Backward is also compared with finite differences of forwards that draw the same masks.

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
        return DIFFERS, result.problems
    if column == "dropout":
        return f"{max(result.worst['loss'], result.worst['gradients']):.1f}", []
    if column.startswith("bfloat16"):
        return f"{result.worst['gradients']:.0e}", []
    return f"{max(result.worst.values()):.0e}", []


def key(name: str, attention: str) -> str:
    """The start of a line."""
    return f"| {name} | {attention} |"


def lines() -> dict[str, str]:
    """Those of the page, by their start."""
    text = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {key(*case): line for case in CASES for line in text if line.startswith(key(*case))}


def check() -> int:
    """The status for the shell."""
    known = lines()
    wrong = [case for case in CASES if DIFFERS in known.get(key(*case), DIFFERS) or "Error" in known[key(*case)]]
    if wrong:
        print(f"{PAGE.name} lacks, or says is wrong: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return check()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = lines()
    for name, attention in CASES:
        if arguments and name not in arguments:
            continue
        start, cells = time.time(), []
        for column in COLUMNS:
            text, problems = cell(column, name, attention)
            cells.append(text)
            for problem in problems:
                print(f"  {name}, {attention}, {column}: {problem}", flush=True)
        rows[key(name, attention)] = f"{key(name, attention)} {' | '.join(cells)} |"
        print(rows[key(name, attention)], f"{time.time() - start:.0f} s", flush=True)
        head = HEAD.format(transformers=transformers.__version__, torch=torch.__version__.split("+")[0], draws=80,
                           columns=" | ".join(COLUMNS), rule=" | ".join("---" for _ in COLUMNS))
        absent = " not run |" * len(COLUMNS)
        _, title, others = (PAGE.read_text() if PAGE.exists() else "").partition("\n" + SCRIPTS)
        PAGE.write_text(head + "".join(rows.get(key(*case), key(*case) + absent) + "\n" for case in CASES) + title + others)
    return check()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
