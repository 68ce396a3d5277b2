"""Writes docs/environment.md from the list in onnxtrain/options.py: `python tools/environment.py` (or `--check`, which
only compares).
"""

from __future__ import annotations

import sys
from pathlib import Path

from onnxtrain import options

PAGE = Path(__file__).resolve().parents[1] / "docs" / "environment.md"


def page() -> str:
    lines = ["# Environment variables", "",
             "`python tools/environment.py` makes this page from `onnxtrain/options.py`. If a value is not one of the",
             "choices, a warning lists them, and the default applies. Variables are read when a module is wrapped or",
             "exported; those that are \"read by the core\" at import or later, so set them before.", "",
             "| variable | default | choices | effect |", "| --- | --- | --- | --- |"]
    lines += [row(variable) for variable in options.VARIABLES.values()]
    lines += ["", "These have no effect, which a warning says if they are set:", "", "| variable | instead |",
              "| --- | --- |"]
    lines += [f"| `{name}` | {instead} |" for name, instead in options.IGNORED.items()]
    return "\n".join(lines) + "\n"


def row(variable: options.Variable) -> str:
    older = "".join(f" (older name: `{name}`)" for name, _ in variable.older)
    cells = (f"`{variable.name}`{older}", variable.shown_default, variable.choices, variable.effect)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print("docs/environment.md is not current: run python tools/environment.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
