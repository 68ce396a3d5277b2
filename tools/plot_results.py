"""Draws docs/results.svg from docs/results.json: bars of eager PyTorch, torch.compile and onnxtrain for each workload.

    python tools/plot_results.py            # writes the image
    python tools/plot_results.py --check    # fails where it is not what the data gives

Milliseconds stand beside the bars. Colours follow the reader's light or dark mode. No library is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
SERIES = (("eager", "eager PyTorch"), ("compile", "torch.compile"), ("onnxtrain", "onnxtrain"))
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 840, 200, 90, 70, 14, 14  # pixels
STYLE = """<style>
text { font: 13px sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e; stroke: #ffffff; stroke-width: 3px; paint-order: stroke }
.page { fill: #ffffff } .eager { fill: #9aa4ae } .compile { fill: #d29a3a } .onnxtrain { fill: #1f6feb }
line { stroke: #59636e; stroke-dasharray: 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1; stroke: #0d1117 } line { stroke: #9198a1 }
.page { fill: #0d1117 } .eager { fill: #6e7681 } .compile { fill: #bb8009 } .onnxtrain { fill: #4493f8 } }
</style>"""


def _workload(row: dict[str, Any], top: int, scale: float) -> list[str]:
    """Three bars, one above the other, whose unit is eager's time."""
    lines = [f'<text x="{LEFT - 10}" y="{top + 2 * BAR - 3}" text-anchor="end">{escape(row["name"])}</text>']
    for i, (key, _) in enumerate(SERIES):
        width, y = scale * row[key] / row["eager"], top + BAR * i
        lines.append(f'<rect class="{key}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}"/>'
                     f'<text class="small" x="{LEFT + width + 5:.1f}" y="{y + BAR - 4}">{row[key]:g} ms</text>')
    return lines


def chart(data: dict[str, Any]) -> str:
    """The image of the results."""
    rows = data["workloads"]
    step = len(SERIES) * BAR + GAP
    height = TOP + step * len(rows) + 45
    longest = max(row[key] / row["eager"] for row in rows for key, _ in SERIES)
    scale = (WIDTH - LEFT - RIGHT) / longest
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
             f'height="{height}" role="img">', f"<title>{escape(data['title'])}</title>", STYLE,
             f'<rect class="page" width="{WIDTH}" height="{height}"/>',
             f'<text x="10" y="22">{escape(data["title"])} (shorter is better)</text>']
    for i, (key, label) in enumerate(SERIES):
        lines.append(f'<rect class="{key}" x="{LEFT + 150 * i}" y="36" width="12" height="12"/>'
                     f'<text x="{LEFT + 150 * i + 18}" y="47">{label}</text>')
    end = TOP + step * len(rows)
    lines.append(f'<line x1="{LEFT + scale:.1f}" y1="{TOP - 6}" x2="{LEFT + scale:.1f}" y2="{end - GAP + 4}"/>')
    for i, row in enumerate(rows):
        lines += _workload(row, TOP + step * i, scale)
    lines += [f'<text class="small" x="10" y="{end + 12}">Machine: {escape(data["machine"])}.</text>',
              f'<text class="small" x="10" y="{end + 30}">Command: {escape(data["command"])}</text>', "</svg>", ""]
    return "\n".join(lines)


def main() -> int:
    """The status of the process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the image instead of writing it")
    arguments = parser.parse_args()
    image = DOCS / "results.svg"
    text = chart(json.loads((DOCS / "results.json").read_text(encoding="utf-8")))
    if not arguments.check:
        image.write_text(text, encoding="utf-8")
    elif not image.exists() or image.read_text(encoding="utf-8") != text:
        print(f"{image} is not what the data gives: run python tools/plot_results.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
