"""Padded, unlabelled and unread rows are left out: losses and gradients stay those of the program that computes all,
dropout on, and those of eager PyTorch, dropout off."""

import copy

import pytest
import torch

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

transformers = pytest.importorskip("transformers")
from padded_models import BATCH, LENGTH, MODELS, SIZES, Loss, batch, gradients, same, totals  # noqa: E402


@pytest.fixture(autouse=True)
def every_graph_is_large_enough():
    _C.disable_passes(["+pack_rows"])
    yield
    _C.disable_passes([])


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
    monkeypatch.setenv(variable, "INFO" if variable.endswith("LEVEL") else "0")
    torch.manual_seed(0)
    model = ORTModule(MODELS["masked tokens"](), DebugOptions(LogLevel.INFO))
    with caplog.at_level("INFO", logger="onnxtrain"):
        model(*batch("masked tokens")).backward()
    stats = totals(model)
    assert (bool(stats["label_rows_of"]), bool(stats["key_rows_of"])) == (labels, padding)
    for text in (caplog.text, onnxtrain.explain(model)):
        assert ("rows of scores are computed: those of tokens with a label" in text) == labels
        assert ("tokens are computed: padding is not" in text) == padding


def test_density_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("ORTMODULE_PRINT_INPUT_DENSITY", "1")
    torch.manual_seed(0)
    ORTModule(MODELS["classes"]())(*batch("classes")).backward()
    assert "training: label density 100.0%, embedding density 5" in capsys.readouterr().out
