"""The configuration's section ``algorithm.ce``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lightning_core.config.types import Names, Positive, Section

CeTokens = Literal["tool", "user", "response"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class CrossEntropy(Section):
    """A cross-entropy loss on tokens of the step's rollouts, in the same update. docs/sft.md describes it."""

    weight: Positive
    """Coefficient of the cross-entropy, which is in nats per token: the mean over rollouts of the mean over the chosen
    tokens of each."""
    tokens: Annotated[tuple[CeTokens, ...], BeforeValidator(_listed), Field(strict=False)] = ("tool",)
    """The tokens, one of these or a list. `tool`: results of tools (ECHO). `user`: messages of the user. Of both, those
    that follow a response of the rollout. `response`: the responses of rollouts with a reward of `min_reward` or more."""
    min_reward: float | None = None
    """With `response`: the least reward of a rollout; null: `eval.solved`."""
    agents: Names | None = None
    """Agents whose prompts and responses are meant, with `*` as wildcard; null: all trained agents."""
