"""The passes that a variable can leave out are those that the core runs."""

import re

from test_environment import ROOT, _fresh  # noqa: F401

from onnxtrain import options


def test_passes_are_those_of_the_core():
    text = (ROOT / "csrc/passes/pipeline.c").read_text(encoding="utf-8")
    found = set(re.findall(r'^    \{"(\w+)", ont_pass_\w+, false', text, re.M)) | set(
        re.findall(r'is_disabled\("(\w+)"\)', text + (ROOT / "csrc/run/schedule.c").read_text(encoding="utf-8")))
    assert {*options.PASSES} == {*found, "winograd", "whole_step"} and list(options.PASSES) == sorted(options.PASSES)
