"""Pages that are made from the code are current; examples of pages run, one after another,
as a reader would run them.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# How many examples each has.
PAGES = {"tutorial": 7, "ortmodule": 9, "fallback": 6, "debugging": 7, "mixed_precision": 3, "ecosystem": 7,
         "compatibility": 6, "trainer": 3, "sparsity": 1, "memory": 1}
PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}


def test_operator_table_is_current():
    done = subprocess.run([sys.executable, "-W", "ignore", ROOT / "tools" / "operators.py", "--check"],
                          capture_output=True, text=True, env=PATHS)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("page", PAGES)
def test_examples(page, tmp_path):
    """In a process of their own. An example about a library that is not installed here (```python library) is left
    out.
    """
    path = ROOT / "docs" / f"{page}.md"
    blocks = re.findall(r"```python ?([\w,]*)\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == PAGES[page]
    script = tmp_path / "examples.py"
    script.write_text("\n".join(code for needs, code in blocks
                                if all(importlib.util.find_spec(name) for name in filter(None, needs.split(",")))))
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, cwd=tmp_path,
                          env=PATHS)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_example_is_tested():
    with_examples = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")
                     if "```python" in path.read_text(encoding="utf-8")}
    # Those of optimizers by tests/optim, and scripts for several processes or under old names by test_site.py.
    assert with_examples == {*PAGES, "optimizers", "distributed", "migration"}
