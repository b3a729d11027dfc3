"""The configuration's section ``algorithm.distill``."""

from __future__ import annotations

from lightning_core.config.types import CallableName, Names, Positive, Section


class Distill(Section):
    """On-policy distillation: a teacher scores the tokens that the policy sampled, and each token gets
    `weight · (log teacher − log policy)` as an advantage. docs/distillation.md describes it."""

    teacher: str = "base"
    """The teacher's weights. `base`: the initial ones. `policy`: the current ones. Otherwise the folder or the name of a
    model with the same vocabulary."""
    prompt: CallableName | None = None
    """`module:callable`, called with the messages of a call; it returns those that the teacher reads instead, such as the
    same with examples. null: the same messages."""
    weight: Positive = 1.0
    """Coefficient of the advantages, which are in nats."""
    agents: Names | None = None
    """Agents that learn from the teacher, with `*` as wildcard; null: all trained agents."""
