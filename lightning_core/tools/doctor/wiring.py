"""Checks of a trial: agents, destinations of requests, and ends of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lightning_core.capture.elsewhere import CONNECTION, NO_MODEL_NAMED
from lightning_core.capture.selectors import as_yaml, matches
from lightning_core.dialects.fields import NO_SEARCH
from lightning_core.errors import plural
from lightning_core.observers.monitors.agents import OF_INFRASTRUCTURE
from lightning_core.records.ledger import selectable_names
from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.abort_checks import remedies
from lightning_core.rollouts.attempt import Rollout
from lightning_core.tools.doctor.finding import Checks, Observed
from lightning_core.tools.doctor.trial import Trial
from lightning_core.tools.doctor.units import listed

_ADVICE = {
    CONNECTION: "give the client the URL and key of lightning_core.propagation.endpoint_environment(), if these are model calls",
    NO_MODEL_NAMED: "add any model to the body of the request, if it is a model call",
}
"""Advice on requests that went elsewhere and may be model calls, by reason."""

FAILED = frozenset({"failed", "masked"})
"""The statuses of rollouts whose agent failed."""
_EXITS = ("AgentExit: ", "EOFError: ")
"""The errors of agents that end the process, or read from a terminal. No answer changes that."""
_CORRECT = "correct the agent, or let it return a reward if it can fail at every task"
_CORRECT_SOME = "correct the error, or return a reward if the model's response causes it"
_OUTSIDE = "make what failed work: the agent is not to blame, and a reward that it returned instead would be noise"
_RETURN = "let the agent return its reward: sys.exit() ends a rollout as failed, and input() reads nothing in a run"

checks: Checks[Trial] = Checks("The agent's requests")


@checks.check("stopped")
def stopped(t: Trial) -> Iterator[Observed]:
    """A run would stop with this error after its first rollouts: a name in `agents.train` that no agent has, a
    trained agent that does not use the endpoint, or credit that cannot be assigned. Run the command again after the change."""
    if t.error is not None and not t.is_explained:
        names = selectable_names(t.ledger)
        yield Observed(
            "problem",
            f"a run stops here: {t.error}",
            f"names for agents.train: {', '.join(map(as_yaml, names))}" if names else "",
        )


@checks.check("speakers")
def speakers(t: Trial) -> Iterator[Observed]:
    """The agents that make model calls, their number, and the model or provider that answers them. With the script, calls of agents that
    are not trained are answered by the script too, so no provider is called."""
    calls: Counter[str] = Counter()
    for entry, count in t.ledger.items():
        if entry.kind in ("call", "failed"):
            where = "not trained" if t.scripted and entry.detail != "trained" else entry.destination
            calls[f"{entry.agent or '(no agent)'} → {where}"] += count
    if calls:
        yield Observed("info", "; ".join(f"{route}: {plural(count, 'call')}" for route, count in calls.most_common()))
    elif t.rollouts:
        yield Observed("warning", "no model call was seen", "see docs/troubleshooting.md, Trained agents without calls")


@checks.check("not reached")
def not_reached(t: Trial) -> Iterator[Observed]:
    """A trained agent that made no call in the trial. It exists, but these tasks do not need it, or another agent calls the model
    for it. Examine more tasks with `--tasks`."""
    callers = {c.agent for c in t.calls if c.agent is not None}
    for name in sorted(s for s in t.config.agents.trained_names if not any(matches(s, agent) for agent in callers)):
        if t.error is None:
            yield Observed(
                "warning",
                f"the trained agent {name!r} made no call in {plural(len(t.rollouts), 'rollout')}",
                f"try more tasks (--tasks N), or train one of: {', '.join(selectable_names(t.ledger))}",
            )


@checks.check("not routed")
def not_routed(t: Trial) -> Iterator[Observed]:
    """Requests that bypass the endpoint, and may be model calls: they are neither recorded nor trained, and a provider may
    charge for them. Point the client to the endpoint."""
    for reason in dict.fromkeys(e.detail for e in t.ledger if e.kind == "elsewhere"):
        hosts: Counter[str] = Counter()
        for entry, count in t.ledger.items():
            if entry.kind == "elsewhere" and entry.detail == reason:
                hosts[f"{entry.where} (by {entry.agent or 'no agent'}, {count}×)"] += count
        text = f"{reason}: {listed([host for host, _ in hosts.most_common()])}"
        yield Observed("warning" if reason in _ADVICE else "info", text, _ADVICE.get(reason, ""))


@checks.check("refused")
def refused(t: Trial) -> Iterator[Observed]:
    """Requests that the endpoint refused, with the reason. The agent got an error for each. Change the request."""
    for entry, count in t.ledger.items():
        if entry.kind == "refused":
            yield Observed(
                "warning",
                f"{plural(count, 'request')} of {entry.agent or 'no agent'} refused: {entry.reason or entry.where}",
                "see docs/troubleshooting.md, Refused requests",
            )


@checks.check("dropped fields")
def dropped(t: Trial) -> Iterator[Observed]:
    """Fields of requests without effect on a model that is sampled here, such as `top_k`, and tools of a provider, which the
    model is not shown."""
    fields = dict.fromkeys(e.detail for e in t.ledger if e.kind == "dropped")
    tools = [field for field in fields if field.endswith(NO_SEARCH)]
    if tools:
        advice = "remove these tools, or give the agent functions that do the same"
        yield Observed("warning", f"tools of the provider: {listed(tools)}", advice)
    if others := [field for field in fields if field not in tools]:
        yield Observed("info", f"fields without effect: {listed(others)}")


@checks.check("failures")
def failures(t: Trial) -> Iterator[Observed]:
    """Rollouts that raised an error, exceeded the time limit or reached `rollouts.max_calls` (they count with the reward so
    far, else 0), or that ended for a reason outside the agent (they are left out). With the script, an agent may fail because
    of the answer `ok`; a problem is then only that all rollouts fail before any answer, or that all end by `sys.exit` or at
    `input()`, which reads nothing in a run."""
    at_limit = [r for r in t.rollouts if r.status == "max_calls"]
    if at_limit:
        text = f"{len(at_limit)} of {plural(len(t.rollouts), 'rollout')} reached rollouts.max_calls"
        yield Observed(
            "warning", text, "raise it if the agent needs more model calls, or end its loop after a number of turns"
        )
    for left_out, meaning in ((False, "failed"), (True, "were left out")):
        statuses = LEFT_OUT - {"invalid"} if left_out else FAILED
        affected = [r for r in t.rollouts if r.status in statuses]
        if affected and not (left_out and is_of_reward(affected[0].error)):
            exits = len(affected) == len(t.rollouts) and all((r.error or "").startswith(_EXITS) for r in affected)
            by_script = t.scripted and t.is_any_answered and not exits
            every = not t.is_any_ok and not by_script
            if left_out:
                advice = _OUTSIDE if every else _of_left_out(affected)
            elif by_script:
                advice = ""
            else:
                advice = _RETURN if exits else _CORRECT if every else _CORRECT_SOME
            answer = " with the scripted answer 'ok'" if by_script else ""
            yield Observed(
                "problem" if every else "warning",
                f"{len(affected)} of {plural(len(t.rollouts), 'rollout')} {meaning}{answer}; the first error: {affected[0].error}",
                advice,
            )


def _of_left_out(affected: Sequence[Rollout]) -> str:
    """The advice if ``affected``, some of the rollouts, were left out."""
    found = list(remedies(affected))
    if any(r.status == "infrastructure" for r in affected):
        found.append(f"{OF_INFRASTRUCTURE[0].upper()}{OF_INFRASTRUCTURE[1:]}")
    return ". ".join(found)


def is_of_reward(error: str | None) -> bool:
    """Whether the reward function raised the error of a rollout that was left out."""
    return "the reward function" in (error or "")
