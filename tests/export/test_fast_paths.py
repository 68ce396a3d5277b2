"""Evaluation of torch.nn's attention layers without gradients, where they call fused operators: in the engine, equal."""

import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain.ortmodule import ORTModule


def compare(model, *arguments, **keywords):
    """In evaluation under no_grad; every call in the engine."""
    model.eval()
    ours = ORTModule(model)
    with torch.no_grad():
        want, got = model(*arguments, **keywords), ours(*arguments, **keywords)
    counts = onnxtrain.stats(ours)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (1, 0), counts["reasons"]
    for one, eager in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,),
                          strict=True):
        if eager is None:
            assert one is None
        else:
            torch.testing.assert_close(one, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("layers", [1, 2])
def test_encoder(layers, activation, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, activation=activation, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    compare(model, torch.randn(3, 7, 32))


@pytest.mark.parametrize("kind", ["pairs", "causal", "keys", "both"])
def test_masks_of_an_encoder(kind):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    pairs = torch.rand(7, 7) < 0.4
    pairs.fill_diagonal_(False)
    if kind == "causal":
        pairs = nn.Transformer.generate_square_subsequent_mask(7)
    keys = torch.arange(7) >= torch.tensor([[7], [5], [6]])
    masks = {"pairs": (pairs, None), "causal": (pairs, None), "keys": (None, keys), "both": (pairs, keys)}[kind]
    compare(model, torch.randn(3, 7, 32), src_mask=masks[0], src_key_padding_mask=masks[1])


@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_attention(same, options):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    query = torch.randn(3, 7, 32)
    other = query if same else torch.randn(3, 9, 32)
    compare(model, query, other, other, **options)


def test_training_and_evaluation_take_turns():
    """With gradients the layers take another path, which the engine runs as before."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    ours, x = ORTModule(model), torch.randn(3, 7, 32)
    for _ in range(2):
        ours.train()
        model.zero_grad()
        ours(x).square().sum().backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        for one, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(one, p.grad, rtol=1e-4, atol=1e-4)
        ours.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(x), model(x), rtol=1e-5, atol=1e-5)
    assert onnxtrain.stats(ours)["fallback_steps"] == 0
