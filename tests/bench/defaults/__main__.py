"""Trains small agents with the shipped defaults, and with changes of them, at equal processor time.

    python -m tests.bench.defaults [--suite first] [--variant "name: key=value key=value" …] [--minutes 3] [--seeds 3]
    python -m tests.bench.defaults --report

A run sets what every user must set: the agents, the model, the seed and the tasks. All else is the default, or a change of a
``--variant`` (``--change key=value`` is short for a variant with one change). A run ends when its rollouts and updates have used
``--minutes`` of two cores (3: 360 processor seconds), in this process and in the workers of agents. Loading and evaluations do not
count. Each run is a process of its own, and adds a line to ``--results``. Runs with a line there are not repeated, so an interrupted
bench continues. All variants of an agent follow each other, and the seeds are the outer loop.

The first suite is for choosing defaults. The second is for one comparison at the end. ``--list`` prints what is left, ``--starts``
the rewards of the untrained model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.defaults import report, results
from tests.bench.defaults.queue import Run, left, steps_of, wanted
from tests.bench.defaults.suites import SUITES, agents_of
from tests.bench.defaults.variant import BASELINE, Variant, parse_variant

ROOT = Path(__file__).parents[3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="first")
    parser.add_argument("--agents", nargs="+", metavar="NAME", help="default: all of the suite")
    parser.add_argument("--variant", action="append", default=[], metavar="'NAME: KEY=VALUE …'")
    parser.add_argument("--change", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="minutes of two cores that a run trains (default: 3)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.jsonl")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--starts", type=int, nargs="?", const=80, metavar="TASKS")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    try:
        rows = results.read(options.results)
        variants = [BASELINE, *map(parse_variant, [*options.variant, *(f"{c}: {c}" for c in options.change)])]
    except ValueError as error:
        parser.error(str(error))
    if options.report:
        print("\n".join(report.lines(rows)))
        return 0
    agents = agents_of(options.suite)
    names = options.agents or list(agents)
    if unknown := [name for name in names if name not in agents]:
        parser.error(f"--agents: found {unknown[0]!r}, expected some of {', '.join(agents)}")
    if options.starts:
        from tests.bench.defaults.starts import HEAD, start_line, untrained

        with untrained() as opened:
            print(HEAD)
            for name in names:
                print(start_line(opened, agents[name], options.starts), flush=True)
        return 0
    runs = left(
        list(wanted(options.suite, names, variants, seeds=options.seeds, minutes=options.minutes)),
        rows,
    )
    if options.list:
        print("\n".join(f"{run.agent}, seed {run.seed}, {run.variant.name}" for run in runs))
        return 0
    failed = run_all(runs, options.results)
    print("\n".join(report.lines(results.read(options.results))))
    return failed


def run_all(runs: Sequence[Run], path: Path) -> int:
    """Make ``runs``, one after another; returns 1 if one failed, else 0. A failed run has no row, so the next call repeats it."""
    failed = 0
    for number, run in enumerate(runs, 1):
        print(f"\n[{number}/{len(runs)}] {run.agent}, seed {run.seed}, {run.variant.name}", flush=True)
        rows = results.read(path)
        if not left([run], rows):
            print("recorded by another queue")
            continue
        if subprocess.run(_command(run, path, steps_of(run, rows)), check=False, cwd=ROOT).returncode:
            failed = 1
            print(f"FAILED: {run.agent}, seed {run.seed}, {run.variant.name}", flush=True)
    return failed


def _command(run: Run, path: Path, steps: int) -> list[str]:
    variant: Variant = run.variant
    return [
        *(sys.executable, "-m", "tests.bench.defaults.run", run.suite, run.agent, str(run.seed), str(run.minutes)),
        *(str(path.absolute()), "--variant", variant.name, "--steps", str(steps)),
        *(("--change", *variant.changes) if variant.changes else ()),
    ]


if __name__ == "__main__":
    sys.exit(main())
