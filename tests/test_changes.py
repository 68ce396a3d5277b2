"""`pytest --changed BASE`: which tests a change runs whole."""

import subprocess
from pathlib import Path

import pytest
from changes import FAMILIES, ROOT, changed_since, touched

TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("changed, expected", [
    ("tests/ops/test_pad.py", {"tests/ops/test_pad.py"}),
    ("csrc/ops/loss/ctc.c", {"tests/ops/test_ctc.py"}),
    ("onnxtrain/_export/messages.py", {"tests/export/test_messages.py"}),
    ("tests/unit/order.c", {"tests/unit/test_unit.py"}),
    ("csrc/ops/reduce/reduce_desc.c", {"tests/ops/test_reduce.py", "tests/ops/test_softmax.py"}),
    ("csrc/optim/rules.c", {"tests/optim/test_rules.py"}),
    ("csrc/py/optim_device.c", {"tests/optim/test_step.py", "tests/optim/test_stage.py"}),
    ("README.md", set()), ("csrc/threads.md", set()),
])
def test_the_touched_a_file(changed, expected):
    found = touched([changed], TESTS)
    assert expected <= found
    assert len(found) == len(expected) or len(expected) > 1


def test_every_source_file_has_tests():
    sources = [path.relative_to(ROOT).as_posix() for folder in ("csrc", "cuda", "onnxtrain")
               for path in (ROOT / folder).rglob("*") if path.suffix in (".c", ".h", ".cu", ".py")]
    assert not [path for path in sources if not touched([path], TESTS)]
    assert all((ROOT / folder).is_dir() for folder in FAMILIES.values())


def test_the_working_tree_counts():
    """A file is changed whether or not the change is committed."""
    head = subprocess.run(["git", "-C", str(ROOT), "diff", "--name-only", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        pytest.skip("no repository of git")
    assert changed_since("HEAD") == head.stdout.splitlines()
    assert all(Path(path).suffix for path in changed_since("HEAD"))
