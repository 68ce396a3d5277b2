"""Names of torch that are replaced for a while: by whom they are seen, what is there afterwards, what is missing."""

import logging
import threading
import types

import pytest

from onnxtrain import _torch
from onnxtrain._export import state


class Owner:
    value = 1

    def method(self):
        return "method"

    @classmethod
    def of_class(cls):
        return cls.__name__

    @staticmethod
    def plain():
        return "plain"


MODULE = types.SimpleNamespace(function=lambda: "function", flag=False)


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name, call, instead, seen", [
    ("method", lambda: Owner().method(), lambda plain: lambda self: plain(self) + "!", "method!"),
    ("of_class", lambda: Owner.of_class(), lambda plain: lambda cls: plain(cls) + "!", "Owner!"),
    ("plain", lambda: Owner.plain(), lambda plain: lambda: plain() + "!", "plain!"),
], ids=["method", "of_class", "plain"])
def test_a_function_is_replaced_for_this_thread(name, call, instead, seen, monkeypatch):
    before, raw = call(), vars(Owner)[name]
    monkeypatch.setattr(_torch, "_places", {"mine": (Owner, name)})
    with state.wrapped("mine", instead):
        assert call() == seen and in_thread(call) == before
        with state.wrapped("mine", instead):
            assert call() == seen + "!"
        assert call() == seen
    assert vars(Owner)[name] is raw


def test_what_is_not_called_holds_everywhere():
    with state.replaced(Owner, "value", 2), state.replaced(MODULE, "flag", True):
        assert in_thread(lambda: (Owner.value, MODULE.flag)) == (2, True)
    assert (Owner.value, MODULE.flag) == (1, False)


def test_an_inherited_name_is_removed_again():
    class Other(Owner):
        pass

    with state.replaced(Other, "method", lambda self: "other"):
        assert Other().method() == "other" and Owner().method() == "method"
    assert "method" not in vars(Other)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first out first", "last out first"])
@pytest.mark.parametrize("name, value", [("function", lambda: "ours"), ("flag", True)], ids=["function", "flag"])
def test_threads_that_overlap_leave_what_was_there(order, name, value):
    plain = getattr(MODULE, name)
    leave = [threading.Event(), threading.Event()]
    entered = [threading.Event(), threading.Event()]

    def use(i):
        with state.replaced(MODULE, name, value):
            entered[i].set()
            leave[i].wait(60)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread, event in zip(threads, entered, strict=True):
        thread.start()
        assert event.wait(60)
    for i in order:
        leave[i].set()
        threads[i].join()
    assert getattr(MODULE, name) is plain


def test_what_is_kept_while_a_function_is_replaced_is_torchs_afterwards():
    """As a module has it that another thread imports during an export."""
    with state.replaced(MODULE, "function", lambda: "ours"):
        kept = MODULE.function
        assert in_thread(kept) == "function"
    assert kept() == "function"


def test_a_missing_name_is_left_alone_and_said_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="onnxtrain")
    monkeypatch.setattr(_torch, "_left_alone", [])
    for i, path in enumerate(("torch._dynamo.utils:gone", "torch._dynamo.gone:name", "torch._dynamo.utils:Gone.name")):
        monkeypatch.setitem(_torch.TABLE, f"gone{i}", _torch.Name(path, "a test", "replaced for a while", False))
    for i in (0, 1, 2, 0):
        with state.wrapped(f"gone{i}", lambda plain: pytest.fail("there is nothing to wrap")):
            pass
    said = [record.getMessage() for record in caplog.records if "left alone" in record.getMessage()]
    assert len(said) == 3 and "torch._dynamo.utils.gone, which is missing: a test" in said[0]
