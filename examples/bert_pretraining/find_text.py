"""Prints text files for the small run, by commas: find_text.py FOLDER.

They are those of a wikitext-2 folder beside the repository. Where there is none, the docstrings of Python's standard
library are written to FOLDER, an article a module.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
import warnings
from pathlib import Path

LEAST = 1000  # characters of an article


def docstrings(path: Path) -> str:
    """The prose of a module: its docstrings, without indented blocks, which are mostly code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree)
             if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return " ".join(" ".join(line for line in text.splitlines() if not line.startswith((" ", ">>>", "=", "-")))
                    for text in texts)


def standard_library(output: Path) -> None:
    """Writes articles under headings as Wikitext has them."""
    articles = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        try:
            text = docstrings(path)
        except (SyntaxError, UnicodeDecodeError):
            continue
        if len(text) >= LEAST:
            articles.append(f" = {path.stem} = \n\n{text}\n")
    output.write_text("\n".join(articles), encoding="utf-8")


def main() -> None:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext-2"
    files = sorted(str(path) for path in folder.glob("*.txt"))
    if not files:
        own = Path(sys.argv[1]) / "standard_library.txt"
        if not own.exists():
            standard_library(own)
        files = [str(own)]
    print(",".join(files))


if __name__ == "__main__":
    main()
