"""LSTM, GRU and RNN against torch's cells, written out step by step, and against torch.nn where it has the case."""


import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, run_case

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
ACTS = {
    "relu": lambda x, a, b: F.relu(x), "tanh": lambda x, a, b: torch.tanh(x),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "affine": lambda x, a, b: a * x + b, "leakyrelu": lambda x, a, b: F.leaky_relu(x, a),
    "thresholdedrelu": lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x)),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x), "hardsigmoid": lambda x, a, b: (a * x + b).clamp(0, 1),
    "elu": lambda x, a, b: F.elu(x, a), "softsign": lambda x, a, b: F.softsign(x),
    "softplus": lambda x, a, b: F.softplus(x),
}
PARAMETERS = {"affine": (1, 0), "leakyrelu": (0.01,), "thresholdedrelu": (1.0,), "scaledtanh": (1, 1),
              "hardsigmoid": (0.2, 0.5), "elu": (1.0,)}


def activations(op, attrs, directions):
    default = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}[op]
    alphas, betas = list(attrs.get("activation_alpha", [])), list(attrs.get("activation_beta", []))
    result = []
    for name in attrs.get("activations", default * directions):
        name = name.lower()
        defaults = PARAMETERS.get(name, ())
        a = (alphas.pop(0) if alphas else defaults[0]) if len(defaults) > 0 else 0
        b = (betas.pop(0) if betas else defaults[1]) if len(defaults) > 1 else 0
        clip = attrs.get("clip", 0)
        result.append(lambda x, f=ACTS[name], a=a, b=b: f(x.clamp(-clip, clip) if clip else x, a, b))
    return result


def step(op, attrs, acts, x, h, c, w, r, wb, rb, p):
    """One step of the specification's formulas."""
    if op == "RNN":
        return acts[0](x @ w.T + h @ r.T + wb + rb), c
    if op == "GRU":
        wz, wr, wh = w.chunk(3)
        rz, rr, rh = r.chunk(3)
        bz, br, bh = wb.chunk(3)
        cz, cr, ch = rb.chunk(3)
        z = acts[0](x @ wz.T + h @ rz.T + bz + cz)
        reset = acts[0](x @ wr.T + h @ rr.T + br + cr)
        if attrs.get("linear_before_reset"):
            n = acts[1](x @ wh.T + reset * (h @ rh.T + ch) + bh)
        else:
            n = acts[1](x @ wh.T + (reset * h) @ rh.T + ch + bh)
        return (1 - z) * n + z * h, c
    gi, go, gf, gc = (x @ w.T + h @ r.T + wb + rb).chunk(4, 1)
    pi, po, pf = p.chunk(3)
    i = acts[0](gi + pi * c)
    f = 1 - i if attrs.get("input_forget") else acts[0](gf + pf * c)
    c = f * c + i * acts[1](gc)
    return acts[0](go + po * c) * acts[2](c), c


def network(op, attrs, names, n_outputs):
    """The whole operator as a function of the present inputs, called by `names`."""

    def run(*tensors):
        given = dict(zip(names, tensors))
        x = given["X"].transpose(0, 1) if attrs.get("layout") else given["X"]
        steps, batch = x.shape[:2]
        directions, hidden = given["R"].shape[0], given["R"].shape[2]
        zeros = x.new_zeros(batch, hidden)
        acts = activations(op, attrs, directions)
        each = len(acts) // directions
        lens = given.get("lens", torch.full((batch,), steps)).long()
        ys, hs, cs = [], [], []
        for d in range(directions):
            reverse = attrs.get("direction") == "reverse" or d == 1
            state = [given[k].transpose(0, 1)[d] if attrs.get("layout") and k in given else given[k][d] if k in given
                     else zeros
                     for k in ("h0", "c0")]
            bias = given["B"][d] if "B" in given else x.new_zeros(2 * GATES[op] * hidden)
            peep = given["P"][d] if "P" in given else x.new_zeros(3 * hidden)
            out = [None] * steps
            for t in (reversed(range(steps)) if reverse else range(steps)):
                h, c = step(op, attrs, acts[d * each:(d + 1) * each], x[t], *state, given["W"][d], given["R"][d],
                            *bias.chunk(2), peep)
                live = (lens > t)[:, None]
                out[t] = torch.where(live, h, torch.zeros_like(h))
                state = [torch.where(live, h, state[0]), torch.where(live, c, state[1])]
            ys.append(torch.stack(out))
            hs.append(state[0])
            cs.append(state[1])
        y, h, c = torch.stack(ys, 1), torch.stack(hs), torch.stack(cs)
        if attrs.get("layout"):
            y, h, c = y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)
        return (y, h, c)[:n_outputs]

    return run


def case(op, *given, steps=3, batch=2, size=3, hidden=2, lens=None, name="", opset=22, alloc=False, n_outputs=None,
         **attrs):
    """`given` names the optional inputs: B, h0, c0, P."""
    d = 2 if attrs.get("direction") == "bidirectional" else 1
    g, swap = GATES[op], bool(attrs.get("layout"))
    state = (batch, d, hidden) if swap else (d, batch, hidden)
    shapes = {"X": (batch, steps, size) if swap else (steps, batch, size), "W": (d, g * hidden, size),
              "R": (d, g * hidden, hidden), "B": (d, 2 * g * hidden), "lens": None, "h0": state, "c0": state,
              "P": (d, 3 * hidden)}
    order = ["X", "W", "R", "B", "lens", "h0"] + (["c0", "P"] if op == "LSTM" else [])
    inputs = [lens if k == "lens" else R(*shapes[k], low=-1, high=1) if k in given or k in "XWR" else None
              for k in order]
    while inputs[-1] is None:
        inputs.pop()
    names = [k for k, v in zip(order, inputs) if v is not None]
    n_outputs = n_outputs or (3 if op == "LSTM" else 2)
    attrs["hidden_size"] = hidden
    run = network(op, attrs, names, n_outputs)
    return Case(op, inputs, attrs, n_outputs=n_outputs, opset=opset, torch=run, alloc=alloc, fd=False,
                reference=lambda *arrays: [t.numpy()
                                           for t in run(*(torch.from_numpy(a) for a in arrays if a is not None))],
                name=name or "-".join([*given, *(f"{k}={v}" for k, v in attrs.items() if k != "hidden_size")]))


LENS = V([3, 1, 2], np.int32)
CASES = [
    case("RNN", alloc=True), case("RNN", "B", "h0", direction="bidirectional", opset=14),
    case("RNN", "B", activations=["Relu"]), case("RNN", "B", "h0", direction="reverse", layout=1),
    case("RNN", batch=3, lens=LENS, direction="bidirectional", name="lens"),
    case("RNN", "B", clip=0.25), case("RNN", steps=1, name="one step"), case("RNN", opset=7, name="v7"),
    case("GRU", alloc=True), case("GRU", "B", "h0"), case("GRU", "B", "h0", linear_before_reset=1),
    case("GRU", "B", "h0", direction="bidirectional", linear_before_reset=1), case("GRU", "B", direction="reverse"),
    case("GRU", "B", "h0", layout=1, direction="bidirectional"), case("GRU", "h0", linear_before_reset=1),
    case("GRU", "B", "h0", batch=3, lens=LENS, direction="reverse", name="lens reverse"),
    case("GRU", "B", activations=["HardSigmoid", "Softsign"], activation_alpha=[0.25], activation_beta=[0.375]),
    case("LSTM", alloc=True), case("LSTM", "B", "h0", "c0"), case("LSTM", "B", "h0", "c0", "P"),
    case("LSTM", "B", "h0", "c0", "P", direction="bidirectional"), case("LSTM", "B", direction="reverse"),
    case("LSTM", "B", "h0", "c0", layout=1, direction="bidirectional"), case("LSTM", "B", "P", input_forget=1),
    case("LSTM", "B", "h0", "c0", clip=0.5), case("LSTM", "B", n_outputs=1, name="Y only"), case("LSTM", "c0"),
    case("LSTM", "B", "h0", "c0", "P", batch=3, lens=LENS, name="lens"),
    case("LSTM", "B", "h0", "c0", batch=3, lens=LENS, direction="bidirectional", name="lens both"),
    case("LSTM", batch=3, lens=C([3, 3, 3], np.int32), name="known full lens"),
    case("LSTM", batch=3, lens=C([3, 0, 2], np.int32), name="known lens"),
    case("LSTM", "B", activations=["Sigmoid", "Softplus", "Elu"], activation_alpha=[0.5]),
    case("LSTM", "B", activations=["Affine", "LeakyRelu", "ScaledTanh"], activation_alpha=[0.5, 0.125, 1.5],
         activation_beta=[0.25, 0.75]),
    case("LSTM", "B", activations=["sigmoid", "ThresholdedRelu", "tanh", "Sigmoid", "Tanh", "Affine"],
         activation_alpha=[0.125, 2.0], activation_beta=[0.5], direction="bidirectional"),
    case("LSTM", "B", size=1, hidden=1, batch=1, name="ones"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recurrent(case):
    run_case(case)


@pytest.mark.parametrize("op,layers", [("LSTM", 2), ("GRU", 1)])
def test_against_torch_nn(op, layers):
    """The formulas above are torch's own: gate order i f g o there, i o f c here; r z n there, z r h here."""
    torch.manual_seed(0)
    module = getattr(torch.nn, op)(3, 4, layers).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    h = x
    for layer in range(layers):
        w, r, wb, rb = (getattr(module, f"{k}_l{layer}") for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        order = [0, 3, 1, 2] if op == "LSTM" else [1, 0, 2]

        def mix(p):
            return torch.cat([p.chunk(len(order))[k] for k in order])

        run = network(op, {"linear_before_reset": 1}, ["X", "W", "R", "B"], 1)
        h = run(h, mix(w)[None], mix(r)[None], torch.cat([mix(wb), mix(rb)])[None])[0][:, 0]
    torch.testing.assert_close(h, module(x)[0], rtol=1e-12, atol=1e-12)
