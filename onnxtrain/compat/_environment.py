"""`python -m onnxtrain alias on|off|status`: `onnxruntime.training` in all scripts of a Python environment.

`on` writes two files into site-packages: a copy of _hook.py, and a `.pth` file, whose last line imports it when Python
starts.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import shutil
import site
import sys
import sysconfig
from pathlib import Path

from onnxtrain.compat import _alias

HOOK, START = "_onnxtrain_alias", "onnxtrain_alias.pth"
PACKAGE = Path(__file__).resolve().parents[1]


def main(command: str, user: bool) -> int:
    """Runs one of the commands; the status of the process. `user`: the user's site-packages, not the environment's."""
    if user and not site.ENABLE_USER_SITE:
        print(f"{sys.prefix} does not read the user's site-packages: leave --user out", file=sys.stderr)
        return 1
    try:
        if command == "on":
            on(Path(site.getusersitepackages() if user else sysconfig.get_path("purelib")))
        elif command == "off":
            off()
    except OSError as error:
        print(f"{error.filename} cannot be changed ({error.strerror}): use a virtual environment, or `alias on --user`",
              file=sys.stderr)
        return 1
    for name, text in status():
        print(f"{name:<38} {text}")
    return 0


def _folders() -> list[Path]:
    """Where `on` may have written."""
    return [Path(sysconfig.get_path("purelib")), *([Path(site.getusersitepackages())] if site.ENABLE_USER_SITE else [])]


def on(folder: Path) -> None:
    """Writes the files. The `.pth` file adds a checkout that is not installed to sys.path."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(PACKAGE / "compat" / "_hook.py", folder / f"{HOOK}.py")
    installed = PACKAGE.parent in [*_folders(), *map(Path, site.getsitepackages())]
    (folder / START).write_text(f"import {HOOK}\n" if installed else f"{PACKAGE.parent}\nimport {HOOK}\n")


def off() -> None:
    """Removes them, with what Python compiled of them."""
    for folder in _folders():
        compiled = folder / "__pycache__"
        for file in (folder / START, folder / f"{HOOK}.py", *compiled.glob(f"{HOOK}.*")):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others' files are in it, or there is none
            compiled.rmdir()


def status() -> list[tuple[str, str]]:
    """Whether the alias is on, for which environment, and where names come from."""
    there = [folder for folder in dict.fromkeys([*_folders(), *map(Path, site.getsitepackages())])
             if (folder / START).exists()]
    installed = importlib.machinery.PathFinder.find_spec("onnxruntime")
    beside = installed is not None and installed.loader is not None and installed.origin
    return [
        ("environment", f"{sys.prefix}, Python {sysconfig.get_python_version()}"),
        ("alias", f"on: {', '.join(str(folder / START) for folder in there)}" if there else "off"),
        ("onnxtrain", str(PACKAGE)),
        ("onnxruntime", f"{beside}, with its own names; what follows is added where it lacks that"
         if beside else "not installed: it has what follows, and nothing for inference"),
        *((name, " and ".join(f"{'any name' if names == '*' else names} of {here}" for here, names in sources.items()))
          for name, sources in _alias.FILLED.items() if sources),
        *((name, f"is {here}") for name, here in _alias.OURS if "._" not in name and name != _alias.TRAINING),
    ]
