"""verl's replay buffer, looking often: with its two seconds between looks, what a loop takes could be told to two seconds only."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class EagerReplayBuffer(ReplayBuffer):
    """Constructed by verl (``trainer.v1.sampler.custom_sampler``)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.1)
