"""Models of `transformers` in small, through ORTModule against eager; see against_eager.py for what is compared.

Every step in the engine, or a failure that names the reason. A run takes a sample by a printed seed; ONNXTRAIN_SLOW=1
takes all. docs/models.md is the table of all of them.
"""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import against_eager as against
from seeds import drawn_seed
from transformers_zoo import CASES, UNDROPPED

SEED = drawn_seed()
EVERY = {
    "three_steps": [(name, attention, where) for name, attention in CASES for where in ("inside", "outside")],
    "bfloat16": [(name, attention, where) for name, attention in CASES for where in ("inside", "outside")],
    "dropped": [(name, attention) for name, attention in CASES if name not in UNDROPPED],
}
COUNTS = {"three_steps": 5, "bfloat16": 2, "dropped": 1}


def sample(kind: str) -> list[pytest.ParameterSet]:
    """Cases of this run."""
    every = EVERY[kind]
    if os.environ.get("ONNXTRAIN_SLOW") != "1":
        every = sorted(random.Random(f"{SEED} {kind}").sample(every, COUNTS[kind]))
    return [pytest.param(*case, id="-".join(case)) for case in every]


print(f"ONNXTRAIN_TEST_SEED={SEED}: {sum(COUNTS.values())} of {sum(map(len, EVERY.values()))} cases of models")


@pytest.mark.parametrize("name, attention, where", sample("three_steps"))
def test_three_steps(name, attention, where):
    assert not against.three_steps(name, attention, where).problems


@pytest.mark.parametrize("name, attention, where", sample("bfloat16"))
def test_bfloat16_autocast(name, attention, where):
    assert not against.bfloat16(name, attention, where).problems


@pytest.mark.parametrize("name, attention", sample("dropped"))
def test_dropout(name, attention):
    assert not against.dropped(name, attention).problems


def test_the_table_has_every_case():
    place = Path(__file__).resolve().parents[2] / "tools" / "models.py"
    spec = importlib.util.spec_from_file_location("models_table", place)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.check() == 0
