"""`python -m onnxtrain alias`: a virtual environment in which scripts import onnxruntime.training by themselves."""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from onnxtrain.compat import _environment

ROOT = Path(__file__).resolve().parents[2]
# What an installed onnxruntime does: it looks for its own training while it is imported, and has most of these names.
INSTALLED = {
    "__init__.py": """
__version__ = "9.9"
from onnxruntime.capi._pybind_state import SessionOptions, set_seed
try:
    from onnxruntime.training.ortmodule import ORTModule
    trains = True
except ImportError:
    trains = False
""",
    "capi/__init__.py": "",
    "capi/_pybind_state.py": "class SessionOptions: pass\ndef set_seed(seed): return 'its own'\n",
}
TRAIN = """
import sys
assert "_onnxtrain_alias" in sys.modules
assert not {"torch", "onnxtrain", *sys.argv[1:]} & sys.modules.keys()
import onnxruntime
from onnxruntime.capi import _pybind_state
assert not hasattr(onnxruntime, "nothing") and not {"torch", "onnxtrain"} & sys.modules.keys()
import torch
import onnxruntime.training.pytorch as ort
assert onnxruntime.trainer is ort.trainer and sys.meta_path[0].__module__ == "onnxtrain.compat._alias"
from onnxruntime.training.optim import FusedAdam
from onnxruntime.training.ortmodule import ORTModule
from onnxruntime.capi._pybind_state import set_cuda_device_id
import onnxtrain.compat.onnxruntime
assert [finder.__module__ for finder in sys.meta_path if "alias" in finder.__module__] == ["onnxtrain.compat._alias"]
model = ORTModule(torch.nn.Linear(4, 2))
model(torch.ones(3, 4)).sum().backward()
from onnxruntime.training.ortmodule import _utils
assert _utils is onnxtrain.ortmodule._utils
print(model.weight.grad.tolist(), onnxruntime.__version__, onnxruntime.set_seed(1), getattr(onnxruntime, "trains", None))
"""


@pytest.fixture
def environment(request, tmp_path):
    """A virtual environment with the packages of this one; its site-packages. Parametrized: whether it has the system's
    and the user's packages, too."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False, system_site_packages=getattr(request, "param", False))
    folder = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    (folder / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder


def python(folder, *arguments, **more):
    """Runs the Python of an environment, outside of the checkout."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run([str(folder.parents[2] / "bin" / "python"), *arguments], cwd=folder.parents[3],
                          capture_output=True, text=True, env={**variables, **more})


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}, set(folder.iterdir())


def alias(folder, *arguments, **more):
    """The command. The checkout is on PYTHONPATH for it alone."""
    return python(folder, "-m", "onnxtrain", "alias", *arguments, PYTHONPATH=str(ROOT), **more)


def test_on_and_off(environment):
    """What is installed beside stays what it is."""
    before = contents(environment)
    done = alias(environment, "on", "--user")
    assert done.returncode == 1 and done.stderr.strip().endswith("leave --user out") and contents(environment) == before
    done = alias(environment, "on")
    assert done.returncode == 0 and f"on: {environment}" in done.stdout and "not installed" in done.stdout, done.stderr
    assert str(environment.parents[2]) in done.stdout and "onnxruntime.training.pytorch" in done.stdout
    done = python(environment, "-c", TRAIN, "importlib.util", "typing")
    assert done.stdout.split("]] ")[1:] == ["1.19.2 None None\n"], done.stderr

    for name, text in INSTALLED.items():
        (environment / "onnxruntime" / name).parent.mkdir(parents=True, exist_ok=True)
        (environment / "onnxruntime" / name).write_text(text)
    done = python(environment, "-c", TRAIN)
    assert done.stdout.split("]] ")[1:] == ["9.9 its own False\n"], done.stderr
    assert f"{environment / 'onnxruntime' / '__init__.py'}, with its own names" in alias(environment, "status").stdout

    done = python(environment, "-I", "-m", "onnxruntime.training.ortmodule.torch_cpp_extensions.install")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "") and "nothing to do" in done.stdout
    assert python(environment, "-S", "-c", "import sys; assert '_onnxtrain_alias' not in sys.modules").returncode == 0

    shutil.rmtree(environment / "onnxruntime")
    done = alias(environment, "off")
    assert done.returncode == 0 and re.search("^alias +off$", done.stdout, re.M), done.stderr
    assert contents(environment) == before
    assert "No module named 'onnxruntime'" in python(environment, "-c", "import onnxruntime.training").stderr


@pytest.mark.parametrize("environment", [True], indirect=True)
def test_on_and_off_for_the_user(environment):
    """`python -I` reads no packages of the user."""
    before, user = contents(environment), environment.parents[3] / "user"
    done = alias(environment, "on", "--user", PYTHONUSERBASE=str(user))
    assert done.returncode == 0 and f"on: {user}" in done.stdout, done.stderr
    done = python(environment, "-c", TRAIN, PYTHONUSERBASE=str(user))
    assert done.stdout.split("]] ")[1:] == ["1.19.2 None None\n"], done.stderr
    done = python(environment, "-I", "-c", "import onnxruntime.training", PYTHONUSERBASE=str(user))
    assert "No module named 'onnxruntime'" in done.stderr
    assert alias(environment, "off", PYTHONUSERBASE=str(user)).returncode == 0
    assert not [path for path in user.rglob("*") if path.is_file()] and contents(environment) == before


def test_without_onnxtrain_the_hook_does_nothing(environment):
    _environment.on(environment)
    (environment / _environment.START).write_text(f"import {_environment.HOOK}\n")  # of an installed one that is gone
    (environment.parents[3] / "onnxtrain").mkdir()  # a folder of that name where it runs is no package
    done = python(environment, "-c", "import onnxruntime.training")
    assert done.stderr.strip().splitlines()[-1] == "ModuleNotFoundError: No module named 'onnxruntime'"


def test_what_cannot_be_written_is_one_sentence(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "file" / "site-packages"))
    assert _environment.main("on", user=False) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith(f"{tmp_path / 'file' / 'site-packages'} cannot be changed (Not a directory): use a virtual")


def test_an_installed_package_needs_no_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(ROOT))
    _environment.on(tmp_path)
    assert (tmp_path / _environment.START).read_text() == f"import {_environment.HOOK}\n"
    monkeypatch.undo()
    _environment.on(tmp_path)
    assert (tmp_path / _environment.START).read_text() == f"{ROOT}\nimport {_environment.HOOK}\n"


def test_usage():
    done = subprocess.run([sys.executable, "-m", "onnxtrain", "alias", "maybe"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage:") and "alias on [--user]" in done.stderr
    done = subprocess.run([sys.executable, "-m", "onnxtrain", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage:")


def test_a_tool_that_imports_every_module_installs_no_hook():
    """Two finders that ask each other for a module of onnxruntime's never end."""
    code = ("import sys; before = list(sys.meta_path); import onnxtrain.compat._hook; assert sys.meta_path == before\n"
            "import importlib.util, onnxtrain.compat.onnxruntime\n"
            "assert importlib.util.find_spec('onnxruntime.nothing_here') is None")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
