"""Forks: rollouts that repeat a recorded one up to one of its calls, and sample from there on.

The agent runs again from its start. The policy endpoint answers its earlier calls from the record (`recording`), so an
agent whose tools are deterministic, or return their recorded results, sends the prompts that it sent before, token for token.
A fork whose agent did not, is dropped, and the reason is logged and counted.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from lightning_core.capture.selectors import find_selector
from lightning_core.errors import shorten
from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.signals.forks.recording import Recording
from lightning_core.signals.forks.replayed_tools import calls_of_tools, recorded_tools, tools_that_ran
from lightning_core.signals.forks.section import Forks
from lightning_core.signals.forks.tool_results import RecordedTool, ToolResults
from lightning_core.trace import Call, Trace


def recording_of(trace: Trace, point: Call) -> Recording:
    """The calls of ``trace`` to repeat to reach the call ``point``.

    Calls that began before ``point`` ended cannot depend on its response, so those beside it are repeated too.
    """
    calls = [call for call in trace.calls if call.id != point.id and call.start_ns < point.end_ns and _answered(call)]
    return Recording(calls=calls, point=point)


def fork_points(trace: Trace, agents: Collection[str]) -> list[Call]:
    """The calls of ``agents`` in ``trace`` that can be sampled anew."""
    return [
        call
        for call in trace.calls
        if call.agent in agents and call.replays is None and call.prompt_ids is not None and _answered(call)
    ]


def difference(recording: Recording, trace: Trace, tools: Sequence[RecordedTool] = ()) -> str | None:
    """The difference between ``trace`` and the ``recording`` that it repeats, up to the call to sample anew; None without one.

    ``tools``: those whose recorded results it returned (`recorded_tools`).
    """
    repeated = {call.replays for call in trace.calls} | calls_of_tools(trace, tools)
    missing = next((c for c in recording.needed if (c.replays or c.id) not in repeated), None)
    point = recording.point
    if missing is None and any(call.forks == (point.forks or point.id) for call in trace.calls):
        return None
    expected = missing or point
    own = [c for c in trace.calls if c.agent == expected.agent and c.replays is None and c.error is None]
    ran = tools_that_ran(trace, tools)
    if not own:
        return f"agent {expected.agent!r} did not make the call again{ran}"
    return f"agent {expected.agent!r} sent another prompt: {_first_difference(expected, own[0])}{ran}"


def choose_points(
    traces: Sequence[Trace], settings: Forks, agents: Collection[str], *, seed: int
) -> list[tuple[Trace, Call]]:
    """The calls to sample anew, of ``traces``, the attempts at one task; see ``rollouts.forks``."""
    chosen_agents = [a for a in agents if settings.agents is None or find_selector(settings.agents, a) is not None]
    candidates = [(trace, call) for trace in traces for call in fork_points(trace, chosen_agents)]
    random.Random(f"{seed}:forks").shuffle(candidates)
    return candidates[: settings.points]


def fork_jobs(rollouts: Sequence[Rollout], settings: Forks, agents: Collection[str]) -> list[Job]:
    """The forks of ``rollouts``, the attempts at one task, at calls of ``agents``; see ``rollouts.forks``."""
    finished = {r.trace.rollout: r for r in rollouts if r.status not in LEFT_OUT}
    if not finished:
        return []
    seed = next(iter(finished.values())).job.seed
    points = choose_points([r.trace for r in finished.values()], settings, agents, seed=seed)
    return [
        fork_job(finished[trace.rollout], call, index, sample)
        for index, (trace, call) in enumerate(points)
        for sample in range(settings.samples)
    ]


def fork_job(origin: Rollout, point: Call, index: int, sample: int) -> Job:
    """Fork ``sample`` of ``origin`` at its call ``point``, which is point number ``index`` of the task."""
    job, trace = origin.job, origin.trace
    return replace(
        job,
        seed=fork_seed(job.seed, index, sample),
        agent_seed=job.seed + origin.attempt,
        recorded=recording_of(trace, point),
        tools=replace(job.tools, recorded=recorded_tools(trace, point)) if isinstance(job.tools, ToolResults) else None,
    )


def reason_to_drop(fork: Rollout) -> str | None:
    """The reason ``fork`` is not used, or None."""
    recording, tools = fork.job.recorded, fork.job.tools
    assert isinstance(recording, Recording), "a fork repeats another rollout"
    if fork.status in LEFT_OUT:
        return fork.error or fork.status
    return difference(recording, fork.trace, tools.recorded if isinstance(tools, ToolResults) else ())


def fork_seed(seed: int, point: int, sample: int) -> int:
    """The sampling seed of fork ``sample`` at point number ``point`` of a task."""
    return int(hashlib.blake2b(f"fork:{seed}:{point}:{sample}".encode(), digest_size=7).hexdigest(), 16)


def _answered(call: Call) -> bool:
    return call.error is None and call.response is not None


def _first_difference(expected: Call, found: Call) -> str:
    for number, (old, new) in enumerate(zip(expected.messages, found.messages, strict=False), 1):
        if old != new:
            return f"message {number} was {shorten(repr(old), 200)}, now {shorten(repr(new), 200)}"
    before, now = len(expected.messages), len(found.messages)
    if before != now:
        return f"it had {before} messages, now {now}"
    return "the messages are equal, but their tokens, tools or settings differ"
