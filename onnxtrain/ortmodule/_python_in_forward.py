"""Python in forward that Dynamo cuts a graph for, though it knows all that it needs: sizes in texts, as keys of a cache
have them, what a method of a text returns, calls with wrong arguments, and Variable, which was a tensor's class once.
And what it would get wrong, so that it has to cut: a deque that has a largest length, shuffle().

A text of sizes is a constant: each size is a capture of its own. Used by _numbers.py while it captures.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from onnxtrain import _torch
from onnxtrain._export.state import wrapped


def _number(value: _torch.Value) -> Any:
    """What a value of Dynamo's is in Python, guarded where it is a size.

    Raises NotImplementedError where Dynamo does not know it.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    value = value.realize() if isinstance(value, _torch.LazyVariableTracker) else value
    if isinstance(value, _torch.SymNodeVariable) and not free_unbacked_symbols(value.sym_num):
        return value.evaluate_expr()
    if isinstance(value, _torch.BaseListVariable) and value.python_type() in (list, tuple, torch.Size):
        return value.python_type()([_number(item) for item in value.items])
    return value.as_python_constant()


def _text(value: _torch.Value) -> _torch.Value:
    """A formatted text of sizes as a constant of Dynamo's, or the value itself."""
    if not isinstance(value, _torch.StringFormatVariable):
        return value
    try:
        named = {name: _number(part) for name, part in value.sym_kwargs.items()}
        return _torch.ConstantVariable.create(value.format_string.format(*map(_number, value.sym_args), **named))
    except NotImplementedError:
        return value


def _of_texts(plain: Callable[..., Any]) -> Callable[..., object]:
    """call_method of Dynamo's variable for a constant."""
    def call_method(self: Any, tx: _torch.Translator, name: str, args: _torch.Values, kwargs: _torch.Named) -> object:
        if name == "join" and len(args) == 1 and type(self.value) is str:
            parts = _torch.VariableTracker.build(tx, list).call_function(tx, list(args), {})
            args = [_torch.ListVariable(list(map(_text, parts.items)), mutation_type=_torch.ValueMutationNew())]
        found = plain(self, tx, name, args, kwargs)
        if type(found) is _torch.ListVariable and found.mutation_type is None:  # of split(), which Python may change
            return _torch.ListVariable(found.items, mutation_type=_torch.ValueMutationNew())
        return found

    return call_method


def _builtin(plain: Callable[..., object]) -> Callable[..., object]:
    """call_function of Dynamo's variable for a function of Python's own."""
    def call_function(self: Any, tx: _torch.Translator, args: _torch.Values, kwargs: _torch.Named) -> object:
        if self.fn is isinstance and len(args) == 2 and args[1].is_python_constant():
            kinds = args[1].as_python_constant()
            if torch.autograd.Variable in (kinds if isinstance(kinds, tuple) else (kinds,)):  # which any tensor is
                args = [args[0], _torch.VariableTracker.build(tx, torch.Tensor)]
        if self.fn is str and len(args) == 1 and not kwargs:
            given = args[0].realize() if isinstance(args[0], _torch.LazyVariableTracker) else args[0]
            if isinstance(given, (_torch.SymNodeVariable, _torch.BaseListVariable)):
                with contextlib.suppress(NotImplementedError):
                    return _torch.ConstantVariable.create(str(_number(given)))
        return plain(self, tx, args, kwargs)

    return call_function


def _refusing(plain: Callable[..., object]) -> Callable[..., object]:
    """bind_args of Dynamo's variable for a function of Python that it reads: wrong arguments are a TypeError, which
    forward may catch, as `try: layer(x, lengths) except TypeError: layer(x)` does.
    """
    def bind_args(self: Any, parent: _torch.Translator, args: _torch.Values, kwargs: _torch.Named) -> Any:
        try:
            return plain(self, parent, args, kwargs)
        except TypeError:
            text = _refusal(self.get_function(), len(args), kwargs)
            if text is None:
                raise
        _torch.raise_observed_exception(TypeError, parent, args=[_torch.ConstantVariable.create(text)])

    return bind_args


def _refusal(function: types.FunctionType, count: int, named: Collection[str]) -> str | None:
    """What Python says where a function does not take so many arguments, or ones of these names; None if it does."""
    bare = types.FunctionType(function.__code__, {}, closure=function.__closure__, argdefs=function.__defaults__)
    bare.__qualname__, bare.__kwdefaults__ = function.__qualname__, function.__kwdefaults__
    given, by_name = [None] * count, dict.fromkeys(named)
    try:
        inspect.signature(bare).bind(*given, **by_name)
    except TypeError:
        try:
            bare(*given, **by_name)  # which Python refuses before anything of it runs
        except TypeError as error:
            return str(error)
    return None


@functools.cache
def _follow_opt_einsum(sharing: types.ModuleType) -> None:
    """From now on Dynamo reads whether opt_einsum keeps intermediate results as a question of its list of those. The
    function itself asks for the number of the thread, which Dynamo does not know. And opt_einsum finds the functions of
    torch now, instead of importing them in the first contraction.

    Raises AttributeError or ValueError where it is another function, or has been replaced already.
    """
    @torch.compiler.substitute_in_graph(sharing.currently_sharing)
    def currently_sharing() -> bool:
        return len(sys.modules["opt_einsum.sharing"]._SHARING_STACK) > 0

    if (backends := sys.modules.get("opt_einsum.backends")) is not None:
        for name in ("tensordot", "transpose", "einsum"):
            backends.get_func(name, "torch")
        backends.has_einsum("torch")


def _with_full_deques(plain: Callable[..., object]) -> Callable[..., object]:
    """_wrap of what makes Dynamo's variables: it takes a deque(maxlen=...) that it is given for one without an end."""
    def wrap(self: object, value: Any) -> object:
        if issubclass(type(value), collections.deque) and value.maxlen is not None:
            _torch.unimplemented(gb_type="a deque(maxlen=...)", context="",
                                 explanation="Dynamo forgets its maxlen.", hints=[])
        return plain(self, value)

    return wrap


def _generators_are_others(_: Callable[..., object]) -> Callable[..., object]:
    """is_supported_random_obj of Dynamo's variable for a random.Random, the hidden one of shuffle() and sample() since
    torch 2.15: it draws once, for all calls. Of another object's methods Python draws, between two graphs.
    """
    return lambda value: False


@functools.cache
def _follow_variable() -> None:
    """From now on Dynamo puts torch.autograd.Variable(x) into a graph; _export/captured.py makes x.detach() of it."""
    torch.compiler.allow_in_graph(torch.autograd.Variable)


@functools.cache
def _follow_random() -> None:
    """From now on Dynamo reads random.random() as uniform(), which draws the same number, and which it follows.

    Raises ValueError where it has been replaced already.
    """
    @torch.compiler.substitute_in_graph(random.random, skip_signature_check=True)
    def draw() -> float:
        return random.uniform(0.0, 1.0)


@functools.cache
def _follow_dora(integrations: types.ModuleType) -> None:
    """From now on Dynamo takes a plain weight as it is where peft's DoRA would dequantize it. To see whether it has to,
    peft asks for the Python module of the weight's class, which Dynamo does not know.

    Raises AttributeError or ValueError where there is no such function, or it has been replaced already.
    """
    plain = integrations.dequantize_module_weight
    of_others = types.FunctionType(plain.__code__, plain.__globals__, plain.__name__)

    @torch.compiler.substitute_in_graph(plain)
    def dequantize_module_weight(module: torch.nn.Module) -> object:
        return module.weight if type(module.weight) is torch.nn.Parameter else of_others(module)


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """While Dynamo captures."""
    _follow_variable()
    with contextlib.suppress(ValueError):
        _follow_random()
    if (sharing := sys.modules.get("opt_einsum.sharing")) is not None:
        with contextlib.suppress(AttributeError, ValueError):  # another version, or it is substituted already
            _follow_opt_einsum(sharing)
    if (integrations := sys.modules.get("peft.utils.integrations")) is not None:
        with contextlib.suppress(AttributeError, ValueError):
            _follow_dora(integrations)
    with wrapped("call_of_texts_method", _of_texts), \
            wrapped("call_of_builtin", _builtin), \
            wrapped("bind_args", _refusing), \
            wrapped("wrap_value", _with_full_deques), \
            wrapped("is_supported_random", _generators_are_others):
        yield
