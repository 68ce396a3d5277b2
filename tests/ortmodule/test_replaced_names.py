"""Names inside PyTorch that onnxtrain replaces for a while: a first step calls each, with every torch that is tested. One
that another release calls no longer is lost without a word.
"""

import os
import subprocess
import sys
import textwrap

from onnxtrain import _torch

PROGRAM = textwrap.dedent('''
    import collections, functools, logging, warnings
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
    from torch.utils.checkpoint import checkpoint
    from agree import Square
    import onnxtrain
    from onnxtrain import _torch
    from onnxtrain._export import state
    from onnxtrain.ortmodule import ORTModule

    calls = collections.Counter()

    def counted(name, value):
        calls[name] += 0
        def counting(function):
            @functools.wraps(function)
            def call(*args, **kwargs):
                calls[name] += 1
                return function(*args, **kwargs)
            return call
        if isinstance(value, (staticmethod, classmethod)):
            return type(value)(counting(value.__func__))
        if isinstance(value, type):
            own = {"__init__": counting(value.__init__), "__module__": value.__module__}
            return type(value.__name__, (value,), own)
        return counting(value) if callable(value) else value

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
            self.recurrent, self.linear, self.out = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 16), nn.Linear(16, 50)
            self.alike = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
            self.calls = np.int64(0)

        def forward(self, tokens, lengths, labels):
            h = self.layer(self.embedding(tokens)) * np.sqrt(tokens.shape[1])
            self.calls = self.calls + 1
            logging.getLogger("model").info("a line")
            warnings.warn("a word", stacklevel=1)
            h, _ = self.recurrent(pack_padded_sequence(h, lengths, True, False))
            h, _ = pad_packed_sequence(h, True)
            h = Square.apply(h) + checkpoint(self.linear, h, use_reentrant=False)
            with torch.no_grad():  # a region, for which the program is traced twice
                h = h / h.abs().max()
            h = self.alike(h + F.scaled_dot_product_attention(h, h, h) * (h > 0))
            return F.cross_entropy(self.out(h).view(-1, 50), labels.view(-1))

    model = ORTModule(Model())
    state.observer = counted
    model(torch.randint(0, 50, (2, 6)), torch.tensor([6, 4]), torch.randint(0, 50, (2, 6))).backward()
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (1, 0), counts
    for short, name in _torch.TABLE.items():
        if name.how == "replaced for a while" and (place := _torch.place(short)) is not None:
            owner, attribute = place
            owner = getattr(owner, "__qualname__", getattr(owner, "__name__", type(owner).__name__))
            print(calls.pop(f"{owner}.{attribute}", 0), short)
    print(*[f"{count} {name}" for name, count in calls.items()], sep="\\n")
''')
# What forward would have to call; and a list of functions, which is not called.
OF_CALLERS = {"collect_backward_inputs", "binary_operators", "is_supported_random",
              *(["find_compatible_overload"] if _torch.OpTraceDispatchMode is None else [])}
PUBLIC = "_ConfigEntry."  # settings of Dynamo's


def test_each_is_called_in_a_first_step():
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=300,
                         env={**os.environ, "ORTMODULE_CACHE_DIR": ""})
    assert ran.returncode == 0, ran.stderr
    counts = [line.split(" ", 1) for line in ran.stdout.splitlines() if line[:1].isdigit()]
    assert len(counts) > 20
    assert {name for count, name in counts if count == "0" and not name.startswith(PUBLIC)} <= OF_CALLERS
