"""The words of banned_words.tsv, which docs/internals/glossary.md replaces, are in no identifier, comment or page."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RULES = [line.split("\t") for line in (ROOT / "tests/banned_words.tsv").read_text(encoding="utf-8").splitlines()[1:]]
_C_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S)


def parts(path: str, source: str) -> tuple[str, str]:
    """(identifiers, text) of a file, each with the other blanked: text is comments, strings, includes, whole pages."""
    if path.endswith(".md"):
        return "", source
    if path.endswith(".py"):
        lines = [list(line) for line in source.splitlines(keepends=True)]
        text = [[character if character == "\n" else " " for character in line] for line in lines]
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                for row in range(token.start[0] - 1, token.end[0]):
                    first = token.start[1] if row == token.start[0] - 1 else 0
                    last = token.end[1] if row == token.end[0] - 1 else len(lines[row])
                    text[row][first:last], lines[row][first:last] = (lines[row][first:last], text[row][first:last])
        return "".join(map("".join, lines)), "".join(map("".join, text))
    blank = re.compile(r"[^\n]")
    identifiers = _C_TEXT.sub(lambda found: blank.sub(" ", found[0]), source)
    text = "".join(" " if kept != " " and kept != "\n" else character
                   for kept, character in zip(identifiers, source, strict=True))
    return identifiers, text


@pytest.fixture(scope="module")
def files() -> dict[str, tuple[str, str]]:
    kinds = (".c", ".h", ".cu", ".cuh", ".def", ".py", ".pyi", ".md")
    listed = [path.relative_to(ROOT).as_posix() for folder in ("csrc", "cuda", "onnxtrain", "docs")
              for path in sorted((ROOT / folder).rglob("*")) if path.suffix in kinds]
    return {path: parts(path.removesuffix("i") if path.endswith(".pyi") else path,
                        (ROOT / path).read_text(encoding="utf-8"))
            for path in [*listed, "README.md"]}


def test_there_are_rules():
    assert RULES


@pytest.mark.parametrize("rule", RULES, ids=[rule[0] for rule in RULES])
def test_word(files, rule):
    word, instead, where = rule
    pattern = re.compile(word)
    found = []
    for path, (identifiers, text) in files.items():
        for kind, source in (("identifiers", identifiers), ("text", text)):
            if where in (kind, "everywhere"):
                found += [f"{path}:{source.count(chr(10), 0, match.start()) + 1}: {match[0]}"
                          for match in pattern.finditer(source)]
    assert not found, f"use {instead}: " + "; ".join(found[:10])
