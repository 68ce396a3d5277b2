"""Which results a script reads in training: the others are None and not computed, and what is read is eager's.

Every result is a tensor when the call returns, whatever becomes of it, and stays that: see the last tests, which keep
everything and read it at the end.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from agree import RECENT, equal, in_engine
from torch import nn
from torch.utils.checkpoint import checkpoint

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.training import ORTTrainer, ORTTrainerOptions, legacy, optim
from onnxtrain.training.step import trainer

WORDS, ROWS = 4096, 96  # scores take 1.5 MiB
Pair = collections.namedtuple("Pair", "loss scores")


@dataclasses.dataclass
class Plain:
    loss: torch.Tensor | None
    scores: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor | None
    scores: torch.Tensor


def of_transformers(loss, scores):
    from transformers.modeling_outputs import MaskedLMOutput

    return MaskedLMOutput(loss=loss, logits=scores)


def as_dict(loss, scores):
    return {"loss": loss, "scores": scores}


KINDS = {  # name -> (what forward returns, outputs=, what the scores are found by)
    "tuple": (lambda loss, scores: (loss, scores), 0, 1), "list": (lambda loss, scores: [loss, scores], (-2,), 1),
    "namedtuple": (Pair, "loss", "scores"), "namedtuple, position": (Pair, 0, "scores"), "dict": (as_dict, "loss", "scores"),
    "OrderedDict": (lambda loss, scores: collections.OrderedDict(as_dict(loss, scores)), ["loss"], "scores"),
    "dataclass": (Plain, "loss", "scores"), "frozen dataclass": (Frozen, ("loss",), "scores"),
    "nested": (lambda loss, scores: {"losses": {"all": loss, "half": loss / 2}, "scores": [scores]}, "losses", "scores"),
    "ModelOutput": (of_transformers, "loss", "logits"), "ModelOutput, either": (of_transformers, ("loss", 0), "logits"),
}


class Head(nn.Module):
    """A loss with the scores beside it, as models of libraries return them."""

    def __init__(self, kind=as_dict, dropout=0.0):
        super().__init__()
        self.words, self.dropout, self.scores = nn.Embedding(WORDS, 16), nn.Dropout(dropout), nn.Linear(16, WORDS)
        self.kind = kind

    def forward(self, x, labels=None):
        scores = self.scores(self.dropout(torch.tanh(self.words(x))))
        return self.kind(None if labels is None else F.cross_entropy(scores, labels), scores)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randint(0, WORDS, (2, ROWS), generator=generator)
    labels[seed % 3::3] = -100
    return x, labels


def pair(*args, outputs="loss", **kwargs):
    """A module and, wrapped, its copy."""
    torch.manual_seed(5)
    module = Head(*args, **kwargs)
    return module, ORTModule(copy.deepcopy(module), outputs=outputs)


def part(result, key):
    return result[key] if isinstance(result, (list, dict)) or isinstance(key, int) else getattr(result, key)


def losses(result):
    found = next(iter(result.values())) if isinstance(result, dict) else part(result, 0) if isinstance(
        result, (list, tuple)) else result.loss
    return found["all"] + found["half"] if isinstance(found, dict) else found


def same_gradients(ours, eager):
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7, msg=name)


def everything(result):
    """As pytree and agree.py take it."""
    return vars(result) if isinstance(result, (Plain, Frozen)) else result


def results_of_graphs(model):
    """How many results each exported graph has."""
    return [len(program.exported.outputs) for _, programs in model._all_programs() for program in programs]


#: Torch 2.10 fills objects behind its graph, and 2.15 an OrderedDict: the graph has the other results too.
FILLED = int(not RECENT or torch.__version__ >= (2, 15))


@pytest.mark.parametrize(("kind", "outputs", "scores"), KINDS.values(), ids=KINDS)
def test_kinds_of_results(kind, outputs, scores):
    eager, model = pair(kind, outputs=outputs)
    for seed in range(3):
        for m in (eager, model):
            m.zero_grad()
        want, got = eager(*batch(seed)), model(*batch(seed))
        assert type(got) is type(want) and part(got, scores) is None
        torch.testing.assert_close(losses(got), losses(want), rtol=1e-5, atol=1e-6)
        losses(want).backward()
        losses(got).backward()
        same_gradients(model, eager)
    in_engine(model, 3)
    results = 1 + (kind is KINDS["nested"][0])
    assert results_of_graphs(model) in ([results], [results + FILLED])
    with torch.no_grad():  # of the first run of a reentrant checkpoint, say, whose second one has gradients
        assert part(model(*batch(9)), scores) is None
    for m in (eager, model):
        m.eval()
    equal(everything(model(*batch(9))), everything(eager(*batch(9))), 1e-4)
    assert not in_engine(model, 5)["graph_breaks"] or FILLED


def test_positions_and_keys_of_a_model_output_stay():
    pytest.importorskip("transformers")
    _, model = pair(of_transformers)
    result = model(*batch(0))
    assert list(result) == ["loss", "logits"] and result[1] is result["logits"] is result.logits is None
    assert result[0] is result.loss


def test_a_call_without_labels_returns_everything():
    """As a model of transformers has no loss then, nothing of what is named is there."""
    eager, model = pair(of_transformers)
    torch.testing.assert_close(model(batch(0)[0]).logits, eager(batch(0)[0]).logits, rtol=1e-4, atol=1e-5)


def test_one_tensor_is_returned_as_it_is():
    model = ORTModule(nn.Linear(4, 4), outputs="loss")
    assert model(torch.ones(2, 4)).shape == (2, 4)
    in_engine(model)


class Custom:
    def __init__(self, loss, scores):
        self.loss, self.scores = loss, scores


@pytest.mark.parametrize(("kind", "outputs", "message"), [
    (as_dict, "los", "'los' is no result of the module. It returns a dict of 'loss', 'scores'"),
    (as_dict, ("loss", "logits"), "'logits' is no result of the module"),
    (Plain, 2, "2 is no result of the module. It returns a Plain of 'loss', 'scores'"),
    (lambda loss, scores: (loss, scores), "loss", "'loss' is no result of the module. It returns a tuple of 0, 1: give one of these"),
    (lambda loss, scores: [loss, scores], (0, 5), "5 is no result of the module. It returns a list of 0, 1"),
    (of_transformers, "scores", "It returns a MaskedLMOutput of 'loss', 'logits', 'hidden_states', 'attentions'"),
    (Custom, "loss", "forward returns an object of the class Custom")])
def test_a_wrong_name(kind, outputs, message):
    _, model = pair(kind, outputs=outputs)
    for _ in range(3):
        with pytest.raises(ValueError, match=message):
            model(*batch(0))
    model.eval()(*batch(0))


@pytest.mark.parametrize("outputs", [1.5, True, ("loss", None), [b"loss"]], ids=str)
def test_what_is_no_name(outputs):
    with pytest.raises(TypeError, match="takes names or positions of the results that are read in training, not"):
        ORTModule(Head(), outputs=outputs)


def test_in_pytorch_as_in_the_engine(monkeypatch):
    """A fallback returns the same."""
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    _, model = pair()
    assert model(*batch(0))["scores"] is None and onnxtrain.stats(model)["fallback_steps"] == 1
    assert model.eval()(*batch(0))["scores"] is not None


def test_a_graph_that_is_cut():
    class Cut(Head):
        def forward(self, x, labels):
            torch._dynamo.graph_break()
            return super().forward(x, labels)

    torch.manual_seed(5)
    eager = Cut()
    model = ORTModule(copy.deepcopy(eager), outputs="loss")
    want, got = eager(*batch(0)), model(*batch(0))
    torch.testing.assert_close(got["loss"], want["loss"])
    assert got["scores"] is None and in_engine(model)["graph_breaks"]


def test_what_the_module_keeps_is_whole():
    """It holds the result that it returned: the caller gets another object."""
    class Keeping(Head):
        def forward(self, x, labels):
            self.last = super().forward(x, labels)
            return self.last

    torch.manual_seed(5)
    eager = Keeping()
    model = ORTModule(copy.deepcopy(eager), outputs="loss")
    for m in (eager, model):
        m(*batch(0))
    equal(model.module.last, eager.last, 1e-4)


def test_copies_and_pickles():
    _, model = pair()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert other(*batch(0))["scores"] is None
        assert other.eval()(*batch(0))["scores"] is not None


def test_the_variable(monkeypatch):
    monkeypatch.setenv("ORTMODULE_OUTPUTS", " loss , 0")
    model = ORTModule(Head())
    assert model(*batch(0))["scores"] is None
    assert ORTModule(Head(), outputs=())(*batch(0))["scores"] is not None
    assert ORTModule(Head(), outputs="scores")(*batch(0))["loss"] is None
    assert ORTModule(Head(lambda loss, scores: (loss, scores)))(*batch(0))[1] is None


def test_run_with_outputs(tmp_path):
    (tmp_path / "train.py").write_text("""
import sys, torch
from onnxruntime.training.ortmodule import ORTModule
class Model(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return {"loss": y.sum(), "scores": y}
print(sys.argv[1:], {name: type(value).__name__ for name, value in ORTModule(Model(2, 2))(torch.ones(1, 2)).items()})
""")
    done = subprocess.run([sys.executable, "-m", "onnxtrain", "run", "--outputs", "loss", "train.py", "--outputs", "x"],
                          cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "ORTMODULE_CACHE_DIR": ""})
    assert "['--outputs', 'x'] {'loss': 'Tensor', 'scores': 'NoneType'}" in done.stdout, done.stderr


def test_what_it_would_save_is_said_once(caplog):
    torch.manual_seed(5)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        for outputs in (None, "loss", ()):
            model = ORTModule(Head(), outputs=outputs)
            for seed in range(2):
                model(*batch(seed))["loss"].backward()
            said = "results beside the loss take 1.5 MiB" in onnxtrain.explain(model)
            assert said == (outputs != "loss")
    assert caplog.text.count("results beside the loss take 1.5 MiB") == 1
    assert caplog.text.count("outputs=) with the loss's name or place among the results, 'loss' or 0, leaves") == 1


def test_small_results_are_no_news(caplog):
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        model = ORTModule(Head())
        model(*[part[:8] for part in batch(0)])["loss"].backward()
    assert "beside the loss" not in caplog.text


# ---- what stands around the call ----


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around(reentrant):
    eager, model = pair(dropout=0.0)
    for m in (eager, model):
        x = torch.ones((), requires_grad=True)  # what a reentrant one wants
        checkpoint(lambda x, m=m: m(*batch(3))["loss"] * x, x, use_reentrant=reentrant).backward()
    same_gradients(model, eager)
    in_engine(model)


def test_gradients_of_gradients():
    eager, model = pair()
    penalties = []
    for m in (eager, model):
        loss = m(*batch(3))["loss"]
        found = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        penalty = loss + sum(grad.square().sum() for grad in found)
        penalty.backward()
        penalties.append(penalty.detach())
    torch.testing.assert_close(*penalties)
    same_gradients(model, eager)


def test_dropout_follows_the_seed():
    _, model = pair(dropout=0.5)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append((model(*batch(9))["loss"].detach(), torch.rand(3)))
    equal(drawn[1], drawn[0], 0)


@pytest.mark.parametrize("around", ["DistributedDataParallel", "fully_shard"])
def test_with_data_parallel_training(around, tmp_path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    eager, model = pair()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if around == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            wrapped = fully_shard(model, mesh=mesh, reshard_after_forward=True)
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
        for seed in range(3):
            for m in (eager, wrapped):
                m.zero_grad()
                result = m(*batch(seed))
                result["loss"].backward()
            assert result["scores"] is None
        for p, q in zip(wrapped.parameters(), eager.parameters(), strict=True):
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            torch.testing.assert_close(grad, q.grad, rtol=1e-4, atol=1e-7)
        in_engine(model, 3)
        del wrapped, p, q, grad, m
        gc.collect()  # no reducer outlives the group, see test_managed_gradients.py
    finally:
        dist.destroy_process_group()


# ---- what a module of transformers leaves out for its loss ----


def test_rows_without_a_label_and_padding_are_left_out():
    transformers = pytest.importorskip("transformers")
    from onnxtrain import _C

    config = transformers.BertConfig(vocab_size=900, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    eager = transformers.BertForMaskedLM(config).train()
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(1, 900, (4, 20), generator=generator), torch.ones(4, 20, dtype=torch.int64)
    mask[1, 8:], mask[2, 15:] = 0, 0
    labels = torch.where((torch.rand(4, 20, generator=generator) < 0.2) & (mask > 0), ids, -100)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    _C.disable_passes(["+pack_rows"])
    try:
        for outputs in ("loss", ("loss", 0), ("loss", "hidden_states"), ()):
            model = ORTModule(copy.deepcopy(eager), outputs=outputs)
            eager.zero_grad()
            want, got = eager(**inputs), model(**inputs)
            torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
            want.loss.backward()
            got.loss.backward()
            same_gradients(model, eager)
            (program,) = [program for _, programs in model._all_programs() for program in programs]
            totals = program.totals()
            assert bool(totals["label_rows_of"]) == bool(outputs) and (got.logits is None) == bool(outputs)
            assert not outputs or 0 < totals["label_rows"] < totals["key_rows"] < 80 == totals["key_rows_of"]
    finally:
        _C.disable_passes([])


# ---- every result is a tensor: keep everything, and read it at the end ----

STEPS = 12


def scores_of(module):
    """The module without its loss."""
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = module

        def forward(self, x):
            return self.head(x)["scores"]

    return Scores()


def cross_entropy(scores, labels):
    return F.cross_entropy(scores, labels)


def kept_by_a_loop(wrap, inside):
    """Losses and scores of each step of plain training."""
    torch.manual_seed(5)
    model = wrap(Head() if inside else scores_of(Head()))
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.5), []
    for seed in range(STEPS):
        x, labels = batch(seed)
        if inside:
            result = model(x, labels)
            loss, scores = result["loss"], result["scores"]
        else:
            scores = model(x)
            loss = cross_entropy(scores, labels)
        kept.append((loss, scores))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [(loss.detach(), scores.detach()) for loss, scores in kept]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize("way", ["ORTModule", "torch.compile"])
def test_what_a_loop_keeps(way, inside):
    wrap = ORTModule if way == "ORTModule" else lambda module: torch.compile(module, backend="onnxtrain")
    for (loss, scores), want in zip(kept_by_a_loop(wrap, inside), kept_by_a_loop(lambda module: module, inside),
                                    strict=True):
        assert type(loss) is type(scores) is torch.Tensor
        equal((loss, scores), want, 1e-4)


def trainers(module):
    """Form -> a step that gives the loss and the scores."""
    names = {"inputs": [("x", ["batch"]), ("labels", ["batch"])],
             "outputs": [("loss", [], True), ("scores", ["batch", WORDS])]}
    described = legacy.ModelDescription(
        [legacy.IODescription("x", ["batch"]), legacy.IODescription("labels", ["batch"])],
        [legacy.IODescription("loss", []), legacy.IODescription("scores", ["batch", WORDS])])
    on_cpu, rate = ORTTrainerOptions({"device": {"id": "cpu"}}), torch.tensor([0.5])
    head = module.head

    def old():
        made = legacy.ORTTrainer(module, cross_entropy, described, "SGDOptimizer", None,
                                 legacy.IODescription("Learning_Rate", [1], torch.float32), "cpu")
        return lambda x, labels: made.train_step(x, labels, rate)

    return {
        "ORTTrainer": lambda: ORTTrainer(module, names, optim.SGDConfig(lr=0.5), cross_entropy, on_cpu).train_step,
        "ORTTrainer, loss inside": lambda: ORTTrainer(head, names, optim.SGDConfig(lr=0.5), options=on_cpu).train_step,
        "ORTTrainer of 2020": old,
        "trainer": lambda: trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.5)).step,
    }


@pytest.mark.parametrize("form", ["ORTTrainer", "ORTTrainer, loss inside", "ORTTrainer of 2020", "trainer"])
def test_what_a_trainer_returned(form):
    torch.manual_seed(5)
    step = trainers(scores_of(Head()))[form]()
    kept = [step(*batch(seed)) for seed in range(STEPS)]
    for (loss, scores), want in zip(kept, kept_by_a_loop(lambda module: module, True), strict=True):
        assert type(loss) is type(scores) is torch.Tensor
        equal((loss, scores), want, 1e-4)
