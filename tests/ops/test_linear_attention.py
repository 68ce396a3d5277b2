"""LinearAttention under every update rule and CausalConvWithState, against their recurrences written in torch."""


import pytest
import torch
from harness import Case, R, expect_error, run_case


def recurrence(q_heads, heads, gated, delta, past=False, scale=None):
    def compute(q, k, v, *rest):
        rest = list(rest)
        b, steps, d_k, d_v = q.shape[0], q.shape[1], k.shape[2] // heads, v.shape[2] // heads
        state = rest.pop(0) if past else torch.zeros(b, heads, d_k, d_v, dtype=q.dtype)
        decay = rest.pop(0) if gated else None
        beta = rest.pop(0) if delta else None
        results = []
        for t in range(steps):
            kt, vt = k[:, t].reshape(b, heads, d_k), v[:, t].reshape(b, heads, d_v)
            if gated:
                state = state * decay[:, t].reshape(b, heads, -1, 1).exp()
            if delta:
                vt = beta[:, t].reshape(b, -1, 1) * (vt - torch.einsum("bhkv,bhk->bhv", state, kt))
            state = state + kt[..., None] * vt[..., None, :]
            qt = q[:, t].reshape(b, heads, q_heads // heads, d_k)
            results.append(torch.einsum("bhgk,bhkv->bhgv", qt, state).reshape(b, -1) * (scale or d_k**-0.5))
        return torch.stack(results, 1), state

    return compute


def in_numpy(compute):
    return lambda *x: tuple(r.numpy() for r in compute(*[torch.tensor(v) for v in x if v is not None]))


def linear(rule, q_heads, heads, d_k, d_v, *rest, past=False, steps=3, **attrs):
    gated, delta = "gated" in rule, "delta" in rule
    compute = recurrence(q_heads, heads, gated, delta, past, attrs.get("scale"))
    inputs = [R(2, steps, q_heads * d_k), R(2, steps, heads * d_k), R(2, steps, heads * d_v), R(2, heads, d_k, d_v)
              if past else None, *rest]
    while inputs[-1] is None:
        inputs.pop()
    return Case("LinearAttention", inputs, {"update_rule": rule, "q_num_heads": q_heads, "kv_num_heads": heads,
                                            **attrs}, n_outputs=2,
                opset=27, torch=compute, reference=in_numpy(compute), tol=1e-4, alloc=steps == 1,
                name=f"{rule} {q_heads} {heads} {past} {len(rest)}{attrs}")


def conv(k, bias, past, activation):
    def compute(x, w, *rest):
        rest = list(rest)
        c = rest.pop(0) if bias else None
        before = rest.pop(0) if past else torch.zeros(2, 3, k - 1, dtype=x.dtype)
        padded = torch.cat([before, x], 2)
        y = torch.conv1d(padded, w, c, groups=3)
        return torch.nn.functional.silu(y) if activation else y, padded[:, :, x.shape[2]:]

    inputs = [R(2, 3, 5), R(3, 1, k), R(3) if bias else None, R(2, 3, k - 1) if past else None]
    while inputs[-1] is None:
        inputs.pop()
    return Case("CausalConvWithState", inputs, {"activation": activation} if activation else {}, n_outputs=2, opset=27,
                torch=compute, reference=in_numpy(compute), name=f"{k} {bias} {past} {activation}")


CASES = [
    linear("linear", 2, 2, 3, 4),
    linear("linear", 4, 2, 3, 4, past=True, scale=0.5),
    linear("gated", 2, 2, 3, 2, R(2, 3, 2, high=0), past=True),
    linear("gated", 2, 2, 3, 2, R(2, 3, 6, high=0)),
    linear("delta", 2, 2, 3, 2, None, R(2, 3, 2, low=0, high=1)),
    linear("gated_delta", 4, 2, 3, 2, R(2, 3, 6, high=0), R(2, 3, 1, low=0, high=1), past=True),
    linear("gated_delta", 2, 1, 3, 2, R(2, 1, 1, high=0), R(2, 1, 1, low=0, high=1), steps=1),
    *(conv(k, b, p, a) for k, b, p, a in ((3, False, False, None), (3, True, True, "silu"), (1, True, False, "swish"),
                                          (4, False, True, None))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def test_errors():
    x = [R(1, 2, 4), R(1, 2, 4), R(1, 2, 4)]
    heads = {"q_num_heads": 2, "kv_num_heads": 2}
    expect_error(Case("LinearAttention", x, {**heads, "update_rule": "gated"}, opset=27), ValueError, "needs decay")
    expect_error(Case("LinearAttention", x, {**heads, "update_rule": "cubic"}, opset=27), NotImplementedError, "cubic")
    expect_error(Case("LinearAttention", x, {"q_num_heads": 3, "kv_num_heads": 2, "update_rule": "linear"}, opset=27),
                 ValueError, "multiple")
    expect_error(Case("CausalConvWithState", [R(1, 2, 4), R(2, 1, 3)], {"activation": "relu"}, opset=27),
                 NotImplementedError, "relu")
