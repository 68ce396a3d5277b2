"""`python -m onnxtrain` runs scripts unedited, names its commands and reports what a bug report needs."""

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import helper
from onnxruntime.training.ortmodule import ORTModule
import onnxruntime
if __name__ == "__main__":
    onnxruntime.set_seed(3)
    import torch
    first = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(1))
    print(helper.NAME, sys.argv[1:], ORTModule.__module__.split(".")[0])
"""


def run(*arguments, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "onnxtrain", *arguments], cwd=cwd, capture_output=True, text=True)


def test_a_script_runs_unedited(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("NAME = 'beside'\n")
    done = run("run", str(tmp_path / "train.py"), "--epochs", "2")
    assert done.stdout.strip() == "beside ['--epochs', '2'] onnxtrain", done.stderr
    for arguments in (("run",), ("walk",)):
        done = run(*arguments)
        assert done.returncode == 2 and done.stderr.startswith("usage:")


def test_the_report_of_a_build_holds_what_a_bug_report_needs(monkeypatch, capsys):
    from onnxtrain.__main__ import main

    for name in [name for name in os.environ if name.startswith(("ORTMODULE_", "ONNXTRAIN_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main([]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"] == torch.__version__ and rows["Python"].startswith(sys.version.split()[0])
    assert onnx.__version__ in rows["onnx,"] and "hardware threads" in rows["processor"]
    assert rows["variables"].startswith("no ORTMODULE_*")
    assert all(name in rows for name in ("onnxtrain", "instruction", "threads", "matrix", "oneDNN", "CUDA", "MPI"))
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    monkeypatch.setenv("ONNXTRAIN_MISSPELT", "1")
    assert main([]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["ORTMODULE_MEMORY_OPT_LEVEL"] == "1" and "variables" not in rows
    assert rows["ONNXTRAIN_MISSPELT"] == "1 (not read at run time)"


def test_commands_are_named_and_a_script_that_is_missing(capsys, tmp_path):
    from onnxtrain.__main__ import main

    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("run ", "alias on ", "alias off", "migrate ", "doctor "))
    with pytest.raises(SystemExit, match="nope.py: there is no such file"):
        main(["run", str(tmp_path / "nope.py")])
