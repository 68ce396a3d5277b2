"""Attention has the values and gradients of the specification's formula."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import C, Case, R, V, expect_error, run_case

NAMES = ("Q", "K", "V", "mask", "past_k", "past_v", "lens")


def attend(names, heads=None, kv_heads=None, scale=None, causal=False, softcap=0.0, left=-1, right=-1, mode=0,
           n_outputs=1):
    """The specification's formula, masks as additions of -inf, on the inputs called `names`."""

    def run(*tensors):
        given = dict(zip(names, tensors))
        q, k, v = (given[n] for n in "QKV")
        packed = q.dim() == 3
        if packed:
            q = q.unflatten(2, (heads, -1)).transpose(1, 2)
            k, v = (t.unflatten(2, (kv_heads, -1)).transpose(1, 2) for t in (k, v))
        past = given["past_k"].shape[2] if "past_k" in given else 0
        if past:
            k, v = torch.cat([given["past_k"], k], 2), torch.cat([given["past_v"], v], 2)
        group = q.shape[1] // k.shape[1]
        raw = q @ k.repeat_interleave(group, 1).transpose(2, 3) * (scale or q.shape[3] ** -0.5)
        capped = softcap * torch.tanh(raw / softcap) if softcap else raw
        n_q, n_k = raw.shape[2:]
        key, at = torch.arange(n_k), torch.arange(n_q)[:, None] + past
        allowed = torch.ones(1, 1, n_q, n_k, dtype=torch.bool)
        if "lens" in given:
            lens = given["lens"].reshape(-1, 1, 1, 1)
            at = torch.arange(n_q)[:, None] + lens - n_q
            allowed = allowed & (key < lens)
        if causal:
            allowed = allowed & (key <= at)
        if left >= 0:
            allowed = allowed & (key >= at - left)
        if right >= 0:
            allowed = allowed & (key <= at + right)
        bias = torch.zeros_like(raw)
        if "mask" in given:
            mask = given["mask"]
            missing = n_k - mask.shape[-1]
            mask = F.pad(mask, (0, missing), value=0 if mask.dtype == torch.bool else -torch.inf)
            bias = bias + (torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask)
        bias = bias.masked_fill(~allowed, -torch.inf)
        empty = (bias == -torch.inf).all(-1, keepdim=True)
        p = (capped + bias.masked_fill(empty, 0)).softmax(-1).masked_fill(empty, 0)
        y = p @ v.repeat_interleave(group, 1)
        y = y.transpose(1, 2).flatten(2) if packed else y
        return (y, k, v, (raw, capped, capped + bias, p)[mode])[:n_outputs]

    return run


def attention(name, q=(2, 2, 3, 4), k=None, v=None, mask=None, past=0, lens=None, n_outputs=1, mode=0, opset=24,
              alloc=False, **attrs):
    k = k or q
    inputs = [R(*q), R(*k), R(*(v or k)), mask, None, None, lens]
    if past:
        inputs[4:6] = R(k[0], k[1], past, k[3]), R(k[0], k[1], past, (v or k)[3])
    names = [n for n, i in zip(NAMES, inputs) if i is not None]
    while inputs[-1] is None:
        inputs.pop()
    onnx_names = {"heads": "q_num_heads", "kv_heads": "kv_num_heads", "causal": "is_causal", "left": "left_window_size",
                  "right": "right_window_size", "scale": "scale", "softcap": "softcap"}
    given = {onnx_names[key]: value for key, value in attrs.items()} | ({"qk_matmul_output_mode": mode} if mode else {})
    run = attend(names, mode=mode, n_outputs=n_outputs, **attrs)
    if mode == 0 and n_outputs > 3:  # the reference evaluator shows the capped scores here, against its specification
        attrs_reference = {"reference": lambda
                           *a: [t.numpy() for t in run(*(torch.from_numpy(x) for x in a if x is not None))]}
    else:
        attrs_reference = {}
    # No gradient through outputs that hold -inf.
    return Case("Attention", inputs, given, n_outputs=n_outputs, opset=opset, torch=run, name=name, alloc=alloc,
                no_grad_outputs=(3,) if mode == 2 else (), **attrs_reference)


BOOLS = np.array([[True, False, True], [False, False, False], [True, True, True]])
CASES = [
    attention("plain", alloc=True),
    attention("v23", opset=23),
    attention("causal", causal=1),
    attention("cross", k=(2, 2, 5, 4), v=(2, 2, 5, 6), scale=0.5),
    attention("grouped", q=(2, 6, 3, 4), k=(2, 2, 5, 4), v=(2, 2, 5, 3), causal=1),
    attention("packed", q=(2, 3, 8), k=(2, 5, 8), v=(2, 5, 6), heads=2, kv_heads=2),
    attention("packed grouped", q=(2, 3, 12), k=(2, 5, 6), heads=4, kv_heads=2, causal=1),
    attention("float mask", mask=R(3, 3)),
    attention("mask of heads", mask=R(1, 2, 3, 3), causal=1),
    attention("bool mask with an empty row", mask=V(BOOLS, np.bool_)),
    attention("known bool mask", mask=C(BOOLS, np.bool_)),
    attention("short bool mask", k=(2, 2, 5, 4), mask=V(BOOLS, np.bool_)),
    attention("short float mask", k=(2, 2, 5, 4), mask=R(2, 1, 3, 3)),
    attention("mask with -inf rows", mask=V([[0, -np.inf, 1], [-np.inf] * 3, [0.5, 0, 0]])),
    attention("softcap", softcap=1.5, causal=1),
    attention("past", past=2, causal=1, n_outputs=3),
    attention("past and mask", past=2, mask=R(3, 5), n_outputs=3),
    attention("lengths", k=(2, 2, 5, 4), lens=V([5, 2], np.int64)),
    attention("causal lengths, some rows empty", k=(2, 2, 5, 4), lens=V([4, 2], np.int64), causal=1),
    attention("window", q=(1, 2, 5, 4), left=1, right=0, opset=25),
    attention("window, some rows empty", q=(1, 2, 6, 4), k=(1, 2, 3, 4), left=1, opset=25),
    attention("raw scores", n_outputs=4, softcap=2.0),
    attention("capped scores", n_outputs=4, softcap=2.0, mode=1),
    attention("biased scores", n_outputs=4, causal=1, mode=2),
    attention("probabilities", n_outputs=4, mask=V(BOOLS, np.bool_), mode=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case):
    run_case(case)


def shaped(op, *inputs, opset=24, **attrs):
    return Case(op, list(inputs), attrs, opset=opset)


QKV = (R(2, 2, 3, 4),) * 3
ERRORS = [
    (shaped("Attention", R(2, 3, 8), R(2, 3, 8), R(2, 3, 8), q_num_heads=3, kv_num_heads=2), ValueError,
     "8 features for 3 heads"),
    (shaped("Attention", R(2, 3, 3, 4), R(2, 2, 3, 4), R(2, 2, 3, 4)), ValueError, "Q has 3 heads"),
    (shaped("Attention", *QKV, R(2, 2, 2)), ValueError, "attn_mask"),
    (shaped("Attention", *QKV, None, R(2, 2, 1, 4)), ValueError, "must be given together"),
    (shaped("Attention", *QKV, qk_matmul_output_mode=4), ValueError, "qk_matmul_output_mode"),
]


@pytest.mark.parametrize("case,error,match", ERRORS, ids=str)
def test_errors(case, error, match):
    expect_error(case, error, match)
