"""Types what README.md and docs/tutorial.md tell a reader to type, in order, in a fresh clone and fresh environments.

    python tests/first_hour.py          # needs pip's index; wheelhouse/ (tests/wheel.sh) stands for the released wheel

Two environments: one by the first block of README, the released wheel, in which README's example, the sample and the
tutorial run; one by the second block, from source. Both are typed in the clone's own folder, where the package of the
source tree lies beside the reader. It prints the seconds of each block. .github/workflows/newest.yml calls it each week.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What README's example leaves to the reader.
READERS = """
import torch
class MyModel(torch.nn.Linear):
    def __init__(self): super().__init__(8, 3)
loader = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
"""


def blocks(page: str, heading: str | None = None) -> list[tuple[str, str]]:
    """(language, text) of the blocks of a page, or of one section of it, that a reader types."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading is not None:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.S | re.M)


def of_kind(found: list[tuple[str, str]], kind: str) -> list[str]:
    return [text for language, text in found if language == kind]


class Reader:
    """A shell in the clone, with one environment."""

    def __init__(self, folder: Path, clone: Path) -> None:
        venv.create(folder / "venv", with_pip=True)
        (folder / "tools").mkdir()
        # Packages of the system are there: whoever installs a build's needs is root, or has sudo, and we have neither.
        (folder / "tools/sudo").write_text('#!/bin/sh\nshift 2\nexec dpkg -s "$@" >/dev/null\n')
        (folder / "tools/sudo").chmod(0o755)
        self.folder, self.clone = folder, clone
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(("ONNXTRAIN_", "ORTMODULE_", "PYTHON", "VIRTUAL_ENV"))}
        self.environment |= {"ORTMODULE_CACHE_DIR": str(folder / "cache"), "PATH": f"{folder}/venv/bin:{folder}/tools:{os.environ['PATH']}",
                             "PIP_FIND_LINKS": f"{ROOT / 'wheelhouse'} {os.environ.get('PIP_FIND_LINKS', '')}"}

    def types(self, what: str, text: str) -> None:
        """Runs the lines of a block; the first that fails ends it."""
        start = time.monotonic()
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=self.clone, env=self.environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(f"{time.monotonic() - start:7.1f} s  {what}", flush=True)
        if done.returncode:
            sys.exit(f"{text}\nended with {done.returncode}:\n{done.stdout[-5000:]}")

    def runs(self, what: str, code: str) -> None:
        """Runs Python code as a script of the reader's, which lies elsewhere."""
        script = self.folder / "script.py"
        script.write_text(code, encoding="utf-8")
        self.types(what, f"cd {self.folder} && python script.py")


def main() -> None:
    if not list((ROOT / "wheelhouse").glob("*.whl")):
        subprocess.run(["bash", str(ROOT / "tests/wheel.sh"), "--build-only"], check=True)
    released, from_source = of_kind(blocks("README.md", "Install"), "sh")
    (example,) = of_kind(blocks("README.md", "Use"), "python")
    (sample,) = of_kind(blocks("README.md", "Use"), "sh")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        clone = scratch / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for folder in ("wheel", "source"):
            (scratch / folder).mkdir()
        reader = Reader(scratch / "wheel", clone)
        reader.types("README: the released wheel", released)
        reader.runs("README: the example", READERS + example)
        reader.types("README: the sample", sample)
        for text in of_kind(blocks("docs/tutorial.md"), "sh"):
            reader.types(f"tutorial: {text.strip()}", text)
        reader.runs("tutorial: its script", "\n".join(of_kind(blocks("docs/tutorial.md"), "python")))
        assert not (clone / ".venv").exists(), "the sample has made an environment of its own"
        Reader(scratch / "source", clone).types("README: from source", from_source)


if __name__ == "__main__":
    main()
