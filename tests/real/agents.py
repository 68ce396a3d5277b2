"""Reinforcement learning: methods other than forward, samples drawn in rollouts."""

import sys

import numpy as np
import torch
from scripts import Run, definitions, script
from torch import nn, optim

CLEANRL = "vwxyzjn/cleanrl@fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"


@script(CLEANRL, line='agent = ORTModule(Agent(envs), methods=("get_value", "get_action_and_value"))', replaced="nothing",
        requires=("gymnasium", "tyro", "tensorboard"))
def cleanrl_ppo(run: Run):
    """cleanrl/ppo.py on CartPole: a rollout of 16 moves in 4 environments, then minibatches; a step is an update."""
    import gymnasium

    ppo = definitions(run.folder / "cleanrl" / "ppo.py")
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    agent = run.wrap(ppo.Agent(envs), methods=("get_value", "get_action_and_value"))
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    state = torch.Tensor(envs.reset(seed=1)[0])
    for _ in range(run.steps):
        state, batch = rollout(agent, envs, state, 16)
        loss = update(agent, optimizer, *batch)
        run.step(loss)


def rollout(agent, envs, state, moves):
    """The script's: observations, log probabilities, actions, advantages, returns and values of the moves."""
    rows, ended = [], torch.zeros(envs.num_envs)
    for _ in range(moves):
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(state)
        following, reward, terminated, truncated, _ = envs.step(action.numpy())
        rows.append((state, logprob, action, torch.tensor(reward, dtype=torch.float32), ended, value.flatten()))
        state, ended = torch.Tensor(following), torch.Tensor(np.logical_or(terminated, truncated))
    obs, logprobs, actions, rewards, dones, values = map(torch.stack, zip(*rows))
    with torch.no_grad():
        next_value, last, advantages = agent.get_value(state).reshape(1, -1), 0, torch.zeros_like(rewards)
        for t in reversed(range(moves)):
            alive = 1.0 - (ended if t == moves - 1 else dones[t + 1])
            following = next_value if t == moves - 1 else values[t + 1]
            delta = rewards[t] + 0.99 * following * alive - values[t]
            advantages[t] = last = delta + 0.99 * 0.95 * alive * last
    return state, [x.reshape(-1, *x.shape[2:]) for x in (obs, logprobs, actions, advantages, advantages + values, values)]


def update(agent, optimizer, obs, logprobs, actions, advantages, returns, values):
    """The script's: one epoch of minibatches with the clipped objective."""
    order = np.arange(len(obs))
    np.random.shuffle(order)
    for chosen in np.split(order, 4):
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs[chosen], actions.long()[chosen])
        ratio = (newlogprob - logprobs[chosen]).exp()
        advantage = advantages[chosen]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
        newvalue = newvalue.view(-1)
        clipped = values[chosen] + torch.clamp(newvalue - values[chosen], -0.2, 0.2)
        value = 0.5 * torch.max((newvalue - returns[chosen]) ** 2, (clipped - returns[chosen]) ** 2).mean()
        loss = policy - 0.01 * entropy.mean() + value * 0.5
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
    return loss


@script("stable-baselines3==2.9.2",
        line='model.policy = ORTModule(model.policy, methods=("evaluate_actions", "predict_values"))',
        replaced="nothing", requires=("gymnasium",))
def stable_baselines3_ppo(run: Run):
    """PPO.learn on CartPole; a step is a rollout and its updates."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    class Watch(BaseCallback):
        seen = 0

        def _on_step(self):
            return True

        def _on_rollout_start(self):  # the update of the rollout before is done
            self.seen += 1
            if self.seen > 1:
                run.step(self.model.logger.name_to_value["train/loss"])

    model = PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, n_epochs=2, seed=0, device="cpu")
    model.policy = run.wrap(model.policy, methods=("evaluate_actions", "predict_values"))
    model.learn(total_timesteps=32 * run.steps, callback=Watch(), log_interval=None)
    run.step(model.logger.name_to_value["train/loss"])


@script(CLEANRL, line="actor, qf1, qf2 = ORTModule(actor, methods=('get_action',)), ORTModule(qf1), ORTModule(qf2)",
        replaced="data", requires=("gymnasium", "tyro", "tensorboard", "stable-baselines3"))
def cleanrl_sac(run: Run):
    """cleanrl/sac_continuous_action.py: the updates, on drawn transitions."""
    from types import SimpleNamespace

    from gymnasium.spaces import Box

    sys.path.insert(0, str(run.folder))
    sac = definitions(run.folder / "cleanrl" / "sac_continuous_action.py", LOG_STD_MAX=2, LOG_STD_MIN=-5)
    space = SimpleNamespace(single_observation_space=Box(-1, 1, (5,)), single_action_space=Box(-1, 1, (2,)))
    actor = run.wrap(sac.Actor(space), methods=("get_action",))
    qf1, qf2 = run.wrap(sac.SoftQNetwork(space)), run.wrap(sac.SoftQNetwork(space))
    targets = sac.SoftQNetwork(space), sac.SoftQNetwork(space)
    for target, source in zip(targets, (qf1, qf2)):
        target.load_state_dict(source.state_dict())
    q_optimizer = optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-3)
    actor_optimizer = optim.Adam(actor.parameters(), lr=3e-4)
    for _ in range(run.steps):
        obs, following, actions = torch.rand(16, 5), torch.rand(16, 5), torch.rand(16, 2) * 2 - 1
        rewards = torch.rand(16)
        with torch.no_grad():
            next_actions, next_log_pi, _ = actor.get_action(following)
            q_next = torch.min(*(target(following, next_actions) for target in targets)) - 0.2 * next_log_pi
            q_next = rewards + 0.99 * q_next.view(-1)
        q_loss = sum(nn.functional.mse_loss(q(obs, actions).view(-1), q_next) for q in (qf1, qf2))
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()
        pi, log_pi, _ = actor.get_action(obs)
        actor_loss = (0.2 * log_pi - torch.min(qf1(obs, pi), qf2(obs, pi))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        for target, source in zip(targets, (qf1, qf2)):
            for q, p in zip(target.parameters(), source.parameters()):
                q.data.copy_(0.005 * p.data + 0.995 * q.data)
        run.step(q_loss + actor_loss)
