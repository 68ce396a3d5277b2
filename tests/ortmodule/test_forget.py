"""What Dynamo compiled of functions that are gone."""

import subprocess
import sys

import pytest

GONE = """
import sys, torch
from onnxtrain.ortmodule import ORTModule
model = ORTModule(torch.nn.Linear(4, 4))
model.register_full_backward_hook(lambda module, given, got: None)
model(torch.randn(3, 4, requires_grad=True)).sum().backward()
del model
if sys.argv[1] == "reset":
    torch._dynamo.reset()
"""


@pytest.mark.parametrize("when", ["reset", "exit"])
def test_a_model_that_goes_while_dynamo_clears_its_caches(when):
    """In a process of its own, which died of clearing the same code twice."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", GONE, when], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
