"""Random modules through ORTModule against eager: a few, by a printed seed; ONNXTRAIN_SLOW=1 takes many."""

import os

import pytest
import random_modules
from seeds import drawn_seed

COUNT = 200 if os.environ.get("ONNXTRAIN_SLOW") else 5
SEED = drawn_seed()


@pytest.fixture(scope="module", autouse=True)
def _say_the_seed(pytestconfig):
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"random modules: ONNXTRAIN_TEST_SEED={SEED}")


@pytest.mark.parametrize("index", range(COUNT))
def test_random_module(index):
    difference = random_modules.compare(SEED + index)
    assert difference is None, f"seed {SEED + index}: {difference}\n{random_modules.RandomModule(SEED + index).text()}"
