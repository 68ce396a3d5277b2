"""`python -m onnxtrain migrate train.py`: what a script that was written for onnxruntime-training needs.

The script is read, not run. Names of onnxruntime, torch_ort and the environment are looked up in the alias
(compat/onnxruntime.py) and in options.py, so that the answer is that of this version.
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path

from onnxtrain.compat._alias import OURS

WORKS = "works"
VARIABLE = re.compile(r"ORTMODULE_[A-Z_]+")


@dataclass(frozen=True)
class Finding:
    """One name of a script: the first line that has it, and what becomes of it."""

    line: int
    name: str
    status: str

    @property
    def works(self) -> bool:
        return self.status.startswith(WORKS)


class _Names(ast.NodeVisitor):
    """Full names of everything that comes from the packages in `ROOTS`, and of variables of the environment."""

    ROOTS = ("onnxruntime", "torch_ort")

    def __init__(self) -> None:
        self.local: dict[str, str] = {}  # a name of the script: what it stands for
        self.found: dict[str, int] = {}

    def note(self, name: str, line: int) -> None:
        if name.split(".")[0] in self.ROOTS:
            self.found.setdefault(name, line)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.split(".")[0]
            self.local[alias.asname or root] = alias.name if alias.asname else root
            if alias.name != root:
                self.note(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        for alias in node.names:
            name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
            self.local[alias.asname or alias.name] = name
            self.note(name, node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts = [node.attr]
        inner = node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self.local:
            self.note(".".join([self.local[inner.id], *reversed(parts)]), node.lineno)
        else:
            self.visit(inner)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
            self.found.setdefault(node.value, node.lineno)


def _existing(name: str) -> str:
    """As much of a full name as there is in the alias."""
    parts = name.split(".")
    importlib.import_module("onnxtrain.compat.onnxruntime")
    found: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return ".".join(parts[: i - 1])
        found = getattr(found, part)
    return name


@functools.cache
def _modules() -> list[str]:
    """The alias's public modules of training, the shortest name first."""
    found = []
    for theirs, here in OURS:
        if theirs.startswith("onnxruntime.training") and "._" not in theirs:
            inside = pkgutil.iter_modules(getattr(importlib.import_module(here), "__path__", ()))
            found += [theirs, *(f"{theirs}.{each.name}" for each in inside if not each.name.startswith("_"))]
    return sorted(set(found), key=lambda name: (len(name), name))


def _place(member: str) -> str:
    """What to write for something that is in another module than the script says; "" where it is in none."""
    return next((f"write {name}.{member}" for name in _modules()
                 if hasattr(importlib.import_module(name), member)), "")


def _status(name: str) -> str:
    """What becomes of one name."""
    from onnxtrain import options

    if VARIABLE.fullmatch(name):
        if name in options.IGNORED:
            return f"{WORKS} without effect: {options.IGNORED[name]}"
        return WORKS if name in options.KNOWN else "is not read: docs/environment.md lists what is"
    if name.startswith("torch_ort"):
        member = name.partition(".")[2]
        return "write onnxtrain.ortmodule." + member if member in ("ORTModule", "DebugOptions", "LogLevel") else \
            "leave it out: there is nothing to configure" if member else "write onnxtrain.ortmodule"
    if name in ("onnxruntime.SessionOptions", "onnxruntime.GraphOptimizationLevel"):
        return f"{WORKS} without effect"
    there = _existing(name)
    if there == name:
        return WORKS
    if name.startswith(("onnxruntime.training", "onnxruntime.capi.ort_trainer", "onnxruntime.capi.training")):
        return _place(name.rpartition(".")[2]) or f"is not in onnxtrain ({there} is)"
    return "is onnxruntime's own, for inference: pip install onnxruntime"


def read(script: Path) -> list[Finding]:
    """What a Python file uses of onnxruntime-training, in the order of its lines.

    Raises OSError for a file that cannot be read, and SyntaxError for one that is not Python.
    """
    names = _Names()
    names.visit(ast.parse(script.read_text(encoding="utf-8"), filename=str(script)))
    whole = [name for name in names.found if not any(other.startswith(f"{name}.") for other in names.found)]
    whole.sort(key=lambda name: (names.found[name], name))
    return [Finding(names.found[name], name, _status(name)) for name in whole]


def report(script: Path) -> tuple[str, bool]:
    """The table of one file with a line of what to do, and whether the file runs as it is."""
    found = read(script)
    if not found:
        return f"{script}: nothing of onnxruntime-training", True
    width = max(len(each.name) for each in found)
    lines = [f"{script}", *(f"{each.line:>6}  {each.name:<{width}}  {each.status}" for each in found)]
    wrong = [each for each in found if not each.works]
    if wrong:
        lines.append(f"  {len(wrong)} of {len(found)} to change.")
    else:
        lines.append(f"  Nothing to change: python -m onnxtrain run {script}")
    return "\n".join(lines), not wrong
