"""What the scripts of this folder share: one check after the other, and the JSON object that says how they went."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable

from onnxtrain import _C


def run_checks(checks: Iterable[Callable[[], set[str] | None]],
               before: Callable[[Callable], None] = lambda check: None) -> dict:
    """Calls every check, whatever became of those before it, and says the name of each on stderr.

    Returns the report that a script prints: `ran`, what the checks return together ("operator:kernel"), `passed`, how
    many raised nothing, and `failed`, names and errors of the others. `before` is called with each check first.
    """
    report: dict = {"ran": [], "passed": 0, "failed": []}
    ran: set[str] = set()
    for check in checks:
        print(check.__name__, file=sys.stderr, flush=True)
        try:
            before(check)
            ran |= check() or set()
            report["passed"] += 1
        except Exception as error:  # noqa: BLE001 - reported
            report["failed"].append((check.__name__, f"{type(error).__name__}: {error}"[:1000]))
    report["ran"] = sorted(ran)
    return report


def refusal(call: Callable[[], object]) -> str:
    """The message of the UnsupportedError that a call raises; empty where it raises none."""
    try:
        call()
    except _C.UnsupportedError as error:
        return str(error)
    return ""


class Messages(logging.Handler):
    """What the core logs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + chr(10)

    def count(self, part: str) -> int:
        return self.text.count(part)
