"""The agents of a program that the run has seen, and the calls that must wait until they are known.

No call reaches a provider because of a wrong selection:

- Until every configured name is known to exist (it made a call, is marked, or was declared by an integration), calls of agents that are
  not configured are answered here. Then the attempt is repeated. If a name stays unknown, the run stops if no agent has a name, or if an
  agent has a similar one. Otherwise the policy may have led the program astray, so the attempt is repeated with the agents' own models.
- If nothing is selected or marked, every call is answered by the policy. If the program has a single agent, it is trained.
  If a mark appears during the first attempts, those are repeated; if it appears later, or if there are several agents, the run stops.

A call without a name of its own gets that of a rule under ``agents.named``, else that of the program that makes it. Several roles of calls
without a name stop the run: they are not one agent. After the first attempts they are only logged, since the run has trained on what was
taken for one agent, and a rare call (a summary) should not end it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_core.capture import find_rollout
from lightning_core.capture.address import Address
from lightning_core.capture.marks import mark_of, marked_agents
from lightning_core.capture.selectors import as_yaml, is_known, matches
from lightning_core.endpoint.agents.roles import describe_call
from lightning_core.endpoint.agents.routing import DEFAULT_AGENT, Routing
from lightning_core.endpoint.sessions import Session
from lightning_core.errors import ConfigError, PolicyRequestError, did_you_mean
from lightning_core.trace import POLICY, REWARD_FUNCTION

logger = logging.getLogger(__name__)

_MOST_UNREACHED = 16
"""Most attempts without a call of a trained agent, if names in the configuration are unknown. If marks select, it is a warning."""

_MOST_CHECKED = 16
"""Kept attempts after which several roles no longer stop the run."""

_SIMILAR = 0.8
"""Similarity from which on a name counts as misspelt: ``clasifier``, but not ``rewriter`` for ``writer-1``."""

Verdict = Literal["keep", "repeat"] | ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The agent of a call, and the policy that answers it."""

    address: Address
    policy: str | None
    """None: the agent is not trained."""
    here: str | None = None
    """The model that answers an agent that is not trained, because it is not known yet where its calls go."""
    stand_in: str | None = None
    """The model of a provider that answers in place of ``policy``."""
    unnamed: bool = False
    """The call has no name of its own, and may be of another role than the agent's other calls."""


Facts = dict[str, list[str]]
"""What is known about the agents of a program, as JSON."""
_SHARED = ("_seen", "_unselected", "_marked", "_declared", "_awaited")


class KnownAgents:
    """The agents of a program. Not thread-safe, except `verdict`, `facts` and `learn`."""

    def __init__(self) -> None:
        self._deciding = threading.Lock()
        self._seen: set[str] = set()
        self._unselected: set[str] = set()
        self._kept: set[str] = set()
        """The agents without a mark whose attempts count."""
        self._marked: set[str] = set()
        self._declared: set[str] = set()
        self._awaited: set[str] = set()
        """The selectors that no agent had in an attempt in which the policy answered for others."""
        self._roles_shown: set[str] = set()
        self._checked = 0
        """The number of kept attempts."""
        self._trained_spoke = False
        self._attempts = 0
        """The number of attempts since then without a trained agent."""
        self._untrained: set[str] = set()
        """The agents whose calls went to their own models, and ``(no agent)``."""
        self._idle = 0
        """The number of attempts in which no marked agent has made a call so far, while others did."""

    def decide(
        self,
        session: Session,
        address: Address,
        body: Mapping[str, Any],
        names: Sequence[str],
        *,
        names_served_model: bool,
    ) -> Decision:
        """The agent of the call at ``address`` with the request ``body``, and the policy that answers it.

        ``names``: that rules give it. ``names_served_model``: the request names another model served here than a policy, so no
        provider is involved. Raises `PolicyRequestError` for a call that rules of several names match.
        """
        routing = session.routing
        if address.agent is None or address.inherited:
            address = _named(session, address, body, names)
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
        self._trained_spoke = self._trained_spoke or policy is not None
        if policy is not None or routing.frozen_model(agent) is not None or names_served_model:
            unnamed = policy is not None and address.inherited and routing.select != "all"
            stand_in = None if policy is None else routing.stand_in
            return Decision(address=address, policy=policy, stand_in=stand_in, unnamed=unnamed)
        if routing.select == "marked" and not self._marks(routing):
            session.provisional = True
            self._unselected.add(agent or DEFAULT_AGENT)
            address = replace(address, agent=agent or DEFAULT_AGENT)
            return Decision(address=address, policy=POLICY, stand_in=routing.stand_in, unnamed=agent is None)
        self._note_declared(address.rollout)
        if self._unknown(routing):
            session.provisional = True
            return Decision(address=address, policy=None, here=next(iter(routing.policies.values()), POLICY))
        self._untrained.add(agent or "(no agent)")
        return Decision(address=address, policy=None)

    def verdict(self, session: Session) -> Verdict:
        """Whether the calls of a finished attempt were answered by the right models.

        ``repeat``: not all, but another attempt will have them. An error: the selection is wrong.
        """
        with self._deciding:
            verdict = session.problem or self._several_roles(session) or self._verdict(session)
            self._checked += verdict == "keep"
            return verdict

    def facts(self) -> Facts:
        """What it knows, for the endpoint's other processes."""
        facts = {name: sorted(getattr(self, name)) for name in _SHARED}
        return facts | {"_trained_spoke": ["yes"] if self._trained_spoke else []}

    def learn(self, facts: Facts) -> None:
        """Add what another process knows."""
        with self._deciding:
            for name in _SHARED:
                known: set[str] = getattr(self, name)
                known.update(facts[name])
            self._trained_spoke = self._trained_spoke or bool(facts["_trained_spoke"])

    def _several_roles(self, session: Session) -> ConfigError | None:
        """The error for several roles of calls without a name.

        They are logged once if the configuration or a mark names the program, which is then one agent, and after `_MOST_CHECKED` attempts.
        """
        for agent, roles in list(session.roles.items()):
            if agent in self._roles_shown or (problem := roles.problem()) is None:
                continue
            if agent in (DEFAULT_AGENT, session.routing.program) and self._checked < _MOST_CHECKED:
                return problem
            self._roles_shown.add(agent)
            logger.warning("all roles of the program %r are trained as one agent: %s", agent, problem)
        return None

    def _verdict(self, session: Session) -> Verdict:
        routing = session.routing
        if routing.select == "marked" and self._kept and (marks := self._marks(routing)):
            return late_mark(marks, self._kept)
        self._note_declared(session.root.rollout)
        if self._awaited and (error := self._misspelt(routing, self._awaited)):
            return error
        if not session.provisional:
            self._warn_of_idle_marks(routing)
            return self._unreached(routing) or "keep"
        if routing.select == "marked":
            if self._marks(routing):
                return "repeat"
            if len(self._unselected) > 1:
                return several_agents(self._unselected)
            self._kept |= self._unselected
            return "keep"
        if unknown := self._unknown(routing):
            known = self._known()
            if error := self._misspelt(routing, unknown):
                return ConfigError(str(error) if routing.frozen else f"{error} The endpoint forwarded no call.")
            self._awaited.update(unknown)
            logger.warning(
                "no agent has the name %s yet; the agents so far are %r. Calls of agents that are not trained now go to their own models. "
                "The run stops if %d attempts end without a call of a trained agent",
                *(", ".join(map(repr, unknown)), sorted(known), _MOST_UNREACHED),
            )
        return "repeat"

    def _misspelt(self, routing: Routing, selectors: Collection[str]) -> ConfigError | None:
        """The error for those of ``selectors`` that are certainly wrong."""
        known = self._known()
        named = {"agents.train": routing.trained, "agents.frozen": routing.frozen.keys()}
        wrong = {key: [name for name in names if name in selectors] for key, names in named.items()}
        return misspelt_names(known, routing.trained | routing.frozen.keys(), **wrong)

    def _unreached(self, routing: Routing) -> ConfigError | None:
        """The error if no trained agent was reached although the others were answered by their own models."""
        if not self._awaited or self._trained_spoke:
            return None
        self._attempts += 1
        if self._attempts < _MOST_UNREACHED:
            return None
        error = unknown_names(self._known(), **{"agents.train": routing.trained, "agents.frozen": routing.frozen})
        return ConfigError(f"{error} No trained agent made a call in {self._attempts} attempts.")

    def _warn_of_idle_marks(self, routing: Routing) -> None:
        """Log once that only unmarked agents make calls. A warning: a marked agent exists, and later tasks may reach it."""
        if routing.select != "marked" or self._trained_spoke or not self._untrained:
            return
        self._idle += 1
        if self._idle == _MOST_UNREACHED:
            logger.warning(
                "no trained agent made a call in %d attempts. The marks %r select the agents to train, because agents.train is not set; "
                "the calls came from %r and went to their own models. If that is not meant, stop the run, and mark the function that "
                "makes these calls, or set agents.train: all",
                *(self._idle, sorted(self._marks(routing)), sorted(self._untrained)),
            )

    def _note_declared(self, rollout: str) -> None:
        run = find_rollout(rollout)
        if run is not None:
            self._declared |= run.declared

    def _marks(self, routing: Routing) -> Collection[str]:
        return [name for name in self._marked | marked_agents().keys() if routing.frozen_model(name) is None]

    def _known(self) -> set[str]:
        return self._seen | marked_agents().keys() | self._declared

    def _unknown(self, routing: Routing) -> list[str]:
        if not routing.confirm:
            return []
        return unknown_selectors((routing.trained | routing.frozen.keys()) - self._awaited, self._known())


def _named(session: Session, address: Address, body: Mapping[str, Any], names: Sequence[str]) -> Address:
    """``address`` with the name that the rules give a call; as it is if none matches."""
    if len(names) > 1:
        session.problem = ConfigError(
            f"agents.named: the rules of {names!r} match the same call ({describe_call(body)}); add fields that tell them apart, or give "
            "them one name"
        )
        raise PolicyRequestError(str(session.problem))
    return replace(address, agent=names[0], mark=mark_of(names[0]), inherited=False) if names else address


def unknown_selectors(selectors: Iterable[str], known: Collection[str]) -> list[str]:
    """The ``selectors`` that match none of the names ``known``; see `is_known`."""
    return sorted(s for s in selectors if not is_known(s, known))


def misspelt_names(
    known: Collection[str], taken: Collection[str] = (), **selectors: Iterable[str]
) -> ConfigError | None:
    """`unknown_names` if no agent has a name, or one has a similar name; None if the unknown agents may still appear.

    ``taken``: selectors; the agents that they match are not meant by another one.
    """
    unknown = unknown_selectors((name for names in selectors.values() for name in names), known)
    if not unknown or (known and not _has_similar(unknown, known, taken)):
        return None
    return unknown_names(known, **selectors)


def _has_similar(unknown: Iterable[str], known: Collection[str], selectors: Collection[str]) -> bool:
    """Whether one of ``unknown`` may be misspelt for a name in ``known``.

    Those that one of ``selectors`` matches are meant by it, and a name with another number is another agent. Of a path, the unknown parts
    count.
    """
    free = [name for name in known if not any(matches(selector, name) for selector in selectors)]
    stems = set(map(_stem, free))
    parts = [part for name in unknown for part in {name, *name.split("/")} if not is_known(part, known)]
    return bool(did_you_mean([_stem(part) for part in parts if _stem(part) not in stems], free, cutoff=_SIMILAR))


def _stem(name: str) -> str:
    return name.rstrip("0123456789-_ *")


def unknown_names(known: Collection[str], **selectors: Iterable[str]) -> ConfigError:
    """The error for configured names that no agent has. ``selectors``: the names under each key of the configuration."""
    unknown = {key: unknown_selectors(names, known) for key, names in selectors.items()}
    wrong = "; ".join(f"{key} names {', '.join(map(repr, names))}" for key, names in unknown.items() if names)
    meant = did_you_mean([name for names in unknown.values() for name in names], known)
    if meant:
        advice = f"{meant[0].upper()}{meant[1:]}"
    else:
        advice = (
            "Correct the names, or mark the agents in code: @trainable(name). If they run only after other agents, list those and their "
            "models under agents.frozen. To train every agent, set agents: {train: all}."
        )
    if not known:
        advice = (
            "Mark one in code with @trainable, name its calls by a rule under agents.named that matches them, or remove agents.train if "
            "the program has a single agent: that is trained."
        )
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
        f"agents: {{train: [{as_yaml(agents[0])}]}}, mark them in code with @trainable, or train all with agents: {{train: all}}."
    )
