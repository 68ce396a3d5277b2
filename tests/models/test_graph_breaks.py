"""Dynamo captures every model of the zoos as one graph, but for those of BREAKS, each with its reasons: a model that
begins to break is noticed, and so is one that no longer does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
import against_eager as against
from test_models import MODELS, RANDOM, step
from transformers_zoo import CASES

import onnxtrain
from onnxtrain.ortmodule import ORTModule

#: model -> what stats() says, without details and lines
BREAKS: dict[str, list[str]] = {
    "wav2vec2": ["requires_grad_() intermediate leaked as output" if torch.__version__ >= (2, 15) else
                 "setattr() on Tensor.requires_grad",  # of the input, for checkpoints of its layers
                 "torch.* op returned non-Tensor", "Dynamo could not trace a function, so Python runs it"],
}


def holds(name: str, model: ORTModule) -> None:
    counts = onnxtrain.stats(model)
    found = sorted({text.partition(", in /")[0].partition(": ")[0] for text in counts["graph_breaks"]})
    assert found == sorted(BREAKS.get(name, [])), onnxtrain.explain(model)
    assert not counts["reasons"] and counts["engine_steps"] == 1, onnxtrain.explain(model)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", sorted({*MODELS, *RANDOM}))
def test_zoo(name: str) -> None:
    torch.manual_seed(0)
    case = RANDOM.get(name) or MODELS[name]
    model = ORTModule(case.make().train())
    step(model, case.data(), case.loss)
    holds(name, model)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_transformers(name: str, attention: str) -> None:
    module, kwargs = against.made(name, attention, "inside", 0, dropout=0.1)
    model = ORTModule(module)
    against.step(model, kwargs, "inside")
    holds(name, model)
