"""What an object leads to, as text to compare, and whether a trace has left tensors of its own there.

Imported by tests of what an export does to a module. Knows nothing of how onnxtrain looks at one.
"""

from __future__ import annotations

import collections
import functools
import gc
import random
import types

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor


def _is_of_a_test(kind):
    return kind.__module__.rpartition(".")[2].startswith("test_")


def structure(root):
    """What an object leads to, as text: attributes, slots, items, hooks, closures; tensors by identity and version."""
    lines, seen, pending = [], set(), [(root, "")]
    while pending:
        value, path = pending.pop()
        if isinstance(value, torch.Tensor):
            lines.append(f"{path} {type(value).__name__} {id(value)} {value._version} {value.requires_grad}")
            continue
        if isinstance(value, (int, float, str, bool, type(None), types.ModuleType, torch.dtype, torch.device)):
            lines.append(f"{path} {value!r}")
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        lines.append(f"{path} {type(value).__qualname__} {id(value)}")
        parts = []
        if isinstance(value, dict):
            parts += [(f"[{key!r}]", item) for key, item in dict.items(value)]
        elif isinstance(value, (list, tuple, collections.deque)):
            parts += [(f"[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, np.ndarray):
            lines.append(f"{path} {value.tolist()}")
        elif isinstance(value, random.Random):
            lines.append(f"{path} {hash(value.getstate())}")
        elif isinstance(value, types.FunctionType):
            parts += [(f"<{i}>", cell.cell_contents) for i, cell in enumerate(value.__closure__ or ())]
        elif isinstance(value, functools.partial):
            parts += [(".func", value.func), (".keywords", value.keywords)]
        if not isinstance(value, (type, types.FunctionType)):
            parts += [(f".{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
            names = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
            parts += [(f".{name}", getattr(value, name)) for name in names if hasattr(value, name)]
            if _is_of_a_test(type(value)):
                parts += [(f".{type(value).__name__}.{name}", item) for name, item in vars(type(value)).items()
                          if not callable(item) and not name.startswith("__")]
        pending += [(part, path + name) for name, part in parts]
    return sorted(lines)


def fakes(root):
    """Tensors of a trace that an object leads to."""
    seen, pending, found = set(), [root], []
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (types.ModuleType, types.FrameType)):
            continue
        seen.add(id(value))
        if isinstance(value, (FakeTensor, torch.SymInt)):
            found.append(value)
        elif isinstance(value, types.FunctionType):
            pending += [cell.cell_contents for cell in value.__closure__ or ()]
        elif not isinstance(value, torch.Tensor) and (not isinstance(value, type) or _is_of_a_test(value)):
            pending += gc.get_referents(value)
    return found
