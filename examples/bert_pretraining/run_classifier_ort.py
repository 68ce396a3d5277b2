"""Fine-tunes BERT on pairs of sentences and evaluates it: MRPC's files, or pairs made of any text by --make_pairs.

MRPC's table, which bertPrep.py downloads, has a heading line and the columns label, two ids, and two texts, by tabs.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from create_pretraining_data import Vocabulary, truncate
from modeling import BertConfig, BertForSequenceClassification
from torch import Tensor, nn

import onnxtrain.compat.onnxruntime  # noqa: F401

# isort: split
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim

COLUMNS = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
Pair = tuple[int, str, str]


def read_pairs(path: Path) -> list[Pair]:
    """Raises ValueError: a line has not five columns."""
    pairs = []
    for line in path.read_text(encoding="utf-8-sig").splitlines()[1:]:
        cells = line.split("\t")
        if len(cells) != 5:
            raise ValueError(f"{path}: {len(cells)} columns, expected 5 ({COLUMNS!r}): {line[:60]!r}")
        pairs.append((int(cells[0]), cells[3], cells[4]))
    return pairs


def make_pairs(shards: list[Path], output: Path, seed: int, limit: int) -> None:
    """Writes a table of pairs from text shards: neighbours in one article (1), sentences of two articles (0)."""
    articles = [sentences for path in shards for article in path.read_text(encoding="utf-8").split("\n\n")
                if len(sentences := [line for line in article.splitlines() if len(line) > 40]) > 1]
    rng, lines = random.Random(seed), [COLUMNS]
    for place in range(limit):
        one = rng.randrange(len(articles))
        start = rng.randrange(len(articles[one]) - 1)
        other = (one + rng.randrange(1, len(articles))) % len(articles)
        second = articles[one][start + 1] if place % 2 else rng.choice(articles[other])
        lines.append(f"{place % 2}\t{place}a\t{place}b\t{articles[one][start]}\t{second}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def encode(pairs: list[Pair], vocabulary: Vocabulary, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, segments and mask (pairs, length), and labels (pairs,); int64."""
    ids, segments, mask = (torch.zeros(len(pairs), length, dtype=torch.int64) for _ in range(3))
    rng = random.Random(0)
    texts = vocabulary.encode([text for _, *both in pairs for text in both])
    for row, (first, second) in enumerate(zip(texts[::2], texts[1::2])):
        truncate(first, second, length - 3, rng)
        tokens = [vocabulary.cls, *first, vocabulary.sep, *second, vocabulary.sep]
        ids[row, :len(tokens)] = torch.tensor(tokens)
        segments[row, len(first) + 2:len(tokens)] = 1
        mask[row, :len(tokens)] = 1
    return ids, segments, mask, torch.tensor([label for label, *_ in pairs])


def scores_of(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, and F1 of label 1."""
    hits = int(((predicted == 1) & (labels == 1)).sum())
    total = int((predicted == 1).sum() + (labels == 1).sum())
    return {"accuracy": float((predicted == labels).double().mean()), "f1": 2 * hits / total if total else 0.0}


def evaluate(trainer: ORTTrainer, data: tuple[Tensor, ...], batch: int) -> dict[str, float]:
    outputs = [trainer.eval_step(*(part[start:start + batch] for part in data))
               for start in range(0, len(data[0]), batch)]
    sizes = [len(scores) for _, scores in outputs]
    loss = sum(float(loss) * size for (loss, _), size in zip(outputs, sizes)) / sum(sizes)
    predicted = torch.cat([scores.argmax(1).cpu() for _, scores in outputs])
    return {"loss": loss, **scores_of(predicted, data[3])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--train_file", type=Path, required=True)
    add("--eval_file", type=Path, required=True)
    add("--make_pairs", type=Path, help="a folder of shards: writes both files first, of its training and test shards")
    add("--vocab_file", required=True)
    add("--config_file", required=True)
    add("--init_checkpoint", help="of convert_checkpoint.py; without it all weights are random")
    add("--do_lower_case", action=argparse.BooleanOptionalAction, default=True)
    add("--max_seq_length", type=int, default=128)
    add("--train_batch_size", type=int, default=32)
    add("--learning_rate", type=float, default=2e-5)
    add("--num_train_epochs", type=int, default=3)
    add("--warmup_proportion", type=float, default=0.1)
    add("--seed", type=int, default=42)
    add("--fp16", action="store_true")
    add("--output_file", type=Path, help="results as JSON")
    args = parser.parse_args()
    if args.make_pairs is not None:
        for kind, path, limit in (("training", args.train_file, 2000), ("test", args.eval_file, 500)):
            make_pairs(sorted(args.make_pairs.glob(f"*_{kind}_*.txt")), path, args.seed, limit)
    torch.manual_seed(args.seed)
    vocabulary = Vocabulary(args.vocab_file, args.do_lower_case)
    data, held_out = (encode(read_pairs(path), vocabulary, args.max_seq_length)
                      for path in (args.train_file, args.eval_file))
    model = BertForSequenceClassification(BertConfig.from_json(args.config_file).padded(), 2)
    if args.init_checkpoint:
        state = torch.load(args.init_checkpoint, map_location="cpu", weights_only=True)["model"]
        lacking = [name for name in model.load_state_dict(state, strict=False).missing_keys
                   if not name.startswith("classifier.")]
        if lacking:
            raise ValueError(f"{args.init_checkpoint} lacks {', '.join(lacking)}")
    batch, count = args.train_batch_size, len(data[0])
    steps = max(1, count // batch * args.num_train_epochs)
    tokens = ["batch", "length"]
    trainer = ORTTrainer(
        model, {"inputs": [("input_ids", tokens), ("token_type_ids", tokens), ("attention_mask", tokens),
                           ("label", ["batch"])],
                "outputs": [("loss", [], True), ("scores", ["batch", 2])]},
        optim.AdamConfig([{"params": [name for name, _ in model.named_parameters()
                                      if "bias" in name or "LayerNorm" in name], "lambda_coef": 0.0}],
                         lr=args.learning_rate, lambda_coef=0.01, epsilon=1e-6),
        loss_fn=lambda scores, label: nn.functional.cross_entropy(scores, label),
        options=ORTTrainerOptions({
            "device": {"id": "cuda" if torch.cuda.is_available() else "cpu"},
            "mixed_precision": {"enabled": args.fp16},
            "lr_scheduler": optim.LinearWarmupLRScheduler(steps, args.warmup_proportion)}))
    results: dict[str, float | list[float]] = {}
    for epoch in range(args.num_train_epochs):
        order = torch.randperm(count)
        losses = []
        for start in range(0, count - batch + 1, batch):
            rows = order[start:start + batch]
            loss, _ = trainer.train_step(*(part[rows] for part in data))
            losses.append(float(loss))
        results = evaluate(trainer, held_out, batch)
        print(f"epoch {epoch + 1}: loss {sum(losses) / max(1, len(losses)):.4f}; held out: "
              + ", ".join(f"{name} {value:.4f}" for name, value in results.items()), flush=True)
    if args.output_file is not None:
        args.output_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
