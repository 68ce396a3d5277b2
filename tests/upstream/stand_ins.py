"""What the old trainer's tests ask the network for, made here: a corpus, MNIST's shapes, BERT of 2020, a toy BERT.

Used by run.py and plugin.py. Numbers that those tests have written down are of the real things, and differ.
"""

from __future__ import annotations

import importlib.machinery
import random
import sys
import types
from pathlib import Path
from typing import Any

import onnx
import torch

WORDS = 285  # of the corpus, and of the models' vocabulary (run.py, READ_AS)


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def write_corpus(folder: Path) -> list[str]:
    """Files of test, validation and training text, of random words; those that are there stay."""
    draw = random.Random(3)
    files = []
    for part in ("test", "valid", "train"):
        path = folder / f"{part}.txt"
        if not path.exists():
            words = [f"w{number}" for number in range(WORDS)] + [f"w{draw.randrange(WORDS)}" for _ in range(16000)]
            path.write_text(" ".join(words) + "\n", encoding="utf-8")
        files.append(str(path))
    return files


def _extract_archive(archive: str, to_path: str | None = None) -> list[str]:
    return write_corpus(Path())


def _vocabulary(lists: Any) -> dict[str, int]:
    index: dict[str, int] = {}
    for words in lists:
        for word in words:
            index.setdefault(word, len(index))
    return index


class _Digits(torch.utils.data.Dataset):
    """Random images of MNIST's shape, whose labels can be learned."""

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Any = None) -> None:
        draw = torch.Generator().manual_seed(int(train))
        self.images = torch.randn(1280 if train else 1000, 1, 28, 28, generator=draw)
        self.labels = self.images.flatten(1)[:, :10].argmax(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


def install() -> None:
    """Makes torchtext and torchvision importable where they are not, and transformers' BERT one of 2020."""
    try:  # before there is a torchvision, which transformers would look into
        import transformers

        transformers.utils.is_torchvision_available()
    except ImportError:
        transformers = None
    _module("torchtext")
    _module("torchtext.data")
    _module("torchtext.data.utils", get_tokenizer=lambda name: str.split)
    _module("torchtext.utils", download_from_url=lambda url, root: root, extract_archive=_extract_archive)
    _module("torchtext.vocab", build_vocab_from_iterator=_vocabulary)
    _module("torchvision")
    _module("torchvision.datasets", MNIST=_Digits)
    nothing = types.SimpleNamespace
    _module("torchvision.transforms", ToTensor=nothing, Compose=lambda steps: None, Normalize=lambda *_: None)
    if transformers is None:
        return

    model = transformers.BertForPreTraining
    today = model.forward

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None,
                masked_lm_labels: Any = None, next_sentence_label: Any = None) -> Any:
        """With the parameters and the tuple of transformers 2."""
        found = today(self, input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
                      labels=masked_lm_labels, next_sentence_label=next_sentence_label)
        return tuple(value for value in (found.loss, found.prediction_logits, found.seq_relationship_logits)
                     if value is not None)

    model.forward = forward


def toy_bert(path: Path) -> None:
    """An ONNX file with the inputs, output and names of weights that bert_toy_postprocessed.onnx has."""
    import transformers

    from onnxtrain.training import ORTTrainer, ORTTrainerOptions, optim

    class Toy(transformers.BertForPreTraining):  # type: ignore[misc]
        def forward(self, input_ids: Any, segment_ids: Any, input_mask: Any, masked_lm_labels: Any,
                    next_sentence_labels: Any) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=input_mask, token_type_ids=segment_ids,
                                   labels=masked_lm_labels, next_sentence_label=next_sentence_labels).loss

    torch.manual_seed(0)
    model = Toy(transformers.BertConfig(
        vocab_size=30528, hidden_size=16, num_hidden_layers=5, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, attn_implementation="eager", tie_word_embeddings=False))
    tokens = ["batch", "sequence"]
    names = ["input_ids", "segment_ids", "input_mask", "masked_lm_labels"]
    trainer = ORTTrainer(model, {
        "inputs": [*((name, tokens) for name in names), ("next_sentence_labels", ["batch"])],
        "outputs": [("loss", [], True)]}, optim.LambConfig(), options=ORTTrainerOptions({"device": {"id": "cpu"}}))
    ids = torch.randint(0, 2, (4, 3))
    trainer.eval_step(ids, ids, torch.ones_like(ids), ids, ids[:, 0])
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer.save_as_onnx(str(path))
    saved = onnx.load(path)
    for tensor in [found for found in saved.graph.initializer if found.data_type == onnx.TensorProto.INT64]:
        saved.graph.initializer.remove(tensor)  # the real file has weights alone
        saved.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    onnx.save(saved, path)


if __name__ == "__main__":
    toy_bert(Path(sys.argv[1]))
