"""Padded, unlabelled and unread rows are left out: losses and gradients stay those of the program that computes all,
dropout on, and those of eager PyTorch, dropout off."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
         "max_position_embeddings": 32}
GPT2 = {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 1, "use_cache": False}
BATCH, LENGTH = 4, 20


@pytest.fixture(autouse=True)
def every_graph_is_large_enough():
    _C.disable_passes(["+pack_rows"])
    yield
    _C.disable_passes([])


class Loss(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, labels):
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss


class Shifted(nn.Module):
    """A causal model with the usual loss of the next token."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, labels):
        scores = self.model(input_ids=ids, attention_mask=mask).logits
        return F.cross_entropy(scores[:, :-1].reshape(-1, scores.shape[-1]), labels[:, 1:].reshape(-1))


MODELS = {
    "masked tokens": lambda: Loss(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))),
    "classes": lambda: Loss(transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))),
    "last token": lambda: Loss(transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**GPT2))),
    "next token": lambda: Shifted(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))),
}


def batch(kind, left=False, seed=5, lengths=(20, 12, 7, 3)):
    """(ids, mask, labels); `left`: padding in front."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 48, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(0, LENGTH - length) if left else slice(length, None)] = 0
    ids = ids * mask
    if kind in ("classes", "last token"):
        return ids, mask, torch.tensor([0, 1, 0, 1])
    chosen = torch.rand(ids.shape, generator=generator) < 0.3 if kind == "masked tokens" else torch.tensor(True)
    return ids, mask, torch.where(chosen & (mask > 0), ids, -100)


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name.removeprefix("_torch_module."): p.grad for name, p in model.named_parameters()}


def same(got, wanted, tolerance):
    """Gradients; those of a bias of keys are rounding alone, so that all are measured by the largest."""
    assert got.keys() == wanted.keys()
    largest = max(g.abs().max().item() for g in wanted.values() if g is not None)
    for name, value in wanted.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance * largest,
                                       msg=lambda m: f"{name}: {m}")


def totals(model):
    """Of the largest program."""
    found = [program.totals() for _, programs in model._all_programs() for program in programs]
    return max(found, key=lambda stats: stats["steps"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"])
@pytest.mark.parametrize("kind", MODELS)
def test_same_as_all_rows(kind, dtype, tolerance):
    """Dropout on: the same elements are dropped. Right and left padding."""
    torch.manual_seed(0)
    model = MODELS[kind]().to(dtype).train()
    packed, plain = ORTModule(copy.deepcopy(model)), ORTModule(copy.deepcopy(model))
    for step, left in enumerate((False, True)):
        inputs = batch(kind, left)
        torch.manual_seed(step)
        loss = packed(*inputs)
        found = gradients(packed, loss)
        stats = totals(packed)
        _C.disable_passes(["pack_rows"])
        torch.manual_seed(step)
        wanted = plain(*inputs)
        torch.testing.assert_close(loss, wanted, rtol=tolerance, atol=tolerance)
        same(found, gradients(plain, wanted), tolerance)
        _C.disable_passes(["+pack_rows"])
        assert stats["packed_nodes"] > 40
        assert 42 <= stats["key_rows"] < 60 and stats["key_rows_of"] == BATCH * LENGTH  # a label may be on padding
    assert not totals(plain)["packed_nodes"]


def packed_under_autocast(model, kind):
    """The model in bfloat16, which must equal the one with all rows but for rounding."""
    packed, plain = ORTModule(copy.deepcopy(model)), ORTModule(copy.deepcopy(model))
    for step, left in enumerate((False, True)):
        inputs, found = batch(kind, left), []
        for ours, passes in ((packed, ["+pack_rows"]), (plain, ["pack_rows"])):
            _C.disable_passes(passes)
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = ours(*inputs)
            found.append((loss.detach(), gradients(ours, loss)))
        (loss, got), (wanted_loss, wanted) = found
        torch.testing.assert_close(loss, wanted_loss, rtol=1e-2, atol=1e-2)
        same(got, wanted, 2e-2)
    assert totals(packed)["packed_nodes"] and not totals(plain)["packed_nodes"]
    return packed


@pytest.mark.parametrize("kind", MODELS)
def test_autocast(kind):
    torch.manual_seed(0)
    packed_under_autocast(MODELS[kind]().train(), kind)


def test_autocast_reads_padding_of_short_sequences():
    """Where the processor has products of attention in bfloat16, heads of 64 are fused whatever the length."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 128, "intermediate_size": 64}
    model = Loss(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))
    packed = packed_under_autocast(model.train(), "masked tokens")
    programs = [program for _, programs in packed._all_programs() for program in programs]
    has_kernel = any(kernel == "attention_tiles" for p in programs for _, kernel, _ in p.session.kernels())
    assert bool(totals(packed)["key_rows"]) == has_kernel


@pytest.mark.parametrize("kind", ["masked tokens", "last token"])
def test_same_as_eager(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().double().eval()
    ours = ORTModule(copy.deepcopy(model))
    for lengths in ((20, 12, 7, 3), (20, 20, 20, 20), (1, 2, 3, 4)):
        inputs = batch(kind, lengths=lengths)
        wanted, loss = model(*inputs), ours(*inputs)
        torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
        same(gradients(ours, loss), gradients(model, wanted), 1e-9)


def test_nothing_but_the_mask_decides():
    """A label on a padded token counts, and a token with the padding's number that is not masked too."""
    torch.manual_seed(0)
    model = MODELS["masked tokens"]().double().eval()
    ours = ORTModule(copy.deepcopy(model))
    ids, mask, labels = batch("masked tokens")
    labels[3, 19], ids[0, 5] = 7, 0
    wanted, loss = model(ids, mask, labels), ours(ids, mask, labels)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    same(gradients(ours, loss), gradients(model, wanted), 1e-9)
    assert totals(ours)["key_rows"] == 44  # 43, rounded up to a multiple of 2


def test_results_are_whole():
    """Scores beside the loss: nothing of them is left out."""
    torch.manual_seed(0)
    model = MODELS["masked tokens"]().model.eval()
    ours = ORTModule(copy.deepcopy(model))
    ids, mask, labels = batch("masked tokens")
    wanted = model(input_ids=ids, attention_mask=mask, labels=labels)
    found = ours(input_ids=ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    assert not totals(ours)["label_rows_of"]


@pytest.mark.parametrize(("variable", "labels", "padding"), [
    ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", False, False), ("ORTMODULE_ENABLE_SPARSE_OPTIMIZER", False, False),
    ("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", False, True),
    ("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", True, False), ("ORTMODULE_LOG_LEVEL", True, True)])
def test_variables_and_table(variable, labels, padding, monkeypatch, caplog):
    monkeypatch.setenv(variable, "WARNING" if variable.endswith("LEVEL") else "0")
    torch.manual_seed(0)
    model = ORTModule(MODELS["masked tokens"]())
    with caplog.at_level("WARNING", logger="onnxtrain"):
        model(*batch("masked tokens")).backward()
    stats = totals(model)
    assert (bool(stats["label_rows_of"]), bool(stats["key_rows_of"])) == (labels, padding)
    lines = {line[2:30].strip(): line[31:35].strip() for line in caplog.text.splitlines() if line.startswith("  ")}
    assert (lines["Label sparsity"], lines["Embedding sparsity"]) == ("ON" if labels else "OFF",
                                                                    "ON" if padding else "OFF")
    assert lines["Compute optimizer"] == ("ON" if labels or padding else "OFF")


def test_density_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("ORTMODULE_PRINT_INPUT_DENSITY", "1")
    torch.manual_seed(0)
    ORTModule(MODELS["classes"]())(*batch("classes")).backward()
    assert "training: label density 100.0%, embedding density 5" in capsys.readouterr().out
