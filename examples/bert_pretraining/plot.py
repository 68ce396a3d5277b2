"""Draws the losses of both phases and the rate from a dllogger.json: plot.py LOG IMAGE."""

from __future__ import annotations

import sys
from pathlib import Path

import logs
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(log: Path, image: Path) -> None:
    """Raises ValueError: the log has no losses."""
    # A run that went on from a checkpoint logs the updates since then again: the last line of an update counts.
    entries = {entry["step"][1]: entry["data"] for entry in logs.read(log)
               if isinstance(entry["step"], list) and len(entry["step"]) == 2}
    if not entries:
        raise ValueError(f"{log} has no losses")
    updates = sorted(entries)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1))
    top.plot(updates, [entries[update]["average_loss"] for update in updates])
    top.set(ylabel="loss of both tasks", title="BERT pre-training")
    bottom.plot(updates, [entries[update]["learning_rate"] for update in updates], color="tab:orange")
    bottom.set(xlabel="update", ylabel="rate")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    fresh = image.with_name("." + image.name)
    figure.savefig(fresh, dpi=120, bbox_inches="tight", format="png")
    fresh.replace(image)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")
