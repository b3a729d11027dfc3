"""Programs whose agents call the model from other processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial

from tests.integrations.identity.clients import ask, ask_all
from tests.integrations.identity.rollouts import Program, let_agents_speak

_SPAWN = multiprocessing.get_context("spawn")
_PROGRAM = """
import sys, openai
client = openai.OpenAI(max_retries=0)
for prompt in sys.argv[1:]:
    client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": prompt}])
"""


@contextmanager
def process_pools(url: str) -> Generator[Program]:
    """A pool that is older than the rollouts and serves all of them."""
    with ProcessPoolExecutor(2, mp_context=_SPAWN) as pool:
        list(pool.map(abs, range(2)))

        def say(prompts: Sequence[str]) -> None:
            first, *rest = prompts
            job = pool.submit(ask, url, first)
            list(pool.map(partial(ask, url), rest, chunksize=2))
            job.result()

        yield lambda calls: let_agents_speak(calls, say)


@contextmanager
def processes(url: str) -> Generator[Program]:
    """A process for each agent."""

    def say(prompts: Sequence[str]) -> None:
        process = _SPAWN.Process(target=ask_all, args=(url, prompts))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the process ended with {process.exitcode}")

    yield lambda calls: let_agents_speak(calls, say)


@contextmanager
def subprocesses(url: str) -> Generator[Program]:
    """A program with a plain openai client, for each agent."""

    def say(prompts: Sequence[str]) -> None:
        own = os.environ | {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "sk-own"}
        subprocess.run([sys.executable, "-c", _PROGRAM, *prompts], env=own, check=True, timeout=120)

    yield lambda calls: let_agents_speak(calls, say)
