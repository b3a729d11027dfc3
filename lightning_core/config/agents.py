"""The configuration's section ``agents``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.types import AgentName, Names, Section
from lightning_core.trace import REWARD_FUNCTION


def _one_or_several(names: object) -> object:
    return [names] if isinstance(names, str) and names != "all" else names


class Auxiliary(Section):
    """Calls to exclude from training. A call must match all fields that are set."""

    name: str
    """The name to list them under, such as `title`."""
    agent: AgentName | None = None
    """The name of the agent, with `*` as wildcard; null: any."""
    model: str | None = None
    """The requested model, with `*` as wildcard: `*-haiku-*`; null: any."""
    contains: str | None = None
    """A text in the system prompt or the last message; null: any."""

    @model_validator(mode="after")
    def _matches_something(self) -> Auxiliary:
        if self.agent is None and self.model is None and self.contains is None:
            raise PydanticCustomError(
                INVALID_VALUE, "expected agent, model or contains, or the rule matches every call"
            )
        return self


def _agent_name(name: str) -> str:
    if not name or "*" in name or "/" in name or name == REWARD_FUNCTION:
        raise PydanticCustomError(
            INVALID_VALUE,
            "expected the name of an agent, without * and /, and not {reserved}",
            {"reserved": repr(REWARD_FUNCTION)},
        )
    return name


class NamedCallsSection(Section):
    """A name for calls that have none: no mark in code, no framework's agent or node, no name in the URL. It precedes
    the name of the program that makes them, and that of `solve`. A call must match all fields that are set. Calls that match rules
    of different names stop the run. Several rules may have one name."""

    name: Annotated[AgentName, AfterValidator(_agent_name)]
    """The name, as in `train` and `frozen`."""
    contains: Annotated[str, Field(min_length=1)] | None = None
    """A text in the system prompt, or in the first message if there is no system prompt; null: any."""
    model: str | None = None
    """The requested model, with `*` as wildcard; null: any."""
    tools: Names | None = None
    """Names of tools, with `*` as wildcard, that the request offers, besides others; `[]`: it offers none; null: any."""

    @model_validator(mode="after")
    def _matches_something(self) -> NamedCallsSection:
        if self.contains is None and self.model is None and self.tools is None:
            raise PydanticCustomError(
                INVALID_VALUE, "expected contains, model or tools, or the rule matches every call"
            )
        return self


class Agents(Section):
    """The agents to train, by name.
    A name is the name of a `@trainable` mark, or of a framework's node or agent. A `*` matches any characters of a name:
    `researcher-*` stands for `researcher-1` and `researcher-2`, which may be created at run time. An exact name takes
    precedence over a pattern, a longer pattern over a shorter one, and `frozen` over `train`."""

    train: Annotated[Names | Literal["all"] | None, BeforeValidator(_one_or_several)] = None
    """Names of the agents to train, or a single one; `all`: every agent that is not under `frozen`, with or without a
    name; null: the agents listed under `policies`, or else those marked with `@trainable`, or else the only one that makes model
    calls. `team/writer` is the agent or node `writer` inside `team`. `*` is a wildcard."""
    frozen: dict[AgentName, str] = {}
    """Agents that are not trained: a mapping from agent name, with `*` as wildcard, to model name. A model that is not
    served here is requested from the agent's own provider, or from `policy.upstream`."""
    auxiliary: list[Auxiliary] = []
    """Calls of trained agents that are answered by the policy, but not trained on, such as the titles and summaries
    that a command-line agent requests for itself. They are listed as `AGENT/NAME`."""

    named: list[NamedCallsSection] = []
    """Names for calls without one, by system prompt, requested model or tools, in any process and language."""

    @property
    def trained_names(self) -> tuple[str, ...]:
        """The names in `train`."""
        return self.train if isinstance(self.train, tuple) else ()
