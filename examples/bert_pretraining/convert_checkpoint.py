"""Takes the weights of BERT's body out of a pre-training checkpoint: convert_checkpoint.py INPUT OUTPUT.

The optimizer's state and both heads are left out; names stay, so that fine-tuning and other libraries can load it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DROPPED = ("Moment", "Update_Count", "Gradient", "_fp16", "predictions", "seq_relationship")


def converted(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Weights by name, of a checkpoint of run_pretraining_ort.py or the state in it.

    Raises:
        ValueError: there are none of BERT's.
    """
    state = checkpoint.get("model", checkpoint)
    found = {name: value for name, value in state.items()
             if name != "Step" and not any(part in name for part in DROPPED)}
    if not any(name.startswith("bert.") for name in found):
        raise ValueError("the checkpoint has no weights whose names start with 'bert.'")
    return found


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    found = converted(torch.load(sys.argv[1], map_location="cpu", weights_only=True))
    output = Path(sys.argv[2])
    fresh = output.with_name(f".{output.name}.part")
    torch.save({"model": found}, fresh)
    fresh.replace(output)
    print(f"{output}: {len(found)} tensors, {sum(value.numel() for value in found.values()):,} numbers")


if __name__ == "__main__":
    main()
