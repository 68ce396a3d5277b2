"""Functions in the place of torch's, in what one thread calls."""

import threading

import torch
import torch.nn.functional as F
from torch import fx, nn

from onnxtrain._export.instead import Instead, exchanged, with_copies

X = torch.arange(12.0).view(1, 3, 4)


def halved(query, *_args, **_kwargs):
    return query / 2


HALVED = with_copies({F.scaled_dot_product_attention: halved})


def test_what_torchs_own_python_calls():
    attention = nn.MultiheadAttention(4, 1, bias=False, batch_first=True)
    for parameter in attention.parameters():
        nn.init.eye_(parameter)
    with Instead(HALVED):
        seen, _ = attention(X, X, X, need_weights=False)
        torch.testing.assert_close(F.scaled_dot_product_attention(X, X, X), X / 2)
    torch.testing.assert_close(seen, X / 2)
    assert not torch.equal(F.scaled_dot_product_attention(X, X, X), X / 2)


def test_a_function_of_c_that_torchs_python_calls():
    product = torch._VF.einsum
    ours = with_copies({product: lambda equation, operands: product(equation, operands) + 1})
    with Instead(ours):
        torch.testing.assert_close(torch.einsum("bij,bij->b", X, X), (X * X).sum((1, 2)) + 1)
        torch.testing.assert_close(torch.tensordot(X, X, 3), (X * X).sum())  # which is none of these


def test_other_threads_call_torchs():
    found = []
    with Instead(HALVED):
        thread = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(X, X, X)))
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], F.scaled_dot_product_attention(X, X, X))


def test_a_graph_and_those_inside():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(F.scaled_dot_product_attention, (x, x, x)))
    inner = fx.GraphModule(nn.Module(), graph)
    outer = fx.Graph()
    outer.output(outer.call_module("part", (outer.placeholder("x"),)))
    whole = fx.GraphModule({"part": inner}, outer)
    torch.testing.assert_close(exchanged(whole, HALVED)(X), X / 2)
    torch.testing.assert_close(whole(X), F.scaled_dot_product_attention(X, X, X))  # as it was
