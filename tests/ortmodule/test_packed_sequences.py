"""Packed sequences in the engine: values, gradients, what a user reads of them, and torch's own errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from agree import both, equal, in_engine, step
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
KINDS = {"gru": nn.GRU, "lstm": nn.LSTM, "tanh": nn.RNN, "relu": lambda *sizes, **more: nn.RNN(
    *sizes, nonlinearity="relu", **more)}
SETTINGS = {
    "one layer": {},
    "both directions": {"bidirectional": True},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "three layers without bias": {"num_layers": 3, "bias": False},
}
TIGHT = 1e-10


class Tagger(nn.Module):
    """Packs, runs a recurrent network, and pads again."""

    def __init__(self, kind="gru", ordered=False, batch_first=True, padding=0.0, total=None, **settings):
        super().__init__()
        self.rnn = KINDS[kind](4, 5, batch_first=batch_first, **settings)
        self.ordered, self.batch_first, self.padding, self.total = ordered, batch_first, padding, total

    def forward(self, x, lengths, state=None):
        packed = pack_padded_sequence(x, lengths, self.batch_first, self.ordered)
        output, last = self.rnn(packed, state)
        padded, counts = pad_packed_sequence(output, self.batch_first, self.padding, self.total)
        return padded, counts, last


def use(*lengths, ordered=False, batch_first=True, state=None, as_list=False, steps=8):
    """A step for each of these lists of lengths."""
    def run(model):
        results = []
        for some in lengths:
            some = sorted(some, reverse=True) if ordered else list(some)
            shape = (len(some), steps, 4) if batch_first else (steps, len(some), 4)
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            given = x, some if as_list else torch.tensor(some)
            results.append(step(*given, *([] if state is None else [state(len(some))]))(model))
        return results

    return run


LENGTHS = [3, 8, 1, 5, 5], [8, 8, 2], [1, 4], [7, 7, 7]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_torchs(kind, settings):
    model = both(lambda: Tagger(kind, **SETTINGS[settings]).double(), use(*LENGTHS), TIGHT)
    counts = in_engine(model, len(LENGTHS))
    assert not counts["graph_breaks"], counts


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_layouts(ordered, batch_first):
    model = both(lambda: Tagger(ordered=ordered, batch_first=batch_first).double(),
                 use(*LENGTHS, ordered=ordered, batch_first=batch_first), TIGHT)
    assert not in_engine(model)["graph_breaks"]


@pytest.mark.parametrize("padding,total", [(-1.5, None), (0.0, 8), (0.0, 11), (2.0, 11)])
def test_padding(padding, total):
    model = both(lambda: Tagger(padding=padding, total=total).double(), use(*LENGTHS), TIGHT)
    assert not in_engine(model)["graph_breaks"]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_given_states(kind, ordered):
    def state(batch):
        made = [torch.randn(4, batch, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        return tuple(made) if kind == "lstm" else made[0]

    model = both(lambda: Tagger(kind, ordered, num_layers=2, bidirectional=True).double(),
                 use(*LENGTHS, state=state, ordered=ordered), TIGHT)
    assert not in_engine(model)["graph_breaks"]


def test_lengths_in_a_list():
    """Each list would be a graph of its own: PyTorch packs, as without us."""
    model = both(lambda: Tagger().double(), use([3, 8, 2], [4, 8, 3], [5, 6, 7], as_list=True), TIGHT)
    assert onnxtrain.stats(model)["exports"] <= 1


def test_other_lengths_and_batches_need_no_export():
    model = ORTModule(Tagger().double())
    for lengths in ([3, 8, 2], [4, 8, 3], [5, 6, 7], [1, 2, 2, 8], [3, 1, 1, 1, 1]):
        x = torch.randn(len(lengths), 8, 4, dtype=torch.float64)
        model(x, torch.tensor(lengths))[0].sum().backward()
    assert in_engine(model, 5)["exports"] == 1


class Reads(nn.Module):
    """What a user may read, change and put together."""

    def __init__(self, ordered):
        super().__init__()
        self.rnn, self.fc, self.ordered = nn.GRU(4, 5, 2, batch_first=True), nn.Linear(4, 4), ordered

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, True, self.ordered)
        changed = PackedSequence(self.fc(packed.data).tanh(), packed.batch_sizes, packed.sorted_indices,
                                 packed.unsorted_indices)
        output, last = self.rnn(changed)
        output = output._replace(data=output.data * 2)
        return packed, output, last, output.data.sum(), output.batch_sizes


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_user_reads(ordered):
    model = both(lambda: Reads(ordered).double(), use(*LENGTHS, ordered=ordered), TIGHT)
    assert not in_engine(model)["graph_breaks"]


class Scores(nn.Module):
    """A loss over the words that there are, of packed scores and packed labels."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, bidirectional=True), nn.Linear(10, 9)

    def forward(self, words, lengths, labels):
        packed = pack_padded_sequence(words, lengths, True, False)
        output, _ = self.rnn(packed._replace(data=self.embed(packed.data)))
        wanted = pack_padded_sequence(labels, lengths, True, False).data
        return nn.functional.cross_entropy(self.head(output.data), wanted)


def test_a_loss_of_packed_scores():
    def run(model):
        return [step(*torch.randint(0, 9, (2, len(some), 8)).unbind()[:1], torch.tensor(some),
                     torch.randint(0, 9, (len(some), 8)))(model) for some in LENGTHS]

    assert not in_engine(both(lambda: Scores().double(), run, TIGHT))["graph_breaks"]


class Packed(nn.Module):
    """The caller packs."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 5, 2, bidirectional=True)

    def forward(self, packed):
        return self.rnn(packed)


@pytest.mark.parametrize("ordered", [False, True])
def test_packed_arguments(ordered):
    def run(model):
        results = []
        for some in LENGTHS:
            some = sorted(some, reverse=True) if ordered else some
            x = torch.randn(len(some), 8, 4, dtype=torch.float64)
            results.append(step(pack_padded_sequence(x, torch.tensor(some), True, ordered))(model))
        return results

    model = both(lambda: Packed().double(), run, TIGHT)
    assert not in_engine(model)["graph_breaks"]


class OfTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 5)

    def forward(self, *sequences):
        return self.rnn(pack_sequence(sequences, enforce_sorted=False))[1]


def test_sequences_of_tensors():
    def run(model):
        return [step(*[torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in some])(model)
                for some in ([3, 5, 2], [4, 6, 9], [7, 3, 8])]

    in_engine(both(lambda: OfTensors().double(), run, TIGHT))


def test_dropout_between_layers():
    """Of what is kept, the sum stays the same on average; without training, there is none."""
    torch.manual_seed(0)
    eager = Tagger(num_layers=2, dropout=0.5).double()
    ours = ORTModule(copy.deepcopy(eager))
    x, lengths = torch.randn(4, 8, 4, dtype=torch.float64), torch.tensor([8, 3, 5, 1])
    sums = [torch.stack([model(x, lengths)[0].sum() for _ in range(300)]) for model in (eager, ours)]
    assert in_engine(ours) and sums[1].std() > 0.1
    error = (sums[0].var() / 300 + sums[1].var() / 300).sqrt()
    assert abs(sums[0].mean() - sums[1].mean()) < 5 * error
    equal(ours.eval()(x, lengths), eager.eval()(x, lengths), TIGHT)


def test_float32_and_no_grad():
    torch.manual_seed(0)
    eager = Tagger("lstm", bidirectional=True)
    ours = ORTModule(copy.deepcopy(eager))
    x, lengths = torch.randn(3, 8, 4), torch.tensor([2, 8, 5])
    with torch.no_grad():
        equal(ours(x, lengths), eager(x, lengths))
    with torch.inference_mode():
        equal(ours(x, lengths)[1], eager(x, lengths)[1])
    in_engine(ours)


X = torch.randn(3, 8, 4)
WRONG = {
    "not sorted": (lambda: Tagger(ordered=True), (X, torch.tensor([2, 8, 5]))),
    "zero": (Tagger, (X, torch.tensor([2, 0, 5]))),
    "negative": (Tagger, (X, torch.tensor([2, -1, 5]))),
    "too long": (Tagger, (X, torch.tensor([2, 9, 5]))),
    "too few": (lambda: Tagger(ordered=True), (X, torch.tensor([5, 2]))),
    "too many": (Tagger, (X, torch.tensor([2, 5, 3, 1]))),
    "total length": (lambda: Tagger(total=6), (X, torch.tensor([2, 7, 5]))),
    "state": (Tagger, (X, torch.tensor([2, 7, 5]), torch.randn(1, 2, 5))),
    "state of a sorted batch": (lambda: Tagger(ordered=True), (X, torch.tensor([7, 5, 2]), torch.randn(1, 2, 5))),
    "features": (Tagger, (torch.randn(3, 8, 5), torch.tensor([2, 7, 5]))),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(name, first):
    made, args = WRONG[name]
    eager = made()
    ours = ORTModule(copy.deepcopy(eager))
    good = X, torch.tensor([5, 4, 2])
    if not first:
        equal(ours(*good), eager(*good))
    with pytest.raises(Exception) as wanted:
        eager(*args)
    for _ in range(2):
        with pytest.raises(wanted.type) as got:
            ours(*args)
        assert str(got.value).splitlines()[0] == str(wanted.value).splitlines()[0]
    equal(ours(*good), eager(*good))


def test_packed_states_that_do_not_fit():
    """Batch sizes are known at run time alone where the caller packs."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 5)

        def forward(self, packed, state):
            return self.rnn(packed, state)[1]

    eager = Model()
    ours = ORTModule(copy.deepcopy(eager))
    for lengths in ([8, 5, 2], [7, 5, 2]):
        given = pack_padded_sequence(X, torch.tensor(lengths), True), torch.randn(1, 3, 5)
        equal(ours(*given), eager(*given))
    wrong = pack_padded_sequence(X[:2], torch.tensor([8, 5]), True), torch.randn(1, 3, 5)
    messages = []
    for model in (eager, ours):
        with pytest.raises(RuntimeError) as error:
            model(*wrong)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    in_engine_steps = onnxtrain.stats(ours)["engine_steps"]
    assert in_engine_steps >= 2


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 5, 2, batch_first=True, proj_size=3, bidirectional=True)

    def forward(self, x, lengths):
        output, last = self.rnn(pack_padded_sequence(x, lengths, True, False))
        return pad_packed_sequence(output, True), last


def test_projections():
    both(lambda: Projected().double(), use(*LENGTHS), TIGHT)


class ProjectedPadded(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 5, proj_size=3)

    def forward(self, x):
        return self.fc(self.rnn(self.fc(x))[0] @ self.fc.weight[:3])


def test_a_projection_alone_runs_in_pytorch():
    ours = both(ProjectedPadded, step(X))
    counts = onnxtrain.stats(ours)
    assert counts["fallback_steps"] == 0 and len(counts["graph_breaks"]) == 1, counts["reasons"]


def test_replaced_fields_of_a_named_tuple():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, packed: PackedSequence) -> PackedSequence:
            return packed._replace(data=self.fc(packed.data))

    def run(model) -> list[Tensor]:
        return step(pack_padded_sequence(X, torch.tensor([7, 5, 2]), True))(model)

    in_engine(both(Scaled, run))


class Padded(nn.Module):
    """Sequences of one length."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.rnn = KINDS[kind](4, 5, **settings)

    def forward(self, x, state=None):
        return self.rnn(x, state)


@pytest.mark.parametrize("settings", [{"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}],
                         ids=["both directions", "batch first"])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_one_length(kind, settings):
    """One export serves every length, but for 1, and one more where states are given."""
    def run(model):
        results = []
        for steps, batch, given in (7, 3, False), (9, 3, False), (2, 4, False), (5, 3, True), (6, 2, True):
            x = torch.randn((batch, steps, 4) if "batch_first" in settings else (steps, batch, 4), dtype=torch.float64)
            states = [torch.randn(4 if "bidirectional" in settings else 1, batch, 5, dtype=torch.float64,
                                  requires_grad=True) for _ in range(2)]
            state = [tuple(states) if kind == "lstm" else states[0]] * given
            results.append(step(x.requires_grad_(), *state)(model))
        return results

    counts = in_engine(both(lambda: Padded(kind, **settings).double(), run, TIGHT), 5)
    assert counts["exports"] == 2 and not counts["graph_breaks"]


def test_states_of_another_batch():
    eager = Padded("gru", batch_first=True)
    ours = ORTModule(copy.deepcopy(eager))
    equal(ours(X), eager(X))
    messages = []
    for model in (eager, ours):
        with pytest.raises(RuntimeError) as error:
            model(X, torch.randn(1, 2, 5))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("lengths", [None, [8, 3, 5]], ids=["padded", "packed"])
def test_weights_that_a_parametrization_computes(lengths):
    """In every step from its own parameters, which get their gradients."""
    found = []
    for wrap in (lambda model: model, ORTModule):
        torch.manual_seed(0)
        model = Padded("lstm", batch_first=True) if lengths is None else Tagger("lstm")
        nn.utils.parametrizations.weight_norm(model.double().rnn, "weight_hh_l0")
        model = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            x = torch.randn(3, 8, 4, dtype=torch.float64)
            optimizer.zero_grad()
            model(x, *[] if lengths is None else [torch.tensor(lengths)])[0].square().sum().backward()
            optimizer.step()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
    equal(found[3:], found[:3], TIGHT)
    in_engine(model, 3)
