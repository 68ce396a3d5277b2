"""Writes in place are equal to eager's, or run in PyTorch by name: in_place.py has the cases, and runs all by hand."""

import in_place
import pytest
import torch

COUNT = {"core": 172, "opinfo": 262, "statements": 87}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind, number", [(kind, i) for kind, count in COUNT.items() for i in range(count)])
@pytest.mark.filterwarnings("ignore")
def test_writes(kind, number):
    """A group runs by one of the two routes, which takes turns."""
    cases = in_place.valid(in_place.groups(kind)[number])
    route = in_place.ROUTES[number % 2]
    wrong = [f"{v.route}: {v.case}: {v.text}" for v in in_place.judged(cases, route) if v.kind == "different"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", COUNT)
def test_every_group_has_a_number(kind):
    assert len(in_place.groups(kind)) == COUNT[kind]
