"""Ten of the scripts of run.py, which need no more than packages from PyPI: equal to eager, each call in the engine. And
run.py's verdicts."""

import pytest
import run
import scripts
import torch

WHOLE = ("torchdiffeq_rk4", "x_transformers_rotary", "conformer_block", "pyg_gcn", "transformers_trainer", "accelerate_loop",
         "lightning_autoencoder", "skorch_classifier", "peft_lora", "sentence_transformers")


@pytest.mark.parametrize("name", WHOLE)
def test_script(name):
    script = scripts.load()[name]
    if missing := script.absent():
        pytest.skip(f"not installed: {', '.join(missing)}")
    line = run.here(script, 4)
    assert line.verdict == "whole", str(line)


def result(losses=(2.0, 1.0), weight=1.0, **counts):
    return dict(losses=list(losses), seconds=[1.0, 0.1], tensors={"0.weight": torch.full((3,), weight)},
                **{**dict(engine=2, torch=0, exports=1, graphs=2, reasons=[]), **counts})


@pytest.mark.parametrize("ours, verdict", [
    (result(), "whole"),
    (result(losses=(2.0, 1.0 + 1e-6), weight=1 + 1e-5), "whole"),
    (result(losses=(2.0, 1.01)), "different"),
    (result(losses=(2.0, float("nan"))), "different"),
    (result(weight=1.01), "different"),
    (dict(result(), tensors={}), "different"),
    (result(reasons=["the graph is cut: somewhere"]), "parts"),
    (result(engine=0, torch=2, reasons=["no"]), "parts"),
    (result(engine=0, torch=2, graphs=0, reasons=["no"]), "pytorch"),
    (result(engine=0, graphs=0), "pytorch"),
])
def test_verdict(ours, verdict):
    assert run.compare("name", result(), ours).verdict == verdict


def test_what_roundings_change_is_allowed():
    """Ten times the largest of the runs whose weights differ by one rounding."""
    moved = [result(), result(losses=(2.0, 1.001))]
    assert run.compare("name", result(), result(losses=(2.0, 1.008)), moved).verdict == "whole"
    assert run.compare("name", result(), result(losses=(2.0, 1.012)), moved).verdict == "different"


def test_definitions_leave_out_what_runs(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import math\nprint(1 / 0)\nclass Net:\n    size = math.pi\n\ndef steps():\n    return args.steps\n")
    module = scripts.definitions(path, args=run.argparse.Namespace(steps=3))
    assert module.Net.size > 3 and module.steps() == 3
    assert not hasattr(scripts.definitions(path, only=("steps",)), "Net")


def test_every_source_is_pinned():
    known = scripts.load()
    for script in known.values():
        if script.repository:
            assert len(script.commit) == 40 and int(script.commit, 16), script.name
        else:
            assert "==" in script.source, script.name
    assert len(known) >= 40 and known.keys() >= set(WHOLE)
