"""The prompts of a run's agents, and what they add to a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_core.capture.selectors import find_selector
from lightning_core.errors import PolicyRequestError
from lightning_core.prompts.demonstrations import Conversation, join_demonstrations
from lightning_core.prompts.wire_formats import WIRE_FORMATS, Insertion, insert_messages
from lightning_core.trace import REWARD_FUNCTION


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPrompt:
    """What is added to the requests of one agent."""

    agent: str
    """The agent's name or selector; see `lightning_core.capture.selectors`."""
    label: str
    """The selector and a digest of the content: ``writer@3f2a81c0d1e2``."""
    insertion: Insertion


def make_prompt(
    agent: str, *, extend: str | None = None, replace: str | None = None, demonstrations: Iterable[Conversation] = ()
) -> AgentPrompt:
    """The prompt of ``agent``: text after its system prompt or in place of it, and demonstrations before its own messages."""
    messages = join_demonstrations(demonstrations)
    text = extend if replace is None else replace
    content = json.dumps([text, replace is not None, messages], ensure_ascii=False, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    insertion = Insertion(text=text, replaces=replace is not None, messages=messages)
    return AgentPrompt(agent=agent, label=f"{agent}@{digest}", insertion=insertion)


@dataclass(frozen=True, slots=True)
class AgentPrompts:
    """The prompts of a run, by the selector of their agents."""

    by_agent: Mapping[str, AgentPrompt] = field(default_factory=dict[str, AgentPrompt])

    def find(self, agent: str | None) -> AgentPrompt | None:
        """The prompt of ``agent``, if it has one. The reward function has none, even if a pattern matches it."""
        selector = None if agent in (None, REWARD_FUNCTION) else find_selector(self.by_agent, agent)
        return None if selector is None else self.by_agent[selector]

    def insert(self, agent: str | None, path: str, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
        """``body``, a request of ``agent`` in the wire format with this ``path``, with its prompt, and the prompt's label.

        Raises `PolicyRequestError` for a wire format without a chat.
        """
        prompt = self.find(agent)
        if prompt is None:
            return body, None
        write = WIRE_FORMATS.get(path)
        if write is None:
            raise PolicyRequestError(
                f"agent {agent!r} has a prompt under prompts.{prompt.agent}, but a request to {path} has no system prompt that it could "
                "be added to. Use chat completions, Responses, Messages or generateContent in the agent's client, or remove the prompt"
            )
        return write(body, prompt.insertion), prompt.label

    def messages(self, agent: str | None, messages: Sequence[Any]) -> list[Any]:
        """``messages`` of chat completions of ``agent``, with its prompt."""
        prompt = self.find(agent)
        return list(messages) if prompt is None else insert_messages(messages, prompt.insertion)


NO_PROMPTS = AgentPrompts()
"""No agent has a prompt."""
