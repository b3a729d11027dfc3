"""Counts how many of 10,000 model calls are recorded for the wrong agent or rollout, lost, or recorded twice.

    python -m tests.bench.identity [--calls 10000] [--concurrency 50] [--seed 0]

The program is ``tests/integrations/storm.py``: parallel branches, threads, a sub-graph, retries, streaming, an agent inside an agent, and
random sleeps, over real HTTP against the scripted policy.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from langchain_openai import ChatOpenAI

from lightning_core.testing import open_playground
from lightning_core.testing.contract import answer_prompt
from tests.integrations.storm import CALLS_PER_ROUND, Outcome, Storm

ROUNDS = 5


def run(calls: int, concurrency: int, seed: int) -> Outcome:
    rollouts = -(-calls // (ROUNDS * CALLS_PER_ROUND))
    storm = Storm(ChatOpenAI(model="policy", api_key="sk-of-the-agent", max_retries=0), seed=seed)
    with open_playground(answer_prompt, integrations=["langgraph"]) as playground:
        work = storm.run(playground.rollout, rollouts=rollouts, rounds=ROUNDS, concurrency=concurrency)
        traces = asyncio.run(work)
    return storm.compare(traces)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    outcome = run(options.calls, options.concurrency, options.seed)
    seconds = time.perf_counter() - start
    print(f"{outcome}; {seconds:.1f} s, {outcome.sent / seconds:.0f} calls/s")
    return int(bool(outcome.misattributed or outcome.lost or outcome.twice))


if __name__ == "__main__":
    sys.exit(main())
