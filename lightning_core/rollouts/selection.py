"""The agents that a run trains, and whether they were reached."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_core.capture.agent_paths import ambiguous_paths
from lightning_core.capture.elsewhere import IGNORED, IN_PROCESS, NO_MODEL_NAMED, OTHER_HOSTS
from lightning_core.capture.marks import marked_agents
from lightning_core.capture.reward_names import agents_at, paths_of
from lightning_core.capture.selectors import find_selector, is_pattern, matches
from lightning_core.chat.tool_calls.unread_calls import has_unread_call
from lightning_core.config import Config
from lightning_core.config.checks_agents import chosen_agents
from lightning_core.config.command import CommandSection
from lightning_core.config.prompts import make_prompts
from lightning_core.config.resolve import agents_policies
from lightning_core.credit import Episode
from lightning_core.endpoint.agents.known_agents import misspelt_names, unknown_names, unknown_selectors
from lightning_core.endpoint.agents.routing import DEFAULT_AGENT, AuxiliaryCalls, NamedCalls, Routing
from lightning_core.errors import ConfigError, TrainingError, did_you_mean, plural, show
from lightning_core.propagation.providers import is_listed
from lightning_core.records.ledger import NOT_TRAINED, TRAINED, Ledger, trace_ledger
from lightning_core.records.store import Phase, Store
from lightning_core.rollouts.attempt import Group, Rollout
from lightning_core.trace import DECLARED_AGENTS, Trace

logger = logging.getLogger(__name__)

_ANSWERED_HERE = (TRAINED, NOT_TRAINED)
_ADVICE = {
    NO_MODEL_NAMED: "name a model in the request's body (any name: it decides nothing for a trained agent)",
    IGNORED: "remove the host from rollouts.ignore_hosts",
    IN_PROCESS: "use a transport with a network, such as the client's default, if that is not meant",
}
"""Advice on requests that went elsewhere, by reason, besides the general advice."""
_UNRECORDED = {
    NO_MODEL_NAMED: "sends requests to %s that name no model, but look like model calls otherwise; they are not recorded. If they are "
    "model calls, %s",
    IN_PROCESS: "makes model calls to %s that its client answers itself; they are not recorded: %s",
}
"""Warnings about requests of trained agents that may be model calls, by reason."""


def routing_of(config: Config, phase: Phase) -> Routing:
    """The model of each agent in ``phase``, and the sampling settings of trained agents."""
    temperature = config.rollouts.temperature
    if phase not in ("train", "fork") and config.eval.temperature is not None:
        temperature = config.eval.temperature
    agents, trains_all = config.agents, config.agents.train == "all"
    return Routing(
        select="all" if trains_all else "marked" if agents.train is None else "named",
        trained=frozenset(agents.trained_names),
        policies=agents_policies(config),
        frozen=agents.frozen,
        stand_in=config.eval.model if phase == "eval_manual" else None,
        prompts=make_prompts(config.prompts),
        auxiliary=[AuxiliaryCalls(**rule.model_dump()) for rule in agents.auxiliary],
        named=[NamedCalls(**rule.model_dump()) for rule in agents.named],
        program=_program(config),
        confirm=True,
        unnamed=DEFAULT_AGENT if trains_all else None,
        temperature=temperature,
        max_tokens=config.rollouts.max_tokens,
    )


def _program(config: Config) -> str | None:
    command = config.agent
    return command.agent if isinstance(command, CommandSection) and command.name is None else None


def trained_agents(config: Config, traces: Iterable[Trace]) -> frozenset[str]:
    """Names of the trained agents: the configured ones, and those whose calls in ``traces`` a policy answered.

    A configured pattern stands for the agents with calls in ``traces`` that it matches, unless ``agents.frozen`` lists them.
    """
    routing = routing_of(config, "train")
    named = frozenset(name for name in config.agents.trained_names if not is_pattern(name))
    calls = [c for t in traces for c in t.calls if c.agent]
    return named | {c.agent for c in calls if c.agent and (c.trained or _is_named(routing, c.agent))}


def is_auxiliary(routing: Routing, agent: str | None) -> bool:
    """Whether ``agent`` is the name that the endpoint gives calls after a rule of ``agents.auxiliary``; they are not trained."""
    return agent is not None and any(agent.endswith(f"/{rule.name}") for rule in routing.auxiliary)


def _is_named(routing: Routing, agent: str) -> bool:
    if is_auxiliary(routing, agent):
        return False
    return find_selector(routing.trained, agent) is not None and routing.frozen_model(agent) is None


def check_agents(config: Config, rollouts: Sequence[Rollout], *, measured: bool = False) -> None:
    """Check the agents of the first rollouts. ``measured``: nothing is trained, so all agents may be frozen.

    Raises `ConfigError` if a configured name is misspelt, or if no agent has it and no trained agent made a call, or if a trained agent
    sends its requests elsewhere, and `TrainingError` if no trained agent made a call. Logs a warning for names that no agent had.
    """
    traces = [r.trace for r in rollouts]
    known = known_agents(traces)
    failed = next((f" The first failed rollout: {r.error}" for r in rollouts if r.status in ("failed", "masked")), "")
    train, frozen = config.agents.trained_names, tuple(config.agents.frozen)
    auxiliary = [rule.agent for rule in config.agents.auxiliary if rule.agent is not None]
    error = misspelt_names(known, (*train, *frozen), **_keys(train=train, frozen=frozen))
    error = error or misspelt_names(known, **_keys(auxiliary=auxiliary))
    if error := error or misspelt_names(known, prompts=config.prompts):
        raise ConfigError(f"{error}{failed}")
    policies = agents_policies(config)
    for name, mark in marked_agents().items():
        selector = find_selector(policies, name)
        if selector is not None and mark.policy not in (None, policies[selector]):
            raise ConfigError(
                f"agent {name!r} is marked with policy {mark.policy!r}, but policies.{policies[selector]}.agents names it"
            )
    speaking = {c.agent for t in traces for c in t.calls if c.refused is None}
    trained = trained_agents(config, traces)
    if config.agents.train is None:
        frozen = config.agents.frozen
        trained |= frozenset(name for name in marked_agents() if find_selector(frozen, name) is None)
    if not measured:
        _check_chosen(config, trained, known, failed)
        _warn_of_frozen_marks(config, traces)
    ran = {e.name for t in traces for e in t.events if e.kind in ("agent", "node")}
    if (
        measured
        and speaking
        and all(name is not None and find_selector(config.agents.frozen, name) for name in speaking)
    ):
        return  # such as a teacher's evaluation
    if not trained & speaking:
        if unknown_selectors(train, known):
            raise ConfigError(f"{unknown_names(known, **_keys(train=train, frozen=frozen))}{failed}")
        if trained and speaking and not trained & (ran | {e.agent for t in traces for e in t.events}):
            raise _not_reached(config, trained, speaking, len(traces), failed)
        raise no_calls(rollouts)
    for reason, text in _UNRECORDED.items():
        found = {(e.agent or "", e.where) for t in traces for e in trace_ledger(t) if e.detail == reason}
        for name, host in sorted((name, host) for name, host in found if name in trained):
            logger.warning("the trained agent %r " + text, name, host, _ADVICE[reason])
    _warn_of_unseen(config, known, traces)
    _warn_of_unread_calls(traces)
    auxiliary_only = {name for name in trained for rule in config.agents.auxiliary if f"{name}/{rule.name}" in speaking}
    for name in sorted(trained - speaking - auxiliary_only):
        outside = _elsewhere(traces, name) if name in ran else ""
        if outside:
            raise ConfigError(
                f"no call of the trained agent {name!r} came through the policy endpoint in "
                f"{plural(len(traces), 'rollout')}{outside}{failed}"
            )
        reached = "made no model call" if name in ran else "was not reached"
        logger.warning("the trained agent %r %s in %s", name, reached, plural(len(traces), "rollout"))


def _warn_of_frozen_marks(config: Config, traces: Iterable[Trace]) -> None:
    """Log a warning if a wildcard in ``agents.frozen`` freezes marked agents, and an agent without a mark is trained."""
    if config.agents.train is not None:
        return
    selectors = {name: find_selector(config.agents.frozen, name) for name in marked_agents()}
    marks = sorted(name for name, selector in selectors.items() if selector is not None and is_pattern(selector))
    unmarked = {c.agent or DEFAULT_AGENT for t in traces for c in t.calls if c.trained} - selectors.keys()
    if marks and unmarked:
        logger.warning(
            "agents.frozen: %s matches the marked agents %r, so they are not trained; the calls of %r, without a mark, are trained "
            "instead. To train the marked agents, list them in agents.train, which precedes a wildcard",
            *(", ".join(sorted({repr(selectors[name]) for name in marks})), marks, sorted(unmarked)),
        )


def _not_reached(
    config: Config, trained: Collection[str], speaking: Collection[str | None], rollouts: int, failed: str
) -> TrainingError:
    """The error if all calls came from ``speaking``, agents that are not trained or calls without an agent."""
    by_mark = config.agents.train is None
    named = sorted(name for name in speaking if name is not None)
    advice = ["name one of these in agents.train"] if named else []
    if None in speaking:
        then = "" if by_mark else " and name it in agents.train"
        advice.append(f"mark the function that makes the calls without an agent with @trainable{then}")
    if not config.policies:
        advice.append("set agents.train: all")
    advice.append("add tasks that reach a trained agent")
    text = f"{', '.join(advice[:-1])}, or {advice[-1]}"
    return TrainingError(
        f"no trained agent was reached in {plural(rollouts, 'rollout')}: {sorted(trained)!r}"
        f"{', selected by their marks because agents.train is not set' if by_mark else ''}. Calls came from "
        f"{[*named, *(['(no agent)'] if None in speaking else [])]!r}. {text[0].upper()}{text[1:]}.{failed}"
    )


def _keys(**names: Iterable[str]) -> dict[str, Any]:
    """``names`` by the whole path of their key in ``agents``."""
    return {f"agents.{key}": listed for key, listed in names.items()}


def _warn_of_unseen(config: Config, known: Collection[str], traces: Sequence[Trace]) -> None:
    """Log a warning for patterns and names that no agent had, for rules that matched no call, and for rewards of such agents."""
    rollouts, agents = plural(len(traces), "rollout"), config.agents
    excluded = [rule.agent for rule in agents.auxiliary if rule.agent is not None]
    patterns = filter(is_pattern, agents.trained_names)
    listed = {**_keys(train=patterns, frozen=agents.frozen, auxiliary=excluded), "prompts": config.prompts}
    for key, names in listed.items():
        for name in unknown_selectors(names, known):
            logger.warning("%s names %r, which no agent had in %s", key, name, rollouts)
    speaking = {c.agent for t in traces for c in t.calls}
    for name in sorted({rule.name for rule in config.agents.named} - speaking):
        logger.warning("agents.named: no call matched the rules of %r in %s", name, rollouts)
    _warn_of_idle_rewards(traces)


def _warn_of_idle_rewards(traces: Sequence[Trace]) -> None:
    """Log a warning for rewards of agents that made no call in any of ``traces``."""
    speaking = paths_of(traces)
    rewarded = {r.agent for t in traces for r in t.rewards if r.agent is not None and r.call is None}
    for name in sorted(name for name in rewarded if not agents_at(name, speaking)):
        logger.warning(
            "reward(…, agent=%r) has no effect so far: no agent of this name made a call in %s; the agents with calls are %r; %s",
            *(name, plural(len(traces), "rollout"), sorted(speaking)),
            did_you_mean(name, speaking) or "correct the name if it is misspelt",
        )


def _warn_of_unread_calls(traces: Sequence[Trace]) -> None:
    """Log a warning for trained agents of whose responses with tools at least half have a tool call as text."""
    responses: Counter[str] = Counter()
    unread: defaultdict[str, list[str]] = defaultdict(list)
    for call in (c for t in traces for c in t.calls if c.trained and c.response is not None and c.tools):
        agent, response = call.agent or "", call.response or {}
        responses[agent] += 1
        if call.finish_reason != "length" and has_unread_call(response, call.tools or ()):
            unread[agent].append(response["content"])
    for agent, texts in sorted(unread.items()):
        if 2 * len(texts) >= responses[agent]:
            logger.warning(
                "%d of %s of the agent %r to requests with tools have a tool call as text, malformed or not in the form of the "
                "model's chat template. The first: %s. Unless the agent reads calls in text, have it request tool_choice 'required', which "
                "ensures the form, show a solved task with a call in its prompt, or choose a model that was trained to call tools",
                *(len(texts), plural(responses[agent], "response"), agent, show(texts[0])),
            )


def _check_chosen(config: Config, trained: Collection[str], known: Collection[str], failed: str) -> None:
    """Lists that choose some of the trained agents. With patterns in ``agents.train`` other agents may appear later."""
    may_appear = any(map(is_pattern, config.agents.trained_names))
    for key, names in chosen_agents(config).items():
        unknown = unknown_selectors(names, {*known, *trained})
        if unknown and not may_appear:
            advice = did_you_mean(unknown, trained) or "correct the name, or remove it"
            raise ConfigError(
                f"{key} names {unknown[0]!r}, but the trained agents of this program are {sorted(trained)!r}; {advice}{failed}"
            )
        if idle := [name for name in names if not any(matches(name, agent) for agent in trained)]:
            logger.warning(
                "%s names %s, which no trained agent has; the trained agents are %r",
                *(key, ", ".join(map(repr, idle)), sorted(trained)),
            )


def warn_of_unused(config: Config, folder: Path) -> None:
    """`warn_of_unmatched` for the requests of the run in ``folder``."""
    with Store(folder / "store.db", read_only=True) as store:
        warn_of_unmatched(config, store.ledger())


def warn_of_unmatched(config: Config, ledger: Ledger) -> None:
    """Log a warning for each entry of ``rollouts.ignore_hosts`` and ``agents.auxiliary`` that no request in ``ledger`` matched."""
    trains = any(e.detail == TRAINED for e in ledger)
    for name in sorted({rule.name for rule in config.agents.auxiliary if trains}):
        if not any(e.kind == "call" and (e.agent or "").endswith(f"/{name}") for e in ledger):
            logger.warning(
                "agents.auxiliary: no call of the run matched the rules of %r, so they excluded nothing", name
            )
    ignored = [e.where for e in ledger if e.kind == "elsewhere" and e.detail == IGNORED]
    if OTHER_HOSTS in ignored:
        return
    called = {e.where for e in ledger if e.kind in ("call", "failed", "elsewhere") and e.detail not in _ANSWERED_HERE}
    for entry in sorted(config.rollouts.ignore_hosts):
        # The ledger has no scheme, which implies a port.
        if not any(
            is_listed(urlsplit(f"{scheme}://{host}"), [entry]) for host in ignored for scheme in ("http", "https")
        ):
            advice = did_you_mean(entry, called) or "correct it if it is misspelt"
            logger.warning("rollouts.ignore_hosts lists %r, but no request went there; %s", entry, advice)


def known_agents(traces: Iterable[Trace]) -> set[str]:
    """The names of all agents and nodes that ran in ``traces``, were declared there, or are marked; paths of shared names."""
    names: set[str] = set(marked_agents())
    for trace in traces:
        names |= {e.name for e in trace.events if e.kind in ("agent", "node")}
        names |= {e.agent for e in trace.events if e.agent is not None}
        names |= {n for e in trace.events if e.kind == "rollout" for n in e.attributes.get(DECLARED_AGENTS, ())}
        names |= set(trace.agents)
        names |= {path for paths in ambiguous_paths([trace]).values() for path in paths}
    return names


def require_transitions(groups: Sequence[Group], episodes: Sequence[Episode]) -> None:
    """Raise `TrainingError` if there is nothing to train on."""
    if not any(e.transitions for e in episodes):
        raise no_calls([r for g in groups for r in g.rollouts])


def no_calls(rollouts: Sequence[Rollout]) -> TrainingError:
    """The error for rollouts in which no trained agent made a call."""
    error = next((f"; the first error: {r.error}" for r in rollouts if r.error), "")
    if not error:
        refused = [c.refused for r in rollouts for c in r.trace.calls if c.refused is not None]
        error = f"; the endpoint refused {plural(len(refused), 'request')}, the first: {refused[0]}" if refused else ""
    outside = _elsewhere(r.trace for r in rollouts)
    if not outside and not error:
        outside = (
            ". No other request was seen: the agent calls no model, or uses a cache, a process that was started before the rollouts, or a "
            "client that cannot be seen from Python"
        )
    return TrainingError(f"no trained agent made a call in {plural(len(rollouts), 'rollout')}{error}{outside}")


def _elsewhere(traces: Iterable[Trace], agent: str | None = None) -> str:
    """The hosts that received requests of ``agent`` (None: of any), and what to do about it; empty if there are none."""
    hosts: Counter[str] = Counter()
    for trace in traces:
        for entry, number in trace_ledger(trace).items():
            if entry.kind == "elsewhere" and agent in (None, entry.agent):
                hosts[f"{entry.where} ({entry.detail})"] += number
    if not hosts:
        return ""
    listed = ", ".join(host for host, _ in hosts.most_common(5))
    advice = [do for reason, do in _ADVICE.items() if f"({reason})" in listed]
    advice.append(
        "give the agent's client the URL of the endpoint (the variables OPENAI_BASE_URL and OPENAI_API_KEY of a child process have it)"
    )
    text = ", or ".join(advice)
    return f". Requests went to {listed}. {text[0].upper()}{text[1:]}"
