"""What tells calls apart, and what is asked of the call that goes on."""

import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._running import is_cut, kind_of, kind_of_call, names_of_call, running

X = torch.ones(2, 3)


def test_kinds_of_calls():
    plain = kind_of((X,), {"scale": 2})
    assert plain == kind_of((torch.zeros(5, 7),), {"scale": 3})  # sizes and values are no kind
    others = [kind_of((X.double(),), {"scale": 2}), kind_of((X[0],), {"scale": 2}), kind_of((X,), {"scale": 2.0}),
              kind_of((X,), {"rate": 2}), kind_of(([X],), {"scale": 2})]
    assert len({plain, *others}) == 6
    assert kind_of((X,), {}, sizes=True) != kind_of((torch.zeros(5, 7),), {}, sizes=True)


def test_of_a_call_that_goes_on():
    seen = []

    class Asks(nn.Module):
        def forward(self, rows):
            torch._dynamo.graph_break()
            seen.append((running.call.training, kind_of_call() == kind_of((rows,), {}), names_of_call()[id(rows)]))
            return rows + 1

    torch.testing.assert_close(ORTModule(Asks().eval())(X), X + 1)
    assert seen == [(False, True, "rows")]
    assert running.call is kind_of_call() is None and names_of_call() == {} and not is_cut()
