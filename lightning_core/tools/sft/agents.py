"""The agents of recorded rollouts to train on, and the policy that is trained."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from lightning_core.capture.selectors import matches
from lightning_core.config import Config
from lightning_core.errors import ConfigError
from lightning_core.rollouts.selection import is_auxiliary, routing_of
from lightning_core.trace import Trace

logger = logging.getLogger(__name__)


def learning_agents(config: Config, traces: Sequence[Trace]) -> dict[str | None, str]:
    """The policy of each agent that learns; None: of calls without an agent, which ``agents.train: all`` includes.

    These are the agents of ``agents.train``; without it, those that were trained when ``traces`` were recorded. Raises
    `ConfigError` if they have no call in ``traces``.
    """
    calls = Counter(call.agent for trace in traces for call in trace.calls)
    agents, routing = config.agents, routing_of(config, "train")
    trained = {call.agent for trace in traces for call in trace.calls if call.trained}
    chosen: dict[str | None, str] = {}
    for name in calls:
        if is_auxiliary(routing, name):
            continue
        if name is None and routing.frozen_model(None) is not None:
            continue
        policy = routing.policy_of(name or routing.unnamed, mark=name if name in trained else None)
        if policy is not None:
            chosen[name] = policy
    listed = ", ".join(f"{name or '(no agent)'!r} ({number} calls)" for name, number in calls.most_common()) or "none"
    if not chosen:
        selected = (
            f"agents.train is {list(agents.trained_names)!r}"
            if agents.trained_names
            else "agents.train is not set, and no agent was trained"
        )
        raise ConfigError(
            f"no call of an agent that learns: {selected}; the rollouts have the agents {listed}. Set agents.train"
        )
    for selector in agents.trained_names:
        if not any(name is not None and matches(selector, name) for name in chosen):
            logger.warning("agents.train: no call of %r in the chosen rollouts, which have %s", selector, listed)
    return chosen
