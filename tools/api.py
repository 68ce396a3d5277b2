"""Writes docs/api.md and docs/api/ from the docstrings of the package: `python tools/api.py` (or `--check`, which only compares).

It reads the source and imports nothing, so the page is the same for every version of Python and torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "api.md": ["onnxtrain.ortmodule", "onnxtrain"],
    "api/optim.md": ["onnxtrain.optim"],
    "api/training.md": ["onnxtrain.training", "onnxtrain.training.optim", "onnxtrain.training.amp",
                        "onnxtrain.training.checkpoint"],
    "api/utils.md": ["onnxtrain.integrations", "onnxtrain.utils", "onnxtrain.utils.data", "onnxtrain.utils.hooks",
                     "onnxtrain.backend"],
}
HEAD = """# API: {modules}
"""
FOOT = """`python tools/api.py` makes this page from the docstrings, and a test compares it with the code. Names that begin
with an underscore are not listed: they may change.
"""
FIRST = ("ORTModule", "FusedAdam", "ORTTrainer", "wrap_trainer", "explain")  # what most readers come for
MORE = """
| page | modules |
| --- | --- |
"""
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
Definition = ast.ClassDef | ast.FunctionDef


def source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    if path.is_dir():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path.with_suffix(".pyi")


def public_names(tree: ast.Module) -> list[str]:
    """`__all__` without what it takes over from another module, or what the module defines."""
    names = [node.name for node in tree.body if isinstance(node, Definition)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
    return [name for name in names if not name.startswith("_")]


def definition(module: str, name: str) -> Definition | None:
    """The class or function that a module has under a name; None for anything else, such as a submodule."""
    if not source_of(module).exists():
        return None
    for node in ast.parse(source_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onnxtrain") and node.module != module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(str(node.module), alias.name)
    return None


def arguments(function: ast.FunctionDef, method: bool) -> str:
    text = ast.unparse(function.args)
    return re.sub(r"^(self|cls)(, )?", "", text) if method else text


def signature(node: Definition) -> str:
    """As a call is written: of a class, the arguments of `__init__`, or the fields of a dataclass."""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{node.name}({arguments(node, False)}){returns}"
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        return f"{node.name}({arguments(init, True)})"
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        return f"{node.name}({', '.join(ast.unparse(each) for each in fields)})"
    return node.name


def wrapped(text: str) -> str:
    """A signature over several lines if it is long, one argument in each."""
    if len(text) <= 100:
        return text
    start = text.index("(") + 1
    parts, depth, last = [], 0, start
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth < 0 or (depth == 0 and text[i] == ","):
            parts.append(text[last:i].strip())
            last = i + 1
        if depth < 0:
            return f"{text[:start]}\n" + "".join(f"    {part},\n" for part in parts) + text[i:]
    return text


def item(text: str) -> str:
    """One entry of a section as an item of a list."""
    name, colon, rest = text.partition(": ")
    if not colon or not re.fullmatch(r"[\w.*]+(, [\w.*]+)*", name):
        return f"- {text}"
    return "- " + ", ".join(f"`{each}`" for each in name.split(", ")) + f": {rest}"


def markdown(doc: str) -> Iterator[str]:
    """A docstring as paragraphs and lists."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        first, _, rest = block.partition("\n")
        if first.rstrip(":") in SECTIONS and first.endswith(":"):
            entries: list[str] = []
            for line in textwrap.dedent(rest).splitlines():
                if line.startswith(" ") and entries:
                    entries[-1] += " " + line.strip()
                else:
                    entries.append(line)
            yield f"**{first}**\n\n" + "\n".join(map(item, entries))
        else:
            yield block


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).endswith(("property", ".setter")) for each in node.decorator_list)


def entry(node: Definition) -> Iterator[str]:
    """The signature, the docstring, members of an enumeration and public methods."""
    yield f"### {node.name}"
    yield f"```text\n{wrapped(signature(node))}\n```"
    yield from markdown(ast.get_docstring(node) or "")
    if isinstance(node, ast.FunctionDef):
        return
    if any(ast.unparse(base).rpartition(".")[2] in ("IntFlag", "IntEnum", "Enum", "Flag") for base in node.bases):
        members = [ast.unparse(each.targets[0]) for each in node.body if isinstance(each, ast.Assign)]
        yield "**Members:** " + ", ".join(f"`{name}`" for name in members if not name.startswith("_"))
    for each in node.body:
        doc = isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and ast.get_docstring(each)
        if doc:
            call = each.name if is_property(each) else f"{each.name}({arguments(each, True)})"
            yield f"**`{node.name}.{call}`**"
            yield from markdown(doc)


def page(name: str) -> str:
    """The text of one page; the first one lists the others."""
    parts = [HEAD.format(modules=", ".join(PAGES[name]))]
    if name == next(iter(PAGES)):
        parts[0] += MORE + "".join(f"| [{other}]({other}) | {', '.join(f'`{each}`' for each in modules)} |\n"
                                   for other, modules in PAGES.items() if other != name)
    for module in PAGES[name]:
        tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
        parts += [f"## {module}", *markdown(ast.get_docstring(tree) or "")]
        for public in sorted(public_names(tree), key=lambda name: name not in FIRST):
            parts += [*entry(found)] if (found := definition(module, public)) else []
    return "\n\n".join(part.rstrip() for part in [*parts, FOOT] if part) + "\n"


def main(check: bool) -> int:
    for name in PAGES:
        path = ROOT / "docs" / name
        text = page(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif text != path.read_text(encoding="utf-8"):
            print(f"docs/{name} is not current: run python tools/api.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
