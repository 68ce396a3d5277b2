"""sentence-transformers with its transformer wrapped, trained by its own trainer on pairs: losses, weights and vectors
are those of eager's run, and what is saved loads as the plain model.
"""

import random

import numpy as np
import pytest
import torch

sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from sentence_transformers import SentenceTransformer, losses, models  # noqa: E402

import onnxtrain  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

WORDS = "[PAD] [UNK] [CLS] [SEP] the a cat dog sits runs on mat road red blue big small sees house tree".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A transformer of random weights and its tokenizer, as files."""
    folder = str(tmp_path_factory.mktemp("transformer"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(WORDS, range(len(WORDS)))),
                                                                 unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]",
                                         cls_token="[CLS]", sep_token="[SEP]").save_pretrained(folder)
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32)).save_pretrained(folder)
    return folder


def sentence(draw):
    return " ".join(draw.choices(WORDS[4:], k=draw.randint(3, 8)))


def train(folder, output, wrap, **options):
    transformer = models.Transformer(folder, max_seq_length=16)
    inner = transformer.model
    if wrap:
        transformer.model = inner = ORTModule(inner)
    model = SentenceTransformer(modules=[transformer, models.Pooling(16, "mean")], device="cpu")
    draw = random.Random(0)
    pairs = datasets.Dataset.from_list([{"anchor": sentence(draw), "positive": sentence(draw)} for _ in range(24)])
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(output), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", **options)
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=pairs, loss=losses.MultipleNegativesRankingLoss(model))
    trainer.train()
    return model, inner, [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["plain", "bf16"])
def test_pairs(folder, tmp_path, options):
    plain, _, want = train(folder, tmp_path / "eager", False, **options)
    model, inner, got = train(folder, tmp_path / "ours", True, **options)
    half = bool(options)
    assert len(got) == 4 and got == pytest.approx(want, rel=1e-2 if half else 1e-5)
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0.1 if half else 1e-3, atol=5e-3 if half else 1e-4, msg=name)
    counts = onnxtrain.stats(inner)
    # anchors and positives of four batches, whose lengths differ
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (8, 0, 1), counts
    if half:
        return
    texts = ["the cat sits", "a red dog runs on the road"]
    vectors = model.encode(texts)
    np.testing.assert_allclose(vectors, plain.encode(texts), rtol=1e-3, atol=1e-4)
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(loaded.encode(texts), vectors, rtol=1e-4, atol=1e-5)
    assert type(loaded[0].model) is transformers.BertModel and onnxtrain.stats(inner)["fallback_steps"] == 0
