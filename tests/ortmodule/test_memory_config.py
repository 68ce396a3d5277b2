"""ORTMODULE_MEMORY_OPT_CONFIG: how plans are spelled, what they do to a module, and what is said of them."""

import copy
import json
import logging

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule
from onnxtrain.ortmodule._memory_config import parse

NAME = "ORTMODULE_MEMORY_OPT_CONFIG"
ROWS, WIDTH, LAYERS = 256, 64, 3


def test_the_spellings(tmp_path):
    assert parse("") == parse("  ") == parse("[]") == []
    assert parse("Gelu+:1:-1") == parse("Gelu:1:-1") == [("Gelu+", False, -1)]
    assert parse("Cast+Gelu+:2:3, Dropout+:1:0") == [("Cast+Gelu+", True, 3), ("Dropout+", False, 0)]
    plans = ["Gelu+:1:-1", "MatMul+:1:2,Softmax+:1:1"]
    expected = [("Gelu+", False, -1), ("MatMul+", False, 2), ("Softmax+", False, 1)]
    assert parse(json.dumps(plans)) == expected
    for name in ("plans.json", "plans"):
        (tmp_path / name).write_text(json.dumps(plans))
        assert parse(str(tmp_path / name)) == expected


def test_names_of_onnxruntime():
    for theirs, ours in (("BiasGelu+", "Gelu+"), ("FastGelu+", "Gelu+"), ("Gemm+", "MatMul+"),
                         ("FusedMatMul+BiasGelu+", "MatMul+Gelu+"), ("BitmaskBiasDropout+", "Dropout+"),
                         ("BiasSoftmaxDropout+", "Softmax+Dropout+"), ("Cast+Reshape+Dropout+", "Cast+Dropout+"),
                         ("SkipLayerNormalization+", "LayerNormalization+")):
        assert parse(f"{theirs}:1:-1") == [(ours, False, -1)]


def test_the_later_of_two_plans_wins():
    assert parse("Gelu+:1:-1,BiasGelu+:1:2") == [("Gelu+", False, 2)]
    assert parse("Gelu+:1:-1,Gelu+:0:-1") == []


@pytest.mark.parametrize("text, bad", [
    ("Gelu+", "Gelu+"), ("Gelu+:1", "Gelu+:1"), ("Gelu+:1:-1,Dropout+:3:1", "Dropout+:3:1"), (":1:-1", ":1:-1"),
    ("Gelu+:1:-2", "Gelu+:1:-2"), ("Gelu+:x:1", "Gelu+:x:1"), ("Ge lu+:1:1", "Ge lu+:1:1"), ("Gelu++:1:1", "Gelu++:1:1"),
    ("/nowhere/plans.json", "/nowhere/plans.json"), ("[1]", "[1]"), ('["Gelu+:1:-1"', '["Gelu+:1:-1"'),
    ("nowhere", "nowhere"),
])
def test_malformed_plans_raise(text, bad, monkeypatch):
    monkeypatch.setenv(NAME, text)
    with pytest.raises(ValueError) as raised:
        ORTModule(nn.Linear(2, 2))
    assert NAME in str(raised.value) and bad in str(raised.value)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))


def trained(eager, level=logging.WARNING, **options):
    """(statistics, gradients) of one step of a copy."""
    model = ORTModule(copy.deepcopy(eager), DebugOptions(log_level=LogLevel.INFO) if level == logging.INFO else None)
    for name, value in options.items():
        setattr(model._runtime, name, value)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    model(x).square().mean().backward()
    assert onnxtrain.stats(model)["engine_steps"] == 1
    [(_, [program])] = model._all_programs()
    return program.totals(), [p.grad for p in model.parameters()]


def test_a_module(monkeypatch, caplog):
    torch.manual_seed(0)
    eager = nn.Sequential(*(Block() for _ in range(LAYERS)))
    plain, expected = trained(eager)
    monkeypatch.setenv(NAME, "LayerNormalization+:1:-1,FusedMatMul+:1:2,Nothing+Add+:1:-1,Gelu+Dropout+:0:-1")
    with caplog.at_level(logging.INFO, "onnxtrain"):
        totals, got = trained(eager, logging.INFO)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    saved = (LAYERS + 2 * 4) * ROWS * WIDTH * 4
    assert totals["recomputed_nodes"] == LAYERS + 2 and totals["recomputed_bytes"] == saved
    assert totals["kept_bytes"] == plain["kept_bytes"] - saved
    said = [(r.levelno, r.getMessage()) for r in caplog.records if NAME in r.getMessage()]
    [warning] = [text for level, text in said if level == logging.WARNING]
    assert "the graph has no subgraph Nothing+Add+ of type 1" in warning
    [table] = [text for level, text in said if level == logging.INFO]
    rows = {" ".join(line.split()) for line in table.splitlines()[1:]}
    assert {row.split(" : ", 1)[1] for row in rows} >= {
        f"ON : LayerNormalization+:1:-1 {LAYERS} {LAYERS * ROWS * WIDTH * 4:,}",
        f"ON : MatMul+:1:2 {LAYERS} {LAYERS * 4 * ROWS * WIDTH * 4:,}",
        f"OFF : Gelu+Dropout+:1:-1 {LAYERS} {LAYERS * 4 * ROWS * WIDTH * 4:,}"}


def test_the_table_can_be_pasted(caplog):
    """Each row of it, as a setting, does what it says."""
    torch.manual_seed(0)
    eager = nn.Sequential(*(Block() for _ in range(LAYERS)))
    with caplog.at_level(logging.INFO, "onnxtrain"):
        plain, _ = trained(eager, logging.INFO)
    [table] = [r.getMessage() for r in caplog.records if NAME in r.getMessage()]
    plans = [line.split(" : ")[2].split()[0] for line in table.splitlines()[1:]]
    assert len(plans) >= 3
    totals, _ = trained(eager, memory_optimizer_config=",".join(plans))
    assert totals["recomputed_nodes"] >= 4 * LAYERS and totals["kept_bytes"] < 0.5 * plain["kept_bytes"]


def test_levels_choose_by_themselves():
    torch.manual_seed(0)
    eager = nn.Sequential(*(Block() for _ in range(LAYERS)))
    totals, _ = trained(eager, memory_optimizer_config="LayerNormalization+:1:-1", memory_optimization_level=1)
    assert totals["recomputed_nodes"] == 0  # too small for a level
