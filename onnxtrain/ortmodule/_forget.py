"""Functions that are gone, of which Dynamo has to forget what it compiled: it keeps compiled code for each code object,
which keeps the graphs and the module alive. Used by _captured.py and _whole.py.
"""

from __future__ import annotations

import sys
import types

from onnxtrain._torch import TABLE, reset_code

_gone: list[types.CodeType] = []  # of functions of which Dynamo still has to forget what it compiled


def forget(code: types.CodeType) -> None:
    """Has Dynamo forget what it compiled of a function that is gone, and all that this holds.

    The function may go with one of Dynamo's guards or caches, while Dynamo clears them in C++: clearing the same code
    once more would free memory that it goes on to use. Then the next call does it.
    """
    _gone.append(code)
    while not _is_clearing():
        try:
            reset_code(_gone.pop())
        except IndexError:  # this thread or another one has done the last
            return


def _is_clearing() -> bool:
    """Whether a function of Dynamo that clears guards or caches is running, or forget() is."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if (name in ("invalidate", "reset", "reset_code_caches") and module.startswith(TABLE["dynamo"].dotted())
                or frame.f_code is forget.__code__):
            return True
        frame = frame.f_back
    return False
