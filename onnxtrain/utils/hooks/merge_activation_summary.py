"""Two runs' activations in one file per step: python -m onnxtrain.utils.hooks.merge_activation_summary
--pt_dir eager --ort_dir ours --output_dir merged

The folders are those of StatisticsSubscriber. A file `{output_dir}/merge_summary/step_{n}.txt` has the activations in
the order in which the first run made them, each with both runs' statistics; then those of the second run alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ORDER = "order.txt"


def _order(folder: Path) -> list[str]:
    return (folder / ORDER).read_text(encoding="utf-8").split("\n")[:-1] if (folder / ORDER).exists() else []


def _statistics(folder: Path, name: str) -> str:
    file = folder / name
    return file.read_text(encoding="utf-8") if file.exists() else "not there\n"


def merge(first: Path, second: Path, output: Path) -> list[Path]:
    """Writes a file for each step of either run.

    Raises:
        FileNotFoundError: one of the first two folders does not exist, or no step is in either.
        FileExistsError: `output` has a merge_summary.
    """
    for folder in (first, second):
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
    steps = sorted({path.name for folder in (first, second) for path in folder.glob("step_*")},
                   key=lambda name: (len(name), name))
    if not steps:
        raise FileNotFoundError(f"neither {first} nor {second} has a step")
    target = output / "merge_summary"
    target.mkdir(parents=True)
    written = []
    for step in steps:
        names = list(dict.fromkeys([*_order(first / step), *_order(second / step)]))
        parts = [f"{number}. {name}\n[{first.name}]\n{_statistics(first / step, name)}[{second.name}]\n"
                 f"{_statistics(second / step, name)}" for number, name in enumerate(names, 1)]
        written.append(target / f"{step}.txt")
        written[-1].write_text("\n".join(parts), encoding="utf-8")
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pt_dir", required=True, type=Path, help="statistics of the run in PyTorch")
    parser.add_argument("--ort_dir", required=True, type=Path, help="statistics of the run with ORTModule")
    parser.add_argument("--output_dir", required=True, type=Path, help="gets a folder merge_summary")
    given = parser.parse_args(arguments)
    try:
        written = merge(given.pt_dir, given.ort_dir, given.output_dir)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(written)} steps: {written[0].parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
