"""passes/channels_last.c on the emulated device: models with convolutions, whose images change their order."""

from __future__ import annotations

from test_emulated import built, run


def test_models_in_channels_last():
    report = run("conv_graph.py", built("asan", "--sanitize"))
    assert report["passed"] == 11 and not report["failed"], report["failed"]
    assert {f"{op}:cuda_conv_graph" for op in ("Conv", "ConvGradInput", "ConvGradWeight")} <= set(report["ran"])
