"""DebugOptions: files of every stage, verification and levels."""

import logging

import onnx
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from onnxtrain import _C
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule
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
