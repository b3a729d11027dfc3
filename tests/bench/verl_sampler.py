"""verl's replay buffer with a short polling interval. The default of two seconds would limit the resolution."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class EagerReplayBuffer(ReplayBuffer):
    """Constructed by verl (``trainer.v1.sampler.custom_sampler``)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.1)
