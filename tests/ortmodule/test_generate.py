"""transformers' generate() on a wrapped model: the tokens of eager PyTorch, every forward in the engine."""

import copy

import pytest
import torch
import torch.nn as nn
from agree import equal, in_engine

import onnxtrain
from onnxtrain.ortmodule import ORTModule

transformers = pytest.importorskip("transformers")
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=48, **SPECIAL))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=24,
        vocab_size=40, max_position_embeddings=48, **SPECIAL))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        num_layers=1, num_heads=2, d_model=16, d_kv=8, d_ff=24, vocab_size=40, decoder_start_token_id=0,
        **SPECIAL | {"eos_token_id": 1}))


def pair(make):
    torch.manual_seed(0)
    eager = make().eval()
    return eager, ORTModule(copy.deepcopy(eager))


def same_tokens(eager, ours, length, **options):
    ids = torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(length))
    tokens = []
    for model in (eager, ours):
        torch.manual_seed(1)
        tokens.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **options))
    assert torch.equal(*tokens) and tokens[0].shape[1] > 2


WAYS = ({"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 10})


@pytest.mark.parametrize("make, exports", [(gpt2, 2), (llama, 2), (t5, 3)])
def test_with_a_growing_cache(make, exports):
    """One export for the first call of a prompt and one for the calls after it, whatever their lengths; T5 has one more
    for the call that finds its encoder's keys there already."""
    eager, ours = pair(make)
    for length in (5, 8):
        for way in WAYS:
            same_tokens(eager, ours, length, **way)
    counts = in_engine(ours, 2 * len(WAYS) * 3)
    assert counts["exports"] == exports, counts
    steps = counts["engine_steps"]
    same_tokens(eager, ours, 11)
    counts = in_engine(ours, steps + 1)
    assert counts["exports"] == exports, counts


def test_without_a_cache():
    eager, ours = pair(gpt2)
    for way in ({"do_sample": False}, {"num_beams": 2}, {"do_sample": True}):
        same_tokens(eager, ours, 5, use_cache=False, **way)
    assert in_engine(ours, 9)["exports"] == 1


def test_the_callers_cache_is_filled_and_handed_back():
    eager, ours = pair(gpt2)
    ids = torch.randint(3, 40, (2, 7))
    results = []
    for model in (eager, ours):
        cache = transformers.DynamicCache()
        found = []
        with torch.no_grad():
            for part in (ids[:, :4], ids[:, 4:]):
                out = model(part, **{_cache_argument(eager): cache}, use_cache=True)
                handed = next(value for value in out.values() if isinstance(value, transformers.Cache))
                assert handed is cache
                found += [out.logits, cache.get_seq_length()]
        cache.crop(-2)
        found += [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        results.append(found)
    equal(results[1], results[0])
    in_engine(ours, 2)


def _cache_argument(model):
    """Of transformers: "past_key_values", and "cache" lately."""
    import inspect

    names = inspect.signature(model.forward).parameters
    return "past_key_values" if "past_key_values" in names else "cache"


def test_training_through_a_cache():
    """A prompt of weights: gradients flow into what the caller put into the cache, and out of what forward left."""
    eager, ours = pair(llama)
    ids = torch.randint(3, 40, (2, 4))
    results = []
    for model in (eager, ours):
        prompt = torch.linspace(-1, 1, 2 * 2 * 3 * 4).reshape(2, 2, 3, 4).requires_grad_(True)
        cache = transformers.DynamicCache()
        cache.update(prompt, prompt * 2, 0)
        out = model(ids, **{_cache_argument(eager): cache}, use_cache=True)
        (out.logits.square().mean() + cache.layers[0].keys.square().sum() * 0.01).backward()
        results.append([prompt.grad, *[p.grad for p in model.parameters()]])
    equal(results[1], results[0])
    in_engine(ours)


def test_training_with_the_default_cache_in_the_result():
    """Forward makes a cache of its own where nobody says use_cache=False."""
    eager, ours = pair(gpt2)
    ids = torch.randint(3, 40, (2, 5))
    results = []
    for model in (eager, ours):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        out = model(ids, labels=ids)
        out.loss.backward()
        kinds = [type(value).__name__ for value in out.values()]
        results.append([kinds, out.loss, [p.grad for p in model.parameters()]])
    equal(results[1], results[0])
    in_engine(ours)


class Base(nn.Module):
    table = {"by name": "_twice"}

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.fc(x))

    def _twice(self, x):
        return self(self(x))

    def run(self, x):
        return getattr(type(self), self.table["by name"])(self, x)


def test_methods_that_are_looked_up_on_the_class():
    model, x = ORTModule(Base()), torch.randn(2, 4)
    equal(model.run(x), model.module.run(x))
    assert in_engine(model)["engine_steps"] == 2
    assert type(model).table is Base.table and type(model).__name__ == "ORTModule" and isinstance(model, ORTModule)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        type(model).missing  # noqa: B018
    assert onnxtrain.stats(copy.deepcopy(model))["engine_steps"] == 0


class Derived(Base):
    def run(self, x):
        return super().run(x) + self(x)

    @torch.no_grad()
    def decorated(self, x):
        assert isinstance(self, Derived) and issubclass(self.__class__, Derived) and super().run.__func__ is Base.run
        return self.run(x)

    def freeze(self):
        super().train(False)
        self.frozen = True
        return self

    def on(self):
        super().requires_grad_(True)
        return {self: len(list(self.parameters()))}, self == self


def test_methods_that_call_super_run_in_the_engine():
    """They ran on the wrapped module itself, in PyTorch, and nothing counted them."""
    model, x = ORTModule(Derived()), torch.randn(2, 4)
    equal(model.run(x), model.module.run(x))
    assert in_engine(model)["engine_steps"] == 3
    equal(model.decorated(x), model.module.decorated(x))
    assert in_engine(model)["engine_steps"] == 6
    assert model.freeze() is model and model.module.frozen and not model.training and not model.module.training
    assert not model.fc.training and "frozen" not in model.__dict__
    held, same = model.on()
    assert same and held == {model: 2} and repr(next(iter(held))) == repr(model)
    import inspect

    assert list(inspect.signature(model.run).parameters) == ["x"]
