"""The backend suite that the `onnx` wheel ships, as (kind, name, function) triples, and the list of what is not passed.

Run as a script it prints counts, failures by message and missing operators; `-v` every failure; `--update` takes what
passes off the list and puts new failures on it, with what they say as a reason to be judged.
"""

from __future__ import annotations

import collections
import functools
import pathlib
import re
import sys
import warnings
from typing import Any, Callable, Iterator

import onnx
import onnx.backend.test
from containers import ContainersBackend

NOT_PASSED = pathlib.Path(__file__).with_name("not_passed.txt")
KINDS = {"OnnxBackendNodeModelTest": "node", "OnnxBackendPyTorchConvertedModelTest": "pytorch-converted",
         "OnnxBackendPyTorchOperatorModelTest": "pytorch-operator", "OnnxBackendSimpleModelTest": "simple"}


class _Backend(ContainersBackend):
    """As it is, but a model that does not load is a failure with its message, not a skip."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        return True


@functools.cache
def cases() -> dict[str, tuple[str, Callable[[], None]]]:
    """name -> (kind, function that raises where the test does not pass), without the device suffix.

    Node tests of other domains than ai.onnx and "real" models, which are
    downloaded, are left out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = onnx.backend.test.BackendTest(_Backend, __name__)
        nodes = {c.name: c for c in onnx.backend.test.loader.load_model_tests(kind="node")}
    found = {}
    for class_name, test_class in runner.test_cases.items():
        kind = KINDS.get(class_name)
        for name in dir(test_class) if kind else ():
            if not name.startswith("test_") or not name.endswith("_cpu"):
                continue
            case = nodes.get(name[:-4]) if kind == "node" else None
            if case is not None and any(n.domain for n in case.model.graph.node):
                continue
            found[name[:-4]] = kind, functools.partial(getattr(test_class, name), test_class(name))
    return found


def not_passed() -> dict[str, str]:
    """name -> reason, from not_passed.txt: one `name: reason` a line."""
    lines = [line for line in NOT_PASSED.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split(": ", 1) for line in lines]
    assert all(len(p) == 2 and p[1].strip() for p in pairs), "a line without a reason"
    assert len({p[0] for p in pairs}) == len(pairs), "a name is listed twice"
    return dict(pairs)


def run_one(function: Callable[[], None]) -> str | None:
    """None where the test passes, else what it said, in one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function()
        except Exception as error:  # any failure of any kind is the result here
            return f"{type(error).__name__}: " + " ".join(str(error).split())
    return None


def failures(pattern: str = "") -> Iterator[tuple[str, str, str | None]]:
    for name, (kind, function) in cases().items():
        if re.search(pattern, name):
            yield kind, name, run_one(function)


def report(pattern: str = "", verbose: bool = False) -> None:
    passed, total, messages = collections.Counter(), collections.Counter(), collections.Counter()
    missing: collections.Counter = collections.Counter()
    for kind, name, message in failures(pattern):
        total[kind] += 1
        passed[kind] += message is None
        if message is None:
            continue
        operator = re.search(r"operator (\S+) \(opset", message)
        if operator:
            missing[operator[1]] += 1
        else:
            messages[re.sub(r"'[^']*'|\d+", "*", message)[:110]] += 1
        if verbose:
            print(f"{name}: {message[:300]}")
    for kind in total:
        print(f"{kind}: {passed[kind]} of {total[kind]} pass")
    print("missing operators:", ", ".join(f"{op} {n}" for op, n in missing.most_common()))
    for message, n in messages.most_common(60 if not verbose else 0):
        print(f"{n:5} {message}")


def update() -> None:
    listed = not_passed()
    now = {name: message for _, name, message in failures() if message is not None}
    comments = [line for line in NOT_PASSED.read_text().splitlines() if line.startswith("#")]
    lines = [f"{name}: {listed.get(name, message[:120])}" for name, message in sorted(now.items())]
    NOT_PASSED.write_text("\n".join([*comments, *lines, ""]))
    print(f"{len(set(listed) - set(now))} taken off, {len(set(now) - set(listed))} put on")


if __name__ == "__main__":
    if "--update" in sys.argv:
        sys.exit(update())
    report(next((a for a in sys.argv[1:] if not a.startswith("-")), ""), "-v" in sys.argv)
