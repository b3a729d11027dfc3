"""On-policy distillation: the scores of a teacher at the sampled tokens (``algorithm.distill``). With ``divergence: reverse``

    A_t = reward_weight · A_call + weight · (log teacher(token_t) − log policy(token_t))

The second term is the gradient of the reverse KL divergence from the teacher, one token ahead (GKD, arXiv 2306.13649, and its
on-policy form with discount 0). The policy's logprob is the one recorded at sampling. With ``divergence: forward`` the teacher
returns its most likely tokens, and the trainer's loss compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_core.capture.selectors import find_selector
from lightning_core.chat.chat import Chat, Memory
from lightning_core.config.imports import user_code
from lightning_core.credit import Episode
from lightning_core.errors import ConfigError, TrainingError, show
from lightning_core.prompts.agent_prompts import NO_PROMPTS, AgentPrompts
from lightning_core.rollouts.signal import TokenScorer
from lightning_core.signals.distill.section import Distill
from lightning_core.trace import Call, Floats
from lightning_core.transitions import Streams, Transition, transitions_to_rows

TeacherPrompt = Callable[[list[dict[str, Any]]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The teacher of a run."""

    settings: Distill
    scorer: TokenScorer
    chat: Chat
    max_context: int
    prompt: TeacherPrompt | None = None
    """The function that ``settings.prompt`` names."""
    prompts: AgentPrompts = NO_PROMPTS
    """What the teacher reads in addition."""

    def streams(self, episodes: Sequence[Episode], *, masked: Collection[str] = ()) -> Streams:
        """The teacher's terms for the calls that are distilled, without the ``masked`` ones.

        Raises `ConfigError` if the prompt function fails, and `TrainingError` for a prompt that is too long.
        """
        settings = self.settings
        chosen = {
            t.call: t
            for e in episodes
            for t in e.transitions
            if t.call not in masked and (settings.agents is None or find_selector(settings.agents, t.agent))
        }
        calls = {call.id: call for e in episodes for call in e.trace.calls if call.id in chosen}
        rows = transitions_to_rows([self._read_by_teacher(t, calls[t.call]) for t in chosen.values()])
        if settings.divergence == "forward":
            proposed = self.scorer.candidates(rows, settings.candidate_count)
            counts = (
                {"tokens_distilled": sum(len(found.token_ids_TK) for found in proposed.values())} if proposed else {}
            )
            return Streams(
                candidates={call: replace(found, weight=settings.weight) for call, found in proposed.items()},
                counts=counts | _count_left(chosen, proposed),
            )
        scored = self.scorer.logprobs(rows)
        differences = {call: (scored_T - chosen[call].logprobs).astype(np.float32) for call, scored_T in scored.items()}
        return Streams(
            advantages={call: settings.weight * difference_T for call, difference_T in differences.items()},
            counts=_count(differences) | _count_left(chosen, scored),
        )

    def _read_by_teacher(self, transition: Transition, call: Call) -> Transition:
        messages = self._messages(transition.agent, call)
        if messages is None:
            return transition
        ids = self.chat.render(messages, call.tools, Memory()).ids
        length = len(ids) + len(transition.output_ids)
        if length > self.max_context:
            raise TrainingError(
                f"algorithm.distill: the teacher's prompt and the response have {length} tokens, more than policy.max_context = "
                f"{self.max_context}; raise it, or shorten what {self.settings.prompt or 'prompts'!r} adds"
            )
        # A separate rollout: teachers' prompts of two calls can be prefixes of each other.
        return replace(
            transition, prompt_ids=np.array(ids, dtype="<u4"), rollout=f"{transition.rollout}-{transition.call}"
        )

    def _messages(self, agent: str, call: Call) -> list[dict[str, Any]] | None:
        """What the teacher reads in place of the messages of ``call``; None: the same."""
        if self.prompt is None:
            return None if self.prompts.find(agent) is None else self.prompts.messages(agent, call.messages)
        name = self.settings.prompt or getattr(self.prompt, "__name__", "prompt")
        with user_code(f"algorithm.distill.prompt: {name!r} failed"):
            messages: object = self.prompt([dict(m) for m in call.messages])
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ConfigError(
                f"algorithm.distill.prompt: {name!r} returned {show(messages)}; expected a list of messages"
            )
        return messages


def _count(differences: Mapping[str, Floats]) -> dict[str, float]:
    """The tokens that were scored, and the sum of log policy − log teacher over them."""
    if not differences:
        return {}
    total = -math.fsum(float(values_T.sum()) for values_T in differences.values())
    return {"tokens_distilled": sum(map(len, differences.values())), "teacher_kl_sum": total}


def _count_left(chosen: Mapping[str, Transition], scored: Collection[str]) -> dict[str, float]:
    """The tokens of the calls that the scorer left out."""
    left = sum(len(t.output_ids) for call, t in chosen.items() if call not in scored)
    return {"tokens_distill_constrained": left} if left else {}
