"""The configuration's section ``algorithm.distill``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning_core.capture.selectors import may_overlap
from lightning_core.config.imports import import_callable
from lightning_core.config.prompts import PromptSections
from lightning_core.config.signal_sections import SignalSection, StreamKind
from lightning_core.config.source import KeyPath
from lightning_core.config.types import CallableName, Count, Names, Positive, Section
from lightning_core.endpoint.transport.api_key import read_api_key
from lightning_core.trace import BASE, POLICY

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections

_KEY: KeyPath = ("algorithm", "distill")

CANDIDATES, MAX_CANDIDATES = 20, 1000
"""The default is the most that a vLLM server returns without ``--max-logprobs``."""


class Distill(Section):
    """On-policy distillation: a teacher trains the policy at the tokens that it sampled. docs/distillation.md describes it."""

    teacher: str = "base"
    """The teacher's weights. `base`: the initial ones. `policy`: the current ones. Otherwise the folder or the name of a
    model with the same vocabulary, or the URL of a vLLM server with one, such as `http://teacher:8000/v1`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's API key; null: no key is sent."""
    timeout_seconds: Positive | None = None
    """Longest time for one response of the server; null: 300."""
    connections: Count | None = None
    """Most requests at the server at the same time; null: 16."""
    prompt: CallableName | None = None
    """`module:callable`, called with the messages of a call; it returns those that the teacher reads instead, such as the
    same with examples. null: the same messages, or those with `prompts`."""
    prompts: PromptSections = {}
    """Prompts of agents in the form of the section `prompts`, or the path of a file of prompts: the teacher reads them, and the
    policy does not. It learns to answer without them as it would with them."""
    divergence: Literal["reverse", "forward"] = "reverse"
    """The divergence that the policy minimizes. `reverse`: each token that it sampled gets `weight · (log teacher − log policy)` as an
    advantage. `forward`: a term of the loss, the divergence from the teacher's most likely tokens at each sampled one."""
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


class DistillKeys(Section):
    """The keys of distillation in the section ``algorithm``."""

    distill: Distill | None = None
    """On-policy distillation; null: none."""


def distill_of(algorithm: Section) -> Distill | None:
    """The settings in the section ``algorithm``."""
    assert isinstance(algorithm, DistillKeys)
    return algorithm.distill


def prompt_function(distill: Distill) -> Callable[..., Any] | None:
    """The function that ``distill.prompt`` names, if any. Raises `ConfigError` if it cannot be imported."""
    return None if distill.prompt is None else import_callable(distill.prompt, key="algorithm.distill.prompt")


def _check(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield the keys of teachers equal to the policy, keys without effect, and keys that verl does not support."""
    d = distill_of(c.algorithm)
    if d is None:
        return
    is_same = d.prompt is None and not d.prompts
    if is_same and d.teacher == POLICY:
        yield _KEY, "with teacher: policy and the same prompt, teacher and policy are equal; set prompt or prompts"
    if is_same and d.teacher == BASE:
        yield (
            _KEY,
            "with teacher: base and the same prompt, it is a KL penalty; set prompt or prompts, or use algorithm.kl",
        )
    if d.prompt is not None and d.prompts:
        yield (*_KEY, "prompts"), f"found prompts and prompt = {d.prompt!r}; expected one of them"
    for mine in d.prompts:
        if own := next((name for name in c.prompts if may_overlap(mine, name)), None):
            yield (
                (*_KEY, "prompts", mine),
                f"prompts.{own} is added to the requests of the same agents, so that the policy would read both; remove one of them",
            )
    if d.candidates is not None and d.divergence != "forward":
        yield (
            (*_KEY, "candidates"),
            f"goes with divergence: forward, but algorithm.distill.divergence is {d.divergence!r}",
        )
    if d.candidates is not None and d.candidates > MAX_CANDIDATES:
        yield (
            (*_KEY, "candidates"),
            f"found {d.candidates}, expected at most {MAX_CANDIDATES}: all are kept for each sampled token of a step",
        )
    for key in ("api_key_env", "timeout_seconds", "connections"):
        if getattr(d, key) is None or d.server is not None:
            continue
        yield (
            (*_KEY, key),
            f"goes with the URL of a server as the teacher, but algorithm.distill.teacher is {d.teacher!r}",
        )
    if d.server is not None and c.rollouts.temperature != 1:
        yield (
            ("rollouts", "temperature"),
            f"found {c.rollouts.temperature:g}, expected 1.0: the teacher's server {d.server!r} scores tokens at temperature 1",
        )
    if c.policies:
        yield _KEY, "goes with one policy; remove it, or policies"
    if c.trainer.name == "verl":
        yield from _check_verl(d)


def _check_verl(d: Distill) -> Iterator[tuple[KeyPath, str]]:
    if d.server is None:
        yield (
            (*_KEY, "teacher"),
            f"found {d.teacher!r}; with verl expected the URL of a vLLM server, since only the embedded trainer holds a teacher's "
            "weights: start one with `vllm serve MODEL`, or use trainer.name: torch",
        )
    if d.divergence != "reverse":
        yield (
            (*_KEY, "divergence"),
            f"found {d.divergence!r}, expected 'reverse': verl's actor does not keep the logprobs of other tokens than the sampled "
            "ones; or use trainer.name: torch",
        )


def _check_run(c: Sections, tasks: Sequence[Mapping[str, Any]]) -> None:
    d = distill_of(c.algorithm)
    if d is not None:
        prompt_function(d)
        read_api_key(d.api_key_env, "algorithm.distill.api_key_env")


def _agents(c: Sections) -> Iterator[tuple[KeyPath, Names | None]]:
    d = distill_of(c.algorithm)
    if d is not None:
        yield (*_KEY, "agents"), d.agents
        yield (*_KEY, "prompts"), tuple(d.prompts) or None


def _models(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    d = distill_of(c.algorithm)
    if d is not None and d.teacher == BASE and not c.policies:
        yield (*_KEY, "teacher"), BASE


def _kinds(algorithm: Section) -> Collection[StreamKind]:
    d = distill_of(algorithm)
    return () if d is None else ("advantages",) if d.divergence == "reverse" else ("candidates",)


SECTION = SignalSection(
    section="algorithm",
    keys=DistillKeys,
    check=_check,
    check_run=_check_run,
    agents=_agents,
    models=_models,
    stream="distill",
    kinds=_kinds,
    means={"teacher_kl": ("teacher_kl_sum", "tokens_distilled")},
)
