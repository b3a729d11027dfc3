"""The configuration's section ``algorithm.distill``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from lightning_core.config.source import KeyPath
from lightning_core.config.types import CallableName, Count, Names, Positive, Section

CANDIDATES, MAX_CANDIDATES = 20, 1000
"""The default is the most that a vLLM server returns without ``--max-logprobs``."""


class Distill(Section):
    """On-policy distillation: a teacher trains the policy at the tokens that it sampled. docs/distillation.md describes it."""

    teacher: str = "base"
    """The teacher's weights. `base`: the initial ones. `policy`: the current ones. Otherwise the folder or the name of a
    model with the same vocabulary, or the URL of a vLLM server with one, such as `http://teacher:8000/v1`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's API key; null: no key is sent."""
    prompt: CallableName | None = None
    """`module:callable`, called with the messages of a call; it returns those that the teacher reads instead, such as the
    same with examples. null: the same messages."""
    divergence: Literal["reverse", "forward"] = "reverse"
    """What the policy minimises. `reverse`: each token that it sampled gets `weight · (log teacher − log policy)` as an advantage.
    `forward`: a term of the loss, the divergence from the teacher's most likely tokens at each sampled one."""
    candidates: Count | None = None
    """With `forward`: the number of the teacher's most likely tokens; null: 20."""
    weight: Positive = 1.0
    """Coefficient of the advantages or of the divergence, which are in nats."""
    agents: Names | None = None
    """Agents that learn from the teacher, with `*` as wildcard; null: all trained agents."""

    @property
    def candidate_count(self) -> int:
        """The number of the teacher's tokens that are compared at each sampled one; 0: the sampled one only."""
        return 0 if self.divergence == "reverse" else self.candidates or CANDIDATES

    @property
    def server(self) -> str | None:
        """The URL of the teacher's server; None: it runs in this process."""
        return self.teacher if self.teacher.startswith(("http://", "https://")) else None


def check_distill(d: Distill, *, temperature: float) -> Iterator[tuple[KeyPath, str]]:
    """Yield the keys of a teacher that can teach nothing, and those without effect. ``temperature``: that of the rollouts."""
    if d.prompt is None and d.teacher == "policy":
        yield (
            ("algorithm", "distill"),
            "with teacher: policy and the same prompt, teacher and policy are equal; set prompt",
        )
    if d.prompt is None and d.teacher == "base":
        yield (
            ("algorithm", "distill"),
            "with teacher: base and the same prompt, it is a KL penalty; set prompt, or use algorithm.kl",
        )
    if d.candidates is not None and d.divergence != "forward":
        yield (
            ("algorithm", "distill", "candidates"),
            f"goes with divergence: forward, but algorithm.distill.divergence is {d.divergence!r}",
        )
    if d.candidates is not None and d.candidates > MAX_CANDIDATES:
        yield (
            ("algorithm", "distill", "candidates"),
            f"found {d.candidates}, expected at most {MAX_CANDIDATES}: all are kept for each sampled token of a step",
        )
    if d.api_key_env is not None and d.server is None:
        yield (
            ("algorithm", "distill", "api_key_env"),
            f"goes with the URL of a server as the teacher, but algorithm.distill.teacher is {d.teacher!r}",
        )
    if d.server is not None and temperature != 1:
        yield (
            ("rollouts", "temperature"),
            f"found {temperature:g}, expected 1.0: the teacher's server {d.server!r} scores tokens at temperature 1",
        )
