"""Runs that are killed and disturbed; prints a table of the results.

    python -m tests.bench.chaos [--kills 100] [--variants plain,lora] [--faults] [--only TEXT] [--seed 0]

The exit code is 1 if a run is not identical to the undisturbed one where it can be, loses or doubles a rollout, hangs, or prints a
traceback.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import each_fault
from tests.chaos.kills import kill_at_random
from tests.chaos.runs import VARIANTS, Bench
from tests.chaos.table import Row, head, meet


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.chaos")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--variants", help=f"some of {', '.join(VARIANTS)}; all unless given")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--only", default="", help="faults whose name has this text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    variants = options.variants.split(",") if options.variants else list(VARIANTS)
    good = True
    for number, variant in enumerate(variants):
        share = len(range(number, options.kills, len(variants)))
        if share:
            with tempfile.TemporaryDirectory() as folder:
                good = _kills(Bench(Path(folder), variant), variant, share, options.seed) and good
    if options.faults or options.only:
        with tempfile.TemporaryDirectory() as folder:
            good = _faults(Bench(Path(folder)), options.only) and good
    return 0 if good else 1


def _kills(bench: Bench, variant: str, count: int, seed: int) -> bool:
    made = same = lost = doubled = tracebacks = 0
    for kill in kill_at_random(bench, count, seed=seed):
        made += len(kill.points)
        same += len(kill.points) * kill.identical
        tracebacks += kill.ended.traceback
        if kill.difference:
            lost += kill.difference.lost
            doubled += kill.difference.doubled
        if not kill.identical:
            points = ", ".join(f"{at:.2f}" for at in kill.points)
            print(f"killed at {points} CPU seconds: {kill.difference}\n{kill.ended.output}", file=sys.stderr)
    print(
        f"{variant}: kills {made}, identical {same}, rollouts lost {lost}, doubled {doubled}, tracebacks {tracebacks}",
        flush=True,
    )
    return same == made and not lost + doubled + tracebacks


def _faults(bench: Bench, only: str) -> bool:
    rows: list[Row] = []
    print(head())
    for fault in each_fault():
        if only in fault.name:
            rows.append(meet(bench, fault))
            print(rows[-1].line(), flush=True)
    good = [row for row in rows if row.good]
    print(f"\nfaults {len(rows)}: as promised {len(good)}")
    return len(good) == len(rows)


if __name__ == "__main__":
    sys.exit(main())
