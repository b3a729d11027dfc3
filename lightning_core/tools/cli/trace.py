"""``lightning-rl trace``: shows a run's rollouts, stored traces, or one task run now."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError, LightningError, plural
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import agents_output_apart, say
from lightning_core.tools.cli.numbers import finite, whole

if TYPE_CHECKING:
    from lightning_core.records.store import CallCredit, RolloutRecord
    from lightning_core.trace import Trace

PHASES = ("train", "fork", "judge", "eval_before", "eval", "eval_after", "eval_manual", "eval_unfinished")
STATUSES = (
    "ok",
    "failed",
    "masked",
    "max_calls",
    "infrastructure",
    "invalid",
    "timeout",
    "overflow",
    "refused",
    "unauthorized",
    "late",
    "stream_error",
)
ORDERS = ("ordinal", "step", "task_id", "reward", "calls", "seconds")
_ONE_ROLLOUT = "--rollout selects one rollout"
_EXPECTED = (
    "a run's folder such as runs/latest, a file of traces (.json, .jsonl, .pb) or a folder of them, or a configuration "
    "(YAML)"
)
_LAST = 50
_FILTERS = ("phase", "step", "task_id", "agent", "status", "min_reward", "max_reward", "text")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "config",
        metavar="RUN|TRACES|CONFIG",
        help="a run's folder such as runs/latest, traces (.json, .jsonl, .pb) or a folder of them, or a YAML file",
    )
    parser.add_argument(
        "--rollout", metavar="N", help="number or id of the rollout to show; without it, the newest are listed"
    )
    parser.add_argument("--task", metavar="ID", help="with CONFIG: the task to run (default: the first)")
    parser.add_argument("--full", action="store_true", help="show whole prompts and responses")
    parser.add_argument("--json", action="store_true", help="one JSON document: the list, or the whole rollout")
    lists = parser.add_argument_group("which rollouts of a run to list")
    lists.add_argument("--last", metavar="N", type=whole(1), help=f"number on a page (default: {_LAST})")
    lists.add_argument("--page", metavar="K", type=whole(1), help="page K, from 1 with the newest rollouts (default)")
    lists.add_argument("--phase", choices=PHASES, help="only rollouts of this phase")
    lists.add_argument(
        "--step",
        metavar="N",
        type=whole(0),
        help="only those of step N, from 1, with the evaluation after it; 0: before training",
    )
    lists.add_argument("--task-id", metavar="ID", help="only attempts at this task")
    lists.add_argument("--agent", metavar="NAME", help="only those with a model call of this agent")
    lists.add_argument("--status", choices=STATUSES, help="only those with this status")
    lists.add_argument("--min-reward", metavar="X", type=finite, help="only those with at least this reward")
    lists.add_argument("--max-reward", metavar="X", type=finite, help="only those with at most this reward")
    lists.add_argument("--text", metavar="TEXT", help="only those with this text in a message, tool call or error")
    lists.add_argument("--sort", choices=ORDERS, default="ordinal", help="from low to high (default: as stored)")
    lists.add_argument("--reverse", action="store_true", help="sort from high to low")


def trace(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from lightning_core.records.run_folder.runs import other_runs

    stored = stored_traces(options.config)
    run = None if stored else as_run_folder(options.config)
    if not Path(options.config).exists():
        raise ConfigError(f"{options.config!r} does not exist; expected {_EXPECTED}{other_runs(Path(options.config))}")
    if run is None and not stored:
        return _run_task(options)
    if options.overrides or options.task is not None:
        raise ConfigError(
            "--task and key=value are for a configuration; "
            "recorded rollouts cannot be reconfigured; select one with --rollout"
        )
    if run is None:
        _refuse_filters(options, f"{options.config!r} has traces without a run")
        if options.rollout is not None:
            _refuse_pages(options, _ONE_ROLLOUT)
        _show_stored(options)
    elif options.rollout is None:
        _list_run(run / "store.db", options)
    else:
        _refuse_filters(options, _ONE_ROLLOUT)
        _refuse_pages(options, _ONE_ROLLOUT)
        _show_rollout(run / "store.db", options.rollout, options)
    return exits.OK


def _refuse_filters(options: argparse.Namespace, why: str) -> None:
    filters = [name for name in _FILTERS if getattr(options, name) is not None]
    filters += [name for name in ("reverse",) if options.reverse] + ["sort"] * (options.sort != "ordinal")
    if filters:
        raise ConfigError(
            f"--{filters[0].replace('_', '-')} filters or sorts the rollouts of a run's folder, but {why}"
        )


def _refuse_pages(options: argparse.Namespace, why: str) -> None:
    for name in ("last", "page"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} selects a part of the list of rollouts, but {why}")


def stored_traces(path: str) -> list[Path]:
    """The files of traces that ``path`` is or, as a folder other than a run's, has; any other file is a configuration."""
    from lightning_core.otel.reading import TRACE_FILES, trace_files
    from lightning_core.tools.runs.sources import is_run

    folder = Path(path)
    if not folder.is_dir():
        return [folder] if path.endswith(TRACE_FILES) else []
    return [] if is_run(folder) else trace_files(folder)


def as_run_folder(path: str) -> Path | None:
    """``path`` as a run's folder; None for a file. Raises `ConfigError` for any other folder."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{path!r} is a folder, but not a run's: expected config.yaml and store.db in it")
    return folder


def _run_task(options: argparse.Namespace) -> int:
    if options.rollout is not None:
        raise ConfigError(
            f"--rollout is for a run's folder or a file of traces; {options.config!r} is a configuration: use --task"
        )
    why = f"{options.config!r} is a configuration, of which one task is run"
    _refuse_filters(options, why)
    _refuse_pages(options, why)
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
            with agents_output_apart():
                evaluate(config=config, folder=Path(scratch), tasks=[chosen])
        except LightningError as error:
            # For example an unknown agent name: the recorded spans show the names to choose from.
            failure = error
        last = last_rollout(store)
        status = None if last is None else _show_rollout(store, str(last), options)
    if failure is not None:
        raise failure
    return exits.OK if status == "ok" else exits.ERROR


def last_rollout(path: Path) -> int | None:
    """The ordinal of the last rollout in the store at ``path``; None if there is none."""
    from lightning_core.records.store import Store

    if not path.is_file():
        return None
    with Store(path, read_only=True) as store:
        records = store.rollouts(last=1)
    return records[-1].ordinal if records else None


def _list_run(path: Path, options: argparse.Namespace) -> None:
    """List a page of the rollouts that match, with the requests of the listed rollouts."""
    from lightning_core.capture.agent_paths import ambiguous_paths
    from lightning_core.records.store import Store
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.ledger import format_ledger, format_names
    from lightning_core.tools.cli.trace_documents import print_document, rollout_document
    from lightning_core.tools.cli.tree import make_rollout_table
    from lightning_core.tools.runs.browse import RolloutFilter, find_rollouts
    from lightning_core.tools.runs.traces import read_trace

    filters = RolloutFilter(**{name: getattr(options, name) for name in _FILTERS})
    if not filters.is_range:
        raise ConfigError(f"--min-reward {options.min_reward:g}: expected at most --max-reward {options.max_reward:g}")
    as_stored = options.sort == "ordinal" and not options.reverse
    page, size = _page(options)
    with Store(path, read_only=True) as store:
        # As stored, the first page has the newest, which are listed in their order.
        listing = find_rollouts(
            store,
            filters,
            order=options.sort,
            descending=as_stored or options.reverse,
            limit=size,
            offset=(page - 1) * size,
        )
        records = listing.rollouts[::-1] if as_stored else listing.rollouts
        if options.json:
            print_document({"total": listing.total, "rollouts": [rollout_document(r) for r in records]})
            return
        newest = max(records, key=lambda r: r.ordinal, default=None)
        found_trace = None if newest is None else read_trace(store, newest).trace
        paths = ambiguous_paths([] if found_trace is None else [found_trace])
        ledger = store.ledger(rollouts=[r.id for r in records])
        parts = ["", format_ledger(ledger), "", format_names(ledger, paths)] if records else []
        show(make_rollout_table(records), *parts, _hint(len(records), listing.total, options))


def _show_rollout(path: Path, rollout: str, options: argparse.Namespace) -> str:
    """Show one rollout, and return its status."""
    from lightning_core.records.store import Store
    from lightning_core.tools.cli.trace_documents import print_document, trace_document
    from lightning_core.tools.cli.tree import status_text
    from lightning_core.tools.runs.traces import read_trace

    with Store(path, read_only=True) as store:
        try:
            record = store.rollout(rollout if (number := _number(rollout)) is None else number)
        except LookupError as error:
            raise ConfigError(f"--rollout {rollout}: {error}") from None
        trace, _, problem = read_trace(store, record)
        if trace is None:
            raise ConfigError(
                f"--rollout {rollout}: {problem} Its status is {status_text(record.status, record.error)}"
            )
        credit = store.credit(rollout=record.id)
    if options.json:
        print_document(trace_document(trace, record, credit))
    else:
        _show_tree(trace, record, credit, full=options.full)
    return record.status


def _show_stored(options: argparse.Namespace) -> None:
    from lightning_core.capture.agent_paths import ambiguous_paths
    from lightning_core.records.ledger import Ledger, trace_ledger
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.ledger import format_ledger, format_names
    from lightning_core.tools.cli.trace_documents import print_document, trace_document, trace_row
    from lightning_core.tools.cli.tree import make_trace_table
    from lightning_core.tools.runs.sources import list_counts, read_stored

    left_out: Counter[str] = Counter()
    traces = [read.trace for read in read_stored(Path(options.config), left_out)]
    if left_out:
        say(f"left out: {list_counts(left_out)}", error=True)
    rollout: str | None = options.rollout
    if rollout is not None:
        trace = next((t for n, t in enumerate(traces, 1) if n == _number(rollout) or t.rollout == rollout), None)
        if trace is None:
            raise ConfigError(f"--rollout {rollout}: expected a number from 1 to {len(traces)}, or a trace id")
        if options.json:
            print_document(trace_document(trace))
        else:
            _show_tree(trace, full=options.full)
        return
    page, size = _page(options)
    end = max(0, len(traces) - (page - 1) * size)
    listed = list(enumerate(traces, 1))[max(0, end - size) : end]
    if options.json:
        print_document({"total": len(traces), "traces": [trace_row(number, trace) for number, trace in listed]})
        return
    ledger = Ledger()
    for trace in traces:
        ledger.update(trace_ledger(trace))
    names, hint = format_names(ledger, ambiguous_paths(traces)), _hint(len(listed), len(traces), options)
    show(make_trace_table(listed), "", format_ledger(ledger), "", names, hint)


def _show_tree(
    trace: Trace, record: RolloutRecord | None = None, credit: Sequence[CallCredit] = (), *, full: bool
) -> None:
    from lightning_core.capture.agent_paths import ambiguous_paths
    from lightning_core.records.ledger import trace_ledger
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.ledger import format_ledger, format_names
    from lightning_core.tools.cli.tree import make_tree

    ledger = trace_ledger(trace, {row.agent for row in credit})
    names = format_names(ledger, ambiguous_paths([trace]))
    show(make_tree(trace, record, credit, full=full), "", format_ledger(ledger), "", names)


def _hint(listed: int, count: int, options: argparse.Namespace) -> str:
    """The options to go on with; the number of rollouts, unless all are listed."""
    if listed == count:
        return "show one: --rollout N" if count else "no rollout matches"
    page, size = _page(options)
    if not listed:
        return (
            f"page {page} is empty: there {'is' if count == 1 else 'are'} {plural(count, 'rollout')}, {size} on a page"
        )
    more = f"--page {page + 1} or " if page * size < count else ""
    return f"page {page}, {listed} of {plural(count, 'rollout')}; more: {more}--last N; show one: --rollout N"


def _page(options: argparse.Namespace) -> tuple[int, int]:
    """The page, and the number of rollouts on it."""
    return options.page or 1, options.last or _LAST


def _number(rollout: str) -> int | None:
    # Of 64 bits, as SQLite's integers; longer ones may be ids.
    return int(rollout) if rollout.isdecimal() and len(rollout) <= 18 else None
