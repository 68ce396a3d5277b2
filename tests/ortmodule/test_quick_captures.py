"""What a process with a kept export imports, and that Dynamo's functions answer as without it."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onnxtrain.ortmodule import _quick_captures

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
from onnxtrain.ortmodule import ORTModule
import onnxtrain
model = ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()))
model(torch.randn(5, 4)).sum().backward()
print(onnxtrain.stats(model)["cached_exports"],
      *[name for name in ("onnxtrain.export", "onnxscript", "onnx_ir", "networkx", "functorch.compile",
                          "torch.export._trace", "torch._dynamo.testing", "torch._dynamo.repro.after_dynamo",
                          "torch._functorch.aot_autograd")
        if name in sys.modules])
"""


def test_a_kept_export_needs_neither_the_exporter_nor_torchs_compiler(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORTMODULE_CACHE_DIR": str(tmp_path / "cache")}
    said = [subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True,
                           check=True).stdout.split() for _ in range(2)]
    assert said[0][0] == "0" and "onnxscript" in said[0]
    assert said[1] == ["1"]


def test_what_is_replaced_is_put_back():
    from torch._dynamo import eval_frame, output_graph, symbolic_convert
    from torch.fx.experimental import symbolic_shapes

    def all_of_them():
        in_some = getattr(output_graph.OutputGraph, "get_replayed_side_effect_source_refs", None)  # not in torch 2.10
        return (eval_frame.get_compiler_fn, output_graph.uninteresting_files,
                symbolic_convert.InstructionTranslator._throw_if_in_functorch, symbolic_shapes.uninteresting_files,
                symbolic_convert.get_funcname, *([in_some] if in_some else []))

    before = all_of_them()
    with _quick_captures.backend_as_it_is(), _quick_captures.capturing():
        assert all(one is not other for one, other in zip(before, all_of_them(), strict=True))
    assert all_of_them() == before


def test_a_transform_that_is_active_is_refused_as_before():
    def refuse(translator):
        raise RuntimeError("active")

    throw = _quick_captures._in_functorch(refuse)
    throw(None)
    with pytest.raises(RuntimeError, match="active"):
        torch.func.grad(lambda x: (throw(None), x.sum())[1])(torch.ones(2))


def test_a_log_that_is_on_has_the_names_of_functions(caplog):
    from torch._dynamo import symbolic_convert

    def here():
        with _quick_captures.capturing():
            return symbolic_convert.get_funcname(__file__, here.__code__.co_firstlineno + 1)

    assert here() is None
    with caplog.at_level(logging.DEBUG, symbolic_convert.trace_call_log.name):
        assert here().endswith("here")


def test_messages_leave_out_the_same_files():
    from torch.fx.experimental import symbolic_shapes

    theirs = symbolic_shapes.uninteresting_files()  # imports torch.export
    assert _quick_captures._files(symbolic_shapes.uninteresting_files)() == theirs
    ours = {sys.modules[name].__file__ for name in _quick_captures._UNINTERESTING}
    assert ours <= theirs
