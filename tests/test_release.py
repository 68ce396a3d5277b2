"""What a release relies on: one version everywhere, workflows that parse and name scripts that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import onnxtrain

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_version_is_one():
    assert onnxtrain.__version__ == VERSION == onnxtrain._C.build_info()["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == VERSION
    sections = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert sections[0] == VERSION


def steps(workflow: Path) -> list[dict]:
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    return [step for job in content["jobs"].values() for step in job.get("steps", [])]


def files_in(command: str) -> list[str]:
    """The files and folders of the tree that a command names."""
    return re.findall(r"(?:tests|tools|docs|\.ci)/[\w/.-]+", command)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(workflow):
    """It has least rights, runs one at a time for a branch, pins its actions and names files that exist."""
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert content["permissions"] == {"contents": "read"} and "concurrency" in content
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step), step
        assert re.search(r"@(v\d+|release/v\d+|[0-9a-f]{40})$", step.get("uses", "@v1")), step
        for name in files_in(step.get("run", "")):
            assert (ROOT / name).exists(), f"{workflow.name}: {name}"


def test_the_wheels_are_made_by_scripts_that_exist():
    wheels = PROJECT["tool"]["cibuildwheel"]
    named = [name for key in ("before-all", "repair-wheel-command", "test-command") for name in files_in(wheels[key])]
    assert named == ["tests/packages.sh", "tests/wheel.sh", "tests/smoke.py"]
    assert all((ROOT / name).exists() for name in named)


def test_the_workflows_call_the_scripts():
    called = {name for workflow in WORKFLOWS for step in steps(workflow) for name in files_in(step.get("run", ""))}
    assert {"tests/lint.sh", "tests/run.sh", "tests/wheel.sh"} <= called


def test_a_source_tree_that_is_not_built_says_so(tmp_path):
    (tmp_path / "onnxtrain").mkdir()
    shutil.copy(ROOT / "onnxtrain/__init__.py", tmp_path / "onnxtrain")
    for command in (["-c", "import onnxtrain"], ["-m", "onnxtrain"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True,
                              env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
        last = done.stderr.splitlines()[-1]
        assert done.returncode != 0 and f"{tmp_path}/onnxtrain is source code of onnxtrain, and not built" in last
        assert "Change to another folder" in last and "python setup.py build_ext --inplace" in last


def test_loops_are_chosen_on_every_machine():
    """A table of loops for x86-64 alone would leave a symbol undefined elsewhere."""
    dispatch = {path: path.read_text(encoding="utf-8") for path in (ROOT / "csrc/simd").rglob("*.c")
                if not path.name.endswith(".inc.c")}
    chosen = {path.name for path, text in dispatch.items() if "_avx2" in text}
    assert len(chosen) > 9
    assert {path.name for path, text in dispatch.items() if "_neon" in text} == chosen
