"""Tests of what one front alone does: torch.export's refusals by name, and its count of exports."""

import pytest


@pytest.fixture(autouse=True)
def _capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = request.node.get_closest_marker("capture")
    if mark is not None:
        monkeypatch.setenv("ONNXTRAIN_CAPTURE", mark.args[0])
