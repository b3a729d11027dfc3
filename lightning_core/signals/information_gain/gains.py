"""The gain of each call of a rollout in the likelihood of the task's answer (``credit.information_gain``).

The answer is scored at the prompt of each trained call, in place of the response. A call's gain is the score at the prompt of the
call that follows it, which has the call's own response and what its tools returned, less the score at its own prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Literal

from lightning_core.credit.episode import Episode
from lightning_core.trace import Call, Event, Trace
from lightning_core.transitions import Transition

ANSWER_LOGPROBS = "lightning.answer_logprobs"
"""The array of a call: float32 [A], of the task's answer in place of the response."""
Measure = Literal["probability", "log-probability"]
After = Literal["agent", "policy"]


def information_gains(
    episode: Episode, *, after: After = "agent", measure: Measure = "probability"
) -> list[float | None]:
    """The score after each transition minus the score before it; None without both.

    ``measure``: the score. ``probability``: exp of the mean logprob of the answer's tokens; ``log-probability``: the mean itself.
    ``after``: the agents whose next prompt has the score after a call: the same ``agent``, or any agent with the same ``policy``. The
    next call is the first, in order of arrival, that began after the call ended and does not run in a parallel branch.
    """
    scores = {call: math.exp(s) if measure == "probability" else s for call, s in answer_scores(episode).items()}
    calls = {call.id: call for call in episode.trace.calls}
    parallel = _parallel(episode.trace)

    def follows(later: Transition, t: Transition) -> bool:
        same = later.policy == t.policy and (after == "policy" or later.agent == t.agent)
        own, other = calls[t.call], calls[later.call]
        return same and other.start_ns >= own.end_ns and not parallel(own, other)

    gains: list[float | None] = []
    for index, t in enumerate(episode.transitions):
        following = next((u for u in episode.transitions[index + 1 :] if follows(u, t)), None)
        scored = following is not None and t.call in scores and following.call in scores
        gains.append(scores[following.call] - scores[t.call] if scored and following is not None else None)
    return gains


def answer_scores(episode: Episode) -> dict[str, float]:
    """The mean logprob of the answer's tokens, by id of the calls at whose prompt it was scored."""
    scored = ((call.id, call.arrays.get(ANSWER_LOGPROBS)) for call in episode.trace.calls)
    return {call: float(logprobs.mean()) for call, logprobs in scored if logprobs is not None}


def rewards_and_scores(episode: Episode) -> Hashable:
    """All rewards of the episode by place (`Episode.outcome`), and the answer's scores by agent and turn."""
    scores = answer_scores(episode)
    places = zip(episode.transitions, episode.turns, strict=True)
    found = tuple(sorted((t.agent, turn, scores[t.call]) for t, turn in places if t.call in scores))
    return None if episode.outcome is None else (episode.outcome, found)


def _parallel(trace: Trace) -> Callable[[Call, Call], bool]:
    """Whether two calls are below spans that have the same parent and overlap in time."""
    spans: dict[str, Call | Event] = {span.id: span for span in (*trace.events, *trace.calls)}

    def path(span: Call | Event) -> list[Call | Event]:
        found = [span]
        while (parent := spans.get(found[-1].parent or "")) is not None:
            found.append(parent)
        return found[::-1]

    def parallel(one: Call, other: Call) -> bool:
        for a, b in zip(path(one), path(other), strict=False):
            if a.id != b.id:
                return a.start_ns < b.end_ns and b.start_ns < a.end_ns
        return False

    return parallel
