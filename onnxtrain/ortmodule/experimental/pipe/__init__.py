"""The name of upstream's pipeline module, for scripts that import it."""

from __future__ import annotations


class ORTPipelineModule:
    """Not supported: pipelines of stages.

    Raises:
        NotImplementedError: always, with what can be used.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            "ORTPipelineModule, DeepSpeed's PipelineModule with each stage in an ORTModule, is not supported. Data "
            "parallel training (DDP), ZeRO stages 1 and 2 of DeepSpeed, and FSDP around an ORTModule are.")
