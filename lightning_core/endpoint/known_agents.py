"""The agents of a program that the run has seen, and the calls that must wait until they are known.

No call reaches a provider because of a wrong selection:

- Until every configured name is known to exist (it made a call, is marked, or was declared by an integration), calls of agents that are
  not configured are answered here. The attempt is repeated once all names are known; if some stay unknown, the run stops.
- If nothing is selected or marked, every call is answered by the policy. If the program has a single agent, it is trained.
  If a mark appears during the first attempts, those are repeated; if it appears later, or if there are several agents, the run stops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from lightning_core.capture import find_rollout
from lightning_core.capture.address import Address
from lightning_core.capture.marks import marked_agents
from lightning_core.capture.selectors import is_known
from lightning_core.endpoint.routing import DEFAULT_AGENT, Routing
from lightning_core.endpoint.sessions import Session
from lightning_core.errors import ConfigError, did_you_mean
from lightning_core.trace import POLICY, REWARD_FUNCTION

Verdict = Literal["keep", "repeat"] | ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The agent of a call, and the policy that answers it."""

    address: Address
    policy: str | None
    """None: the agent is not trained."""
    here: str | None = None
    """The model that answers an agent that is not trained, because it is not known yet where its calls go."""


class KnownAgents:
    """The agents of a program. Not thread-safe, except `verdict`."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._unselected: set[str] = set()
        self._kept: set[str] = set()
        """The agents without a mark whose attempts count."""
        self._marked: set[str] = set()
        self._declared: set[str] = set()

    def decide(self, session: Session, address: Address, *, names_served_model: bool) -> Decision:
        """The agent of the call at ``address``, and the policy that answers it.

        ``names_served_model``: the request names another model served here than a policy, so no provider is involved.
        """
        routing = session.routing
        if address.agent is None and routing.unnamed is not None:
            address = replace(address, agent=routing.unnamed)
        agent = address.agent
        if agent == REWARD_FUNCTION:
            return Decision(address=address, policy=None)
        if agent is not None:
            self._seen.add(agent)
            if address.mark is not None:
                self._marked.add(agent)
        policy = routing.policy_of(agent, address.mark)
        if policy is not None or routing.frozen_model(agent) is not None or names_served_model:
            return Decision(address=address, policy=policy)
        if routing.select == "marked" and not self._marks(routing):
            session.provisional = True
            self._unselected.add(agent or DEFAULT_AGENT)
            return Decision(address=replace(address, agent=agent or DEFAULT_AGENT), policy=POLICY)
        self._note_declared(address.rollout)
        if self._unknown(routing):
            session.provisional = True
            return Decision(address=address, policy=None, here=next(iter(routing.policies.values()), POLICY))
        return Decision(address=address, policy=None)

    def verdict(self, session: Session) -> Verdict:
        """Whether the calls of a finished attempt were answered by the right models.

        ``repeat``: not all, but another attempt will have them. An error: the selection is wrong.
        """
        routing = session.routing
        if routing.select == "marked" and self._kept and (marks := self._marks(routing)):
            return late_mark(marks, self._kept)
        if not session.provisional:
            return "keep"
        self._note_declared(session.root.rollout)
        if routing.select == "marked":
            if self._marks(routing):
                return "repeat"
            if len(self._unselected) > 1:
                return several_agents(self._unselected)
            self._kept |= self._unselected
            return "keep"
        if not self._unknown(routing):
            return "repeat"
        error = unknown_names(self._known(), train=routing.trained, frozen=routing.frozen)
        return ConfigError(f"{error} The endpoint forwarded no call.")

    def _note_declared(self, rollout: str) -> None:
        run = find_rollout(rollout)
        if run is not None:
            self._declared |= run.declared

    def _marks(self, routing: Routing) -> Collection[str]:
        return [name for name in self._marked | marked_agents().keys() if routing.frozen_model(name) is None]

    def _known(self) -> set[str]:
        return self._seen | marked_agents().keys() | self._declared

    def _unknown(self, routing: Routing) -> list[str]:
        return unknown_selectors(routing.trained | routing.frozen.keys(), self._known()) if routing.confirm else []


def unknown_selectors(selectors: Iterable[str], known: Collection[str]) -> list[str]:
    """The ``selectors`` that match none of the names ``known``; see `is_known`."""
    return sorted(s for s in selectors if not is_known(s, known))


def unknown_names(known: Collection[str], **selectors: Iterable[str]) -> ConfigError:
    """The error for configured names that no agent has. ``selectors``: the names under each key of ``agents``."""
    unknown = {key: unknown_selectors(names, known) for key, names in selectors.items()}
    wrong = "; ".join(f"agents.{key} names {', '.join(map(repr, names))}" for key, names in unknown.items() if names)
    meant = did_you_mean([name for names in unknown.values() for name in names], known)
    if meant:
        advice = f"{meant[0].upper()}{meant[1:]}"
    else:
        advice = (
            "Correct the names, or mark the agents in code: @trainable(name). If they run only after other agents, list those and their "
            "models under agents.frozen. To train every agent, set agents: {train: all}."
        )
    if not known:
        advice = "Mark one in code with @trainable, or remove agents.train if the program has a single agent: that is trained."
        return ConfigError(f"{wrong}, but no agent of this program has a name. {advice}")
    return ConfigError(f"{wrong}, but the agents of this program are {sorted(known)!r}. {advice}")


def late_mark(marks: Iterable[str], kept: Iterable[str]) -> ConfigError:
    """The error for a mark that appears after attempts of a program without marks were kept."""
    return ConfigError(
        f"@trainable marked {sorted(marks)!r} only after attempts in which {sorted(kept)!r}, without a mark, was the agent to train. Mark "
        "agents when their module is imported, not in some of the rollouts, or name those to train in agents.train."
    )


def several_agents(names: Iterable[str]) -> ConfigError:
    """The error for a program of several agents if none is selected."""
    agents = sorted(set(names))
    return ConfigError(
        f"no agent is selected for training, and the program has several: {agents!r}. Name those to train, such as "
        f"agents: {{train: [{agents[0]}]}}, mark them in code with @trainable, or train all with agents: {{train: all}}. "
        "The endpoint forwarded no call."
    )
