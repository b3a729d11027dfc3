"""The configured routing from agents to models, without state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from lightning_core.capture.selectors import find_selector, matches
from lightning_core.endpoint.request_body import conversation, instructions, system_prompt, text_of_message, tool_names
from lightning_core.prompts.agent_prompts import NO_PROMPTS, AgentPrompts
from lightning_core.trace import POLICY, REWARD_FUNCTION

DEFAULT_AGENT = "agent"
"""The name of calls without one, if all agents are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryCalls:
    """A rule that excludes calls of trained agents from training; see `agents.auxiliary` in the configuration."""

    name: str
    agent: str | None = None
    model: str | None = None
    contains: str | None = None

    def is_of(self, agent: str | None) -> bool:
        """Whether calls of ``agent`` may be these."""
        return self.agent is None or (agent is not None and matches(self.agent, agent))

    def matches(self, body: Mapping[str, Any]) -> bool:
        """Whether a request with the JSON ``body`` is one of these calls, if its agent is right."""
        if self.model is not None and not fnmatchcase(str(body.get("model", "")), self.model):
            return False
        return self.contains is None or any(self.contains in text for text in instructions(body))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """A name for calls without one; see `agents.named` in the configuration."""

    name: str
    contains: str | None = None
    model: str | None = None
    tools: Sequence[str] | None = None

    def matches(self, body: Mapping[str, Any]) -> bool:
        """Whether a request with the JSON ``body`` gets the name."""
        if self.model is not None and not fnmatchcase(str(body.get("model", "")), self.model):
            return False
        if self.tools is not None:
            offered = tool_names(body)
            if not self.tools and offered:
                return False
            if not all(any(matches(tool, name) for name in offered) for tool in self.tools):
                return False
        if self.contains is None:
            return True
        return self.contains in (system_prompt(body) or "".join(map(text_of_message, conversation(body)[:1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The routing from agents to models, for all rollouts of a phase."""

    select: Literal["named", "marked", "all"] = "named"
    """The agents that are trained: those in ``trained``, those marked in code, or all. Never those in ``frozen``."""
    trained: frozenset[str] = frozenset()
    """Selectors, as are the keys of ``policies`` and ``frozen``; see `lightning_core.capture.selectors`."""
    policies: Mapping[str, str] = field(default_factory=dict[str, str])
    """The policy of each trained agent; ``policy`` for trained agents that are not listed."""
    frozen: Mapping[str, str] = field(default_factory=dict[str, str])
    """The model of each agent under ``agents.frozen``."""
    stand_in: str | None = None
    """The model that answers trained agents in place of their policies, from a provider; see `eval.model` in the configuration."""
    prompts: AgentPrompts = NO_PROMPTS
    """What is added to the agents' requests; see `prompts` in the configuration."""
    auxiliary: Sequence[AuxiliaryCalls] = ()
    unnamed: str | None = None
    """The agent of calls without a name, such as a child process's: the agent that the rollout was opened for."""
    named: Sequence[NamedCalls] = ()
    program: str | None = None
    """The name of the program that is the agent, if the configuration gives it no name of its own."""
    confirm: bool = False
    """Forward no call of an agent that is not listed before all names in ``trained`` and ``frozen`` are known to exist."""
    temperature: float | None = None
    """Sampling temperature of trained agents; None: as requested."""
    max_tokens: int = 1024
    """Most tokens of a response that is sampled here."""
    default_temperature: float = 1.0
    """Sampling temperature if neither the run nor the request sets one."""
    default_max_tokens: int | None = None
    """Most tokens of a response if the request sets no number; None means ``max_tokens``."""

    def policy_of(self, agent: str | None, mark: str | None = None) -> str | None:
        """The policy that answers ``agent``; None if it is not trained. ``mark``: see `Address.mark`."""
        if agent is None or agent == REWARD_FUNCTION or self.frozen_model(agent) is not None:
            return None
        named = find_selector(self.trained, agent)
        if not {"named": named is not None, "marked": mark is not None, "all": True}[self.select]:
            return None
        return self.policies.get(find_selector(self.policies, agent) or "", POLICY)

    def frozen_model(self, agent: str | None) -> str | None:
        """The model under ``agents.frozen`` for ``agent``; None if it is not listed, or if ``trained`` lists its very name."""
        if agent is None:
            return self.frozen.get("")  # calls without an agent; no pattern is meant for them
        selector = find_selector(self.frozen, agent)
        if selector is None or (selector != agent and agent in self.trained):
            return None
        return self.frozen[selector]

    def rules_for(self, body: Mapping[str, Any]) -> tuple[list[str], list[AuxiliaryCalls]]:
        """The different names that rules in ``named`` give a request, and the rules in ``auxiliary`` that match it."""
        names = dict.fromkeys(rule.name for rule in self.named if rule.matches(body))
        return list(names), [rule for rule in self.auxiliary if rule.matches(body)]
