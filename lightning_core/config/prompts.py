"""The configuration's section ``prompts``: what the endpoint adds to the prompts of agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.types import AgentName, Section, expanded
from lightning_core.prompts.agent_prompts import AgentPrompts, make_prompt
from lightning_core.prompts.demonstrations import check_demonstrations, read_demonstrations
from lightning_core.prompts.file import read_agents

T = TypeVar("T")
_Text = Annotated[str, Field(min_length=1)]


def _or_invalid(read: Callable[[], T]) -> T:
    """The result of ``read``, whose ValueError becomes a problem of the configuration."""
    try:
        return read()
    except ValueError as error:
        raise PydanticCustomError(INVALID_VALUE, "{text}", {"text": str(error)}) from None


def _demonstrations(value: object) -> object:
    if isinstance(value, str):
        path = Path(expanded(value))
        value = _or_invalid(lambda: read_demonstrations(path))
    if not isinstance(value, list):
        raise PydanticCustomError(INVALID_VALUE, "expected the path of a JSONL file, or a list of conversations")
    listed = cast("list[Any]", value)
    return _or_invalid(lambda: check_demonstrations(listed))


def _from_file(value: object) -> object:
    if not isinstance(value, str):
        return {} if value is None else value
    return dict(_or_invalid(lambda: read_agents(expanded(value))))


class PromptSection(Section):
    """The prompt of the agents with this name, with `*` as wildcard. With `prompts`, the endpoint adds it to their requests in
    rollouts, in evaluations and in `lightning-rl serve`; their code is not changed. With `algorithm.distill.prompts`, only the teacher
    reads it. In place of the mapping by name, both may be the path of a file with one, such as `lightning-rl prompts` writes:
    `prompts.yaml`, or `prompts.yaml#DIGEST` for one of its versions. The content of files becomes a part of the run's configuration.
    docs/prompts.md describes it."""

    extend: _Text | None = None
    """Text after the agent's system prompt, or a system prompt if it has none; null: nothing."""
    replace: _Text | None = None
    """Text in place of the agent's system prompt; null: its own stays."""
    demonstrations: Annotated[list[list[dict[str, Any]]], BeforeValidator(_demonstrations)] = []
    """Conversations before the agent's own first message: a JSONL file with one list of messages, or object with `messages`, per
    line, or the list itself. Each starts with a message of the user and ends with one of the assistant."""

    @model_validator(mode="after")
    def _adds_something(self) -> PromptSection:
        if self.extend is not None and self.replace is not None:
            raise PydanticCustomError(INVALID_VALUE, "expected extend or replace, not both")
        if self.extend is None and self.replace is None and not self.demonstrations:
            raise PydanticCustomError(INVALID_VALUE, "expected extend, replace or demonstrations")
        return self


PromptSections = Annotated[dict[AgentName, PromptSection], BeforeValidator(_from_file)]
"""Prompts by agent, or the path of a file of prompts. The content of files becomes a part of the configuration."""


def make_prompts(sections: Mapping[str, PromptSection]) -> AgentPrompts:
    """The prompts in ``sections``."""
    return AgentPrompts({
        agent: make_prompt(
            agent, extend=section.extend, replace=section.replace, demonstrations=section.demonstrations
        )
        for agent, section in sections.items()
    })  # fmt: skip
