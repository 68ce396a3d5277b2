"""The list of passes that are left out or forced."""

import pytest
from test_recompute import network, run

from onnxtrain import _C


@pytest.fixture(autouse=True)
def passes_as_they_were():
    yield
    _C.disable_passes([])


def recomputed(names, width=1024):
    _C.disable_passes(names)
    return run(*network(256, width, layers=2))[0].stats()["recomputed_nodes"]


def test_names_are_whole_names():
    assert recomputed([]) > 0
    for names in (["recompute"], ["cse", "recompute"], ["recompute", "cse"]):
        assert recomputed(names) == 0, names
    for names in (["recomput"], ["compute"], ["recomputes"], ["recompute_regions"], ["+recompute"], ["re", "compute"]):
        assert recomputed(names) > 0, names


def test_a_list_that_is_too_long_changes_nothing():
    _C.disable_passes(["recompute"])
    with pytest.raises(ValueError, match="list of passes is too long"):
        _C.disable_passes(["x" * 600])
    assert run(*network(256, 1024, layers=2))[0].stats()["recomputed_nodes"] == 0
