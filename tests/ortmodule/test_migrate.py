"""python -m onnxtrain migrate: what a script uses of onnxruntime-training."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onnxtrain.__main__ import migrate
from onnxtrain._migrate import read, report

SCRIPT = """
import os
import onnxruntime as ort
import onnxruntime.training.ortmodule as wrapped
from onnxruntime.training import ORTTrainerOptions, optim
from onnxruntime.training.experimental.gradient_graph import GradientGraphBuilder
from torch_ort import ORTModule as Other
from onnxruntime.capi._pybind_state import set_seed

os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
os.environ["ORTMODULE_MEMORY_OPT_CONFIG"] = "x"
os.environ.setdefault("ORTMODULE_NEVER_WAS", "1")

def main(model):
    model = wrapped.ORTModule(Other(model))
    session = ort.InferenceSession("model.onnx", ort.SessionOptions())
    return optim.AdamConfig(), model.onnxruntime
"""


def statuses(text, folder):
    script = folder / "script.py"
    script.write_text(text)
    return {each.name: each.status for each in read(script)}


def test_every_kind_of_name(tmp_path):
    found = statuses(SCRIPT, tmp_path)
    works = {"onnxruntime.training.ortmodule.ORTModule", "onnxruntime.training.ORTTrainerOptions",
             "onnxruntime.training.optim.AdamConfig", "onnxruntime.capi._pybind_state.set_seed",
             "ORTMODULE_FALLBACK_POLICY", "ORTMODULE_MEMORY_OPT_CONFIG"}
    assert {name for name, status in found.items() if status == "works"} == works
    others = {"onnxruntime.training.experimental.gradient_graph.GradientGraphBuilder": "is not in onnxtrain",
              "torch_ort.ORTModule": "write onnxtrain.ortmodule.ORTModule",
              "onnxruntime.InferenceSession": "is onnxruntime's own", "onnxruntime.SessionOptions": "works without effect",
              "ORTMODULE_NEVER_WAS": "is not read"}
    assert found.keys() == works | others.keys()
    for name, status in others.items():
        assert found[name].startswith(status), (name, found[name])


def test_what_moved_has_its_place(tmp_path):
    found = statuses("from onnxruntime.training import FusedAdam\n"
                     "from onnxruntime.training.optim.lr_scheduler import LambConfig\n"
                     "from onnxruntime.training.ortmodule import FP16_Optimizer, NeverWas\n", tmp_path)
    assert list(found.values()) == ["write onnxruntime.training.optim.FusedAdam",
                                    "write onnxruntime.training.optim.LambConfig",
                                    "write onnxruntime.training.optim.FP16_Optimizer",
                                    "is not in onnxtrain (onnxruntime.training.ortmodule is)"]
    for place in list(found.values())[:3]:
        assert list(statuses(place.replace("write ", "import ").rpartition(".")[0] + "\n"
                             + place.removeprefix("write "), tmp_path).values()) == ["works"]


def test_the_first_line_of_each(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import onnxruntime\n\nonnxruntime.set_seed(1)\nonnxruntime.set_seed(2)\n")
    (found,) = read(script)
    assert (found.line, found.name, found.works) == (3, "onnxruntime.set_seed", True)


@pytest.mark.parametrize("text, line, works", [
    ("import torch\n", "nothing of onnxruntime-training", True),
    ("from onnxruntime.training.ortmodule import ORTModule\n", "Nothing to change: python -m onnxtrain run ", True),
    ("import torch_ort\ntorch_ort.configure()\n", "1 of 1 to change.", False)])
def test_the_last_line_says_what_to_do(tmp_path, text, line, works):
    script = tmp_path / "script.py"
    script.write_text(text)
    shown, fine = report(script)
    assert line in shown.splitlines()[-1] and fine is works


def test_the_command(tmp_path, capsys):
    (tmp_path / "old.py").write_text(SCRIPT)
    (tmp_path / "fine.py").write_text("from onnxruntime.training import optim\n")
    (tmp_path / "wrong.py").write_text("def (\n")
    assert migrate([str(tmp_path / "fine.py")]) == 0
    assert migrate([str(tmp_path / "fine.py"), str(tmp_path / "old.py")]) == 1
    assert migrate([str(tmp_path / "wrong.py"), str(tmp_path / "old.py")]) == 2
    assert migrate([str(tmp_path / "none.py")]) == 2
    out, err = capsys.readouterr()
    assert "invalid syntax" in err and "No such file" in err and out.count(" to change.") == 2


def test_as_a_process(tmp_path):
    (tmp_path / "old.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-m", "onnxtrain", "migrate", str(tmp_path / "old.py")], capture_output=True,
                          text=True)
    assert done.returncode == 1 and "4 of 11 to change" in done.stdout, done.stdout + done.stderr
