"""How many decision points of unmodified agents can be forked: the examples of four frameworks, all calls of their rollouts.

    python -m tests.bench.forks [--points 250] [--tools live|recorded]

A scripted model answers at random, so that rollouts differ in their number of calls, in their tools and in their errors; BFCL's mostly
makes the gold calls, since a rollout ends at a wrong turn. Each call of each rollout is then sampled anew after the recorded calls before
it. A point is restored if the agent reaches it with exactly the recorded prompt.

With ``--tools``: instead of the examples, programs whose tools give a new result every time (`tests.integrations.random_tools`), with
their tools run again or their results taken from the record.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_core import Config, load_config
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.entry_points import load_agent, load_reward
from lightning_core.rollouts.local_agents import LocalAgents, capturing, open_agents
from lightning_core.rollouts.selection import routing_of
from lightning_core.rollouts.tasks import load_tasks
from lightning_core.signals.forks.points import fork_job, fork_points, reason_to_drop
from lightning_core.signals.forks.recording import Recording
from lightning_core.signals.forks.replayed_tools import kept_tools
from tests.integrations import random_tools

ROOT = Path(__file__).parents[2]
Answer = Callable[[random.Random, str], str]


class Example(NamedTuple):
    """An example, and the answers of its scripted model."""

    framework: str
    folder: str
    answer: Answer
    overrides: tuple[str, ...] = ()
    """Settings in place of those of ``lightning.yaml``."""
    requires: str | None = None
    """A module that is in none of the extras."""


def sql(rng: random.Random, prompt: str) -> str:
    return rng.choice(
        ("SELECT name FROM nowhere", "SELECT 1", "SELECT count(*) FROM city", "SELEKT", "the table is wrong", "yes")
    )


def calculate(rng: random.Random, prompt: str) -> str:
    if rng.random() < 0.6 and prompt.count("tool\n") < 6:
        arguments = f'{{"expression": "{rng.randint(1, 20)}*{rng.randint(1, 20)}{rng.choice(("", "+", "/0"))}"}}'
        return f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>'
    return str(rng.randint(1, 99))


def search(rng: random.Random, prompt: str) -> str:
    wanted = rng.choice(("Nassau", "currency of Ruritania", "language of the Bahamas"))
    return f"Search: {wanted}" if rng.random() < 0.6 else f"Answer: {wanted}"


def look_up(rng: random.Random, prompt: str) -> str:
    if rng.random() < 0.6:
        arguments = f'{{"item": "paper lamp", "column": "{rng.choice(("price", "stock", "maker", "nothing"))}"}}'
        return f'<tool_call>{{"name": "look_up", "arguments": {arguments}}}</tool_call>'
    return "I do not know"


def functions(rng: random.Random, prompt: str) -> str:
    from tests.examples.bfcl_gold import stray  # it needs the wheel

    return stray(rng, prompt)


BFCL = Example(
    "OpenAI Agents SDK: BFCL", "bfcl", functions, ("tasks.train=examples.bfcl.tasks:train",), requires="bfcl_eval"
)
EXAMPLES = (
    Example("LangGraph", "text_to_sql", sql),
    Example("LangChain", "langchain_agent", look_up),
    Example("OpenAI Agents SDK", "rag", search),
    Example("AutoGen", "math_tool", calculate),
    BFCL,
)


class Found(NamedTuple):
    """The decision points of one example."""

    rollouts: int
    points: int
    restored: int
    changed: int
    """Forks whose reward or number of calls differs from that of their rollout."""
    reasons: Counter[str]
    seconds: float


def scripted(answer: Answer, seed: int = 0) -> ScriptedBackend:
    """A model with random answers; every answer is new."""
    rng, lock = random.Random(seed), threading.Lock()

    def script(prompt: str) -> str:
        with lock:
            return answer(rng, prompt)

    return ScriptedBackend(script)


def example_config(example: Example) -> Config:
    """The configuration of ``example``, for a scripted model."""
    settings = {
        "rollouts": {"group_size": 2, "max_tokens": 4096},
        "policy": {"max_context": 1 << 20},
        "run": {"dir": "unused"},
    }
    return load_config(
        ROOT / "examples" / example.folder / "lightning.yaml", overrides=[*_flat(settings), *example.overrides]
    )


def random_config(program: str, tools: str) -> Config:
    """The configuration of a program of `tests.integrations.random_tools`. ``tools``: ``live`` or ``recorded``."""
    names = "live" if tools == "live" else sorted(random_tools.TOOLS)
    return load_config(
        {
            "agent": f"tests.integrations.random_tools:{random_tools.PROGRAMS[program].__name__}",
            "tasks": {"train": {"source": "tests.integrations.random_tools:tasks", "args": {"count": 1000}}},
            "agents": {"train": sorted(random_tools.AGENTS)},
            "policy": {"model": "scripted", "max_context": 1 << 20},
            "credit": {"rewards": "counterfactual"},
            "rollouts": {"group_size": 2, "max_tokens": 4096, "forks": {"tools": names}},
            "run": {"dir": "unused"},
        }
    )


def measure(
    config: Config, answer: Answer, points: int, forked: Collection[str] | None = None, *, batch: int = 50
) -> Found:
    """Fork the calls of as many rollouts as have ``points`` calls.

    ``forked``: agents whose calls are; None: those in the configuration. ``batch``: tasks that are run at once.
    """
    backend = scripted(answer)
    chats = dict.fromkeys(backend.models, Chat(backend.tokenizer))
    with (
        capturing(config),
        open_agents(config, load_agent(config), backend, chats, reward_function=load_reward(config)) as agents,
    ):
        return asyncio.run(
            _measure(
                agents, config, load_tasks(config.tasks.train), points, forked or config.agents.trained_names, batch
            )
        )


async def _measure(
    agents: LocalAgents, config: Config, tasks: Sequence[Any], points: int, forked: Collection[str], batch: int
) -> Found:
    routing = routing_of(config, "train")
    rollouts: list[Rollout] = []
    jobs: list[Job] = []
    kept = None if config.rollouts.forks is None else kept_tools(config.rollouts.forks)
    for start in range(0, len(tasks), batch):
        new = [
            Job(task=t, task_id=str(t["id"]), seed=start + i, tools=kept)
            for i, t in enumerate(tasks[start : start + batch])
        ]
        for rollout in await agents.roll_out(new, routing, lambda attempts: None):
            rollouts.append(rollout)
            jobs += [
                fork_job(rollout, call, index, 0)
                for index, call in enumerate(fork_points(rollout.trace, frozenset(forked)))
            ]
        if len(jobs) >= points:
            break
    jobs = jobs[:points]
    by_call = {call.id: rollout for rollout in rollouts for call in rollout.trace.calls}
    began = time.perf_counter()
    forks = await agents.roll_out(jobs, routing, lambda attempts: None)
    seconds = time.perf_counter() - began
    dropped = [reason_to_drop(fork) for fork in forks if reason_to_drop(fork) is not None]
    changed = 0
    for fork in forks:
        assert isinstance(fork.job.recorded, Recording)
        origin = by_call[fork.job.recorded.point.id]
        changed += (fork.reward, len(fork.trace.calls)) != (origin.reward, len(origin.trace.calls))
    return Found(len(rollouts), len(jobs), len(jobs) - len(dropped), changed, Counter(dropped), seconds)


def _flat(sections: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{section}.{key}={value}" for section, values in sections.items() for key, value in values.items()]


def _installed(example: Example) -> bool:
    found = example.requires is None or importlib.util.find_spec(example.requires) is not None
    if not found:
        print(f"{example.framework:24} left out: {example.requires} is not installed")
    return found


def main() -> None:
    """Print one row for each framework."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=250, help="decision points of each framework")
    parser.add_argument("--tools", choices=["live", "recorded"], help="run the programs with random tools")
    options = parser.parse_args()
    points = options.points
    if points < 1:
        parser.error(f"--points: found {points}, expected 1 or more")
    print(f"{'framework':24} {'rollouts':>9} {'points':>7} {'restored':>9} {'changed':>8} {'ms a fork':>10}")
    total = Counter[str]()
    if options.tools is None:
        runs = {e.framework: (example_config(e), e.answer, None) for e in EXAMPLES if _installed(e)}
    else:
        # Not the calls in a tool: the tool runs again to reach them, and its own prompts are random.
        runs = {n: (random_config(n, options.tools), random_tools.script, {"clerk"}) for n in random_tools.PROGRAMS}
    for framework, (config, answer, forked) in runs.items():
        found = measure(config, answer, points, forked)
        print(
            f"{framework:24} {found.rollouts:9} {found.points:7} {found.restored:9} {found.changed:8} "
            f"{1000 * found.seconds / found.points:10.0f}",
            flush=True,
        )
        total.update(points=found.points, restored=found.restored)
        for reason, number in found.reasons.most_common(3):
            print(f"    dropped {number}: {reason}")
    print(f"{'all':24} {'':9} {total['points']:7} {total['restored']:9}")


if __name__ == "__main__":
    main()
