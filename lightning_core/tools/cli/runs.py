"""``lightning-rl runs``: lists, compares and removes runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError, visible
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.numbers import whole

if TYPE_CHECKING:
    from lightning_core.records.run_folder.runs import RunInfo

_ACTIONS = ("list", "compare", "remove")


def with_action(arguments: Sequence[str]) -> Sequence[str]:
    """``arguments`` with ``list`` after ``runs`` if no other action is there: ``runs DIR`` is short for ``runs list DIR``."""
    if list(arguments[:1]) != ["runs"] or (len(arguments) > 1 and arguments[1] in (*_ACTIONS, "-h", "--help")):
        return arguments
    return ["runs", "list", *arguments[1:]]


def add_options(parser: argparse.ArgumentParser) -> Collection[argparse.ArgumentParser]:
    """Add the command's options to ``parser``; returns the parsers of its actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    listed = actions.add_parser("list", help="list the runs, the newest first; also without the word list: runs DIR")
    listed.add_argument("dir", metavar="DIR", nargs="?", default="runs", help="their folder (default: %(default)s)")
    listed.add_argument(
        "--search", metavar="TEXT", help="only runs with all words of TEXT in name, model, tags or settings"
    )
    listed.add_argument("--tag", metavar="T", action="append", default=[], help="only runs with this tag (run.tags)")
    listed.add_argument("--json", action="store_true", help="as one JSON document")

    compare = actions.add_parser("compare", help="show the settings, metrics and held-out rewards of several runs")
    compare.add_argument("runs", metavar="RUN", nargs="+", help="names of runs in the folder, or paths")
    compare.add_argument(
        "--tasks",
        metavar="N",
        type=whole(0),
        default=5,
        help="list the N tasks that differ most (default: %(default)s)",
    )

    compare.add_argument(
        "--prices",
        metavar="FILE",
        help="a YAML file with prices of models (default: the setting prices of the first run with one)",
    )

    remove = actions.add_parser("remove", help="delete runs with everything in their folders")
    remove.add_argument("names", metavar="NAME", nargs="+", help="names of runs in the folder")
    remove.add_argument("--yes", action="store_true", help="do not ask")

    for action in (compare, remove):
        action.add_argument("--dir", default="runs", help="the folder of the runs (default: %(default)s)")
    return actions.choices.values()


def runs(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    return {"list": _list, "compare": _compare, "remove": _remove}[options.action](options)


def _list(options: argparse.Namespace) -> int:
    from lightning_core.records.run_folder.runs import list_runs
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.run_tables import make_run_table, run_document

    everything = list_runs(Path(options.dir))
    matching = [run for run in everything if _matches(run, options.search, options.tag)]
    if options.json:
        print(json.dumps([run_document(run) for run in matching], indent=2, allow_nan=False))
    elif matching:
        show(make_run_table(matching))
    else:
        say(f"no run in {options.dir!r}" + (f" matches; it has {len(everything)}" if everything else ""))
    return exits.OK


def _matches(run: RunInfo, text: str | None, tags: Sequence[str]) -> bool:
    from lightning_core.tools.runs.config_rows import matches

    return set(tags) <= set(run.tags) and matches(run, text or "")


def _compare(options: argparse.Namespace) -> int:
    from lightning_core.records.run_folder.runs import read_run
    from lightning_core.records.statistics.prices import read_prices
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.run_tables import make_comparison

    folders = list(dict.fromkeys(_find(options.dir, text).resolve() for text in options.runs))
    if len(folders) < 2:
        raise ConfigError(f"found one run, {folders[0].name!r}; expected two or more different ones")
    found = [read_run(folder) for folder in folders]
    configured = (run.config.get("prices") for run in found)
    prices = read_prices(options.prices or next((path for path in configured if isinstance(path, str)), None))
    show(make_comparison(found, options.tasks, prices))
    return exits.OK


def _find(parent: str, text: str) -> Path:
    from lightning_core.records.run_folder.runs import is_run, run_folders

    for folder in (Path(text), Path(parent, text)):
        if is_run(folder):
            return folder
    if not Path(parent).is_dir() or next(run_folders(Path(parent)), None) is None:
        raise ConfigError(
            f"no run {text!r}, neither as a path nor in {parent!r}, where there is no run yet: start one with `lightning-rl train`, or set "
            "--dir to the folder of the runs"
        )
    raise ConfigError(f"no run {text!r}, neither as a path nor in {parent!r}; `lightning-rl runs {parent}` lists them")


def _remove(options: argparse.Namespace) -> int:
    from lightning_core.records.run_folder.remove import check_removable, remove_runs

    folders = check_removable(Path(options.dir), options.names)
    names = visible(", ".join(folder.name for folder in folders), lines=False)
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"standard input is not a terminal to ask on: add --yes to remove {names}")
        if input(f"Remove {names} with all checkpoints from {options.dir}? [y/N] ").strip().lower() not in ("y", "yes"):
            say("nothing was removed")
            return exits.ERROR
    remove_runs(folders)
    say(f"removed {names}")
    return exits.OK
