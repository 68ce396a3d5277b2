"""A model that is cut short is refused."""

from __future__ import annotations

import loader_models
import pytest
from loader_build import answers

from onnxtrain import _C


@pytest.mark.parametrize("name", ["mlp", "functions", "everything"])
def test_truncated(check, name):
    """Cut at any length, a model is refused or, where the cut falls between fields, read without what follows."""
    data = loader_models.ALL[name]().SerializeToString()
    cuts = [data[:n] for n in range(0, len(data), 1 + len(data) // 400)]
    for n, line in zip(range(len(cuts)), answers(check, cuts), strict=True):
        assert line.split()[0] in ("EINVAL", "EUNSUPPORTED"), (n, line)


def test_truncated_in_python():
    data = loader_models.mlp().SerializeToString()
    for n in range(0, len(data), 5):
        with pytest.raises((ValueError, _C.UnsupportedError)):
            _C.Session(data[:n])
