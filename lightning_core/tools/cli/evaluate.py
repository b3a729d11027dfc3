"""``lightning-rl eval`` and ``lightning-rl baseline``: evaluate the policy, or a provider's model in its place, on held-out tasks."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError, plural
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.numbers import whole
from lightning_core.tools.cli.trace import as_run_folder, last_rollout

if TYPE_CHECKING:
    from lightning_core.records.results import Evaluation
    from lightning_core.records.store import Store

_BASELINE = "baseline"


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``eval`` to ``parser``."""
    parser.add_argument("config", metavar="CONFIG|RUN", help="a YAML file, or a run's folder")
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="with RUN: such as step-000010, or best (default: the newest)"
    )


def add_baseline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``baseline`` to ``parser``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file; see docs/configuration.md")
    parser.add_argument(
        "--model", metavar="NAME", help="the model that answers the trained agents (default: eval.model)"
    )
    parser.add_argument("--tasks", metavar="N", type=whole(1), help="number of held-out tasks (default: eval.tasks)")
    parser.add_argument("--samples", metavar="K", type=whole(1), help="rollouts per task (default: eval.samples)")
    parser.add_argument(
        "--prices", metavar="FILE", help="a YAML file with prices of models (default: the setting prices)"
    )
    parser.add_argument(
        "--recorded",
        metavar="PATH",
        action="append",
        default=[],
        help="recorded traces or a run whose responses answer in place of the providers; may be repeated",
    )


def baseline(options: argparse.Namespace) -> int:
    """Run ``lightning-rl baseline``; returns its exit code."""
    values = {"eval.model": options.model, "eval.tasks": options.tasks, "eval.samples": options.samples}
    values["prices"] = options.prices
    given = (f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None)
    options.overrides = [*options.overrides, *given]
    if as_run_folder(options.config) is not None:
        raise ConfigError(f"expected a configuration, found the run {options.config!r}; pass its config.yaml")
    options.checkpoint = None
    return _evaluate(options, options.recorded)


def evaluate(options: argparse.Namespace) -> int:
    """Run ``lightning-rl eval``; returns its exit code."""
    from lightning_core.records.run_folder.runs import missing_run

    if (missing := missing_run(Path(options.config))) is not None:
        raise ConfigError(f"{missing}. Expected a run's folder or a configuration file")
    return _evaluate(options)


def _evaluate(options: argparse.Namespace, recorded: Sequence[str] = ()) -> int:
    """``recorded``: the sources of the responses that answer in place of the providers; empty: the providers answer."""
    from lightning_core.config import dump_config, load_config
    from lightning_core.loop import evaluate
    from lightning_core.observers.progress import show_progress
    from lightning_core.records.report import Summary
    from lightning_core.records.run_folder.checkpoints import checkpoint_step, choose_checkpoint
    from lightning_core.records.run_folder.configs import config_of_step
    from lightning_core.records.run_folder.folder import create_folder
    from lightning_core.records.run_folder.remove import removed_if_unused
    from lightning_core.records.statistics.measured import measure
    from lightning_core.records.statistics.prices import read_prices
    from lightning_core.records.store import Store
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.ledger import format_ledger
    from lightning_core.tools.cli.measured import make_evaluation
    from lightning_core.tools.replay.responses import read_responses
    from lightning_core.tools.replay.server import replaying

    run = as_run_folder(options.config)
    checkpoint = None if run is None else choose_checkpoint(run, options.checkpoint)
    source = options.config
    if run is not None and checkpoint is not None:
        source = config_of_step(run, checkpoint_step(checkpoint))
    config = load_config(source, options.overrides, needs=("agent", "tasks.eval"))
    if options.command == _BASELINE and config.eval.model is None:
        raise ConfigError(
            "expected the model to measure, such as the one in production: --model NAME, or the setting eval.model"
        )
    prices = read_prices(config.prices)
    responses = None
    if recorded:
        ignored = config.rollouts.ignore_hosts
        responses = read_responses(recorded, model=str(config.eval.model), ignore_hosts=ignored)
        beside = "" if config.policy.upstream is None else ", and of policy.upstream"
        say(f"{plural(len(responses), 'recorded response')} answer in place of the providers{beside}")
    providers = nullcontext(config) if responses is None else replaying(config, responses)
    if run is None:
        if options.checkpoint is not None:
            raise ConfigError(f"--checkpoint requires a run's folder; {options.config!r} is not one")
        folder = Path(config.run.dir) / time.strftime(f"{options.command}-%Y%m%d-%H%M%S")
        create_folder(folder, dump_config(config))
    else:
        folder = run
    options.folder = folder
    before, began, progress = last_rollout(folder / "store.db") or 0, time.monotonic(), show_progress()
    try:
        with removed_if_unused(folder) if run is None else nullcontext(), providers as used:
            result = evaluate(config=used, folder=folder, checkpoint=checkpoint, progress=progress)
    finally:
        progress.close()
    model = config.eval.model or str(checkpoint or config.policy.model)
    where = f", as recorded in {', '.join(recorded)}" if recorded else ""
    say(f"model in place of the policy: {model}{where}" if config.eval.model else f"policy: {model}")
    with Store(folder / "store.db", read_only=True) as store:
        step = next((r.step for r in store.rollouts(phase="eval_manual", last=1)), 0)
        measured = measure(
            store,
            result.rewards,
            model=model,
            phase="eval_manual",
            step=step,
            solved=config.eval.solved,
            prices=prices,
            left_out=result.left_out,
            after=before,
        )
        measured = replace(measured, recorded_in=tuple(recorded))
        show(make_evaluation(measured))
        _show_endings(store, result, before)
        show("", format_ledger(store.ledger(after=before)), "")
        for line in () if responses is None else responses.describe_use():
            say(line)
        if run is None:
            summary = Summary(
                eval=None,
                evaluation=measured,
                steps=0,
                rollouts=0,
                tokens_sampled=store.tokens_sampled(),
                tokens_trained=0,
                wall_seconds=time.monotonic() - began,
                seed=config.run.seed,
            )
            summary.write(folder / "summary.json")
    say(f"recorded in {folder}")
    return exits.OK


def _show_endings(store: Store, result: Evaluation, before: int) -> None:
    """Print the numbers of rollouts that failed or were left out, with their first errors. ``before``: the last earlier rollout."""
    from lightning_core.records.statistics.summary import ENDINGS, count_statuses, first_error

    for number, what, name in (
        (result.failed, "failed", "failed"),
        (result.max_calls, "reached rollouts.max_calls", "max_calls"),
        (result.left_out, "left out", "left_out"),
    ):
        if number:
            error = first_error(store, ENDINGS[name], phase="eval_manual", after=before)
            statuses = count_statuses(store, name, phase="eval_manual", after=before)
            say(f"{plural(number, 'rollout')} {what}{statuses}{'' if error is None else f'; the first: {error}'}")
