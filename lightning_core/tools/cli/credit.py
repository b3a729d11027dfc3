"""``lightning-rl credit``: recomputes a run's credit with other rules and compares them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError
from lightning_core.tools import exits
from lightning_core.tools.cli.numbers import whole
from lightning_core.tools.cli.trace import as_run_folder

if TYPE_CHECKING:
    from lightning_core.config import Config
    from lightning_core.credit import CreditRules

_SETTING = re.compile(r"credit\.|policies\.[^=]+\.credit\.|rollouts\.forks=null$")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("config", metavar="RUN", help="a run's folder, such as runs/latest")
    parser.add_argument("--rule", metavar="NAME", help="reward rule; short for credit.rewards=NAME")
    parser.add_argument(
        "--step", metavar="N", type=whole(1), help="only the rollouts of this step, from 1 (default: all)"
    )
    parser.add_argument(
        "--calls", metavar="N", type=whole(0), default=5, help="list the N calls that change most (default: 5)"
    )


def credit(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    folder = as_run_folder(options.config)
    if folder is None:
        from lightning_core.records.run_folder.runs import other_runs

        path = Path(options.config)
        state, others = ("is a file", "") if path.exists() else ("does not exist", other_runs(path))
        raise ConfigError(f"{options.config!r} {state}; expected a run's folder, such as runs/latest{others}")
    overrides = [*([f"credit.rewards={options.rule}"] if options.rule else []), *options.overrides]
    unsupported = next((text for text in overrides if not _SETTING.match(text)), None)
    if unsupported is not None:
        raise ConfigError(
            f"{unsupported!r}: recorded rollouts cannot be reconfigured; expected settings under credit, or rollouts.forks=null for rules "
            "without forks"
        )
    from lightning_core.records.run_folder.configs import config_of_step, load_recorded

    _rules(load_recorded(folder / "config.yaml", overrides))
    from lightning_core.records.store import Store
    from lightning_core.signals.information_gain.gains import ANSWER_LOGPROBS
    from lightning_core.signals.information_gain.section import NEED
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.credit_report import make_report
    from lightning_core.tools.runs.recredit import credited_steps, recredit

    with Store(folder / "store.db", read_only=True) as store:
        steps = credited_steps(store)
        if options.step is not None:
            if options.step not in steps:
                raise ConfigError(f"--step {options.step}: the run has credit for steps {_range(steps)}")
            steps = [options.step]
        files = {step: config_of_step(folder, step) for step in steps}
        configs = {file: load_recorded(file, overrides) for file in dict.fromkeys(files.values())}
        rules = {file: _rules(config) for file, config in configs.items()}
        needing = next(
            (r.reward_rule.name for named in rules.values() for r in named.values() if NEED in r.reward_rule.needs),
            None,
        )
        if needing is not None and not store.has_arrays(ANSWER_LOGPROBS):
            raise ConfigError(
                f"rewards: {needing} needs the probabilities of the tasks' answers, which this run did not record; train with "
                "credit.information_gain"
            )
        changes = [change for step in steps for change in recredit(store, step, configs[files[step]])]
    if not changes:
        raise ConfigError(f"the run {str(folder)!r} has no credited calls yet")
    show(make_report(changes, rules[files[steps[-1]]], len(steps), options.calls))
    return exits.OK


def _rules(config: Config) -> Mapping[str, CreditRules]:
    """The rules of each policy. Raises `ConfigError` if one cannot be computed again."""
    from lightning_core.config.build_rules import policy_rules

    rules = policy_rules(config)
    if any(r.needs_values for r in rules.values()):
        raise ConfigError(
            f"rewards: {config.credit.rewards} needs a critic's values, which are available in training only"
        )
    return rules


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"
