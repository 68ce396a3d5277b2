"""First calls at the same time, in child processes: each is right, none waits for ever, and torch is afterwards what it
was.
"""

import subprocess
import sys
import textwrap

import pytest
import torch

# A torch with CUDA that finds no GPU: each fake mode of 2.10 replaces the guard that other threads hold, and they crash.
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 11) and torch.version.cuda is not None
                                and not torch.cuda.is_available(), reason="PyTorch 2.10 crashes in threads here")
COMMON = """
import threading, time
import torch
from torch import nn
torch.set_num_threads(1)
import onnxtrain
from onnxtrain._export import state
from onnxtrain.ortmodule import ORTModule, _captured

noted = {}
def note(name, value):
    noted.setdefault(name)
    return value
state.observer = note
before = {}
plain_place = state._Place.__init__
def place(self, owner, name, value):
    before.setdefault((id(owner), name), (owner, name, vars(owner).get(name), name in vars(owner)))
    plain_place(self, owner, name, value)
state._Place.__init__ = place

class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.5
        return x.sum()

wrong, errors = [], []
def train(model, shape=(4, 8)):
    try:
        x = torch.randn(shape)
        ours = ORTModule(model)
        loss = ours(x)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        want = model(x)
        want.backward()
        if not torch.allclose(loss, want, rtol=1e-4, atol=1e-5) or not all(  # a sum of 32 numbers may be near 0
                torch.allclose(g, p.grad, rtol=1e-3, atol=1e-5) for g, p in zip(grads, model.parameters())):
            wrong.append(model)
        counts = onnxtrain.stats(ours)
        if counts["fallback_steps"] or counts["graph_breaks"]:
            errors.append((counts["reasons"], counts["graph_breaks"]))
    except BaseException as error:
        errors.append(repr(error))

def together(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def check():
    import gc
    assert not errors and not wrong, (errors, wrong)
    assert len(before) > 20, len(before)
    left = [name for owner, name, value, own in before.values()
            if (name in vars(owner)) != own or vars(owner).get(name) is not value]
    assert not left and not state._places, left
    assert gc.isenabled()
"""


def run(script, seconds=560):
    """In a process that is ended where it does not end by itself."""
    done = subprocess.run([sys.executable, "-c", COMMON + textwrap.dedent(script) + "\nprint('done')"],
                          capture_output=True, text=True, timeout=seconds)
    assert done.stdout.split()[-1:] == ["done"], done.stderr[-3000:]


@pytest.mark.parametrize("count", [2, 6, 16])
def test_torch_is_what_it_was(count):
    run(f"together(*[lambda i=i: (time.sleep(0.02 * i), train(Net(1 + i % 3))) for i in range({count})]); check()")


def test_a_pool_of_threads_inside_forward():
    """Its threads run wrapped modules that are captured while the outer call goes on."""
    run("""
    from concurrent.futures import ThreadPoolExecutor
    pool = ThreadPoolExecutor(2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.parts = [ORTModule(Net(i + 1)) for i in range(2)]
        def forward(self, x):
            h = self.first(x)
            return h.sum() + self.pooled(h)
        @torch._dynamo.disable
        def pooled(self, h):
            return sum(pool.map(lambda part: part(h), self.parts))

    outer, x = Outer(), torch.randn(4, 8)
    want = outer(x)
    assert torch.allclose(ORTModule(outer)(x), want, rtol=1e-4)
    check()
    """)


def test_other_compiles_of_the_process_keep_working():
    """What a user compiles himself, whole, while wrapped modules have their first calls in two other threads. Neither
    a backward of AOTAutograd's nor a checkpoint is among them: PyTorch traces the one and runs the other with globals of
    the process (torch.fx.traceback), and without a lock.
    """
    run("""
    from agree import Square
    def own(backend, layers):
        try:
            net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)], nn.Dropout(0.0))
            def plain(x):
                h = net(x)
                return Square.apply(h).sum() * len(h.shape) + torch.nn.functional.gelu(h)[..., 0].mean()
            for rows in (3, 5):
                x = torch.randn(rows, 8)
                compiled = torch.compile(plain, backend=backend, fullgraph=True)
                with torch.set_grad_enabled(backend == "eager"):
                    got, want = compiled(x), plain(x)
                if backend == "eager":
                    got, want = [torch.autograd.grad(loss, net[0].weight)[0] for loss in (got, want)]
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
        except BaseException as error:
            errors.append(repr(error))

    def repeated(call, *kinds):
        for kind in kinds:
            call(*kind)

    together(lambda: repeated(own, ("aot_eager", 1), ("eager", 2), ("aot_eager", 3)),
             lambda: repeated(lambda i: train(Net(i)), (1,), (2,), (3,)),
             lambda: repeated(lambda i: train(Net(i)), (4,), (5,), (6,)))
    check()
    """)
