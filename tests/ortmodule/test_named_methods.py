"""ORTModule(model, methods=...): methods beside forward run in the engine, equal to eager's."""

import copy
import logging
import pickle

import pytest
import torch
import torch.nn as nn
from torch.distributions import Categorical

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Agent(nn.Module):
    """As scripts of reinforcement learning have it: forward is never called."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.actor, self.critic, self.calls = nn.Linear(16, 3), nn.Linear(16, 1), 0
        self.dropout = nn.Dropout(0.5)

    def get_value(self, obs):
        return self.critic(self.body(obs))

    def get_action_and_value(self, obs, action=None, *, scale=1.0):
        self.calls += 1
        hidden = self.dropout(self.body(obs))
        chosen = Categorical(logits=self.actor(hidden) * scale)
        if action is None:
            action = chosen.sample()
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(hidden)

    def _private(self, obs):
        return self.body(obs)


METHODS = "get_value", "get_action_and_value"


def trained(agent, steps=4):
    """Losses of a few steps of a policy's loop, weights and Python state."""
    torch.manual_seed(0)
    optimizer, losses = torch.optim.AdamW(agent.parameters(), lr=1e-2), []
    agent.dropout.p = 0.0
    for _ in range(steps):
        with torch.no_grad():
            obs = torch.randn(5, 6)
            action, old, _, value = agent.get_action_and_value(obs)
        _, new, entropy, now = agent.get_action_and_value(obs, action, scale=0.5)
        loss = ((new - old).exp().mean() - entropy.mean() + (now - value - 1).square().mean()
                + agent.get_value(obs).mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in agent.parameters()], agent.calls


def compare(ours, plain):
    for got, want in zip(trained(ours), trained(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_methods_are_in_the_engine():
    plain = Agent()
    model = ORTModule(copy.deepcopy(plain), methods=METHODS)
    compare(model, plain)
    counts = onnxtrain.stats(model)
    assert counts["engine_steps"] == 12 and counts["fallback_steps"] == 0, counts
    assert "calls of forward and methods: 12 in the engine, 0 in PyTorch" in onnxtrain.explain(model)
    assert counts["exports"] <= 8  # of three kinds of calls, and of a counter that changes


def test_modes_and_one_name():
    plain = Agent()
    model = ORTModule(copy.deepcopy(plain), methods="get_value")
    obs = torch.randn(2, 6)
    for mode in (True, False, True):
        model.train(mode), plain.train(mode)
        torch.testing.assert_close(model.get_value(obs), plain.get_value(obs))
    assert onnxtrain.stats(model)["engine_steps"] == 3
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
def test_a_copy_has_its_own(copied):
    plain = Agent()
    model = ORTModule(copy.deepcopy(plain), methods=METHODS)
    other = copied(model)
    compare(other, plain)
    assert onnxtrain.stats(other)["engine_steps"] == 12


def test_forward_beside_them():
    class Both(Agent):
        def forward(self, obs):
            return self.get_value(obs) * 2

    plain = Both()
    model = ORTModule(copy.deepcopy(plain), methods=("forward", "get_value"))
    obs = torch.randn(3, 6)
    (model(obs).sum() + model.get_value(obs).sum()).backward()
    (plain(obs).sum() + plain.get_value(obs).sum()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert onnxtrain.stats(model)["engine_steps"] == 2


@pytest.mark.parametrize("name", ["get_values", "actor", "missing"])
def test_a_name_that_is_no_method(name):
    with pytest.raises(ValueError, match=f"methods= names '{name}', which is no method of Agent; its methods are "
                                         "get_action_and_value, get_value"):
        ORTModule(Agent(), methods=(name,))


def test_methods_that_pytorch_runs_are_named_once(caplog):
    model = ORTModule(Agent())
    with caplog.at_level(logging.WARNING):
        for _ in range(45):
            model.get_value(torch.randn(2, 6))
            model._private(torch.randn(2, 6))
    said = [record.getMessage() for record in caplog.records if "has not been called" in record.getMessage()]
    assert len(said) == 1 and "forward of Agent has not been called yet, but get_value has, 20 times" in said[0]
    assert "methods=('get_value',)" in said[0]
