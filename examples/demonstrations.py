"""Records how an agent would solve its tasks if its model knew the answers, for supervised fine-tuning.

The agent runs as in training, on its training tasks. A function of the task and the prompt returns the responses of all its agents::

    python -m examples.demonstrations examples/text_to_sql/spider.yaml examples.text_to_sql.spider:gold_response gold.jsonl --last 600
    lightning-rl sft gold.jsonl -c examples/text_to_sql/spider.yaml run.name=warm

The traces have messages. `lightning-rl sft` renders them with the policy's own chat template.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_core import load_config, reward
from lightning_core.config.imports import import_callable
from lightning_core.errors import ConfigError, LightningError, describe
from lightning_core.otel import spans_to_otlp
from lightning_core.propagation import ProgramResult
from lightning_core.rollouts.entry_points import load_agent
from lightning_core.rollouts.tasks import training_tasks
from lightning_core.testing import open_playground

Respond = Callable[[Mapping[str, Any], str], str]
"""The response to a prompt, from the task and the prompt's text in ChatML."""


async def record(
    solve: Callable[[Any], Any], tasks: Sequence[Mapping[str, Any]], respond: Respond, train: Sequence[str], path: Path
) -> list[float | None]:
    """Run ``solve`` on each task; write the traces to ``path``, a line of OTLP/JSON each. Returns the rewards.

    Tasks whose agent or ``respond`` fails are left out; the errors are printed.

    ``train``: the names of the agents that will learn, as in ``agents.train``. A rollout's reward is the number that ``solve`` returns,
    or those that it passes to `reward`; None: there is none.
    """
    current: Mapping[str, Any] = {}
    rewards: list[float | None] = []

    def answer(prompt: str) -> str:
        text = respond(current, prompt)
        if not isinstance(text, str):
            raise TypeError(f"respond returned {text!r} for the task {current.get('id')!r}, expected text")
        return text

    with path.open("w", encoding="utf-8") as file, open_playground(answer) as opened:
        for current in tasks:
            try:
                with opened.rollout(current, train=train) as run:
                    solution = solve(current)
                    value = await solution if inspect.isawaitable(solution) else solution
                    if value is not None and not isinstance(value, ProgramResult):
                        reward(float(value))
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - any error of the agent or of `respond`
                print(f"task {current.get('id')!r} is left out: {describe(error)}", file=sys.stderr)
                continue
            rewards.append(run.trace.reward)
            file.write(json.dumps(spans_to_otlp(run.spans)) + "\n")
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("respond", help="module:function of the task and the prompt's text")
    parser.add_argument("out", type=Path)
    parser.add_argument("--last", type=positive, help="only this many tasks, from the end of the training tasks")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    try:
        print(_recorded(options))
    except LightningError as error:
        sys.exit(f"demonstrations: {error}")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text}, expected a whole number from 1 on")
    return int(text)


def _recorded(options: argparse.Namespace) -> str:
    config = load_config(options.config, options.overrides)
    tasks = training_tasks(config)[-options.last if options.last else 0 :]
    respond = import_callable(options.respond, key="respond")
    rewards = asyncio.run(record(load_agent(config), tasks, respond, config.agents.trained_names, options.out))
    known = [value for value in rewards if value is not None]
    solved = f"{sum(value >= config.eval.solved for value in known)} of {len(tasks)} tasks solved"
    failed = f", {len(tasks) - len(rewards)} failed" if len(rewards) < len(tasks) else ""
    without = f", {len(rewards) - len(known)} without a reward" if len(known) < len(rewards) else ""
    return f"{solved}{failed}{without}; traces in {options.out}"


if __name__ == "__main__":
    main()
