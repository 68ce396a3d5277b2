"""Functions in C that are too long or take too many parameters: `python tools/long_functions.py [--check]`.

Prints each function of csrc/ and cuda/ with more than 60 lines (from its name to its last brace) or more than 7
parameters, worst first, and both counts. `--check`, as tests/lint.sh calls it, fails where there is one, and prints no
counts.

Functions of cuda/emulate may have more parameters: those of the library that they stand in for.

It reads text: comments, strings and lines of the preprocessor are blanked, and a function is a parameter list and a
brace outside all braces.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LINES, PARAMETERS = 60, 7
EMULATION = ROOT / "cuda/emulate"
SUFFIXES = {".c", ".h", ".cu", ".cuh"}
BLANKED = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.S | re.M)


class Function(NamedTuple):
    name: str
    path: Path
    line: int
    lines: int
    parameters: int


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _group_before(text: str, end: int) -> int:
    """The opening parenthesis of the group that closes right before `end`, or -1."""
    depth = 0
    for at in range(end - 1, -1, -1):
        depth += (text[at] == ")") - (text[at] == "(")
        if depth == 0:
            return at if text[at] == "(" else -1
    return -1


def _parameters(text: str) -> int:
    depth, commas = 0, 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        commas += c == "," and depth == 0
    return 0 if text.strip() in ("", "void") else commas + 1


def functions(path: Path) -> list[Function]:
    """The functions that a file defines, in their order."""
    text = BLANKED.sub(_blank, path.read_text())
    text = re.sub(r'extern\s+"?\s*"?\s*\{', lambda m: " " * len(m[0]), text)
    found, depth, start = [], 0, 0
    for at, c in enumerate(text):
        if c == "{":
            if depth == 0:
                start = at
            depth += 1
        elif c == "}":
            depth -= 1
            head = text[:start].rstrip()
            if depth == 0 and head.endswith(")"):
                opened = _group_before(head, len(head))
                name = re.search(r"(\w+(?:\s*\([^()]*\))?)\s*$", text[:opened])
                if name:
                    first = text.count("\n", 0, name.start()) + 1
                    last = text.count("\n", 0, at) + 1
                    found.append(Function(name[1], path, first, last - first + 1,
                                          _parameters(text[opened + 1:len(head) - 1])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    paths = [p for folder in ("csrc", "cuda") for p in sorted((ROOT / folder).rglob("*")) if p.suffix in SUFFIXES]
    every = [f for path in paths for f in functions(path)]
    long = sorted((f for f in every if f.lines > LINES), key=lambda f: -f.lines)
    wide = sorted((f for f in every if f.parameters > PARAMETERS and EMULATION not in f.path.parents),
                  key=lambda f: -f.parameters)
    for f in long:
        print(f"{f.path.relative_to(ROOT)}:{f.line}: {f.name}: {f.lines} lines")
    for f in wide:
        print(f"{f.path.relative_to(ROOT)}:{f.line}: {f.name}: {f.parameters} parameters")
    if check:
        sys.exit(bool(long or wide))
    print(f"{len(every)} functions, {len(long)} over {LINES} lines, {len(wide)} with more than {PARAMETERS} parameters")


if __name__ == "__main__":
    main()
