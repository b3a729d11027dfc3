"""``lightning-rl improve``: from a provider's model to a trained one, as one command."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError, os_problem
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.numbers import finite, whole

if TYPE_CHECKING:
    from lightning_core.config import Config

_REPORT = "report.md"
"""Beside it, `Improvement.write` writes the same as JSON."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file; see docs/configuration.md")
    parser.add_argument("--model", metavar="NAME", help="the provider's model whose score is to be reached")
    parser.add_argument("--prices", metavar="FILE", help="a YAML file with prices of models")
    parser.add_argument(
        "--traces", metavar="SOURCE", action="append", default=[], help="runs or traces for the warm start; repeatable"
    )
    parser.add_argument(
        "--teach",
        metavar="N",
        type=whole(0),
        default=0,
        help="with --model: let it solve N training tasks for the warm start, if its terms allow it (default: 0)",
    )
    parser.add_argument(
        "--skip", metavar="STAGE", action="append", default=[], help="prompts, warm or train; repeatable"
    )
    budget = parser.add_argument_group("budget")
    budget.add_argument(
        "--minutes",
        metavar="N",
        type=finite,
        help="after which no stage begins, and training ends (default: trainer.steps ends it)",
    )
    budget.add_argument(
        "--usd",
        metavar="X",
        type=finite,
        help="for the provider's model; limits --teach, not the first measurement; needs --prices",
    )
    budget.add_argument("--tokens", metavar="N", type=whole(1), help="that training samples (trainer.token_budget)")


def improve(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from lightning_core.config import load_config
    from lightning_core.records.atomic import write_atomically
    from lightning_core.records.run_folder.lock import running
    from lightning_core.records.run_folder.runs import other_runs
    from lightning_core.records.statistics.prices import read_prices
    from lightning_core.rollouts.interrupts import interruptible
    from lightning_core.tools.improve.pipeline import ImprovementLimits, ImprovementPipeline
    from lightning_core.tools.improve.report import improvement_of, report_text
    from lightning_core.tools.improve.stage import StageFailed
    from lightning_core.tools.runs.sources import path_and_phase

    config = load_config(options.config, options.overrides, needs=("agent", "tasks.train", "tasks.eval"))
    skip = _skipped(options.skip)
    if options.teach and options.model is None:
        raise ConfigError("--teach requires --model, the model that solves the tasks")
    if missing := [path for source in options.traces if not (path := path_and_phase(source)[0]).exists()]:
        others = other_runs(missing[0])
        raise ConfigError(f"--traces {str(missing[0])!r} does not exist; expected a run's folder, or traces{others}")
    for name in ("minutes", "usd"):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise ConfigError(f"--{name} is {value:g}; expected a number above 0")
    prices_file = options.prices or config.prices
    prices = read_prices(prices_file)
    if options.usd is not None and options.model is None:
        raise ConfigError("--usd limits what the provider's model costs: pass --model too")
    if options.usd is not None and not prices:
        raise ConfigError("--usd requires prices of models: --prices FILE, or the setting prices")
    _check_tasks(config)
    folder = Path(config.run.dir) / time.strftime("improve-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    pipeline = ImprovementPipeline(
        config=config,
        file=options.config,
        overrides=[text for text in options.overrides if not text.startswith(("run.dir=", "run.name="))],
        folder=folder,
        limits=ImprovementLimits(minutes=options.minutes, usd=options.usd, tokens=options.tokens),
        prices=prices,
        prices_file=prices_file,
        model=options.model,
        teach=options.teach,
        traces=options.traces,
        skip=skip,
        say=say,
    )
    report, command = folder / _REPORT, _command(options)

    def write() -> None:
        found = improvement_of(pipeline, command)
        try:
            found.write(folder)
            write_atomically(report, report_text(found))
        except OSError as error:  # such as a full disk: the stages go on
            say(f"lightning-rl: the report {str(report)!r} cannot be written: {os_problem(error)}", error=True)

    pipeline.on_change = write
    code = exits.OK
    say(f"follow it: lightning-rl view {folder}")
    with running(folder):
        try:
            with interruptible():
                pipeline.run()
        except StageFailed as error:
            say(f"lightning-rl: {error}", error=True)
            pipeline.problem, code = str(error), error.code
        except KeyboardInterrupt:
            pipeline.problem = "interrupted"
            raise
        finally:
            write()
            say(f"\nreport: {report}\nruns: lightning-rl view {folder}")
    if not code:
        say(report_text(improvement_of(pipeline, command)).partition("## Commands")[0].strip())
    return code


def _check_tasks(config: Config) -> None:
    """Raise `ConfigError` if tasks cannot be read, or are too few to compare stages by: before a stage takes time and money."""
    from lightning_core.records.statistics.intervals import MIN_TASKS
    from lightning_core.rollouts.tasks import held_out_tasks, training_tasks

    training_tasks(config)
    number = len(held_out_tasks(config))
    if number < MIN_TASKS:
        raise ConfigError(
            f"stages are compared by held-out tasks: found {number}, expected {MIN_TASKS} or more. Add tasks to tasks.eval, or raise "
            "eval.tasks"
        )


def _command(options: argparse.Namespace) -> str:
    """The command line that gives ``options``."""
    words = ["lightning-rl", "improve", options.config, *options.overrides]
    for name in ("model", "prices", "minutes", "usd", "tokens"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    words += [word for source in options.traces for word in ("--traces", source)]
    words += [word for stage in options.skip for word in ("--skip", stage)]
    return shlex.join([*words, *(["--teach", str(options.teach)] if options.teach else [])])


def _skipped(names: list[str]) -> frozenset[str]:
    from lightning_core.tools.runs.improvement import STAGES

    known = {stage.partition(" ")[0]: stage for stage in STAGES}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--skip {unknown[0]}: expected one of {', '.join(known)}")
    return frozenset(known[name] for name in names)
