"""NVRTC compiles generated kernels for every architecture, and refuses what is wrong."""

from __future__ import annotations

import facts
from test_nvidia_facts import needs_nvrtc, sources  # noqa: F401


@needs_nvrtc
def test_nvrtc_compiles_generated_kernels(sources):
    kept = facts.drawn(sources, 24)
    assert not facts.check_generated(facts.nvrtc(), kept)


@needs_nvrtc
def test_nvrtc_refuses_what_is_wrong(sources):
    refused = facts.check_generated(facts.nvrtc(), [sources[0].replace("ont_fused", "ont_fused(", 1)])
    assert len(refused) == len(facts.ARCHITECTURES)
