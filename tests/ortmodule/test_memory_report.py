"""memory_report() and max_batch(): plans for sizes that never run, against what a step of those sizes then takes."""

import re

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule


class Net(nn.Module):
    def __init__(self, width=128, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                                  nn.Dropout(0.1), nn.Linear(4 * width, width))
                                    for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def model():
    model = ORTModule(Net())
    model(torch.randn(8, 128)).backward()
    return model


def test_the_plan_is_that_of_the_step(model):
    report = onnxtrain.memory_report(model, (4096, 128))
    model(torch.randn(4096, 128)).backward()
    assert report.slab_bytes == onnxtrain.stats(model)["slab_bytes"]
    assert report.slab_bytes >= max(report.live) == max(report.phases["forward"], report.phases["backward"])
    assert report.phases["gradients"] == report.phases["parameters"] == sum(p.nbytes for p in model.parameters())
    assert 0 < report.phases["kept"] <= report.phases["forward"]
    assert onnxtrain.memory_report(model).slab_bytes < report.slab_bytes  # of the first step


def test_what_is_said(model):
    report = onnxtrain.memory_report(model, (4096, 128))
    levels, budgets = report.levels, report.budgets
    assert levels[0][0] == report.slab_bytes > levels[1][0] >= levels[2][0]
    sizes = [size for size, _ in budgets.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size <= part * report.slab_bytes for part, (size, _) in budgets.items() if part >= 0.6)
    assert sum(size for _, size in report.holders) == max(report.live)
    assert any("layers." in name for name, _ in report.holders)
    text = str(report)
    assert f"planned activations {report.slab_bytes / 2**20:.1f} MiB" in text
    assert len(re.findall("ORTMODULE_MEMORY_OPT_LEVEL=", text)) == 3


def test_the_largest_batch(model):
    batch = onnxtrain.max_batch(model, 64 << 20)
    def planned(size):
        report = onnxtrain.memory_report(model, (size, 128))
        return report.slab_bytes + report.phases["outputs"] + report.phases["gradients"]
    assert planned(batch) <= 64 << 20 < planned(batch + 1)
    assert onnxtrain.max_batch(model, "64MB", (1, 128)) == batch
    assert onnxtrain.max_batch(model, 1000) == 0
    assert onnxtrain.max_batch(model, "4GB", most=5) == 5
    with pytest.raises(ValueError, match="expected a number of bytes"):
        onnxtrain.max_batch(model, 0.5)


def test_bad_questions(model):
    with pytest.raises(TypeError, match="takes an ORTModule, but was given a Net"):
        onnxtrain.memory_report(Net())
    with pytest.raises(RuntimeError, match="no training step of this model has run"):
        onnxtrain.memory_report(ORTModule(Net()))
    with pytest.raises(ValueError, match="2 sizes are given, but the graph has 1 inputs"):
        onnxtrain.memory_report(model, (1, 128), (1, 128))
    with pytest.raises(ValueError, match="shape is"):
        onnxtrain.memory_report(model, (128,))
    with pytest.raises(ValueError, match="negative size"):
        onnxtrain.memory_report(model, (-1, 128))
