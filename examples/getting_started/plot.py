"""Draws loss.png and times.png from the results of train.py and train_ort.py: plot.py RESULT RESULT FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def save(figure: plt.Figure, path: Path) -> None:
    fresh = path.with_name("." + path.name)
    figure.savefig(fresh, dpi=120, bbox_inches="tight", format="png")
    fresh.replace(path)


def smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, unbiased at its start."""
    out, mean, norm = [], 0.0, 0.0
    for value in values:
        mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(mean / norm)
    return out


def main() -> None:
    runs = [json.loads(Path(path).read_text()) for path in sys.argv[1:3]]
    folder = Path(sys.argv[3])
    figure, axis = plt.subplots(figsize=(7, 4))
    for run in runs:
        axis.plot(smoothed(run["losses"]), label=run["label"])
    axis.set(xlabel="batch", ylabel="training loss (smoothed)", title="Getting-started transformer")
    axis.legend()
    axis.grid(alpha=0.3)
    save(figure, folder / "loss.png")
    figure, axis = plt.subplots(figsize=(7, 4))
    for run in runs:
        steady = run["times"][2:]
        median = sorted(steady)[len(steady) // 2]
        axis.plot(range(2, len(run["times"])), steady, label=f"{run['label']}, median {median:.0f} ms", linewidth=0.8)
    axis.set(xlabel="batch", ylabel="ms a batch", title="Step time (steps above the axis are captures, or disturbed)")
    usual = sorted(time for run in runs for time in run["times"][2:])
    axis.set_ylim(0, 1.3 * usual[int(0.95 * len(usual))])  # one slow step would squeeze all others
    axis.legend()
    axis.grid(alpha=0.3)
    save(figure, folder / "times.png")
    print(f"wrote {folder / 'loss.png'} and {folder / 'times.png'}")


if __name__ == "__main__":
    main()
