"""What a run leaves: the adapter, and the model with the adapter in its weights, as safetensors, GGUF and ONNX. What is
written is read back.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch

from onnxtrain.finetune import gguf
from onnxtrain.finetune.data import Example
from onnxtrain.finetune.files import FinetuneError, replacing
from onnxtrain.finetune.model import load, loaded, multiplies_bfloat16


def check(args: argparse.Namespace, config: Any, tokenizer: Any) -> None:
    """Raises FinetuneError where an output that is asked for cannot be written of such a model."""
    if not args.gguf:
        return
    try:
        import gguf as package  # noqa: F401

        gguf.check(config, tokenizer)
    except ImportError:
        raise FinetuneError("--gguf needs gguf: pip install gguf") from None
    except gguf.Refused as error:
        raise FinetuneError(f"--gguf: {error}") from None


def write(args: argparse.Namespace, model: Any, tokenizer: Any, example: Example) -> None:
    """Writes a trained PeftModel. Raises FinetuneError where a disk is full, or what is read back is not the same."""
    import peft

    replacing(args.out, lambda part: model.save_pretrained(str(part)))
    read = peft.load_peft_weights(str(args.out), device="cpu")
    kept = peft.get_peft_model_state_dict(model)
    if read.keys() != kept.keys() or any(not torch.equal(read[name], kept[name]) for name in kept):
        raise FinetuneError(f"{args.out} was read back, and is not the adapter that was written")
    print(f"{args.out}: the adapter, read back")
    if not (args.merged or args.gguf or args.onnx):
        return
    ids = torch.tensor([example["input_ids"]])
    trained = _logits(model, ids)
    if args.base == "nf4":  # the adapter goes to the weights before they were quantized
        plain = load(args.model, "bfloat16" if multiplies_bfloat16() else "float32")
        model = peft.PeftModel.from_pretrained(plain, args.out)
    merged = model.merge_and_unload()
    wanted = _logits(merged, ids)
    away = ((wanted - trained).norm() / trained.norm()).item()  # merged weights are rounded to the base's dtype
    print(f"merging changes the logits of the first example by {away:.1e} of their norm")
    for folder, save, load_again in ((args.merged, _save, _load), (args.gguf, _save_gguf, _load_gguf),
                                     (args.onnx, _save_onnx, None)):
        if not folder:
            continue
        replacing(folder, lambda part, save=save: save(merged, tokenizer, part))  # type: ignore[misc]
        if load_again is None:
            print(f"{folder}: the merged model, checked by onnx")
            continue
        got = _logits(load_again(folder, merged), ids)
        if not (got - wanted).norm() <= (1e-2 if merged.dtype == torch.bfloat16 else 1e-4) * wanted.norm():
            raise FinetuneError(f"{folder} was read back, and computes other logits than the model that was written")
        print(f"{folder}: the merged model, read back")


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits.float()
    return logits


# ---- safetensors ----


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load(folder: Path, like: Any) -> Any:
    import transformers

    return loaded(transformers.AutoModelForCausalLM, str(folder), dtype=like.dtype)


# ---- GGUF ----

_GGUF = "model.gguf"


def _save_gguf(model: Any, tokenizer: Any, folder: Path) -> None:
    gguf.write(model, tokenizer, folder / _GGUF)


def _load_gguf(folder: Path, like: Any) -> Any:
    """By transformers' reader, which is independent of ours. It reads the tensors, but not all that the file says of
    positions, heads and biases.
    """
    import transformers

    config = loaded(transformers.AutoConfig, str(folder), gguf_file=_GGUF)
    for name in ("rope_parameters", "head_dim", "attention_bias", "mlp_bias"):
        if hasattr(like.config, name):
            setattr(config, name, getattr(like.config, name))
    return loaded(transformers.AutoModelForCausalLM, str(folder), gguf_file=_GGUF, config=config, dtype=like.dtype)


# ---- ONNX ----


class _Forward(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def _save_onnx(model: Any, tokenizer: Any, folder: Path) -> None:
    import onnx

    ids = torch.zeros(2, 16, dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=model.config.max_position_embeddings)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Forward(model), (ids, torch.ones_like(ids)), folder / "model.onnx", dynamo=True, external_data=True,
            input_names=["input_ids", "attention_mask"], output_names=["logits"], dynamic_shapes=(sizes, sizes),
            verbose=False)
    onnx.checker.check_model(folder / "model.onnx")
    tokenizer.save_pretrained(folder)
