"""tools/scaling.py: limits of the formula, the table of docs/scaling.md, and that the measurement runs."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("scaling", ROOT / "tools/scaling.py")
scaling = importlib.util.module_from_spec(spec)
sys.modules["scaling"] = scaling
spec.loader.exec_module(scaling)
HARDWARE = scaling.Hardware()


def test_limits():
    bert = scaling.MODELS[0]
    one = scaling.step(bert, 1, True, 4, 0.0, HARDWARE)
    assert one.reduce == 0 and one.total == one.compute + one.update and one.state == 16 * bert.parameters
    instant = dataclasses.replace(HARDWARE, nvlink_latency=0.0, infiniband_latency=0.0)
    two = scaling.step(bert, 2, False, 4, 0.0, instant)
    assert two.reduce == pytest.approx(4 * bert.parameters / (300e9 * 0.8))  # 2 (n - 1) / n is 1
    many = scaling.step(bert, 8 * 4096, False, 4, 0.0, instant)
    assert many.reduce == pytest.approx(2 * 4 * bert.parameters * (7 / 8 / 240e9 + 1 / 8 / 20e9), rel=1e-3)
    assert scaling.step(bert, 64, False, 2, 0.0, instant).reduce == pytest.approx(
        scaling.step(bert, 64, False, 4, 0.0, instant).reduce / 2)
    hidden = scaling.step(bert, 64, False, 4, 1.0, HARDWARE)
    assert hidden.total == pytest.approx(hidden.compute + hidden.update) and hidden.hidden == hidden.reduce
    zero = scaling.step(bert, 64, True, 4, 0.0, HARDWARE)
    assert zero.update == pytest.approx(one.update / 64) and zero.state == (8 + 8 / 64) * bert.parameters


def test_the_page_has_the_numbers():
    page = (ROOT / "docs/scaling.md").read_text()
    for line in rows():
        assert line in page, line


def rows():
    """The table of the page."""
    for model in scaling.MODELS:
        def at(gpus, zero=False, model=model):
            return scaling.step(model, gpus, zero, 4, 0.0, HARDWARE)

        shares = [f"{at(1).total / at(gpus, zero).total:.3f}" for gpus, zero in ((8, False), (64, False), (1024, False),
                                                                                (1024, True))]
        yield (f"| {model.name}, {model.sequences} x {model.sequence} tokens x {model.accumulation} | "
               f"{' | '.join(shares)} | {at(8).state / 2**30:.1f} GiB, {at(8, True).state / 2**30:.1f} GiB |")


def test_the_measurement_runs():
    """Its numbers are for a quiet machine."""
    done = subprocess.run([sys.executable, ROOT / "tools/scaling.py", "--measure"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {line.rsplit(None, 2)[0].strip() for line in done.stdout.splitlines() if line.endswith(" ms")}
    assert {"together, by the model, nothing hidden", "together, measured"} <= found
    assert float(done.stdout.split("| ORTTrainer |")[1].split("|")[3]) > 0
