"""The examples with timm, diffusers, torch_geometric, peft and torchrun, small: losses as eager's, all steps in the
engine.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs an example's main(): what it returns and prints."""

    def call(folder, script, *given):
        spec = importlib.util.spec_from_file_location(f"example_{folder}", EXAMPLES / folder / script)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # where Dynamo looks for the globals of its functions
        spec.loader.exec_module(module)
        return module.main([*given]), capsys.readouterr().out

    return call


def same_losses(result, printed, steps):
    eager, ours = result
    assert ours == pytest.approx(eager, rel=1e-3) and ours[-1] < ours[0]
    assert f"{steps} of {steps} steps" in printed


def test_image_classification(run):
    importlib.import_module("timm_apart")
    result, printed = run("image_classification", "train.py", "--model", "test_resnet", "--steps", "6", "--batch", "8",
                          "--lr", "0.001")
    same_losses(result, printed, 6)


def test_diffusion(run, tmp_path):
    diffusers = pytest.importorskip("diffusers")
    result, printed = run("diffusion", "train.py", "--channels", "8", "--size", "8", "--steps", "6", "--batch", "4",
                          "--output", str(tmp_path))
    same_losses(result, printed, 6)
    assert type(diffusers.UNet2DModel.from_pretrained(tmp_path)) is diffusers.UNet2DModel


def test_graph_network(run):
    pytest.importorskip("torch_geometric")
    result, printed = run("graph_network", "train.py", "--graphs", "40", "--hidden", "16", "--batch", "9", "--epochs", "3")
    same_losses(result, printed, 12)
    assert "exports: 1;" in printed


def test_lora(run, tmp_path):
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number + 1} are {2 * number + 1}\n" for number in range(60)))
    result, printed = run("lora", "finetune.py", "--data", str(text), "--block", "16", "--batch", "4", "--steps", "5",
                          "--rank", "2", "--output", str(tmp_path / "adapter"))
    same_losses(result, printed, 5)
    assert "ms a step (median), onnxtrain " in printed and "s for capture and export" in printed
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "adapter")).r == 2


def test_distributed():
    """Two processes, started as the README says."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         EXAMPLES / "distributed" / "train.py", "--steps", "5", "--width", "16", "--layers", "1", "--batch", "4"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^ *\d+ +([\d.]+) +([\d.]+)$", done.stdout, re.M)
    assert len(rows) == 5 and all(abs(float(eager) - float(ours)) < 2e-3 for eager, ours in rows)
    assert "2 processes; 5 of 5 steps of each ran in the engine" in done.stdout


def test_every_example_is_in_the_table():
    """A folder has a README with its command, and a row in the table."""
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    assert len(folders) == len(re.findall(r"^\| \[", table, re.M)) == 9
    for folder in folders:
        assert f"({folder.name}/README.md)" in table
        assert re.search(r"^ *(bash|python|torchrun) \S", (folder / "README.md").read_text(encoding="utf-8"), re.M), folder
