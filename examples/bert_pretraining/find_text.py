"""Prints text files for the small run, by commas: those of a wikitext-2 folder beside the repository, if there is one."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext-2"
    files = sorted(str(path) for path in folder.glob("*.txt"))
    if not files:
        sys.exit("there is no wikitext-2 folder beside the repository: give text files by --text FILE,FILE")
    print(",".join(files))
