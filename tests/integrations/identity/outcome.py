"""Compares the calls that programs made with those that were recorded.

A prompt is ``NUMBER AGENT UNIQUE``: the number of its rollout, the agent that makes the call, and a text that no other call has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from lightning_core import Trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of the sent calls by how they were recorded."""

    sent: int
    recorded: int
    misattributed: int
    lost: int
    """Not recorded."""
    twice: int
    silent: int
    """Not recorded, and without an error."""

    @property
    def is_exact(self) -> bool:
        """Whether each call was recorded once, for its agent and rollout."""
        return self.sent == self.recorded and not (self.misattributed or self.lost or self.twice or self.silent)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


NOTHING = Outcome(0, 0, 0, 0, 0, 0)


def compare(sent: Iterable[str], traces: Sequence[Trace], failed: Iterable[str] = ()) -> Outcome:
    """The outcome of the prompts ``sent``, of which ``failed`` raised an error; traces are in the order of their rollouts."""
    recorded: Counter[str] = Counter()
    wrong = 0
    for number, trace in enumerate(traces):
        for call in trace.calls:
            prompt = str(call.messages[0]["content"])
            recorded[prompt] += 1
            rollout, agent, _ = prompt.split(" ")
            wrong += (int(rollout), agent, trace.rollout) != (number, call.agent, call.rollout)
    asked = Counter(sent)
    lost = asked - recorded
    return Outcome(
        sent=asked.total(),
        recorded=recorded.total(),
        misattributed=wrong,
        lost=lost.total(),
        twice=(recorded - asked).total(),
        silent=(lost - Counter(failed)).total(),
    )
