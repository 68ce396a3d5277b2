"""Faults that tests plant in the sources of the device, and what the emulation says of them.

`plant` builds the emulated device from one changed source; the same programs run without the change, too. As a script,

    python tests/cuda/planted.py < JOBS

reads a JSON list of [plugin, names of programs] and prints a list of [status, what was printed]: each job in a process
of its own, forked from this one, which has imported all it needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/emulated"


class Fault(NamedTuple):
    file: str  # below cuda/
    old: str
    new: str
    programs: str  # of programs.py
    message: str  # what is said of it
    kind: str = ""  # of cuda/emulate/build.py: with "--sanitize" the rest is that of the build with AddressSanitizer


FOLDERS = {"": FOLDER / "plain", "--sanitize": FOLDER / "asan"}


def sanitizer() -> str:
    """The libraries that must be in the process before any other: the sanitizer's, and the one whose exceptions it
    watches.
    """
    found = [subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True,
                            check=True).stdout.strip()
             for name in ("libasan.so", "libstdc++.so.6")]
    return " ".join(found)


def environment(kind: str) -> dict[str, str]:
    """Of a process that opens a plugin of this kind."""
    return {} if not kind else {"LD_PRELOAD": sanitizer(),
                                "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}


def plant(fault: Fault) -> Path:
    """The plugin with the fault."""
    spec = importlib.util.spec_from_file_location("emulate_build", ROOT / "cuda/emulate/build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    source = ROOT / "cuda" / fault.file
    text = source.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} has {text.count(fault.old)} times: {fault.old}"
    changed = text.replace(fault.old, fault.new)
    folder = FOLDER / "planted" / hashlib.sha256(repr(fault).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    objects = {path: FOLDERS[fault.kind] / build.object_name(path) for path in build.sources()}
    objects[source] = folder / f"{source.name}.o"
    with open(folder / "lock", "w", encoding="ascii") as lock:  # as build.py: another worker may plant the same fault
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / source.name).write_text(changed, encoding="utf-8")
        build.compile_one(folder / source.name, objects[source], fault.kind)
        build.link(list(objects.values()), folder / "_emulated.so", fault.kind)
    return folder / "_emulated.so"


Outcome = tuple[int, str]  # of a process of programs: its status, and what it printed


def outcomes(faults: list[Fault]) -> tuple[list[Outcome], dict[str, Outcome]]:
    """Of the programs of each fault with it, and by their names without any; all faults are of one kind."""
    (kind,) = {fault.kind for fault in faults}
    subprocess.run([sys.executable, str(ROOT / "cuda/emulate/build.py"), str(FOLDERS[kind]), *kind.split()], check=True,
                   capture_output=True)
    jobs = [(str(plant(fault)), fault.programs) for fault in faults]
    whole = sorted({fault.programs for fault in faults})
    jobs += [(str(FOLDERS[kind] / "_emulated.so"), names) for names in whole]
    paths = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, __file__], input=json.dumps(jobs), capture_output=True, text=True, cwd=ROOT,
                          check=True, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
                                           "ONT_EMULATE_SEED": "0", **environment(kind)})
    found = [tuple(outcome) for outcome in json.loads(done.stdout.splitlines()[-1])]
    return found[:len(faults)], dict(zip(whole, found[len(faults):], strict=True))


class Planted:
    """The faults of a test file, each run once, and their programs without a fault.

    Args:
        faults: by the name that their test has.
    """

    def __init__(self, faults: dict[str, Fault]) -> None:
        self._faults = faults
        found, self._without = outcomes(list(faults.values()))
        self._found = dict(zip(faults, found, strict=True))

    def assert_found(self, name: str) -> None:
        """The message is printed with the fault; without it, the programs pass."""
        fault, (status, printed) = self._faults[name], self._found[name]
        assert fault.message in printed, (status, printed[-2000:])
        status, printed = self._without[fault.programs]
        assert status == 0 and '"failed": []' in printed and fault.message not in printed, (
            "without the fault", status, printed[-2000:])


def run(plugin: str, names: str) -> tuple[int, str]:
    import programs

    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                programs.main(plugin, "emulated", names)
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read().decode(errors="replace")


if __name__ == "__main__":
    print(json.dumps([run(*job) for job in json.load(sys.stdin)]))
