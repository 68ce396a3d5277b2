"""What replaces a function of torch refuses what torch's own refuses, and gives a result of the same dtype and rank.

rewrite.py wraps every replacement in agreeing(). Before a replacement runs, torch's own function runs on the fake
tensors of the trace, outside of the graph: its checks of sizes, dtypes and names are made there, and what they compare
of sizes becomes a guard of the export. So no check is written twice. Where Dynamo has run the same functions for its
capture, and guards what they compared, checked() leaves their run out; captured.py compares results with Dynamo's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.utils._pytree import tree_leaves

from onnxtrain._export.errors import Untraceable

# torch cannot say without the contents of a tensor, or has no fake kernel: then the engine finds out at the step.
_UNKNOWN = (symbolic_shapes.GuardOnDataDependentSymNode, fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException, fake_tensor.UnsupportedOperatorException, NotImplementedError)

_STRICTER = frozenset((torch.nn.functional.grouped_mm,))  # its fake kernel takes bfloat16 alone, the real one all


_is_checked = False  # exports exclude one another


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Within, the arguments are known to be some that torch takes."""
    global _is_checked
    _is_checked = True
    try:
        yield
    finally:
        _is_checked = False


def agreeing(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` in the place of torch's `theirs`, for the length of a trace.

    Raises:
        Untraceable: torch refuses the arguments, or `ours` has another dtype or shape. PyTorch then runs the module,
            and raises what it has to.
    """
    if theirs in _STRICTER:
        return ours
    name = getattr(theirs, "__name__", str(theirs))

    @functools.wraps(ours)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._get_tracing_state() is not None:
            return ours(*args, **kwargs)  # TorchScript's graph is compared with eager, which refuses by itself
        if torch.compiler.is_dynamo_compiling():  # in a branch of torch.cond: its result is dead code
            theirs(*args, **kwargs)
            return ours(*args, **kwargs)
        if _is_checked:
            return ours(*args, **kwargs)
        want = _fake_result(theirs, name, args, kwargs)
        got = ours(*args, **kwargs)
        if want is not None:
            with _outside_of_the_graph():
                _compare(name, tree_leaves(got), tree_leaves(want))
        return got

    return run


def _fake_result(theirs: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch's own function gives for fake tensors; None where it cannot say."""
    try:
        with _outside_of_the_graph():
            return theirs(*args, **kwargs)
    except _UNKNOWN:
        return None
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise Untraceable(f"PyTorch refuses the arguments of {name}: {error}") from None


@contextlib.contextmanager
def _outside_of_the_graph() -> Iterator[None]:
    """No node of the trace, no function of torch replaced, and no rounded weight kept by autocast."""
    cache = torch.is_autocast_cache_enabled()
    with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cache)


def _compare(name: str, got: list[Any], want: list[Any]) -> None:
    for g, w in zip(got, want, strict=True):
        if not isinstance(g, Tensor) or not isinstance(w, Tensor):
            continue
        differs = g.dtype != w.dtype or g.dim() != w.dim() or any(
            symbolic_shapes.statically_known_true(a != b) for a, b in zip(g.shape, w.shape))
        if differs:
            raise Untraceable(f"The module uses {name} in a way that gives {w.dtype} of shape {tuple(w.shape)} in "
                              f"PyTorch, and would give {g.dtype} of shape {tuple(g.shape)} in the engine.")
