"""Runs all kinds of programs, and the graph of ``storm.py``, against one scripted endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

from lightning_core.testing import Playground, open_playground
from lightning_core.testing.contract import answer_prompt
from lightning_core.testing.recording_server import recording_server
from tests.integrations.identity.chat_models import chat_model
from tests.integrations.identity.kinds import KINDS
from tests.integrations.identity.outcome import Outcome
from tests.integrations.identity.rollouts import run_kind
from tests.integrations.storm import CALLS_PER_ROUND, Storm

ROUNDS = 5


def run_all(calls: int, concurrency: int, seed: int) -> Iterator[tuple[str, Outcome]]:
    """The outcome of each kind of program, ``calls`` calls in all."""
    with ExitStack() as older, recording_server() as provider:
        # Opened before the patches, as the pools of modules that are imported early.
        programs = {name: older.enter_context(kind.open(provider.url)) for name, kind in KINDS.items()}
        with open_playground(answer_prompt, integrations=["langgraph"]) as playground:
            sent = 0
            for name, kind in KINDS.items():
                outcome = run_kind(kind, programs[name], playground, calls)
                sent += outcome.sent
                yield name, outcome
            yield "graph", _run_storm(playground, provider.url, calls - sent, concurrency, seed)
        yield "at the provider", Outcome(0, 0, 0, 0, 0, silent=len(provider.requests))


def _run_storm(playground: Playground, url: str, calls: int, concurrency: int, seed: int) -> Outcome:
    """The outcome of at least ``calls`` calls of the graph."""
    storm = Storm(chat_model(url), seed=seed)
    rollouts = max(2, -(-calls // (ROUNDS * CALLS_PER_ROUND)))
    work = storm.run(playground.rollout, rollouts=rollouts, rounds=ROUNDS, concurrency=concurrency)
    return storm.compare(asyncio.run(work))
