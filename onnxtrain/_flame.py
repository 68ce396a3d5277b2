"""A flame chart as SVG: one row a level of the path, widths by time, names and times as tooltips. No script, no font.

Used by _profile.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

WIDTH, ROW, EDGE, TOP = 1200, 20, 10, 40  # pixels
CHARACTER = 6.8  # pixels of one, in the font size that the style sets
STYLE = """<style>
text { font: 12px sans-serif; fill: #222; pointer-events: none }
.page { fill: #fff } rect { stroke: #fff; stroke-width: .5 }
.root { fill: #ccc } .forward { fill: #9ecae1 } .backward { fill: #fdae6b } .rest { fill: #c7c7c7 }
@media (prefers-color-scheme: dark) {
text { fill: #eee } .page { fill: #181818 } rect { stroke: #181818 }
.root { fill: #444 } .forward { fill: #2b5f87 } .backward { fill: #9a4f14 } .rest { fill: #555 } }
</style>"""


class _Part:
    """A name with its time, and what that time is made of, in order of appearance."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.parts: dict[str, _Part] = {}

    def depth(self) -> int:
        return 1 + max([part.depth() for part in self.parts.values()], default=0)


def _tree(paths: Iterable[tuple[Any, ...]]) -> _Part:
    root = _Part()
    for *names, seconds in paths:
        part = root
        part.seconds += seconds
        for name in names:
            part = part.parts.setdefault(name, _Part())
            part.seconds += seconds
    return root


def _boxes(name: str, part: _Part, kind: str, left: float, row: int, scale: float, total: float) -> list[str]:
    width = part.seconds * scale
    if width < 0.5:
        return []
    top = TOP + ROW * row
    fits = int((width - 6) / CHARACTER)
    label = name if len(name) <= fits else name[:max(fits - 1, 0)] + "…" if fits > 2 else ""
    boxes = [f'<g><title>{escape(name)}: {part.seconds * 1e3:.3f} ms, {part.seconds / total:.1%}</title>'
             f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}"/>'
             + (f'<text x="{left + 3:.1f}" y="{top + 14}">{escape(label)}</text>' if label else "") + "</g>"]
    for inner, its in part.parts.items():
        shade = kind if row else inner if inner in ("forward", "backward") else "rest"
        boxes += _boxes(inner, its, shade, left, row + 1, scale, total)
        left += its.seconds * scale
    return boxes


def chart(paths: Iterable[tuple[Any, ...]], title: str) -> str:
    """The chart of (name, name, ..., seconds), each a path from the whole to a part."""
    root = _tree(paths)
    height = TOP + ROW * root.depth() + EDGE
    scale = (WIDTH - 2 * EDGE) / (root.seconds or 1.0)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        STYLE, f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text x="{EDGE}" y="25">{escape(title)}</text>',
        *_boxes("all", root, "root", EDGE, 0, scale, root.seconds or 1.0), "</svg>", ""])
