"""Every variable of onnxtrain/options.py: parsed, documented, and with the effect that it names."""

import json
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain import _C, options
from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, LogLevel, ORTModule, ORTModuleTorchModelException
from onnxtrain.ortmodule.experimental.json_config import load_from_json

ROOT = Path(__file__).resolve().parents[1]
FREE = {"", "a path", "a folder", "a folder; empty: none", "a path of a JSON list of plans, or plans joined by commas", "full names of classes, joined by commas",
        f"{', '.join(options.PASSES)}; joined by commas", "names or positions, joined by commas"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # the default of ORTMODULE_CACHE_DIR is in it
    monkeypatch.setattr(options, "_said", set())
    for name in [*options.VARIABLES, *options.IGNORED, "XDG_CACHE_HOME"]:
        monkeypatch.delenv(name, raising=False)


def default(variable):
    return variable.default() if callable(variable.default) else variable.default


@pytest.mark.parametrize("variable", options.VARIABLES.values(), ids=lambda v: v.name)
def test_parser(variable, monkeypatch, caplog):
    assert variable.read() == default(variable)
    if variable.default not in (None, "", ()):
        assert variable.parse(variable.shown_default) == default(variable)
    if variable.choices in FREE:
        return
    monkeypatch.setenv(variable.name, "nonsense")
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        assert variable.read() == default(variable) == variable.read()
    assert caplog.text.count(f"{variable.name}=nonsense is not one of: {variable.choices}; using "
                             f"{variable.shown_default}") == 1


def test_documentation_is_made_from_the_list():
    assert subprocess.run([sys.executable, ROOT / "tools/environment.py", "--check"]).returncode == 0


def test_no_variable_is_read_that_is_not_listed():
    known = {*options.KNOWN, *options.IGNORED}
    found = set()
    for path in [*(ROOT / "onnxtrain").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]")]:
        found |= set(re.findall(r'"((?:ORTMODULE|ONNXTRAIN)_[A-Z_0-9]+)"', path.read_text(encoding="utf-8")))
    found -= {"ORTMODULE_TORCH_CPP_DIR", "ORTMODULE_FALLBACK_POLICY", "ORTMODULE_FALLBACK_RETRY"} - known
    assert found == known


@pytest.mark.parametrize("name", options.IGNORED)
def test_what_has_no_effect_is_said_once(name, monkeypatch, caplog):
    monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        ORTModule(nn.Linear(2, 2)), ORTModule(nn.Linear(2, 2))
    assert caplog.text.count(f"{name}=1 has no effect in onnxtrain: {options.IGNORED[name]}") == 1


def test_misspelt_names_and_values_are_said_once(monkeypatch, caplog):
    for name, value in (("ORTMODULE_FALLBCK_POLICY", "FALLBACK_DISABLE"), ("ORTMODULE_FOO", "1"),
                        ("OTRMODULE_LOG_LEVEL", "INFO"), ("ONNXTRAIN_GEM", "torch"),
                        ("ONNXTRAIN_ISA", "avx1024"), ("ONNXTRAIN_GEMM", "mkl"),
                        ("ONNXTRAIN_DISABLE", "schedule,everything,+pack_rows"),
                        ("ONNXTRAIN_CUDA", "0"), ("ONNXTRAIN_VENV", "x"), ("ORTMODULE_MEMORY_OPT_LEVEL", "1")):
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        ORTModule(nn.Linear(2, 2)), ORTModule(nn.Linear(2, 2))
    said = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(":")[0] for text in said] == [
        "ONNXTRAIN_DISABLE=everything", "ONNXTRAIN_GEM is not a variable that onnxtrain reads; ONNXTRAIN_GEMM is",
        "ONNXTRAIN_GEMM=mkl is not one of", "ONNXTRAIN_ISA=avx1024 is not one of",
        "ORTMODULE_FALLBCK_POLICY is not a variable that onnxtrain reads; ORTMODULE_FALLBACK_POLICY is",
        "ORTMODULE_FOO is not a variable that onnxtrain reads; docs/environment.md lists those that are",
        "OTRMODULE_LOG_LEVEL is not a variable that onnxtrain reads; ORTMODULE_LOG_LEVEL is"]
    assert "fuse_elementwise" in said[0]


# --- effects ----------------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Dynamo does not follow the generator."""

    def __init__(self):
        super().__init__()
        self.fc, self.random = nn.Linear(2, 2), random.Random(0)

    def forward(self, x):
        return self.fc(x)


def ran(module=None, x=None, debug=None):
    model = ORTModule(module or nn.Linear(2, 2), debug)
    model(torch.ones(1, 2) if x is None else x)
    return model


def program(model):
    (found,) = model._all_programs()[0][1]
    return found


def opset(monkeypatch, **_):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "18")
    assert program(ran()).exported.opset == 18


def outputs(monkeypatch, **_):
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum(), x + 1

    for text, kept in (("", 2), ("loss, 0", 1), ("-1", 1), ("1,0", 2)):
        monkeypatch.setenv("ORTMODULE_OUTPUTS", text)
        assert sum(result is not None for result in ORTModule(Pair(2, 2))(torch.ones(1, 2))) == kept


def log_level(monkeypatch, caplog, **_):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "error")
    assert DebugOptions(LogLevel.VERBOSE).log_level == LogLevel.ERROR


def save_path(monkeypatch, tmp_path, **_):
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    ran(debug=DebugOptions(save_onnx=True, onnx_prefix="m", save_path="elsewhere"))
    assert (tmp_path / "m_torch_exported_training.onnx").exists()


def fallback_policy(monkeypatch, **_):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA | FALLBACK_UNSUPPORTED_TORCH_MODEL")
    assert onnxtrain.stats(ran(Drawing()))["fallback_steps"] == 1
    for policy in ("FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA",
                   "FALLBACK_DISABLE|FALLBACK_UNSUPPORTED_TORCH_MODEL"):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
        with pytest.raises(ORTModuleTorchModelException, match="random.Random"):
            ran(Drawing())
    for policy in ("FALLBACK_FORCE_TORCH_FORWARD", "FALLBACK_FORCE_TORCH_BACKWARD|FALLBACK_UNSUPPORTED_DATA"):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
        counts = onnxtrain.stats(ran())
        assert counts["fallback_steps"] == 1 and counts["exports"] == 0


def fallback_retry(monkeypatch, **_):
    import onnxtrain.export
    from onnxtrain._export.errors import ExportError

    tries = []

    def failing(*_args, **_kwargs):
        tries.append(1)
        raise ExportError("no")

    monkeypatch.setattr(onnxtrain.export, "export", failing)
    for value, expected in (("0", 1), ("1", 3)):
        tries.clear()
        monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", value)
        model = ran()
        model(torch.ones(1, 2)), model(torch.ones(1, 2))
        assert len(tries) == expected


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Calls(nn.Linear):
    def forward(self, x):
        return Wrong.apply(super().forward(x))


def custom_autograd(monkeypatch, name="ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", value="0", **_):
    assert len(program(ran(Calls(2, 2))).exported.functions) == 1
    monkeypatch.setenv(name, value)
    assert onnxtrain.stats(ran(Calls(2, 2)))["fallback_steps"] == 1  # its gradient is not that of its forward


def skipped_functions(monkeypatch, **_):
    custom_autograd(monkeypatch, "ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS", f"{__name__}.Wrong")


def cache_dir(monkeypatch, tmp_path, **_):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "cache"))
    assert onnxtrain.stats(ran())["exports"] == 1 and len(list((tmp_path / "cache").glob("*.zip"))) == 1
    assert onnxtrain.stats(ran())["cached_exports"] == 1
    monkeypatch.delenv("ORTMODULE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert onnxtrain.stats(ran())["exports"] == 1 and len(list((tmp_path / "onnxtrain").glob("*.zip"))) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # counts as not set
    assert options.default_cache() == str(tmp_path / "home" / ".cache" / "onnxtrain")
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "")
    assert onnxtrain.stats(ran())["exports"] == 1 and not (tmp_path / "home").exists()


def print_memory(monkeypatch, capsys, **_):
    monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", "1")
    model = ORTModule(nn.Linear(2, 2))
    for _ in range(20):
        model(torch.ones(1, 2))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1].rstrip(",")) for line in lines] == [*range(1, 11), 16] and "MiB" in lines[0]
    assert all(f"{phase} 0." in lines[0] for phase in ("forward", "kept", "backward"))


class Wide(nn.Module):
    """Residual blocks of two products."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Linear(256, 256)

    def forward(self, x):
        for _ in range(3):
            x = x + self.down(torch.relu(self.up(torch.tanh(x))))
        return self.out(x)


def memory_budget(monkeypatch, caplog, **_):
    """The planned bytes stay within it, as a part of what the level plans or in bytes."""
    whole = program(ran(Wide(), torch.ones(2048, 256))).totals()["slab_bytes"]
    for text, limit in (("70%", 0.7 * whole), ("28 MB", 28 << 20)):
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_BUDGET", text)
        totals = program(ran(Wide(), torch.ones(2048, 256))).totals()
        assert totals["slab_bytes"] <= totals["budget_bytes"] == int(limit)
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_BUDGET", "10kb")
    ran(Wide(), torch.ones(2048, 256))
    assert "more than the budget of 0.0 MiB: raise ORTMODULE_MEMORY_OPT_BUDGET" in caplog.text


def memory_level(monkeypatch, **_):
    """Products run again as well, and less is kept."""
    plans = []
    for level in ("0", "1", "2"):
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", level)
        model = ran(Wide(), torch.ones(2048, 256))
        plans.append(program(model).totals())
        assert f"memory: {plans[-1]['slab_bytes'] / 2**20:.1f} MiB are planned" in onnxtrain.explain(model)
    assert plans[0]["slab_bytes"] > plans[1]["slab_bytes"] >= plans[2]["slab_bytes"]
    assert plans[0]["recomputed_share"] <= 0.02 < plans[1]["recomputed_share"] <= 0.2
    assert plans[1]["recomputed_share"] <= plans[2]["recomputed_share"] <= 0.45
    assert f"backward runs {plans[2]['recomputed_nodes']} nodes again" in onnxtrain.explain(model)


def memory_config(monkeypatch, **_):
    """What it names runs again, at any size: the tanh of the graph's input, not those of sums, which are not kept."""
    plain = program(ran(Wide(), torch.ones(64, 256))).totals()
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "Tanh+:1:-1")
    totals = program(ran(Wide(), torch.ones(64, 256))).totals()
    assert (plain["recomputed_nodes"], totals["recomputed_nodes"]) == (0, 1)
    assert totals["kept_bytes"] == plain["kept_bytes"] - 64 * 256 * 4


class Tokens(nn.Module):
    """Attention that does not see padding, and a loss of the tokens that have a label."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9)

    def forward(self, ids, mask, labels):
        q, k, v = [x.view(*ids.shape, 2, 4).transpose(1, 2) for x in self.qkv(self.embed(ids)).split(8, -1)]
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        scores = self.head(seen.transpose(1, 2).reshape(*ids.shape, 8))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def packed():
    """A module that ran once, with 7 of 20 tokens that are no padding, 3 of which have a label."""
    labels, mask = torch.full((2, 10), -100), torch.arange(10)[None] < torch.tensor([[4], [3]])
    labels[0, :3] = 1
    model = ORTModule(Tokens())
    _C.disable_passes(["+pack_rows"])  # however small the graph
    try:
        model(torch.randint(9, (2, 10)), mask, labels)
    finally:
        _C.disable_passes([])
    return model


def packed_rows(which, wanted, monkeypatch, **_):
    rows = {"label_rows": 3, "key_rows": 7}
    for value, expected in (("1", rows), ("0", {"label_rows": 0, "key_rows": 0, **wanted})):
        monkeypatch.setenv(f"ORTMODULE_ENABLE_{which}_OPTIMIZER", value)
        totals = program(packed()).totals()
        assert {name: totals[name] for name in rows} == expected


def print_density(monkeypatch, capsys, **_):
    monkeypatch.setenv("ORTMODULE_PRINT_INPUT_DENSITY", "1")
    packed()
    assert ("training: label density 15.0% (3 of 20 rows), embedding density 35.0% (7 of 20 rows)"
            in capsys.readouterr().out)


def json_config(monkeypatch, tmp_path, **_):
    (tmp_path / "a.json").write_text(json.dumps({"FallbackPolicy": ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA"]}))
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(tmp_path / "a.json"))
    model = ORTModule(nn.Linear(2, 2))
    load_from_json(model, "nowhere.json")
    assert model._fallback.policy == FallbackPolicy.FALLBACK_DISABLE | FallbackPolicy.FALLBACK_UNSUPPORTED_DATA


def in_process(code, **variables):
    done = subprocess.run([sys.executable, "-c", f"import torch, onnxtrain\nfrom onnxtrain import _C\n{code}"],
                          cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def isa(**_):
    assert in_process("print(_C.build_info()['isa'])", ONNXTRAIN_ISA="plain") == "plain"


RUN = """from onnxtrain.ortmodule import ORTModule
class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(256, 256)

    def forward(self, x):
        return self.fc(x).tanh() + self.fc(x).tanh()

m = ORTModule(Twice())
m(torch.ones(256, 256))
p = m._all_programs()[0][1][0]
"""


def gemm(**_):
    """Two implementations sum in different orders, which shows in the last bits; an older name means the same one."""
    code = f"torch.manual_seed(0)\n{RUN}print(hash(m(torch.randn(256, 256)).detach().numpy().tobytes()))"
    blas, reference, older = (in_process(code, ONNXTRAIN_GEMM=name, ORTMODULE_LOG_LEVEL="ERROR", PYTHONHASHSEED="0")
                              for name in ("torch", "reference", "plain"))
    assert blas != reference == older


def disable(**_):
    code = RUN + "print(len(p.session.kernels()))"
    every, fewer = (int(in_process(code, ONNXTRAIN_DISABLE=names, ORTMODULE_LOG_LEVEL="ERROR"))
                    for names in ("cse", ""))
    assert every > fewer


def flush_denormals(**_):
    """On one thread: a library's team is told for large programs alone."""
    code = f"{RUN}m.fc.weight.data.fill_(1e-40), m.fc.bias.data.zero_()\nprint(m(torch.ones(256, 256)).abs().max().item() > 0)"
    off, on = (in_process(code, ONNXTRAIN_FLUSH_DENORMALS=value, OMP_NUM_THREADS="1", ORTMODULE_LOG_LEVEL="ERROR")
               for value in ("0", "1"))
    assert (off, on) == ("True", "False")


def cuda_graph(monkeypatch, **_):
    """What the engine is told when a module is on CUDA; tests/cuda has what it does then."""
    from onnxtrain.ortmodule import _device

    told = []
    monkeypatch.setattr(_device._C, "set_graphs", told.append)
    for text in ("0", "1"):
        monkeypatch.setenv("ORTMODULE_CUDA_GRAPH", text)
        _device.configure()
    assert told == [False, True]


def efficient_gradients(monkeypatch, **_):
    results = []
    for text in ("0", "1"):
        monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", text)
        model = ORTModule(nn.Linear(4, 2))
        y = model(torch.ones(3, 4)).sum()
        y.backward()
        assert torch.equal(model.weight.grad, torch.full((2, 4), 3.0))
        results.append(sum(node is not None for node, _ in y.grad_fn.next_functions[0][0].next_functions))
    assert results == [2, 1]  # weight and bias, or the anchor


def skip_check(monkeypatch, **_):
    """Checks are not skipped, but a script may read what it has asked for."""
    from onnxtrain.ortmodule.options import _SkipCheck

    monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_DISABLED")
    assert ORTModule(nn.Linear(2, 2))._runtime.skip_check == _SkipCheck.SKIP_CHECK_DISABLED


def reduce_dtype(monkeypatch, tmp_path, **_):
    from onnxtrain.training._collectives import Collectives
    from onnxtrain.training._distributed import Peers

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for text, want in (("", 1.001), ("float32", 1.001), ("bfloat16", 1.0)):
            monkeypatch.setenv("ONNXTRAIN_REDUCE_DTYPE", text)
            gradients = torch.full((2,), 1.001)
            Peers(Collectives()).start_sum(gradients)()
            assert torch.equal(gradients, torch.full((2,), want))
    finally:
        torch.distributed.destroy_process_group()


EFFECTS = {
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": efficient_gradients,
    "ONNXTRAIN_FLUSH_DENORMALS": flush_denormals,
    "ORTMODULE_CUDA_GRAPH": cuda_graph,
    "ORTMODULE_SKIPCHECK_POLICY": skip_check,
    "ORTMODULE_OUTPUTS": outputs,
    "ORTMODULE_ONNX_OPSET_VERSION": opset, "ORTMODULE_LOG_LEVEL": log_level, "ORTMODULE_SAVE_ONNX_PATH": save_path,
    "ORTMODULE_FALLBACK_POLICY": fallback_policy, "ORTMODULE_FALLBACK_RETRY": fallback_retry,
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": custom_autograd,
    "ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS": skipped_functions,
    "ORTMODULE_CACHE_DIR": cache_dir, "ORTMODULE_PRINT_MEMORY_STATS": print_memory,
    "ORTMODULE_JSON_CONFIG_PATH": json_config, "ONNXTRAIN_ISA": isa, "ONNXTRAIN_GEMM": gemm,
    "ONNXTRAIN_REDUCE_DTYPE": reduce_dtype, "ONNXTRAIN_DISABLE": disable,
    "ORTMODULE_MEMORY_OPT_LEVEL": memory_level, "ORTMODULE_MEMORY_OPT_BUDGET": memory_budget,
    "ORTMODULE_MEMORY_OPT_CONFIG": memory_config,
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": lambda **kw: packed_rows("COMPUTE", {}, **kw),
    "ORTMODULE_ENABLE_SPARSE_OPTIMIZER": lambda **kw: packed_rows("SPARSE", {}, **kw),
    "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": lambda **kw: packed_rows("LABEL_SPARSE", {}, **kw),
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER":
        lambda **kw: packed_rows("EMBEDDING_SPARSE", {"label_rows": 3}, **kw),
    "ORTMODULE_PRINT_INPUT_DENSITY": print_density,
}


@pytest.mark.parametrize("name", options.VARIABLES)
def test_effect(name, monkeypatch, tmp_path, caplog, capsys):
    EFFECTS[name](monkeypatch=monkeypatch, tmp_path=tmp_path, caplog=caplog, capsys=capsys)


def test_older_names(monkeypatch):
    custom_autograd(monkeypatch, "ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "1")
