"""Random requests in all wire formats, over HTTP: no status of 500 or above, no hang, each request recorded, flat memory.

    python -m tests.bench.fuzz [--requests 1000000] [--processes 2] [--seed 0]

Each process has an endpoint and conversations of its own. Prints the number of responses by path and status, the requests per second,
and the memory of each process after a tenth of its requests and at the end. The first failures are printed with the seed of their
conversation, which ``--only`` repeats. Exits with 1 if there are any, or if the memory grew.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from random import Random
from typing import Any

import psutil

from tests.endpoint.fuzz import Fuzzer, FuzzFailure, fuzzed_endpoint

MOST_MIB = 64.0
"""Most MiB that a process may grow by in the last nine tenths of its requests: its allocator and its logs are not exactly flat."""
_MOST_FAILURES = 20
_APART = 1 << 40
"""Distance of the seeds of two processes."""


@dataclass(slots=True)
class Outcome:
    """What one process found."""

    requests: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    slowest: float = 0.0
    mib: tuple[float, float] = (0.0, 0.0)
    statuses: Counter[str] = field(default_factory=Counter[str])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    """The first of each kind, by its first characters."""
    failed: int = 0


def fuzz(first: int, requests: int) -> Outcome:
    """Make conversations with the seeds from ``first`` until they have ``requests`` requests."""
    logging.disable(logging.CRITICAL)
    outcome, process = Outcome(), psutil.Process()
    began, cpu, seed = time.monotonic(), time.process_time(), first
    early: float | None = None
    with fuzzed_endpoint() as endpoint:
        fuzzer = Fuzzer(endpoint)
        while outcome.requests < requests and outcome.failed < _MOST_FAILURES:
            try:
                fuzzer.converse(Random(seed))
            except FuzzFailure as failure:
                outcome.failed += 1
                outcome.failures.setdefault(str(failure)[:80], f"--only {seed}: {failure}")
            seed += 1
            outcome.requests = fuzzer.report.statuses.total()
            if early is None and outcome.requests * 10 >= requests:
                early = _mib(process)
        fuzzer.close()
        outcome.mib = (early or _mib(process), _mib(process))
    outcome.statuses, outcome.slowest = fuzzer.report.statuses, fuzzer.report.slowest
    outcome.seconds, outcome.cpu = time.monotonic() - began, time.process_time() - cpu
    return outcome


def _mib(process: psutil.Process) -> float:
    gc.collect()
    return process.memory_info().rss / (1 << 20)


def _print(outcomes: list[Outcome]) -> bool:
    """Print what was found; returns whether everything holds."""
    statuses: Counter[str] = sum((o.statuses for o in outcomes), Counter[str]())
    for name, times in sorted(statuses.items()):
        print(f"{times:>10,}  {name}")
    total = statuses.total()
    print(
        f"{total:>10,}  requests; {sum(o.requests / o.seconds for o in outcomes):,.0f} per second, "
        f"{1000 * sum(o.cpu for o in outcomes) / max(total, 1):.2f} ms CPU each with the client; "
        f"slowest response {max(o.slowest for o in outcomes):.2f} s"
    )
    for index, outcome in enumerate(outcomes):
        print(f"memory of process {index}: {outcome.mib[0]:.0f} MiB after a tenth, {outcome.mib[1]:.0f} MiB at the end")
    failed = sum(o.failed for o in outcomes)
    print(f"{failed} failed conversations")
    for failure in {key: text for o in outcomes for key, text in o.failures.items()}.values():
        print(f"\n{failure}")
    return failed == 0 and all(o.mib[1] - o.mib[0] <= MOST_MIB for o in outcomes)


def main() -> int:
    """Run the processes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of all processes together")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first conversation")
    parser.add_argument("--only", type=int, metavar="SEED", help="make one conversation")
    options: Any = parser.parse_args()
    if options.only is not None:
        return 0 if _print([fuzz(options.only, 1)]) else 1
    each = -(-options.requests // options.processes)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        work = [pool.submit(fuzz, options.seed + index * _APART, each) for index in range(options.processes)]
        return 0 if _print([one.result() for one in work]) else 1


if __name__ == "__main__":
    sys.exit(main())
