"""Trains small agents with the shipped defaults, and with changes of them, at equal processor time.

    python -m tests.bench.defaults [--suite first] [--variant "name: key=value key=value" …] [--minutes 3] [--seeds 3]
    python -m tests.bench.defaults --report [--suite first] [--agents NAME …] [--against VARIANT]

A run sets what every user must set: the agents, the model, the seed and the tasks. Evaluations are at one temperature for all
variants. All else is the default, or a change of a ``--variant`` (``--change key=value`` is short for a variant with one change). A
run ends when its rollouts and updates have used ``--minutes`` of two cores (3: 360 processor seconds), in this process and in the
workers of agents. Loading and evaluations do not count. Each run is a process of its own, and adds a line to ``--results``. Runs with
a line there are not repeated, so an interrupted bench continues. All variants of an agent follow each other, and the seeds are the
outer loop.

``--jobs`` runs are made at the same time, each with its share of the cores as threads: two with ``--jobs 1``, one with ``--jobs 2``.
One thread uses less processor time than two for the same work, so rows are kept by number of threads, as by CPU, and those of
different numbers are not compared. The shipped rows were made with ``--jobs 2``, so ``--jobs 1`` repeats them.

The first suite is for choosing defaults. No default is chosen with the second. ``--list`` prints what is left, ``--starts``
the rewards of the untrained model.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench.cpu import cpu
from tests.bench.defaults import report, results
from tests.bench.defaults.queue import Run, is_scheduled, left, steps_of, wanted
from tests.bench.defaults.results import Row
from tests.bench.defaults.suite.agent import Agent
from tests.bench.defaults.suites import SUITES, agents_of
from tests.bench.defaults.variant import BASELINE, CORES, Variant, check, parse_change, parse_variant

ROOT = Path(__file__).parents[3]


RESULTS = Path(__file__).parent / "results.jsonl"
DEFAULTS: Mapping[str, Any] = {
    "suite": "first",
    "agents": None,
    "variant": (),
    "change": (),
    "minutes": 3.0,
    "seeds": 3,
    "results": RESULTS,
    "jobs": 1,
    "against": BASELINE.name,
    "list": False,
    "report": False,
    "starts": None,
}
WITHOUT_EFFECT: Mapping[str, Sequence[str]] = {
    "list": ("against",),
    "report": ("variant", "change", "minutes", "seeds", "jobs"),
    "starts": ("variant", "change", "minutes", "seeds", "results", "jobs", "against"),
}
"""The options that may not be given with another one."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_parser()
    given = vars(parser.parse_args(arguments))
    options = argparse.Namespace(**{**DEFAULTS, **given})
    try:
        _check_options(options, given)
        rows = [] if options.starts else _rows(options, given)
        variants = _variants(options)
        known = [*report.names(rows), *(variant.name for variant in variants)]
        if options.against not in known:
            raise ValueError(_unknown("--against", options.against, known))
        agents = {} if options.report else _agents(options)
        for variant in variants:
            check(variant, list(agents.values()))
    except ValueError as error:
        parser.error(str(error))
    if options.report:
        print("\n".join(report.lines(rows, options.against)))
        return 0
    if options.starts:
        from tests.bench.defaults.starts import HEAD, start_line, untrained

        with untrained() as opened:
            print(HEAD)
            for agent in agents.values():
                print(start_line(opened, agent, options.starts), flush=True)
        return 0
    threads = CORES // options.jobs
    every = wanted(
        options.suite,
        list(agents),
        variants,
        seeds=options.seeds,
        minutes=options.minutes,
        threads=threads,
        cpu=cpu(),
    )
    runs = left(list(every), rows)
    if options.list:
        print("\n".join(f"{run.agent}, seed {run.seed}, {run.variant.name}" for run in runs))
        return 0
    failed = run_all(runs, options.results, jobs=options.jobs)
    print("\n".join(report.lines(results.read(options.results), options.against)))
    return failed


def options_parser() -> argparse.ArgumentParser:
    """Options that are not given are left out, see `DEFAULTS`."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.defaults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--suite", choices=SUITES, help="the suite of agents (default: first; with --report: both)")
    add("--agents", nargs="+", metavar="NAME", help="some agents of the suite (default: all)")
    changes = "changes of the defaults to be measured, under a name; may be repeated"
    add("--variant", action="append", metavar="'NAME: KEY=VALUE …'", help=changes)
    add("--change", action="append", metavar="KEY=VALUE", help="a variant with one change; may be repeated")
    add("--minutes", type=float, help="minutes of two cores that a run trains (default: 3)")
    add("--seeds", type=int, help="runs of each agent with each variant, from seed 0 (default: 3)")
    add(
        "--results", type=Path, metavar="FILE", help="JSON lines, one for each run (default: the shipped results.jsonl)"
    )
    add("--jobs", type=int, help="runs at the same time; sets the threads of each (default: 1, with two threads)")
    add("--against", metavar="VARIANT", help="the variant that others are compared with (default: defaults)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--list", action="store_true", help="print the runs that are left, and train nothing")
    add("--report", action="store_true", help="print the report of --results, and train nothing")
    starts = "print the untrained model's rewards on the first TASKS held-out tasks, and train nothing (default: 80)"
    add("--starts", type=int, nargs="?", const=80, metavar="TASKS", help=starts)
    return parser


def _check_options(options: argparse.Namespace, given: Collection[str]) -> None:
    """Raises ValueError for numbers out of range, and for options without effect."""
    for mode, others in WITHOUT_EFFECT.items():
        if mode in given and (idle := " and ".join(f"--{name}" for name in others if name in given)):
            raise ValueError(f"--{mode}: found {idle}, without effect there; leave out {idle}")
    if options.starts is not None and options.starts < 1:
        raise ValueError(f"--starts: found {options.starts}, expected 1 or more tasks")
    if options.seeds < 1:
        raise ValueError(f"--seeds: found {options.seeds}, expected 1 or more")
    if not 0 < options.minutes < math.inf:
        raise ValueError(f"--minutes: found {options.minutes:g}, expected a finite number above 0")
    if options.jobs not in range(1, CORES + 1):
        raise ValueError(f"--jobs: found {options.jobs}, expected 1 to {CORES}")


def _rows(options: argparse.Namespace, given: Collection[str]) -> list[Row]:
    """The rows of ``--results``; for the report, those of its suite and agents. Raises ValueError if there are none to report."""
    path: Path = options.results
    if path.exists() and not path.is_file():
        raise ValueError(f"--results: found {str(path)!r}, which is not a file, expected JSON lines, one for each run")
    if not options.report:
        return results.read(path)
    if not path.is_file():
        raise ValueError(f"--results: found no file {str(path)!r}, expected the rows to report")
    rows = [row for row in results.read(path) if "suite" not in given or row.suite == options.suite]
    if not rows:
        raise ValueError(f"--results: found no rows to report in {str(path)!r}, expected one or more")
    for name in options.agents or ():
        if name not in (known := dict.fromkeys(row.agent for row in rows)):
            raise ValueError(_unknown("--agents", name, known))
    return [row for row in rows if not options.agents or row.agent in options.agents]


def _agents(options: argparse.Namespace) -> dict[str, Agent]:
    """The agents of ``--agents``, or all of the suite, by name. Raises ValueError for unknown names."""
    agents = agents_of(options.suite)
    names: Sequence[str] = options.agents or list(agents)
    for name in names:
        if name not in agents:
            raise ValueError(_unknown("--agents", name, agents))
    return {name: agents[name] for name in names}


def _variants(options: argparse.Namespace) -> list[Variant]:
    """The defaults and the variants of the command line. Raises ValueError for those that cannot be read."""
    found = [BASELINE]
    for option, texts, parse in (
        ("--variant", options.variant, parse_variant),
        ("--change", options.change, parse_change),
    ):
        try:
            found += map(parse, texts)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
    return found


def _unknown(option: str, found: str, known: Iterable[str]) -> str:
    return f"{option}: found {found!r}, expected one of {', '.join(map(repr, dict.fromkeys(known)))}"


def run_all(runs: Sequence[Run], path: Path, *, jobs: int) -> int:
    """Make ``runs``, ``jobs`` at a time; returns 1 if one failed, else 0. A failed run has no row, so the next call repeats it.

    Those with a schedule of the learning rate come last: they have as many steps as the defaults.
    """

    def make(numbered: tuple[int, Run]) -> bool:
        number, run = numbered
        name = f"[{number}/{len(runs)}] {run.agent}, seed {run.seed}, {run.variant.name}"
        rows = results.read(path)
        if not left([run], rows):
            print(f"{name}: recorded by another queue", flush=True)
            return True
        try:
            command = _command(run, path, steps_of(run, rows))
        except ValueError as error:
            print(f"{name}: FAILED\n{error}", flush=True)
            return False
        print(name, flush=True)
        # The output of runs at the same time would be mixed. A file, not a pipe: a run outlives a queue that is interrupted.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            code = subprocess.run(
                command,
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
        made = [
            *pool.map(make, [(number, run) for number, run in enumerate(runs, 1) if not is_scheduled(run)]),
            *pool.map(make, [(number, run) for number, run in enumerate(runs, 1) if is_scheduled(run)]),
        ]
    return int(not all(made))


def _command(run: Run, path: Path, steps: int) -> list[str]:
    variant: Variant = run.variant
    return [
        *(sys.executable, "-m", "tests.bench.defaults.run", run.suite, run.agent, str(run.seed), str(run.minutes)),
        *(str(path.absolute()), "--variant", variant.name, "--steps", str(steps)),
        *(("--change", *variant.changes) if variant.changes else ()),
    ]


if __name__ == "__main__":
    sys.exit(main())
