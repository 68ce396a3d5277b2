"""Small modules whose Python state is another one at each call, by name in STATES, and a training step of two of them.

test_changing_numbers.py holds them against eager PyTorch. As a script it prints for each the calls in PyTorch, exports,
those kept in ORTMODULE_CACHE_DIR, and milliseconds a step of eager and of ORTModule, for steps 30 to 60:

    python tests/ortmodule/changing_state.py             # all
    python tests/ortmodule/changing_state.py "a roll"    # those with these words in their names
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

STEPS = 60
BATCH, WIDTH = 6, 8
GENERATOR = random.Random(3)
LEVEL = {"now": 1.0}  # a variable of the Python module, which the script sets at each step
level = 1.0


class Phase(enum.Enum):
    WARM, PLAIN, COOL = range(3)


@dataclasses.dataclass
class Progress:
    step: int = 0
    weight: float = 1.0
    history: list[float] = dataclasses.field(default_factory=list)


class Clock:
    def __init__(self) -> None:
        self.ticks, self.seconds = 0, 0.0

    def tick(self) -> None:
        self.ticks += 1
        self.seconds += 0.25


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.fc(x))


class Changing(nn.Module):
    """Calls one of the functions below; what they change is here. All arguments are float32, (BATCH, WIDTH)."""

    def __init__(self, use: Callable[[Changing, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use, self.calls, self.scale = use, 0, 1.0
        self.fc, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.counts: dict[str, Any] = {"calls": 0}
        self.seen: list[int] = []
        self.losses: list[float] = []
        self.pair = (0, 1.0)
        self.mode = "even"
        self.phase = Phase.WARM
        self.progress, self.clock = Progress(), Clock()
        self.by_name: collections.defaultdict[str, int] = collections.defaultdict(int)
        self.recent: collections.deque[int] = collections.deque()
        self.done: set[int] = set()
        self.rate, self.number = np.float64(1.0), np.int64(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale = self.scale * 0.97
        return self.use(self, x)

    def state(self) -> str:
        """All of it but tensors; of losses as many digits as are equal."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "use"}
        return repr(own | {"clock": vars(self.clock), "losses": [f"{loss:.3f}" for loss in self.losses]})


def dict_entry(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.counts["calls"] += 1
    return m.fc(x) / m.counts["calls"]


def growing_list(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.seen.append(m.calls)
    return m.fc(x) / len(m.seen)


def latest_of_list(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.seen.append(m.calls)
    return m.fc(x) * m.seen[-1]


def noted(m: Changing, x: torch.Tensor) -> torch.Tensor:
    y = m.fc(x)
    m.losses.append(y.mean().item())
    return y


def pair(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.pair = (m.pair[0] + 1, m.pair[1] * 0.9)
    return m.fc(x) * m.pair[1] + m.pair[0]


def nested(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.clock.tick()
    return m.fc(x) * m.clock.seconds + m.clock.ticks


def numpy_float(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.rate = m.rate * 0.9
    return m.fc(x) * float(m.rate)


def numpy_scalar(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.number = m.number + 1
    return m.fc(x) * m.number


def two_names(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.mode = "odd" if m.mode == "even" else "even"
    return m.fc(x) if m.mode == "odd" else m.other(x)


def many_names(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.mode = f"step {m.calls}"
    return m.fc(x) * (2.0 if m.mode.endswith("0") else 1.0)


def warm_up(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x) * min(1.0, m.calls / 40)


def averaged(m: Changing, x: torch.Tensor) -> torch.Tensor:
    decay = min(0.99, (1 + m.calls) / (10 + m.calls))
    m.average.mul_(decay).add_(x.detach().mean(0), alpha=1 - decay)
    return m.fc(x) - m.average


def dropped(m: Changing, x: torch.Tensor) -> torch.Tensor:
    """Its result is comparable: which entries are dropped is not."""
    p = min(0.5, m.calls * 0.01)
    y = F.dropout(torch.ones_like(x), p, m.training)
    return m.fc(x) + (y * y - y / (1 - p))


def smoothed(m: Changing, x: torch.Tensor) -> torch.Tensor:
    goal = torch.arange(BATCH) % WIDTH
    return F.cross_entropy(m.fc(x), goal, label_smoothing=m.scale / 5)


def gumbel(m: Changing, x: torch.Tensor) -> torch.Tensor:
    noise = -torch.log(-torch.log(x.detach().sigmoid()))
    return F.softmax((m.fc(x) + noise) / max(0.5, m.scale), -1)


def of_phase(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.phase = Phase(m.calls % 3)
    return m.fc(x) * {Phase.WARM: 0.5, Phase.PLAIN: 1.0, Phase.COOL: 0.1}[m.phase]


def dataclass_field(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.progress.step += 1
    m.progress.weight = 1.0 / m.progress.step
    return m.fc(x) * m.progress.weight + m.progress.step


def closed_over() -> Callable[[Changing, torch.Tensor], torch.Tensor]:
    count, weight = 0, 1.0

    def use(m: Changing, x: torch.Tensor) -> torch.Tensor:
        nonlocal count, weight
        count, weight = (count + 1) % 1000, weight * 0.99
        return m.fc(x) * weight + count

    return use


def default_dict(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.by_name["a"] += 1
    m.by_name["b"] += 2
    return m.fc(x) * m.by_name["a"] + m.by_name["b"]


def queue(m: Changing, x: torch.Tensor) -> torch.Tensor:
    m.recent.append(m.calls)
    if len(m.recent) > 4:
        m.recent.popleft()
    return m.fc(x) * (sum(m.recent) / len(m.recent))


def member(m: Changing, x: torch.Tensor) -> torch.Tensor:
    at = m.calls % 4
    if at in m.done:
        return m.fc(x)
    m.done.add(at)
    return m.other(x)


def every_tenth(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.other(x) if m.calls % 10 == 0 else m.fc(x)


def since_start(m: Changing, x: torch.Tensor) -> torch.Tensor:
    now = time.monotonic()
    m.counts["late"] = now - m.counts.get("now", now) > 3600
    m.counts["now"] = 0.0 * now
    return m.other(x) if m.counts["late"] else m.fc(x)


def frozen_after(m: Changing, x: torch.Tensor) -> torch.Tensor:
    h = m.fc(x)
    return m.other(h.detach() if m.calls > 10 else h)


def frozen_parameters(m: Changing, x: torch.Tensor) -> torch.Tensor:
    if m.calls == 10:
        m.fc.requires_grad_(False)
    return m.other(m.fc(x))


def drawn_layers(m: Changing, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        if random.random() > 0.2:
            x = layer(x)
    return m.fc(x)


def all_dropped(m: Changing, x: torch.Tensor) -> torch.Tensor:
    """At every third step no layer runs."""
    for layer in m.layers:
        if random.random() >= 0 and m.calls % 3:
            x = layer(x)
    return m.fc(x)


def drawn_branch(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x) if random.random() < 0.5 else m.other(x)


def numpy_branch(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x) if np.random.rand() < 0.5 else m.other(x)


def numpy_choice(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.layers[int(np.random.choice(3))](m.fc(x))


def permuted(m: Changing, x: torch.Tensor) -> torch.Tensor:
    order = [(i + m.calls) % 3 for i in range(3)]
    for i in order:
        x = m.layers[i](x)
    return x


def drawn_order(m: Changing, x: torch.Tensor) -> torch.Tensor:
    order = list(range(3))
    random.shuffle(order)
    for i in order:
        x = m.layers[i](x)
    return x


def sampled(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.layers[random.sample(range(3), 2)[0]](m.fc(x))


def drawn_by_the_script(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x) * GENERATOR.random()


def repeated(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x).repeat(1 + m.calls % 7, 1)


def resized(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(m.fc(x)[:, None], size=4 + m.calls % 20, mode="linear")


def rescaled(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(m.fc(x)[:, None], scale_factor=1.2 + 0.1 * (m.calls % 20), mode="nearest")


def products(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(m.fc(x), x, m.other.weight, beta=m.scale, alpha=1.0 / m.calls)


def of_the_script(m: Changing, x: torch.Tensor) -> torch.Tensor:
    return m.fc(x) * level + LEVEL["now"]


# Each of them is used by a module of its own, and computes the same as eager, in numbers that are inputs.
STATES: dict[str, Callable[[Changing, torch.Tensor], torch.Tensor]] = {
    "a counter that nothing reads": lambda m, x: m.fc(x),
    "a whole number": lambda m, x: m.fc(x) * m.calls,
    "a float": lambda m, x: m.fc(x) * m.scale,
    "a dict's entry": dict_entry,
    "the length of a growing list": growing_list,
    "the latest of a growing list": latest_of_list,
    "a list of losses": noted,
    "a tuple": pair,
    "an object's attributes": nested,
    "a NumPy float": numpy_float,
    "a NumPy scalar": numpy_scalar,
    "a clamp's bounds": lambda m, x: m.fc(x).clamp(-m.scale, m.scale / 2),
    "a slice's end": lambda m, x: m.fc(x)[:, :1 + m.calls % WIDTH],
    "a string of two": two_names,
    "a string of many": many_names,
    "a temperature": lambda m, x: F.softmax(m.fc(x) / max(0.1, m.scale), -1),
    "a warm-up": warm_up,
    "a decay": averaged,
    "dropout's p": dropped,
    "label smoothing": smoothed,
    "a loss's weight": lambda m, x: F.mse_loss(m.fc(x), x) + m.calls / STEPS * m.fc(x).abs().mean(),
    "gumbel's tau": gumbel,
    "a norm's p": lambda m, x: m.fc(x).norm(2.0 + m.scale, dim=-1),
    "a roll": lambda m, x: torch.roll(m.fc(x), m.calls, -1),
    "a roll of two axes": lambda m, x: torch.roll(m.fc(x), (m.calls, -m.calls), (0, 1)),
    "a shift of bits": lambda m, x: m.fc(x) + (x.long() << m.calls % 7) + (x.long() >> m.calls % 3),
    "addmm's alpha and beta": products,
    "elu's alpha": lambda m, x: F.elu(m.fc(x), m.scale),
    "celu's alpha": lambda m, x: F.celu(m.fc(x), m.scale),
    "hardtanh's bounds": lambda m, x: F.hardtanh(m.fc(x), -m.scale, m.scale),
    "a threshold": lambda m, x: F.threshold(m.fc(x), m.scale / 10, m.scale),
    "softshrink's lambda": lambda m, x: F.softshrink(m.fc(x), m.scale / 10),
    "decimals": lambda m, x: m.fc(x) + torch.round(x, decimals=m.calls % 5),
    "a range's end": lambda m, x: m.fc(x) + torch.arange(m.calls).sum(),
    "interpolate's size": resized,
    "interpolate's scale": rescaled,
    "amounts of padding": lambda m, x: F.pad(m.fc(x), (m.calls % 4, m.calls % 3), value=m.scale),
    "topk's k": lambda m, x: m.fc(x).topk(1 + m.calls % WIDTH, -1)[0],
    "narrow": lambda m, x: m.fc(x).narrow(1, m.calls % 4, 3),
    "a count of repeats": repeated,
    "an enum": of_phase,
    "a dataclass": dataclass_field,
    "variables of the script": of_the_script,
    "a variable of a closure": closed_over(),
    "a default dict": default_dict,
    "a deque": queue,
    "members of a set": member,
    "every tenth step": every_tenth,
    "a time": since_start,
    "frozen by detach()": frozen_after,
    "frozen by requires_grad_()": frozen_parameters,
    "layers that are dropped": drawn_layers,
    "all layers dropped": all_dropped,
    "a branch by random.random()": drawn_branch,
    "a branch by NumPy's": numpy_branch,
    "a layer that NumPy chooses": numpy_choice,
    "layers in turn": permuted,
    "layers in a drawn order": drawn_order,
    "a sample": sampled,
    "a drawn factor": lambda m, x: m.fc(x) * random.random(),
    "a generator of the script": drawn_by_the_script,
    "huber's delta": lambda m, x: F.huber_loss(m.fc(x), x, delta=m.scale),
    "smooth_l1's beta": lambda m, x: F.smooth_l1_loss(m.fc(x), x, beta=m.scale),
    "normalize's p": lambda m, x: F.normalize(m.fc(x), p=2.0 + m.scale, dim=-1),
    "an eps": lambda m, x: F.layer_norm(m.fc(x), (WIDTH,), eps=m.scale / 100),
    "a batch norm's momentum": lambda m, x: F.batch_norm(m.fc(x), m.average, m.average.abs() + 1, training=True,
                                                         momentum=m.scale / 10),
    "attention's scale": lambda m, x: F.scaled_dot_product_attention(m.fc(x)[None], x[None], x[None], scale=m.scale),
    "logit's eps": lambda m, x: m.fc(x).sigmoid().logit(m.scale / 100),
    "nan_to_num": lambda m, x: (m.fc(x) / 1.0).nan_to_num(m.scale, m.scale, -m.scale),
    "a margin": lambda m, x: F.triplet_margin_loss(m.fc(x), m.other(x), x, margin=m.scale),
    "a cosine's margin": lambda m, x: F.cosine_embedding_loss(m.fc(x), x, torch.ones(BATCH), margin=m.scale),
    "a remainder": lambda m, x: m.fc(x) + (x % m.scale),
    "a floored quotient": lambda m, x: m.fc(x) + (x.detach() // m.scale),
    "rounded quotients": lambda m, x: m.fc(x) + torch.div(x, m.scale, rounding_mode="trunc"),
    "addcmul's value": lambda m, x: torch.addcmul(m.fc(x), x, x, value=m.scale),
    "a diagonal": lambda m, x: m.fc(x).triu(m.calls % 5 - 2),
    "a one-hot's place": lambda m, x: m.fc(x) * F.one_hot(torch.tensor(m.calls % WIDTH), WIDTH),
    "an index": lambda m, x: m.fc(x)[m.calls % BATCH],
    "an exponent": lambda m, x: m.fc(x).abs().add(0.1).pow(m.scale),
    "a base": lambda m, x: m.fc(x) + (1.0 + m.scale) ** x,
    "masked_fill": lambda m, x: m.fc(x).masked_fill(x > 0, m.scale),
    "where": lambda m, x: torch.where(x > 0, m.fc(x), m.scale),
    "a split's sizes": lambda m, x: m.fc(x).split([1 + m.calls % 3, WIDTH - 1 - m.calls % 3], 1)[0],
    "chunks": lambda m, x: m.fc(x).chunk(1 + m.calls % 4, 1)[0],
    "a quantile": lambda m, x: m.fc(x).quantile(m.scale),
    "cumulative to a power": lambda m, x: (m.fc(x) * torch.tensor([m.scale ** i for i in range(WIDTH)])).cumsum(-1),
    "dist's p": lambda m, x: torch.dist(m.fc(x), x, p=1.5 + m.scale),
    "full": lambda m, x: m.fc(x) + torch.full_like(x, m.scale),
    "a sum of steps": lambda m, x: m.fc(x) * sum(range(m.calls % 5)),
}


class Randomness:
    """The random states of Python, the script's generator, NumPy and torch, one set for each of two modules that take turns."""

    def __init__(self) -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        self._states: dict[Any, tuple[Any, ...]] = {}
        self._first = self._read()

    @staticmethod
    def _read() -> tuple[Any, ...]:
        return random.getstate(), GENERATOR.getstate(), np.random.get_state(), torch.get_rng_state()

    def of(self, who: Any) -> None:
        """Puts that module's states in force."""
        python, script, numpy, torchs = self._states.get(who, self._first)
        random.setstate(python)
        GENERATOR.setstate(script)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)

    def keep(self, who: Any) -> str:
        """Notes them; returns those of Python and NumPy as a text."""
        self._states[who] = self._read()
        return repr(self._states[who][:3])


def steps(use: Callable[[Changing, torch.Tensor], torch.Tensor],
          count: int = STEPS) -> Iterator[tuple[ORTModule, list[tuple[Any, ...]]]]:
    """A training step of eager and of an ORTModule in turns: yields the ORTModule, and of both what is to be equal: the
    loss, gradients, buffer, Python state and random states; and seconds.
    """
    global level
    torch.manual_seed(0)
    eager = Changing(use)
    ours = ORTModule(copy.deepcopy(eager))
    if use.__closure__:
        eager.use, ours.module.use = closed_over(), closed_over()
    randomness = Randomness()
    x = torch.randn(BATCH, WIDTH)
    for i in range(count):
        level, LEVEL["now"] = 1.0 / (1 + i), float(i)
        found = []
        for model, module in ((eager, eager), (ours, ours.module)):
            given = (x + 0.01 * i).requires_grad_()
            module.zero_grad()
            randomness.of(module)
            start = time.perf_counter()
            loss = model(given).square().sum()
            loss.backward()
            seconds = time.perf_counter() - start
            drawn = randomness.keep(module)
            tensors = [loss.detach(), given.grad, module.average.clone(), *[p.grad for p in module.parameters()]]
            found.append((tensors, module.state(), drawn, seconds))
        yield ours, found


def measured(name: str) -> tuple[dict[str, Any], int, tuple[float, float], str]:
    """stats(), the files that were kept, seconds a step of eager and of ORTModule, and what differs."""
    torch._dynamo.reset()
    seconds: tuple[list[float], list[float]] = ([], [])
    differs = ""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ORTMODULE_CACHE_DIR"] = folder
        for i, (ours, found) in enumerate(steps(STATES[name])):
            counts = onnxtrain.stats(ours)
            for each, result in zip(seconds, found, strict=True):
                each.append(result[3])
            differs = differs or difference(*found) and f"step {i}: {difference(*found)}"
        files = sum(name.endswith(".zip") for _, _, names in os.walk(folder) for name in names)
    late = [statistics.median(each[STEPS // 2:]) for each in seconds]
    return counts, files, (late[0], late[1]), differs


def difference(eager: tuple[Any, ...], ours: tuple[Any, ...]) -> str:
    """What is not equal; empty where all is."""
    for what, want, got in zip(("Python state", "random state"), eager[1:3], ours[1:3]):
        if want != got:
            return what
    for place, (want, got) in enumerate(zip(eager[0], ours[0], strict=True)):
        if (want is None) != (got is None):
            return f"tensor {place} is {'' if got is None else 'not '}None"
        if want is not None and not torch.allclose(want, got, rtol=1e-4, atol=1e-4):
            return f"tensor {place} by {(want - got).abs().max():.1e}"
    return ""


def main(words: list[str]) -> None:
    warnings.filterwarnings("ignore")
    print(f"{'module':32s} PyTorch exports files  eager   ours ms/step")
    for name in STATES:
        if not words or any(word in name for word in words):
            counts, files, (eager, ours), differs = measured(name)
            bad = ours > 3 * eager + 1e-4 or counts["exports"] > 8 or files > 8 or differs
            print(f"{name:32s} {counts['fallback_steps']:7d} {counts['exports']:7d} {files:5d} {eager * 1e3:6.2f} "
                  f"{ours * 1e3:6.2f} {'!' if bad else ''} {differs}", flush=True)
            for reason in (*counts["reasons"], *counts["graph_breaks"]):
                print(f"    {reason[:250]}")


if __name__ == "__main__":
    main(sys.argv[1:])
