"""On-policy distillation: what the teacher of ``algorithm.distill`` says where the policy sampled. With ``divergence: reverse``

    A_t = reward_weight · A_call + weight · (log teacher(token_t) − log policy(token_t))

The second term is the gradient of the reverse KL divergence from the teacher, one token ahead (GKD, arXiv 2306.13649, and its
on-policy form with discount 0). The policy's logprob is the one recorded at sampling. With ``divergence: forward`` the teacher
returns its most likely tokens, and the trainer's loss compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_core.capture.selectors import find_selector
from lightning_core.chat.chat import Chat, Memory
from lightning_core.config.distill import Distill
from lightning_core.config.imports import user_code
from lightning_core.credit import Episode
from lightning_core.errors import ConfigError, TrainingError, show
from lightning_core.trace import Call, Floats
from lightning_core.transitions import Candidates, Row, Transition, transitions_to_rows

TeacherPrompt = Callable[[list[dict[str, Any]]], Any]
Score = Callable[[Sequence[Row]], Mapping[str, Floats]]
"""The teacher's logprobs of the sampled tokens of rows: float32 [T] by call id, as at sampling."""
Propose = Callable[[Sequence[Row]], Mapping[str, Candidates]]
"""The teacher's most likely tokens at the sampled tokens of rows, by call id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What a teacher says of a step's calls; one of the two is empty."""

    differences: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """log teacher − log policy of the sampled tokens, float32 [T], by call id."""
    candidates: Mapping[str, Candidates] = field(default_factory=dict[str, Candidates])
    """The teacher's most likely tokens, by call id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The teacher of a run."""

    settings: Distill
    score: Score
    chat: Chat
    max_context: int
    propose: Propose | None = None
    """None: the trainer has no ``divergence: forward``."""
    prompt: TeacherPrompt | None = None
    """The function that ``settings.prompt`` names."""

    def lessons(self, episodes: Sequence[Episode], *, masked: Collection[str] = ()) -> Lessons:
        """What the teacher says of the calls that are distilled, without the ``masked`` ones.

        Raises `ConfigError` if the prompt function fails, and `TrainingError` for a prompt that is too long.
        """
        agents = self.settings.agents
        chosen = {
            t.call: t
            for e in episodes
            for t in e.transitions
            if t.call not in masked and (agents is None or find_selector(agents, t.agent))
        }
        calls = {call.id: call for e in episodes for call in e.trace.calls if call.id in chosen}
        rows = transitions_to_rows([self._read_by_teacher(t, calls[t.call]) for t in chosen.values()])
        if self.settings.divergence == "forward":
            assert self.propose is not None, "the trainer has this divergence"
            return Lessons(candidates=self.propose(rows))
        scored = self.score(rows)
        return Lessons(differences={call: (scored[call] - t.logprobs).astype(np.float32) for call, t in chosen.items()})

    def _read_by_teacher(self, transition: Transition, call: Call) -> Transition:
        if self.prompt is None:
            return transition
        name = self.settings.prompt or getattr(self.prompt, "__name__", "prompt")
        with user_code(f"algorithm.distill.prompt: {name!r} failed"):
            messages: object = self.prompt([dict(m) for m in call.messages])
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ConfigError(
                f"algorithm.distill.prompt: {name!r} returned {show(messages)}; expected a list of messages"
            )
        ids = self.chat.render(messages, call.tools, Memory()).ids
        length = len(ids) + len(transition.output_ids)
        if length > self.max_context:
            raise TrainingError(
                f"algorithm.distill: the teacher's prompt and the response have {length} tokens, more than policy.max_context = "
                f"{self.max_context}; raise it, or shorten what {name!r} adds"
            )
        # A rollout of its own: teachers' prompts of two calls can be prefixes of each other.
        return replace(
            transition, prompt_ids=np.array(ids, dtype="<u4"), rollout=f"{transition.rollout}-{transition.call}"
        )


def token_advantages(
    advantages: Mapping[str, float], differences: Mapping[str, Floats], *, reward_weight: float, weight: float
) -> dict[str, float | Floats]:
    """The advantage of each call (a number), or of each of its tokens (float32 [T]); see the module."""
    found: dict[str, float | Floats] = {call: reward_weight * value for call, value in advantages.items()}
    for call, difference_T in differences.items():
        found[call] = (reward_weight * advantages[call] + weight * difference_T).astype(np.float32)
    return found
