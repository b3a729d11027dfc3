"""Trains small agents with the shipped defaults, and with changes of them, at equal processor time.

    python -m tests.bench.defaults [--suite first] [--variant "name: key=value key=value" …] [--minutes 3] [--seeds 3]
    python -m tests.bench.defaults --report [--against VARIANT]

A run sets what every user must set: the agents, the model, the seed and the tasks. Evaluations are at one temperature for all
variants. All else is the default, or a change of a ``--variant`` (``--change key=value`` is short for a variant with one change). A
run ends when its rollouts and updates have used ``--minutes`` of two cores (3: 360 processor seconds), in this process and in the
workers of agents. Loading and evaluations do not count. Each run is a process of its own, and adds a line to ``--results``. Runs with
a line there are not repeated, so an interrupted bench continues. All variants of an agent follow each other, and the seeds are the
outer loop. ``--jobs`` runs are made at the same time, each with its share of the cores as threads; one thread uses less processor time
than two for the same work, so rows of different numbers of threads are not compared.

The first suite is for choosing defaults. The second is for one comparison at the end. ``--list`` prints what is left, ``--starts``
the rewards of the untrained model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench.defaults import report, results
from tests.bench.defaults.queue import Run, left, steps_of, wanted
from tests.bench.defaults.suites import SUITES, agents_of
from tests.bench.defaults.variant import BASELINE, CORES, Variant, parse_variant

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
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--starts", type=int, nargs="?", const=80, metavar="TASKS")
    parser.add_argument("--report", action="store_true")
    parser.add_argument(
        "--against", metavar="VARIANT", default=BASELINE.name, help="the variant that others are compared with"
    )
    options = parser.parse_args()
    try:
        rows = results.read(options.results)
        variants = [BASELINE, *map(parse_variant, [*options.variant, *(f"{c}: {c}" for c in options.change)])]
    except ValueError as error:
        parser.error(str(error))
    if options.report:
        print("\n".join(report.lines(rows, options.against)))
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
    if options.jobs not in range(1, CORES + 1):
        parser.error(f"--jobs: found {options.jobs}, expected 1 to {CORES}")
    threads = CORES // options.jobs
    every = wanted(options.suite, names, variants, seeds=options.seeds, minutes=options.minutes, threads=threads)
    runs = left(list(every), rows)
    if options.list:
        print("\n".join(f"{run.agent}, seed {run.seed}, {run.variant.name}" for run in runs))
        return 0
    failed = run_all(runs, options.results, jobs=options.jobs)
    print("\n".join(report.lines(results.read(options.results), options.against)))
    return failed


def run_all(runs: Sequence[Run], path: Path, *, jobs: int) -> int:
    """Make ``runs``, ``jobs`` at a time; returns 1 if one failed, else 0. A failed run has no row, so the next call repeats it."""

    def make(numbered: tuple[int, Run]) -> bool:
        number, run = numbered
        name = f"[{number}/{len(runs)}] {run.agent}, seed {run.seed}, {run.variant.name}"
        rows = results.read(path)
        if not left([run], rows):
            print(f"{name}: recorded by another queue", flush=True)
            return True
        print(name, flush=True)
        # The output of runs at the same time would be mixed. A file, not a pipe: a run outlives a queue that is interrupted.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            code = subprocess.run(
                _command(run, path, steps_of(run, rows)),
                check=False,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(run.threads)},
                stdout=output if jobs > 1 else None,
                stderr=subprocess.STDOUT if jobs > 1 else None,
            ).returncode
            output.seek(0)
            if code:
                print(f"{name}: FAILED\n{output.read()}", flush=True)
        return not code

    with ThreadPoolExecutor(jobs) as pool:
        return int(not all(list(pool.map(make, enumerate(runs, 1)))))


def _command(run: Run, path: Path, steps: int) -> list[str]:
    variant: Variant = run.variant
    return [
        *(sys.executable, "-m", "tests.bench.defaults.run", run.suite, run.agent, str(run.seed), str(run.minutes)),
        *(str(path.absolute()), "--variant", variant.name, "--steps", str(steps)),
        *(("--change", *variant.changes) if variant.changes else ()),
    ]


if __name__ == "__main__":
    sys.exit(main())
