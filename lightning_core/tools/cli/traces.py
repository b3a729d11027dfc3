"""``lightning-rl traces``: imports traces of other systems, and exports rollouts to their formats."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path

from lightning_core.errors import ConfigError, plural
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.numbers import finite
from lightning_core.tools.cli.trace import PHASES

SOURCES = ("otlp", "atif", "phoenix", "langsmith", "mlflow", "logfire", "openai", "langfuse")
TARGETS = ("otlp", "atif", "openai")
"""Names of the formats; the lists in `tools.interchange` have their code, which is not imported for ``--help``."""


def add_options(parser: argparse.ArgumentParser) -> Collection[argparse.ArgumentParser]:
    """Add the command's options to ``parser``; returns the parsers of its actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    read = actions.add_parser(
        "import", help="read traces of tracing products into a folder, for trace, sft and traces export"
    )
    read.add_argument(
        "sources", metavar="FILE", nargs="*", help="files of one product (JSON, JSON lines, Parquet, .pb), or folders"
    )
    read.add_argument("--from", dest="format", choices=SOURCES, help="their format (default: recognized)")
    read.add_argument(
        "--url",
        metavar="URL",
        help="a Langfuse server to read in place of files; keys: LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY",
    )
    read.add_argument(
        "--since", metavar="TIME", help="of --url: only what began at TIME or later, such as 2026-11-01T00:00:00Z"
    )
    read.add_argument("-o", "--output", metavar="FOLDER", default="traces", help="where to (default: %(default)s)")
    read.add_argument(
        "--reward", metavar="NAME", help="the scores with this name become rewards (default: no score does)"
    )
    read.add_argument("--agent-key", metavar="KEY", help="the metadata key with the name of the agent of a call")
    read.add_argument(
        "--trace-key", metavar="KEY", help="of OpenAI's completions: those with the same metadata KEY are one trace"
    )

    write = actions.add_parser("export", help="write rollouts of runs or of traces in another format")
    write.add_argument(
        "sources", metavar="SOURCE", nargs="+", help="a run's folder, a file of traces, or a folder of such files"
    )
    write.add_argument("--as", dest="format", choices=TARGETS, required=True, help="the format to write")
    write.add_argument(
        "-o", "--output", metavar="PATH", required=True, help="a file that ends in .jsonl, or a folder (otlp, atif)"
    )
    write.add_argument(
        "--agents", metavar="NAMES", help="only calls of these agents: names or patterns, separated by commas"
    )
    write.add_argument("--min-reward", metavar="X", type=finite, help="only rollouts with at least this reward")
    write.add_argument(
        "--phase",
        choices=(*PHASES, "all"),
        help="of a run: only rollouts of this phase (default: all; with --as openai, train)",
    )
    return actions.choices.values()


def traces(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    return {"import": _import, "export": _export}[options.action](options)


def _import(options: argparse.Namespace) -> int:
    from lightning_core.tools.interchange.importing import ImportOptions, import_traces

    if bool(options.sources) == (options.url is not None):
        raise ConfigError("expected either files of traces, or --url with a Langfuse server")
    if options.url is not None and options.format not in (None, "langfuse"):
        raise ConfigError(f"--url reads a Langfuse server, but --from is {options.format!r}. Remove one of them")
    if options.since is not None and options.url is None:
        raise ConfigError("--since is for --url; files are read whole. Remove it")
    summary = import_traces(
        options.sources,
        Path(options.output),
        ImportOptions(
            format=options.format,
            reward=options.reward,
            agent_key=options.agent_key,
            trace_key=options.trace_key,
            url=options.url,
            since=options.since,
        ),
    )
    if summary.file is None:
        say(f"{summary.format}: no new traces")
    else:
        say(f"{summary.format}: {plural(summary.traces, 'trace')} in {summary.file}, {summary.failed} of them failed")
        _show("agent", summary.calls, "calls")
        _show("model", summary.models, "calls")
    if summary.file is not None and summary.scores and options.reward is None:
        say("\nNo score is a reward. Choose one with --reward NAME, and import into an empty folder:")
        _show("score", summary.scores, "traces")
    elif options.reward is not None and summary.file is not None:
        say(f"\n{plural(summary.rewarded, 'trace')} with a reward")
    _show("left out", summary.left_out, "number")
    return exits.OK


def _export(options: argparse.Namespace) -> int:
    from lightning_core.tools.interchange.exporting import ExportOptions, describe_export, export_traces

    agents = [name.strip() for name in (options.agents or "").split(",") if name.strip()]
    summary = export_traces(
        options.sources,
        ExportOptions(
            format=options.format,
            output=Path(options.output),
            agents=agents,
            min_reward=options.min_reward,
            phase=options.phase,
        ),
    )
    say(f"{describe_export(summary)}, in {options.output}")
    _show("left out", summary.left_out, "number")
    return exits.OK


def _show(title: str, counts: Mapping[str, int], unit: str) -> None:
    from lightning_core.tools.cli.console import Column, make_table, show

    if counts:
        rows = [(name or "(none)", str(number)) for name, number in counts.items()]
        show("", make_table([Column(title, cut=True), Column(unit, "right")], rows))
