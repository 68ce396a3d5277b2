"""tools/plot_results.py: docs/results.svg is what it makes of docs/results.json, and the bars have the right lengths."""

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"
spec = importlib.util.spec_from_file_location("plot_results", ROOT / "tools/plot_results.py")
plot_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plot_results)


def test_the_image_is_current():
    done = subprocess.run([sys.executable, ROOT / "tools/plot_results.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bars_are_as_long_as_the_times():
    data = json.loads((ROOT / "docs/results.json").read_text(encoding="utf-8"))
    root = ET.fromstring(plot_results.chart(data))
    widths = {key: [float(box.get("width")) for box in root.iter(f"{SVG}rect") if box.get("class") == key][1:]
              for key, _ in plot_results.SERIES}  # behind the box of the legend
    for i, row in enumerate(data["workloads"]):
        for key in widths:
            assert abs(widths[key][i] / widths["eager"][i] - row[key] / row["eager"]) < 0.002
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert all(row["name"] in texts and f"{row['onnxtrain']:g} ms" in texts for row in data["workloads"])
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text
