"""The private names of PyTorch that onnxtrain uses: onnxtrain/_torch.py has all, this PyTorch has them as they were
checked, and one that is not as it was is left alone.
"""

import ast
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agree import both
from torch import nn

import onnxtrain
from onnxtrain import _torch
from onnxtrain.__main__ import main

PACKAGE = Path(onnxtrain.__file__).parent
VERSION = torch.__version__.split("+")[0]
# Of torch.nn.Module, of a namedtuple, of Python; and operators, which are the words of a graph.
PUBLIC = re.compile(r"\._(parameters|buffers|modules|replace|forward_(pre_)?hooks|backward_(pre_)?hooks)\b|\.__\w+__"
                    r"|^torch\.ops\..*")
OPERATORS = re.compile(r"^(aten|torch\.ops\.\w+|sys|functools)\._\w+")  # and Python's
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "replaced")
# Of Python, and notes of ours at functions, tensors, classes and optimizers.
OTHERS = {"_fields", "_initializing", "_of_ortmodule", "_onnxtrain_patched", "_packed", "_plain_class", "_wrapped_class"}
PRIVATE = re.compile(r"\b(?:torch|transformers|onnxscript)(?:\.\w+)*?[.:]_\w+|\btorch\.[\w.]*:\w")


def private(text):
    return PRIVATE.search(PUBLIC.sub("", text)) is not None


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else [""]


def mentions(source):
    """(line, name) of each private name: in an import, a path or a string."""
    tree, known, found = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
            known.update((short, name if alias.asname else short) for (short, name), alias in zip(names, node.names))
        elif isinstance(node, ast.ImportFrom):
            names = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
            known.update(names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [("", node.value)]
        else:
            continue
        found += [(node.lineno, name) for _, name in names if private(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = dotted(node)
            if not private(known.get(first, first)) and private(name := ".".join([known.get(first, first), *rest])):
                found.append((node.lineno, name))
    return found


def test_no_other_file_has_a_private_name():
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "_torch.py"]
    assert len(files) > 100
    assert not [f"{path.relative_to(PACKAGE)}:{line}: {name}" for path in files
                for line, name in mentions(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("line", [
    "from torch._dynamo import config", "from torch.utils import _pytree", "import torch._dynamo",
    "import torch\ntorch._C._is_tracing()", "from torch import nn\nnn.functional._verify_batch_size(x)",
    "wrapped('torch._dynamo.utils:run_node', f)", "wrapped('torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_expr', f)",
    "logging.getLogger('torch._dynamo.convert_frame')", "f'{a} torch._C {b}'",
])
def test_a_private_name_is_found(line):
    assert mentions(line)
    assert not mentions("import torch\ntorch.nn.Module._parameters\ntorch.ops.aten._softmax(x)\nmodule._private\n"
                        "torch.Tensor.__add__\n'torch.nn: a text'")


def test_every_name_is_used():
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "_torch.py")
    methods = {re.split("[.:]", name.path)[-1] for name in _torch.METHODS.values()}
    assert set(re.findall(r"\w+", source)) >= _torch.TABLE.keys() | methods


def classes_and_uses():
    """Names with an underscore that the package's modules and classes define, and (file, line, name) of those that it
    reads or sets of an object.
    """
    own, used = set(), []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if of_self and isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
                if not OPERATORS.search(ast.unparse(node)):
                    used.append((path.name, node.lineno, node.attr))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
                used += [(path.name, node.lineno, name.value) for name in node.args[1:2]
                         if isinstance(name, ast.Constant) and name.value.startswith("_")]
            elif isinstance(node, (ast.ClassDef, ast.Module)):
                for part in node.body:
                    own.update(getattr(name, "name", getattr(name, "id", "")) for name in (
                        [part] if isinstance(part, (ast.FunctionDef, ast.ClassDef)) else ast.walk(part)
                        if isinstance(part, (ast.Assign, ast.AnnAssign)) else []))
    return own, used


def test_every_private_attribute_of_an_object_is_listed():
    own, used = classes_and_uses()
    listed = {name for names in _torch.ATTRIBUTES.values() for name in names.split()}
    known = own | listed | OTHERS | {"_wrap_model"}
    assert not [use for use in used if use[2] not in known and not PUBLIC.search(f".{use[2]}")]
    assert listed <= {name for _, _, name in used}


def test_this_torch_has_every_name_as_it_was_checked():
    """With another release than those, a difference is for the table to say: known, or a `lacks`."""
    states = {short: _torch.status(short) for short in _torch.TABLE}
    lacking = {short for short, name in _torch.TABLE.items() if VERSION in name.lacks}
    if VERSION in _torch.CHECKED:
        assert {short for short, state in states.items() if state == "missing"} == lacking
        assert not [short for short, state in states.items() if state == "unknown"]
    assert not [short for short, name in _torch.TABLE.items() if name.needed and states[short] == "missing"
                and short not in lacking]


def test_there_are_few():
    counts = [[name.needed for name in _torch.TABLE.values() if name.how == how]
              for how in ("replaced for a while", "replaced for good")]
    assert sum(map(len, counts)) <= 30 and sum(map(sum, counts)) <= 15 and len(counts[1]) <= 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x, scale):
        x = self.layers(x)
        print(x.shape)
        return torch.nn.functional.elu(x, scale).square().mean()


def step(model):
    x = torch.randn(4, 6, requires_grad=True)
    loss = model(x, 0.5)
    loss.backward()
    return loss, x.grad


@pytest.fixture
def asked_anew(monkeypatch):
    monkeypatch.setattr(_torch, "_places", {})
    monkeypatch.setattr(_torch, "_left_alone", [])


def test_an_unknown_source_leaves_torch_alone(asked_anew, monkeypatch, caplog):
    name = _torch.TABLE["run_node"]
    monkeypatch.setitem(_torch.TABLE, "run_node", name._replace(known=("0" * 12,)))
    caplog.set_level(logging.INFO, logger="onnxtrain")
    model = both(Model, step)
    assert [record.getMessage() for record in caplog.records if "left alone" in record.getMessage()] == [
        f"torch {torch.__version__} is left alone at torch._dynamo.utils.run_node, which is unknown: {name.use}"]
    assert "PyTorch is left alone at torch._dynamo.utils.run_node" in onnxtrain.explain(model)


def test_a_first_step_is_right_without_any_wanted_name(asked_anew, monkeypatch):
    wanted = [short for short, name in _torch.TABLE.items() if not name.needed and name.how != "read"]
    for short in wanted:
        monkeypatch.setitem(_torch.TABLE, short, _torch.TABLE[short]._replace(known=()))
    both(Model, step)
    assert len(_torch.left_alone()) > len(wanted) / 2


def test_a_missing_needed_name_says_which_versions_fit():
    code = ("from onnxtrain import _torch\n"
            "name = _torch.TABLE['reset_code']\n"
            "_torch.TABLE['reset_code'] = name._replace(path='torch._dynamo:gone')\n"
            "import onnxtrain.ortmodule")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        f"ImportError: torch {torch.__version__} has no torch._dynamo.gone, which onnxtrain needs for this: "
        f"{_torch.TABLE['reset_code'].use}. onnxtrain was checked with torch 2.10.0, 2.13.0 and 2.15.0")


def test_another_torch_is_looked_through_at_the_import(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="onnxtrain")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    _torch.check()
    assert "torch 2.99.0 is none of those that onnxtrain was checked with" in caplog.text
    monkeypatch.setitem(_torch.TABLE, "pytree", _torch.Name("torch.utils:_gone", "a test"))
    with pytest.raises(ImportError, match=r"torch 2\.99\.0 has no torch\.utils\._gone, which onnxtrain needs"):
        _torch.check()


def test_doctor(monkeypatch, capsys):
    status = main(["doctor"])
    head, *rows, counts, attributes, methods = capsys.readouterr().out.splitlines()
    assert head == f"Private names that onnxtrain uses, in torch {torch.__version__}:" and len(rows) == len(_torch.TABLE)
    assert rows[0].startswith("torch._dynamo.") and re.search(r"  (wanted|needed)  \w+ source \w+ +\w", rows[0])
    assert re.fullmatch(r"\d+ replaced for a while, \d+ replaced for good, \d+ read", counts)
    assert attributes.startswith("Attributes of objects that it reads: _base ")
    assert methods.endswith(" transformers.Trainer._wrap_model")
    if VERSION in _torch.CHECKED:
        assert status == 0
    monkeypatch.setitem(_torch.TABLE, "run_node", _torch.TABLE["run_node"]._replace(known=()))
    monkeypatch.setitem(_torch.TABLE, "pytree", _torch.Name("torch.utils:_gone", "a test"))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"torch\._dynamo\.utils\.run_node .* unknown source [0-9a-f]{12}", text)
    assert re.search(r"torch\.utils\._gone .* needed +missing", text)


def test_a_digest_is_of_one_definition(tmp_path):
    path, here = tmp_path / "defining.py", {}

    def digests(text):
        path.write_text(text)
        exec(compile(text, str(path), "exec"), here)
        return _torch.digest(here["first"])

    one = digests("def first(\n    a,\n):\n    return a\n\n\nx = 1\n")
    assert one == digests("\nimport os\n\ndef first(\n    a,\n):\n    return a\n# a remark\ndef second(): pass\n")
    assert one == digests("def first(\n    a,\n):\n    # a remark\n\n    return a  # another\n")
    assert one != digests("def first(\n    a,\n):\n    return +a\n")
    assert _torch.digest(len) == "builtin_function_or_method" and _torch.digest([]) == "list"
    path.unlink()
    assert _torch.digest(here["first"]) == "without source"
