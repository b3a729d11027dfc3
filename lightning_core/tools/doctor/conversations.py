"""Checks of a trial: how calls continue earlier ones, and which responses were cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from lightning_core.chat.history.conversations import ADVICE, Cause, cause_of
from lightning_core.errors import plural
from lightning_core.records.shared_state import SharedState
from lightning_core.tools.doctor.finding import Checks, Observed
from lightning_core.tools.doctor.trial import Trial
from lightning_core.tools.doctor.units import listed, percent

_KINDS = ("new", "clean", "realigned", "forked")
_MANY_CUT = 0.1

checks: Checks[Trial] = Checks("Conversations")


@checks.check("contexts")
def contexts(t: Trial) -> Iterator[Observed]:
    """The relation of prompts to earlier calls. `clean` and `realigned` calls continue the row of the call before; `forked` and
    `new` ones start a new row, whose whole prompt is computed again in the update. An agent that rewrites its
    history pays this for each call, as does one with a clock in its system prompt. The first message that differs is
    named."""
    if not t.calls:
        return
    kinds = Counter(c.context for c in t.calls)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in _KINDS if kinds[kind])
    rows = f"; {t.rows} rows for {plural(len(t.calls), 'call')}" if t.rows else ""
    yield Observed("info", f"{counts}{rows}")
    for (kind, cause), reasons in _reasons(t).items():
        # A realigned prompt continues its tokens.
        advice = ADVICE.get(cause, "") if cause is not None and (kind, cause) != ("realigned", "template") else ""
        first = reasons[0] if len(set(reasons)) == 1 else f"the first: {reasons[0]}"
        text = f"{plural(len(reasons), 'call')} {kind}: {first}"
        yield Observed("warning" if advice else "info", text, advice)


def _reasons(t: Trial) -> Mapping[tuple[str | None, Cause | None], list[str]]:
    """The reasons calls do not continue their agent's earlier calls, by context and cause, the most frequent first."""
    found: dict[tuple[str | None, Cause | None], list[str]] = {}
    for call in (c for rollout in t.rollouts for c in rollout.trace.calls):
        if call.trained and call.error is None and call.context_reason is not None:
            found.setdefault((call.context, cause_of(call.context_reason)), []).append(call.context_reason)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


@checks.check("shared state")
def shared_state(t: Trial) -> Iterator[Observed]:
    """Rollouts that began with a response that was sampled in another rollout: an object that several rollouts share keeps the
    conversation, so attempts see earlier answers. Examples are a LangGraph checkpointer with a fixed `thread_id`, a
    `SQLiteSession`, a team that is not reset, and a list at the top of a module. Create it in the agent's function, or set
    `rollouts.fresh: true`, which runs each rollout in a new process; a file or a server keeps its state."""
    earlier = SharedState()
    found = sum([earlier.add(rollout.trace) for rollout in t.rollouts])
    if found:
        yield Observed(
            "problem",
            f"{found} of {plural(len(t.rollouts), 'rollout')} began with a response that was sampled in another rollout",
            "create checkpointers (or a new thread_id), sessions, memories and teams in the agent's function, or set rollouts.fresh: true",
        )


@checks.check("truncation")
def truncation(t: Trial) -> Iterator[Observed]:
    """Responses that ended at the token limit instead of by themselves. Their reward is given for an unfinished answer.
    Raise the limit, or shorten answers by the prompt or by the reward."""
    cut = [c for c in t.calls if c.finish_reason == "length"]
    if not cut:
        return
    share, limit = len(cut) / len(t.calls), t.config.rollouts.max_tokens
    whole = sorted(len(c.output_ids) for c in t.calls if c.finish_reason != "length" and c.output_ids is not None)
    limits = sorted({c.max_tokens for c in cut if c.max_tokens is not None})
    lengths = f"; the others have {whole[0]} to {whole[-1]} tokens" if whole else ""
    text = f"{percent(share)} of {plural(len(t.calls), 'call')} reached the limit of {listed([str(n) for n in limits])} tokens{lengths}"
    # The smallest of several limits is recorded: if it is the run's, that of the request may be equal.
    advice = (
        "the agent's request sets the limit, or the context does: raise max_tokens in the agent, or policy.max_context"
        if limits and limits[0] < limit
        else f"raise rollouts.max_tokens to {2 * limit} or more, and max_tokens in the agent's requests if they set it"
    )
    yield Observed("warning" if share > _MANY_CUT else "info", text, advice)
