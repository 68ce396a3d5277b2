"""DebugOptions: files of every stage, verification, levels, and what is said at the start."""

import logging
import os
import re
import sys
import threading

import onnx
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from onnxtrain import _C, explain
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule, _announce
from onnxtrain.ortmodule._debug import STAGES
from onnxtrain.ortmodule._verify import VerificationError


class Mixed(nn.Module):
    """Operators of both domains, dropout, a normalisation, a constant."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 9, 5)
        self.drop = nn.Dropout(0.25)

    def forward(self, x, y):
        h = F.gelu(self.norm(self.conv(x))).max(-1).values.detach() + self.conv(x).mean(-1)
        h = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1).sum(1, keepdim=True) + h.sum((1, 2)).unsqueeze(1)
        return F.cross_entropy(self.drop(self.fc(F.relu(self.conv(x)).flatten(1)[:, :36]) * h.tanh()), y)


@pytest.mark.parametrize("level", [3, "INFO", None])
def test_refused_levels(level):
    with pytest.raises(TypeError, match="LogLevel"):
        DebugOptions(level)


def test_refused_options(tmp_path):
    for kwargs, error in (({"onnx_prefix": 3}, TypeError), ({"save_onnx": True}, ValueError),
                          ({"save_onnx": True, "onnx_prefix": "m", "save_path": str(tmp_path / "no")}, OSError)):
        with pytest.raises(error):
            DebugOptions(**kwargs)


def test_every_stage_is_written_and_passes_the_checker(tmp_path):
    model = ORTModule(Mixed(), DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path)))
    x, y = torch.randn(2, 1, 6, 6), torch.randint(0, 5, (2,))
    model(x, y).backward()
    with torch.no_grad():
        model(x, y)
    kinds = {}
    for mode in ("training", "inference"):
        for stage in STAGES:
            loaded = onnx.load(tmp_path / f"m_{stage}_{mode}.onnx")
            onnx.checker.check_model(loaded)
            assert loaded.graph.node and loaded.graph.output
            kinds[mode, stage] = [node.op_type for node in loaded.graph.node]
    assert len(list(tmp_path.iterdir())) == 2 * len(STAGES)
    assert len(onnx.load(tmp_path / "m_optimized_pre_grad_training.onnx").graph.output) == 4  # loss and three buffers
    assert len(kinds["training", "execution_model"]) > len(kinds["training", "optimized_pre_grad"])
    assert "SoftmaxCrossEntropyGrad" in kinds["training", "optimized"]
    assert not any(kind.endswith("Grad") for kind in kinds["inference", "execution_model"])
    sizes = [d.dim_value for d
             in onnx.load(tmp_path / "m_execution_model_training.onnx").graph.input[0].type.tensor_type.shape.dim]
    assert all(sizes)


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        h = self.fc(x)
        torch._dynamo.graph_break()
        return h.relu()


def test_each_graph_of_a_module_has_files_of_its_own(tmp_path):
    model = ORTModule(Cut(), DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path)))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 3))
    for mode in ("training", "inference"):
        first, second = [[node.op_type for node in onnx.load(tmp_path / f"m_torch_exported{graph}_{mode}.onnx").graph.node]
                         for graph in ("", "_graph1")]
        assert "Relu" not in first and second == ["Relu"]
    assert len(list(tmp_path.iterdir())) == 4 * len(STAGES)


def test_save_refuses_what_there_is_not():
    model = ORTModule(nn.Linear(2, 2))
    model(torch.ones(1, 2))
    (program,) = model._all_programs()[0][1]
    with pytest.raises(ValueError, match="expected post_processed"):
        program.session.save("final")
    fresh = _C.Session(program.exported.model)
    with pytest.raises(RuntimeError, match="no program"):
        fresh.save("optimized")
    assert onnx.load_model_from_string(fresh.save("post_processed")).graph.node


def test_verify_compares_with_dropout_off_and_leaves_no_trace(caplog):
    torch.manual_seed(0)
    module = Mixed()
    model = ORTModule(module, DebugOptions(verify=2))
    x, y = torch.randn(2, 1, 6, 6), torch.randint(0, 5, (2,))
    mean = module.norm.running_mean.clone()
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(4):
            model(x, y)
    assert caplog.text.count("equal to eager") == 2
    assert "grad fc.weight" in caplog.text and "buffer norm.running_mean" in caplog.text and "output 0" in caplog.text
    assert module.drop.p == 0.25 and module.fc.weight.grad is None
    expected = nn.BatchNorm2d(4)
    for _ in range(4):
        expected(module.conv(x))
    torch.testing.assert_close(module.norm.running_mean, expected.running_mean)
    assert not torch.equal(mean, module.norm.running_mean)


def test_verify_raises_above_tolerance(monkeypatch):
    from onnxtrain.ortmodule import _verify

    real = _verify.without_dropout

    def wrong(model):
        proto = onnx.load_model_from_string(real(model))
        next(node for node in proto.graph.node if node.op_type == "Relu").op_type = "Sigmoid"
        return proto.SerializeToString()

    monkeypatch.setattr(_verify, "without_dropout", wrong)
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), DebugOptions(verify=True))
    with pytest.raises(VerificationError, match="differ from eager PyTorch's by more than 1e-04"):
        model(torch.randn(2, 3))


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_a_long_export_is_said_while_it_goes_on(rank, lines, caplog, monkeypatch):
    monkeypatch.setattr(_announce, "PROGRESS", (0.0, 3600.0))
    monkeypatch.setenv("RANK", rank)
    model = ORTModule(nn.Sequential(nn.Linear(3, 3)))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(2):
            model(torch.randn(2, 3))
    assert caplog.text.count("Sequential is being captured and exported, 0 s so far") == lines
    with pytest.raises(ZeroDivisionError), _announce.start(model):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name == "onnxtrain-progress"]


def test_start_is_one_line_per_mode_on_rank_0(caplog, monkeypatch):
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for _ in range(2):
            model(torch.randn(2, 3))
            model(torch.randn(2, 2, 3))
        model.eval()
        model(torch.randn(2, 3))
    lines = [re.sub(r"[\d.]+", "N", record.getMessage()) for record in caplog.records if record.name == "onnxtrain"]
    assert lines == ["ORTModule: Sequential runs in the engine: N kernels, first call N s, N MiB planned",
                     "ORTModule: Sequential runs in the engine without gradients: N kernels, first call N s, N MiB "
                     "planned"]
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            caplog.clear()
            with caplog.at_level(logging.WARNING, "onnxtrain"):
                ORTModule(nn.Linear(3, 3))(torch.randn(2, 3))
            assert "runs in" not in caplog.text


def test_start_at_info_says_what_explain_says(caplog):
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), DebugOptions(LogLevel.INFO))
    with caplog.at_level(logging.INFO, "onnxtrain"):
        model(torch.randn(2, 3))
    [told] = [record.getMessage() for record in caplog.records if "training graph: " in record.getMessage()]
    assert told.removeprefix("ORTModule: ") in explain(model) and "OFF" not in caplog.text


class Branching(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](x) if x.sum() > 0 else self[1](-x)


def test_start_says_where_only_a_part_is_in_the_engine(caplog):
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        ORTModule(Branching(nn.Linear(3, 3), nn.Linear(3, 3)))(torch.ones(2, 3))
    assert "Branching runs partly in the engine: " in caplog.text and " in 2 graphs, " in caplog.text
    assert "planned; onnxtrain.explain(model) names the rest" in caplog.text


def test_start_says_nothing_of_a_call_that_fails(caplog):
    model = ORTModule(nn.Embedding(3, 3))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        with pytest.raises(IndexError):
            model(torch.tensor([7]))
        assert "runs in" not in caplog.text
        for _ in range(2):
            model(torch.tensor([1]))
    assert caplog.text.count("runs in the engine") == 1


@pytest.mark.parametrize(("level", "info", "warning"),
                         [("INFO", True, True), ("WARNING", False, True), ("ERROR", False, False)])
def test_log_level_and_its_variable(level, info, warning, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "onnxtrain")
    for by_variable in (False, True):
        if by_variable:
            monkeypatch.setenv("ORTMODULE_LOG_LEVEL", level)
        caplog.clear()
        model = ORTModule(nn.Linear(3, 3), DebugOptions(LogLevel.FATAL if by_variable else LogLevel[level]))
        model(torch.randn(2, 3))
        assert any(r.levelno == logging.INFO for r in caplog.records if r.name == "onnxtrain") == info
        assert ("Linear runs in the engine" in caplog.text) == warning


def test_explain_names_opset_time_and_fallbacks(capsys):
    model = ORTModule(nn.Linear(3, 3))
    model(torch.randn(2, 3))
    model(torch.randn(5, 3))
    text = explain(model)
    assert not capsys.readouterr().out and repr(text) == str(text)  # a notebook shows it, print() prints it once
    for part in ("training graph: opset 20", "2 steps", "ms on average", "MiB", "2 in the engine, 0 in PyTorch",
                 "captures: 1 in ", "with 1 export in "):
        assert part in text


def test_lines_of_the_level_asked_for_are_seen_whatever_the_loggers_level(caplog, capsys, monkeypatch):
    class Named(nn.Module):
        def forward(self, x, text):
            return x + len(text)

    ORTModule(Named(), DebugOptions(LogLevel.INFO))(torch.ones(2), "four")
    said = "Received input of type <class 'str'> is treated as a constant"
    assert said in caplog.text
    monkeypatch.setattr(logging.getLogger("onnxtrain"), "propagate", False)
    for level, times in ((LogLevel.INFO, 1), (LogLevel.WARNING, 0)):
        ORTModule(Named(), DebugOptions(level))(torch.ones(2), "four")
        assert capsys.readouterr().err.count(said) == times


def test_the_report_of_a_build_holds_what_a_bug_report_needs(monkeypatch, capsys):
    from onnxtrain.__main__ import main

    for name in [name for name in os.environ if name.startswith(("ORTMODULE_", "ONNXTRAIN_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main([]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"] == torch.__version__ and rows["Python"].startswith(sys.version.split()[0])
    assert onnx.__version__ in rows["onnx,"] and "hardware threads" in rows["processor"]
    assert rows["variables"].startswith("no ORTMODULE_*")
    assert all(name in rows for name in ("onnxtrain", "instruction", "threads", "matrix", "oneDNN", "CUDA", "MPI"))
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    monkeypatch.setenv("ONNXTRAIN_MISSPELT", "1")
    assert main([]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["ORTMODULE_MEMORY_OPT_LEVEL"] == "1" and "variables" not in rows
    assert rows["ONNXTRAIN_MISSPELT"] == "1 (not read at run time)"


def test_commands_are_named_and_a_script_that_is_missing(capsys, tmp_path):
    from onnxtrain.__main__ import main

    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("run ", "alias on ", "alias off", "migrate ", "doctor "))
    with pytest.raises(SystemExit, match="nope.py: there is no such file"):
        main(["run", str(tmp_path / "nope.py")])
