"""``lightning-rl doctor``: checks the environment, a configuration and its agent before training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError, plural, visible
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import agents_output_apart

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_core.tools.doctor import Finding

_STYLES = {"ok": "green", "info": "", "warning": "yellow", "problem": "bold red"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="YAML file; without it, only the environment is checked"
    )
    parser.add_argument(
        "--tasks", metavar="N", type=int, default=2, help="number of training tasks to run (default: %(default)s)"
    )
    parser.add_argument(
        "--attempts", metavar="N", type=int, default=4, help="rollouts of each task (default: %(default)s)"
    )
    parser.add_argument("--no-model", action="store_true", help="run the agent with a scripted policy only")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def doctor(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code: 1 if there is a problem."""
    if options.config is None:
        if options.overrides:
            raise ConfigError("key=value is for a configuration; pass its file: lightning-rl doctor CONFIG key=value")
        from lightning_core.tools.doctor import examine_environment

        return _report(examine_environment(), as_json=options.json)
    for option, least in (("tasks", 1), ("attempts", 2)):
        if (value := getattr(options, option)) < least:
            raise ConfigError(f"--{option} {value}: expected {least} or more")
    from lightning_core.config import load_config

    config = load_config(options.config, options.overrides, needs=("agent", "tasks.train"))
    from lightning_core.observers.progress import show_progress
    from lightning_core.tools.doctor import examine, examine_environment

    progress = show_progress()
    try:
        with agents_output_apart():
            findings = examine_environment(config)
            findings += examine(
                config, count=options.tasks, attempts=options.attempts, model=not options.no_model, progress=progress
            )
    finally:
        progress.close()
    return _report(findings, as_json=options.json)


def _report(findings: Iterable[Finding], *, as_json: bool) -> int:
    findings = list(findings)
    problems = sum(f.level == "problem" for f in findings)
    if as_json:
        json.dump([asdict(f) for f in findings], sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        from rich.text import Text

        from lightning_core.tools.cli.console import show

        warnings = sum(f.level == "warning" for f in findings)
        sections = dict.fromkeys(f.section for f in findings)
        for section in sections:
            show(Text(section, style="bold"), _table([f for f in findings if f.section == section]), "")
        show(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}. Each check: lightning-rl docs doctor")
    return exits.ERROR if problems else exits.OK


def _table(findings: Iterable[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for f in findings:
        table.add_row(Text(f"  {f.level}", style=_STYLES[f.level]), f.name, visible(f.found))
        if f.advice:
            table.add_row("", "", f"→ {visible(f.advice)}")
    return table
