"""Which agents of recorded rollouts are learnt from, and by which policy."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from lightning_core.config import Config
from lightning_core.config.resolve import agents_policies
from lightning_core.errors import ConfigError
from lightning_core.trace import POLICY, REWARD_FUNCTION, Trace

logger = logging.getLogger(__name__)


def learning_agents(config: Config, traces: Sequence[Trace]) -> dict[str | None, str]:
    """The policy of each agent that learns; None: of calls without an agent, which ``agents.train: all`` includes.

    These are the agents of ``agents.train``; without it, those that were trained when ``traces`` were recorded. Raises
    `ConfigError` if they have no call in ``traces``.
    """
    calls = Counter(call.agent for trace in traces for call in trace.calls)
    chosen: list[str | None]
    agents = config.agents
    if agents.train == "all":
        chosen = [name for name in calls if name != REWARD_FUNCTION and name not in agents.frozen]
    elif agents.named:
        chosen = [name for name in agents.named if calls[name]]
    else:
        trained = {call.agent for trace in traces for call in trace.calls if call.trained}
        chosen = [name for name in calls if name in trained and name not in agents.frozen]
    listed = ", ".join(f"{name or '(no agent)'!r} ({number} calls)" for name, number in calls.most_common()) or "none"
    if not chosen:
        found = (
            f"agents.train is {list(agents.named)!r}"
            if agents.named
            else "agents.train is not set, and no agent was trained"
        )
        raise ConfigError(
            f"no call of an agent that learns: {found}; the rollouts have the agents {listed}. Set agents.train"
        )
    for name in agents.named:
        if name not in chosen:
            logger.warning("agents.train: no call of %r in the chosen rollouts, which have %s", name, listed)
    policies = agents_policies(config)
    return {name: policies.get(name or "", POLICY) for name in chosen}
