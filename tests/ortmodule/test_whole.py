"""A module captured as one graph, as files have it: the module is left as it was, and a cut is an error by name."""

import pytest
import torch
import torch.nn as nn

from onnxtrain.export import ExportError
from onnxtrain.ortmodule._whole import export_whole


class Counting(nn.Module):
    """With state of every kind that a capture may touch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = self.out(torch.dropout(self.norm(x), 0.5, self.training)) * scale
        return {"y": y, "sum": y.sum()}


def test_a_capture_leaves_the_module_as_it_was() -> None:
    torch.manual_seed(0)
    module = Counting().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(3, 4)
    random = torch.get_rng_state()
    exported = export_whole(module, (x,), {"scale": torch.tensor(2.0)})
    assert module.calls == 0 and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [(source.kind, source.target) for source in exported.inputs if source.kind == "user"] == [
        ("user", 0), ("user", 1)]
    assert [target.target for target in exported.outputs if target.kind == "user"] == [0, 1]
    assert {source.target for source in exported.inputs if source.kind == "parameter"} == {
        "norm.weight", "norm.bias", "out.weight", "out.bias"}


@pytest.mark.parametrize("change, reason", [
    (lambda y: y if y.sum() > 0 else -y, "one graph"),
    (lambda y: (y, y[0]), "a view of one"),
])
def test_a_file_cannot_say_it(change: object, reason: str) -> None:
    class Module(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:
            return change(super().forward(x))  # type: ignore[operator]

    with pytest.raises(ExportError, match=reason):
        export_whole(Module(4, 4), (torch.ones(2, 4),), {})
