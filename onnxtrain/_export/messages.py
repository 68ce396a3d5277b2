"""What torch says of an export: kept quiet meanwhile, and told in a sentence when it stops; and the lines of the user
that an exception came from. Called by export.py and by ortmodule.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import logging
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Iterator

import torch

from onnxtrain import _torch
from onnxtrain._export.errors import Untraceable

_FRAME = re.compile(r'File "(.+)", line (\d+), in .*\n\s*(.*)')
_OF_GUARD = re.compile(r"  # (.+?)  # (\S+):(\d+) in ")
_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_STANDARD = os.path.dirname(os.__file__) + os.sep  # of the standard library, and of packages beside it
_TRACED = "<eval_with_key>"  # the file of a graph's code
_PLACE = re.compile(r'File "(.+)", line (\d+), in (.*)')
_CONTEXT = re.compile(r"Developer debug context: *(\S.*)")
_NODE = re.compile(r"(?:translating node|While executing) %(\w+)")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch warns of what is put right here, and prints a traced graph when it fails."""
    loggers = [logging.getLogger(name) for name in (
        "torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir",
        *[_torch.TABLE[short].dotted() for short in ("export_internals", "fake_tensor")])]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), \
                contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def root(error: BaseException) -> BaseException:
    """The exception that torch wrapped."""
    while (inner := error.__cause__) is not None:
        error = inner
    return error


def line(trace: str | None) -> str:
    """ ", in FILE, line N (CODE)": the innermost of the user's lines in a stack trace, or that of a guard, in the form
    that torch gives it; empty where there is none.
    """
    own = [frame for frame in _FRAME.findall(trace or "") if _is_users(frame[0])]
    if not own:
        found = [(_whole(file), number, code) for code, file, number in _OF_GUARD.findall(trace or "")]
        own = [frame for frame in found if _is_users(frame[0])]
    return ", in {}, line {} ({})".format(*own[-1]) if own else ""


def _is_users(file: str) -> bool:
    """Whether a file is neither PyTorch's, nor onnxtrain's, nor the standard library's."""
    return not file.startswith(_NOT_THE_USERS) and (
        not file.startswith(_STANDARD) or f"-packages{os.sep}" in file)


def _whole(end: str) -> str:
    """The file of an imported module whose path ends so."""
    files = [str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]]
    return next((file for file in files if file.endswith(end)), end)


def places(reason: str, found_by: str, noted: int | None) -> list[str]:
    """A reason for which Dynamo has cut a graph, in one line, with each of the user's lines that it cut there.

    Args:
        found_by: a part of its text in Dynamo's list of reasons.
        noted: how much Dynamo had noted before; None: the reason itself names the line.
    """
    text, part = " ".join(reason.split("\n")[0].split()), found_by.split("\n")[0]
    cuts = [] if noted is None else [cut for cut in _torch.graph_break_reasons[noted:] if part in cut.reason]
    return list(dict.fromkeys(text + line("".join(traceback.format_list(cut.user_stack))) for cut in cuts)) or [text]


def left(error: BaseException) -> str:
    """Why Dynamo has left a function to Python, in one line: the exception that ended its capture, what Dynamo names
    for it, and the user's line that it had come to.
    """
    inner = getattr(error, "inner_exception", None) or error  # what the compiler of the graph raised
    text = " ".join(str(inner).partition("\n")[0].split()) or type(inner).__name__
    named = _CONTEXT.search(str(error))
    at = line("".join(traceback.format_list(getattr(error, "real_stack", None) or [])))
    return text + (f" ({named[1][:80].strip()})" if named else "") + at


def raised_at(error: BaseException, trace: str | None) -> None:
    """Has reason() name the user's line; the first call for an exception that knows one counts."""
    if at := line(trace):
        error.__dict__.setdefault("user_line", at)


@contextlib.contextmanager
def raised_by(node: torch.fx.Node) -> Iterator[None]:
    """raised_at() of what is raised within."""
    try:
        yield
    except Exception as error:
        raised_at(error, node.meta.get("stack_trace"))
        raise


def raised_by_node(error: BaseException, program: torch.export.ExportedProgram) -> None:
    """raised_at() of the node that the exception names."""
    named = _NODE.search(str(error))
    for part in program.graph_module.modules() if named else ():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.name == named[1]:  # type: ignore[index]
                raised_at(error, node.meta.get("stack_trace"))


def reason(error: BaseException) -> str:
    """The one sentence of an ExportError, with the user's line where that is known."""
    cause, at, link = root(error), "", error
    while not at and link is not None:
        at, link = link.__dict__.get("user_line", ""), link.__cause__  # type: ignore[assignment]
    return f"{_said(cause).removesuffix('.')}{at}" if at else _said(cause)


def _said(cause: BaseException) -> str:
    if isinstance(cause, Untraceable):
        return str(cause)
    text = " ".join(str(cause).split())
    text = re.sub(r"\x1b\[\d+m", "", text)
    text = re.split(" For more information|Caused by:| While executing %| Original traceback:", text)[0]
    if type(cause).__name__ == "GuardOnDataDependentSymNode":
        text = f"Python code branches on, or reads, the value of a tensor: {text}"
    return f"The export stopped with {type(cause).__name__}: {text[:800].strip()}"


def show_users_lines(error: BaseException) -> None:
    """Puts the lines of the user's forward into a traceback, where its innermost part is a graph that PyTorch ran: in
    the place of the graph's own line and of what led to it.
    """
    head, link, traced = error.__traceback__, error.__traceback__, None
    while link is not None:
        traced = link if link.tb_frame.f_code.co_filename.startswith(_TRACED) else traced
        link = link.tb_next
    if head is None or traced is None:
        return
    name = linecache.getline(traced.tb_frame.f_code.co_filename, traced.tb_lineno).split()[:1]
    graph = getattr(traced.tb_frame.f_locals.get("self"), "graph", None)
    traces = [node.stack_trace or "" for node in graph.nodes if [node.name] == name] if graph is not None else []
    rest = traced.tb_next
    for file, number, function in reversed(_PLACE.findall("".join(traces[:1]))):
        made = _traceback(file, int(number), function)
        made.tb_next, rest = rest, made
    if rest is not traced.tb_next:
        head.tb_next, error.__suppress_context__ = rest, True


def _traceback(file: str, number: int, function: str) -> types.TracebackType:
    """One entry of a traceback, of a line that did not run itself."""
    code = ast.parse("raise LookupError")
    for node in ast.walk(code):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = number  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = -1  # type: ignore[attr-defined]  # no part of the line is marked
    try:
        exec(compile(code, file, "exec").replace(co_name=function, co_qualname=function))
    except LookupError as error:
        assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
        return error.__traceback__.tb_next
    raise AssertionError("the line raises")
