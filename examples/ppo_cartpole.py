"""PPO on CartPole as in CleanRL, but the actors ask a Rebind server, and the learner pushes every update to it.

    python examples/ppo_cartpole.py                      # half a minute on one core; the return rises to 500
    python examples/ppo_cartpole.py --total-timesteps 4096 --compile never

The rollout needs no copy of the network: observations go to the server, logits and values come back, and with them the
generation of the weights that gave them. Each request asks for the pushed generation or a newer one
(``min_weights_generation``), so the policy that acts is the one that learns: the example checks it for every step.

With a server of your own: write the model into its repository, start it, and say where it is.

    python examples/ppo_cartpole.py --export models
    rebind serve --model-repository models
    python examples/ppo_cartpole.py --url localhost:8000
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
import tritonclient.http as triton
from torch import nn
from torch.distributions import Categorical

from rebind.client import WeightsClient
from serving import ask, export, serving

if TYPE_CHECKING:
    import numpy.typing as npt

MODEL = "cartpole"
NUM_ENVS = 8
NUM_STEPS = 64  # of each environment in a rollout
UPDATE_EPOCHS = 10
MINIBATCH_SIZE = 256
LEARNING_RATE = 1e-3
GAMMA = 0.98
GAE_LAMBDA = 0.9
CLIP = 0.2
VALUE_COEFFICIENT = 0.5
MAX_GRAD_NORM = 0.5


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Actor and critic; ``float32 [n, 4]`` observations to ``logits [n, 2]`` and ``value [n, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 2, std=0.01))
        self.critic = nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, std=1.0))

    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        """The keys become the names of the served model's outputs."""
        return {"logits": self.actor(observation), "value": self.critic(observation)}


class Rollout:
    """What the actors saw and did; tensors are ``[NUM_STEPS, NUM_ENVS, ...]``."""

    def __init__(self) -> None:
        self.observations = torch.zeros(NUM_STEPS, NUM_ENVS, 4)
        self.actions = torch.zeros(NUM_STEPS, NUM_ENVS)
        self.log_probs = torch.zeros(NUM_STEPS, NUM_ENVS)
        self.rewards = torch.zeros(NUM_STEPS, NUM_ENVS)
        self.dones = torch.zeros(NUM_STEPS, NUM_ENVS)
        self.values = torch.zeros(NUM_STEPS + 1, NUM_ENVS)  # the last row is of what comes after the rollout
        self.generations: list[int] = []  # of the weights that answered, one for each request
        self.returns: list[float] = []  # of the episodes that ended


class Actors:
    """Environments that step together, with actions from the served policy."""

    def __init__(self, url: str, seed: int) -> None:
        self._server = triton.InferenceServerClient(url)
        self._envs = gym.vector.SyncVectorEnv(
            [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))] * NUM_ENVS,
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        )
        self._observation, _ = self._envs.reset(seed=seed)

    def collect(self, generation: int) -> Rollout:
        """The next ``NUM_STEPS`` of every environment, acted by weights no older than ``generation``."""
        rollout = Rollout()
        for step in range(NUM_STEPS):
            policy, rollout.values[step] = self._ask(generation, rollout)
            action = policy.sample()
            rollout.observations[step] = torch.as_tensor(self._observation)
            rollout.actions[step], rollout.log_probs[step] = action, policy.log_prob(action)
            self._observation, reward, terminated, truncated, info = self._envs.step(action.numpy())
            rollout.rewards[step] = torch.as_tensor(reward)
            rollout.dones[step] = torch.as_tensor(terminated | truncated)
            rollout.returns += episode_returns(info)
        _, rollout.values[NUM_STEPS] = self._ask(generation, rollout)
        return rollout

    def _ask(self, generation: int, rollout: Rollout) -> tuple[Categorical, torch.Tensor]:
        answer, parameters = ask(self._server, MODEL, self._observation, min_weights_generation=generation)
        rollout.generations.append(parameters["weights_generation"])
        return Categorical(logits=torch.tensor(answer["logits"])), torch.tensor(answer["value"]).squeeze(1)


def episode_returns(info: dict[str, Any]) -> list[float]:
    """The returns of the episodes that ended with this step."""
    if "final_info" not in info:
        return []
    returns: npt.NDArray[np.float32] = info["final_info"]["episode"]["r"][info["_final_info"]]
    return returns.tolist()


def advantages(rollout: Rollout) -> torch.Tensor:
    """Generalised advantage estimation, ``[NUM_STEPS, NUM_ENVS]``."""
    result = torch.zeros(NUM_STEPS, NUM_ENVS)
    last = torch.zeros(NUM_ENVS)
    for step in reversed(range(NUM_STEPS)):
        continues = 1 - rollout.dones[step]
        delta = rollout.rewards[step] + GAMMA * continues * rollout.values[step + 1] - rollout.values[step]
        last = result[step] = delta + GAMMA * GAE_LAMBDA * continues * last
    return result


class Learner:
    """The network that is trained, in this process; the server has only its pushed weights."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)

    def off_policy(self, rollout: Rollout) -> float:
        """The largest difference in log-probability between server and learner: rounding, if their weights agree."""
        with torch.no_grad():
            policy = Categorical(logits=self.agent(rollout.observations.flatten(0, 1))["logits"])
            change = policy.log_prob(rollout.actions.flatten()) - rollout.log_probs.flatten()
        return change.abs().max().item()

    def update(self, rollout: Rollout, remaining: float) -> None:
        """Trains on one rollout; ``remaining``, the share of training that is left, anneals the learning rate."""
        self._optimizer.param_groups[0]["lr"] = LEARNING_RATE * remaining
        advantage = advantages(rollout)
        value_target = (advantage + rollout.values[:NUM_STEPS]).flatten()
        advantage = advantage.flatten()
        for _ in range(UPDATE_EPOCHS):
            for rows in torch.randperm(NUM_STEPS * NUM_ENVS).split(MINIBATCH_SIZE):
                loss = self._loss(rollout, rows, advantage[rows], value_target[rows])
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_GRAD_NORM)
                self._optimizer.step()

    def _loss(
        self, rollout: Rollout, rows: torch.Tensor, advantage: torch.Tensor, value_target: torch.Tensor
    ) -> torch.Tensor:
        answer = self.agent(rollout.observations.flatten(0, 1)[rows])
        policy = Categorical(logits=answer["logits"])
        log_ratio = policy.log_prob(rollout.actions.flatten()[rows]) - rollout.log_probs.flatten()[rows]
        ratio = log_ratio.exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        value_loss = 0.5 * (answer["value"].squeeze(1) - value_target).square().mean()
        return policy_loss + VALUE_COEFFICIENT * value_loss


def train(agent: Agent, url: str, total_timesteps: int, seed: int) -> None:
    """Alternates rollouts and updates, and prints a line for each."""
    actors, learner = Actors(url, seed), Learner(agent)
    updates = total_timesteps // (NUM_STEPS * NUM_ENVS)
    requests = 0
    returns: list[float] = []
    with WeightsClient(url) as client:
        pushed = client.push(MODEL, agent, label="step-0")
        print(f"{'step':>8} {'return':>8} {'generation':>10} {'refit ms':>9}")
        for number in range(1, updates + 1):
            rollout = actors.collect(pushed.generation)
            # The server answered each step of the rollout with the pushed weights, and these are the learner's.
            assert set(rollout.generations) == {pushed.generation}
            assert learner.off_policy(rollout) < 1e-4
            requests += len(rollout.generations)
            returns = (returns + rollout.returns)[-20:]
            learner.update(rollout, remaining=1 - (number - 1) / updates)
            step = number * NUM_STEPS * NUM_ENVS
            pushed = client.push(MODEL, agent, label=f"step-{step}")
            refit_ms = pushed.durations_ms["total"]
            print(f"{step:8} {np.mean(returns):8.1f} {rollout.generations[-1]:10} {refit_ms:9.2f}")
    print(f"{requests} requests in {updates} rollouts, each answered by the weights of the last update")
    print(f"generation {pushed.generation} serves; the last {len(returns)} episodes returned {np.mean(returns):.1f}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-timesteps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", default="background", help="when the server compiles the policy: `never` if not")
    parser.add_argument("--export", type=Path, metavar="REPOSITORY", help="write the model there, and end")
    parser.add_argument("--url", help="a server that serves it; otherwise one is started")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    agent = Agent()
    if arguments.export:
        export(agent, torch.zeros(2, 4), arguments.export / MODEL, max_batch_size=64)
    elif arguments.url:
        train(agent, arguments.url, arguments.total_timesteps, arguments.seed)
    else:
        with tempfile.TemporaryDirectory() as repository:
            export(agent, torch.zeros(2, 4), Path(repository, MODEL), max_batch_size=64)
            with serving(Path(repository), f"--compile={arguments.compile}") as url:
                train(agent, url, arguments.total_timesteps, arguments.seed)


if __name__ == "__main__":
    main()
