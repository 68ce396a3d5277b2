"""Who may include whom: every #include "..." of csrc/ and cuda/ against the layer table of the design."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# layer: the layers that it may include beside itself, over all of
#     base <- ir <- {onnx, ops} <- passes <- plan <- run <- py
#     simd, device, optim, dist: base only (optim and device also simd)
# A higher layer may use everything that lies under it in its own line.
MAY_INCLUDE = {
    "base": set(),
    "ir": {"base"},
    "simd": {"base"},
    "device": {"base", "simd"},
    "dist": {"base"},
    "optim": {"base", "simd"},
    "ops": {"base", "ir", "simd", "device"},
    "onnx": {"base", "ir"},
    "passes": {"base", "ir", "ops"},
    "plan": {"base", "ir", "ops", "passes"},
    "run": {"base", "ir", "ops", "passes", "plan", "optim", "dist", "device", "simd"},
    "py": {"base", "ir", "onnx", "ops", "passes", "plan", "run", "optim", "dist", "device", "simd"},
}
# One header of a neighbour: the loader resolves operators' names to descriptors.
EXCEPTIONS = {("onnx", "ops/op.h")}
# Headers that only one layer may know.
ONLY = {"onnx-ml.pb-c.h": "onnx", "protobuf-c/protobuf-c.h": "onnx", "Python.h": "py"}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SOURCES = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".c", ".h", ".def"})


def includes(path: Path) -> list[tuple[str, bool]]:
    """(name, quoted) of every #include."""
    return [(name, quote == '"') for quote, name in INCLUDE.findall(path.read_text())]


def complaints(path: Path) -> list[str]:
    layer = path.relative_to(ROOT / "csrc").parts[0]
    found = []
    for name, quoted in includes(path):
        owner = ONLY.get(name)
        target = name.split("/")[0]
        if owner:
            if layer != owner:
                found.append(f"{name}, which is for {owner}/ alone")
        elif not quoted:
            continue
        elif target not in MAY_INCLUDE:
            found.append(f"{name}, which is in no layer (write the path from csrc/)")
        elif target != layer and target not in MAY_INCLUDE[layer] and (layer, name) not in EXCEPTIONS:
            allowed = ", ".join(sorted(MAY_INCLUDE[layer])) or "nothing"
            found.append(f"{name}: {layer}/ may include {allowed} beside itself")
    return [f"{path.relative_to(ROOT)} includes {text}" for text in found]


def test_layers():
    assert SOURCES
    assert not [line for path in SOURCES for line in complaints(path)]


def test_every_folder_is_a_layer():
    folders = {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()}
    assert folders <= set(MAY_INCLUDE)


def test_core_never_includes_cuda():
    """cuda/ includes from csrc/, never the other way."""
    names = {p.name for p in (ROOT / "cuda").rglob("*") if p.suffix in {".h", ".cuh"}}
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path in SOURCES for name, _ in includes(path)
             if name.startswith(("cuda", "cublas", "cudnn")) or Path(name).name in names
             and not (ROOT / "csrc" / name).exists()]
    assert not wrong


def test_no_answers_by_locale():
    """isalpha() and its kin say yes to bytes above 127 in some locales, and what they say indexes tables."""
    assert not [path for path in SOURCES if ("ctype.h", False) in includes(path)]


def test_no_torch_headers():
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path in SOURCES for name, _ in includes(path)
             if name.startswith(("torch/", "ATen/", "c10/"))]
    assert not wrong


@pytest.mark.parametrize("layer", sorted(MAY_INCLUDE))
def test_table_has_no_cycle(layer):
    """The table itself: nothing that a layer may include may include it."""
    seen, queue = set(), list(MAY_INCLUDE[layer])
    while queue:
        below = queue.pop()
        if below not in seen:
            seen.add(below)
            queue += MAY_INCLUDE[below]
    assert layer not in seen


def test_a_wrong_include_is_found(tmp_path, monkeypatch):
    for layer, name in [("base", "ir/graph.h"), ("ops", "passes/pass.h"), ("plan", "onnx/load.h"), ("ir", "graph.h")]:
        path = tmp_path / "csrc" / layer / "wrong.c"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#include "{name}"\n')
        monkeypatch.setitem(globals(), "ROOT", tmp_path)
        assert len(complaints(path)) == 1
