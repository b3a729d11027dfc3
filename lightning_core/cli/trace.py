"""``lightning-rl trace``: shows a run's rollouts, stored traces, or one task run now."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from lightning_core.errors import ConfigError, LightningError

TRACE_FILES = (".json", ".jsonl", ".pb")
"""File name endings of stored traces; any other file is a configuration."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "config",
        metavar="RUN|TRACES|CONFIG",
        help="a run's folder such as runs/latest, a file of traces (.json, .jsonl, .pb), or a YAML file",
    )
    parser.add_argument(
        "--rollout", metavar="N", help="number or id of the rollout to show; without it, the newest are listed"
    )
    parser.add_argument(
        "--last", metavar="N", type=int, default=50, help="number of rollouts to list (default: %(default)s)"
    )
    parser.add_argument("--task", metavar="ID", help="with CONFIG: the task to run (default: the first)")
    parser.add_argument("--full", action="store_true", help="show whole prompts and responses")


def trace(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    run = as_run_folder(options.config)
    stored = options.config.endswith(TRACE_FILES)
    if run is None and not stored:
        if options.rollout is not None:
            raise ConfigError(
                f"--rollout is for a run's folder or a file of traces; {options.config!r} is a configuration: use --task"
            )
        return _run_task(options)
    if options.last < 1:
        raise ConfigError(f"--last {options.last}: expected a number of rollouts, from 1")
    if options.overrides or options.task is not None:
        raise ConfigError(
            "--task and key=value are for a configuration; "
            "recorded rollouts cannot be reconfigured; select one with --rollout"
        )
    if run is None:
        _show_stored(Path(options.config), options.rollout, options.full, options.last)
    else:
        _show_run(run / "store.db", options.rollout, options.full, options.last)
    return 0


def as_run_folder(path: str) -> Path | None:
    """``path`` as a run's folder; None for a file. Raises `ConfigError` for any other folder."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{path!r} is a folder, but not a run's: expected config.yaml and store.db in it")
    return folder


def _run_task(options: argparse.Namespace) -> int:
    from lightning_core.config import load_config

    config = load_config(options.config, options.overrides, needs=("agent",))
    from lightning_core.loop import evaluate
    from lightning_core.rollouts.tasks import load_tasks

    key, source = (
        ("tasks.eval", config.tasks.eval) if config.tasks.train is None else ("tasks.train", config.tasks.train)
    )
    if source is None:
        raise ConfigError("tasks.train and tasks.eval are missing; set one, to have a task to run the agent on")
    tasks = load_tasks(source, key=key)
    chosen = tasks[0] if options.task is None else next((t for t in tasks if t["id"] == options.task), None)
    if chosen is None:
        raise ConfigError(f"--task: {key} has no task with the id {options.task!r}; the first is {tasks[0]['id']!r}")
    with tempfile.TemporaryDirectory(prefix="lightning-trace-") as scratch:
        store, failure = Path(scratch) / "store.db", None
        try:
            evaluate(config=config, folder=Path(scratch), tasks=[chosen])
        except LightningError as error:
            # For example an unknown agent name: the recorded spans show the names to choose from.
            failure = error
        last = last_rollout(store)
        status = None if last is None else _show_run(store, str(last), options.full)
    if failure is not None:
        raise failure
    return 0 if status == "ok" else 1


def last_rollout(path: Path) -> int | None:
    """The ordinal of the last rollout in the store at ``path``; None if there is none."""
    from lightning_core.records.store import Store

    if not path.is_file():
        return None
    with Store(path, read_only=True) as store:
        records = store.rollouts(last=1)
    return records[-1].ordinal if records else None


def _show_run(store_path: Path, rollout: str | None, full: bool, last: int = 1) -> str | None:
    """Show one rollout, and return its status; without ``rollout``, list the ``last`` ones."""
    from lightning_core.cli.console import show
    from lightning_core.cli.ledger import format_ledger, format_names
    from lightning_core.cli.tree import make_rollout_table, make_tree
    from lightning_core.records.ledger import trace_ledger
    from lightning_core.records.paths import ambiguous_paths
    from lightning_core.records.store import Store

    with Store(store_path, read_only=True) as store:
        if rollout is None:
            records = store.rollouts(last=last)
            paths = ambiguous_paths([store.trace(record.id) for record in records[-1:]])
            ledger, hint = store.ledger(), _hint(len(records), store.count())
            show(make_rollout_table(records), "", format_ledger(ledger), "", format_names(ledger, paths), hint)
            return None
        try:
            record = store.rollout(rollout if (number := _number(rollout)) is None else number)
            found = store.trace(record.id)
        except (LookupError, ValueError) as error:
            raise ConfigError(f"--rollout {rollout}: {error}") from None
        credit = store.credit(rollout=record.id)
    ledger = trace_ledger(found, {row.agent for row in credit})
    names = format_names(ledger, ambiguous_paths([found]))
    show(make_tree(found, record, credit, full=full), "", format_ledger(ledger), "", names)
    return record.status


def _show_stored(path: Path, rollout: str | None, full: bool, last: int) -> None:
    from lightning_core.cli.console import show
    from lightning_core.cli.ledger import format_ledger, format_names
    from lightning_core.cli.tree import make_trace_table, make_tree
    from lightning_core.otel import read_traces
    from lightning_core.records.ledger import Ledger, trace_ledger
    from lightning_core.records.paths import ambiguous_paths

    try:
        traces = read_traces(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no traces could be read from {str(path)!r}: {error}") from None
    if rollout is None:
        ledger = Ledger()
        for found in traces:
            ledger.update(trace_ledger(found))
        listed = list(enumerate(traces, 1))[-last:]
        names, hint = format_names(ledger, ambiguous_paths(traces)), _hint(len(listed), len(traces))
        show(make_trace_table(listed), "", format_ledger(ledger), "", names, hint)
        return
    found = next((t for n, t in enumerate(traces, 1) if n == _number(rollout) or t.rollout == rollout), None)
    if found is None:
        raise ConfigError(f"--rollout {rollout}: expected a number from 1 to {len(traces)}, or a trace id")
    ledger = trace_ledger(found)
    show(make_tree(found, full=full), "", format_ledger(ledger), "", format_names(ledger, ambiguous_paths([found])))


def _hint(listed: int, count: int) -> str:
    """The options to go on with; the number of rollouts, unless all are listed."""
    newest = f"the newest {listed} of {count} rollouts; list more: --last N; " if listed < count else ""
    return f"{newest}show one: --rollout N"


def _number(rollout: str) -> int | None:
    return int(rollout) if rollout.isdecimal() and len(rollout) < 32 else None
