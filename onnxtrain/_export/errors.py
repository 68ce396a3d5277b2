"""What an export raises. Untraceable comes up through torch's tracer; export.py makes an ExportError of it."""

from __future__ import annotations


class ExportError(RuntimeError):
    """The module cannot be exported faithfully; the message is one paragraph that says why."""


class ArgumentError(ExportError):
    """An argument is of a kind that no graph can take."""


class NothingToCompute(ExportError):
    """All results are arguments, weights or views of them, which PyTorch gives without computing."""


class ConstantsWanted(Exception):
    """A graph with a number among its arguments cannot be exported for every number: only for this one, perhaps."""


class Untraceable(Exception):
    """Something was reached that a trace would lose without a word; the message is a sentence."""


class CustomFunctionError(Untraceable):
    """A torch.autograd.Function was reached; tracing through it would lose its backward."""


class DefinitionError(ValueError):
    """A gradient that the user registered is not a definition; PyTorch, which would ignore it, is no way out."""


class NotKept(Exception):
    """Something of an export cannot be written down, or compared in another process; the message says what."""


class StaleError(Exception):
    """A weight is not what the graph was exported for; the message says which."""
