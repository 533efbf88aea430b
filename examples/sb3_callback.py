"""A Stable-Baselines3 callback that pushes the policy to a Rebind server after each update.

    python examples/sb3_callback.py                      # PPO on CartPole; half a minute on one core
    python examples/sb3_callback.py --total-timesteps 2048 --compile never

Copy ``Actor`` and ``PushWeights``; ``CompareActions`` shows that what is served is what was trained.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import tritonclient.http as triton
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from torch import nn

from rebind.client import WeightsClient
from serving import ask, export, serving

if TYPE_CHECKING:
    from stable_baselines3.common.policies import ActorCriticPolicy

MODEL = "cartpole"


class Actor(nn.Module):
    """The part of a policy that acts; its layers are those of the policy, not copies."""

    def __init__(self, policy: ActorCriticPolicy) -> None:
        super().__init__()
        self.hidden = policy.mlp_extractor.policy_net
        self.logits = policy.action_net

    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        """The deterministic ``action [n, 1]`` and the ``logits [n, actions]`` behind it."""
        logits = self.logits(self.hidden(observation))
        return {"action": logits.argmax(1, keepdim=True), "logits": logits}


class PushWeights(BaseCallback):
    """Pushes ``actor`` after each update, under the label ``step-N``.

    SB3 learns from a rollout after ``on_rollout_end``, so new weights are first there at the start of the next rollout,
    or at the end of the training.
    """

    def __init__(self, client: WeightsClient, model_name: str, actor: nn.Module) -> None:
        super().__init__()
        self.generation = 0
        """The generation of the last push; as ``min_weights_generation`` it keeps older weights from answering."""
        self._client, self._model_name, self._actor = client, model_name, actor

    def _on_rollout_start(self) -> None:
        self._push()

    def _on_training_end(self) -> None:
        self._push()

    def _on_step(self) -> bool:
        return True

    def _push(self) -> None:
        update = self._client.push(self._model_name, self._actor, label=f"step-{self.num_timesteps}")
        self.generation = update.generation
        self.logger.record("rebind/generation", update.generation)
        self.logger.record("rebind/refit_ms", update.durations_ms["total"])


class CompareActions(BaseCallback):
    """After each push, asks the server and ``model.predict`` about the observations of the last rollout."""

    def __init__(self, url: str, pushes: PushWeights) -> None:
        super().__init__()
        self._server, self._pushes = triton.InferenceServerClient(url), pushes
        self.compared = 0
        self.generations: list[int] = []

    def _on_rollout_start(self) -> None:
        self._compare()

    def _on_training_end(self) -> None:
        self._compare()

    def _on_step(self) -> bool:
        return True

    def _compare(self) -> None:
        assert isinstance(self.model, PPO)
        # Before the first rollout the buffer is all zeros, which can be compared as well.
        observations = self.model.rollout_buffer.observations.reshape(-1, 4).astype(np.float32)
        answer, parameters = ask(self._server, MODEL, observations, min_weights_generation=self._pushes.generation)
        expected, _ = self.model.predict(observations, deterministic=True)
        assert np.array_equal(answer["action"].squeeze(1), expected)
        assert parameters["weights_generation"] == self._pushes.generation
        self.compared += len(expected)
        self.generations.append(self._pushes.generation)
        # What is pushed before the first update is what was exported: nothing to do, and no new label.
        label = parameters.get("weights_label", "exported")
        print(f"{label:>12}  generation {self._pushes.generation:3}  {len(expected)} actions equal to model.predict")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-timesteps", type=int, default=20_000)
    parser.add_argument("--compile", default="background", help="when the server compiles the policy: `never` if not")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    env = make_vec_env("CartPole-v1", seed=1)
    model = PPO("MlpPolicy", env, n_steps=1024, batch_size=128, learning_rate=1e-3, seed=1, device="cpu")
    actor = Actor(model.policy)
    with tempfile.TemporaryDirectory() as repository:
        export(actor, torch.zeros(2, 4), Path(repository, MODEL), max_batch_size=4096)
        with serving(Path(repository), f"--compile={arguments.compile}") as url, WeightsClient(url) as client:
            pushes = PushWeights(client, MODEL, actor)
            compared = CompareActions(url, pushes)
            model.learn(arguments.total_timesteps, callback=[pushes, compared])
    reward, _ = evaluate_policy(model, env, n_eval_episodes=10)
    print(f"{compared.compared} actions of {len(compared.generations)} generations equal to model.predict")
    print(f"mean return of 10 episodes: {reward:.1f}")


if __name__ == "__main__":
    main()
