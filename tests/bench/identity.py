"""Counts how many of 10,000 model calls are recorded for the wrong agent or rollout, lost, or recorded twice.

    python -m tests.bench.identity [--calls 10000] [--concurrency 50] [--seed 0]

The programs are ``tests/integrations/storm.py``, a graph with everything that makes attribution difficult, and those of
``tests/integrations/identity``: threads, pools, event loops, batchers, lazy results, sub-graphs and processes. All of them run over real
HTTP. The policy is scripted; their provider is a server that would answer a call which bypasses the endpoint.

``silent`` is the number of calls that were neither recorded nor ended with an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

_FIELDS = ("sent", "recorded", "misattributed", "lost", "twice", "silent")


def _line(name: str, outcome: Any, seconds: float) -> str:
    return f"{name:16}" + "".join(f"{getattr(outcome, field):14}" for field in _FIELDS) + f"{seconds:8.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Spawned processes import this module.
    from tests.integrations.identity.all_kinds import run_all
    from tests.integrations.identity.outcome import NOTHING

    start = before = time.perf_counter()
    total = NOTHING
    print(" " * 16 + "".join(f"{field:>14}" for field in _FIELDS))
    for name, outcome in run_all(options.calls, options.concurrency, options.seed):
        now = time.perf_counter()
        print(_line(name, outcome, now - before), flush=True)
        total, before = total + outcome, now
    print(_line("all", total, time.perf_counter() - start))
    return int(not total.is_exact)


if __name__ == "__main__":
    sys.exit(main())
