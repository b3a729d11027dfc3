"""The result of a run that met a fault, as a row of a table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import Fault
from tests.chaos.runs import Bench, Difference, Ended


@dataclass(frozen=True, slots=True)
class Row:
    """One fault."""

    fault: Fault
    met: Ended
    """The end of the run that met it."""
    ended: Ended
    """The end of the last try."""
    root: Path
    """The folder of the runs."""
    difference: Difference | None
    """None if the last try failed."""

    @property
    def good(self) -> bool:
        found = self.difference
        hung = "IT HUNG" in self.met.output + self.ended.output
        if found is None or self.met.traceback or self.ended.traceback or hung:
            return False
        if self.fault.changes_run:
            return True
        kept = not found.doubled and (self.fault.takes_records or not found.lost)
        return kept and (found.weights or self.fault.changes_rollout)

    def line(self) -> str:
        found = self.difference
        if found is None:
            cells = ["no", "", "", ""]
        else:
            same = "yes" if found.weights and found.records else "weights" if found.weights else "no"
            if self.fault.changes_run:
                same = "another run"
            elif self.fault.changes_rollout and not found.weights:
                same = "but for a rollout"
            cells = ["yes", str(found.lost), str(found.doubled), same]
            if self.fault.changes_run:
                cells[1:3] = "", ""
        saw = re.sub(r"\s+", " ", self.met.message.replace(f"{self.root}/", "runs/")).replace("|", "\\|")
        if self.met.traceback or self.ended.traceback:
            saw = f"TRACEBACK {saw}"
        return f"| {self.fault.name} | {_code(self.met.code)} | {' | '.join(cells)} | {saw[:240]} |"


def _code(code: int) -> str:
    return str(code) if code >= 0 else f"signal {-code}"


def head() -> str:
    names = ("fault", "exit code", "goes on", "lost", "doubled", "identical", "message")
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def meet(bench: Bench, fault: Fault) -> Row:
    """Let a run meet ``fault``, and try again until it is complete: once as it is, once after what the person does."""
    trial = bench.trial("met")
    ended = met = fault.meet(trial)
    if ended.code != 0:
        ended = trial.end()
    if fault.undo is not None:
        fault.undo(trial)
        ended = trial.end()
    return Row(fault, met, ended, bench.root, trial.difference() if ended.code == 0 else None)
