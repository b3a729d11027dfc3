"""``lightning-rl export``: a trained policy in the format of another tool."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_core.errors import MissingExtra
from lightning_core.records.failures import need_path
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say

FORMATS = {
    "hf": "a Hugging Face folder, adapters merged",
    "peft": "the adapter of a run with policy.tuning: lora",
    "gguf": "a file for llama.cpp",
}
DTYPES = ("float32", "float16", "bfloat16", "q8_0")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must not exist or be empty")
    formats = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
    parser.add_argument("--format", choices=list(FORMATS), default="hf", help=f"{formats} (default: %(default)s)")
    parser.add_argument("--checkpoint", metavar="NAME", help="such as step-000010, or best (default: the newest)")
    parser.add_argument("--policy", metavar="NAME", help="with several policies: which one")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the weights; q8_0: with gguf (default: bfloat16, and float32 for an adapter)",
    )
    parser.add_argument(
        "--push",
        metavar="REPO",
        help="also upload OUT to this repository of the Hugging Face Hub; a new repository is private",
    )


def export(options: argparse.Namespace) -> int:
    """Write the folder, upload it with ``--push``; returns the exit code."""
    try:
        from lightning_core.rollouts.interrupts import interruptible
        from lightning_core.tools.export import export as exporting
        from lightning_core.tools.export import push as pushing
        from lightning_core.tools.export.trained_model import find_trained
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "torch", "lightning-rl export") from error

    out, run = Path(options.out), Path(options.run)
    exporting.check_out(out, run=run)
    with need_path(f"read the run {options.run!r}", "Change its permissions, or export a copy"):
        trained = find_trained(run, checkpoint=options.checkpoint, policy=options.policy, overrides=options.overrides)
    if options.push:
        pushing.check_push(options.push, adapter_of=trained.policy.model if options.format == "peft" else None)
    with interruptible():  # no part of the folder may remain after SIGTERM
        exporting.export(trained, out, format=options.format, dtype=options.dtype)
    say(f"{trained.name} of {trained.checkpoint} as {options.format}: {out}")
    if trained.config.prompts:
        say(
            f"without the prompts of {', '.join(trained.config.prompts)}, which only the policy endpoint adds (docs/prompts.md)"
        )
    if options.push:
        say(f"uploaded to {options.push}: {pushing.push(out, options.push)}")
    return exits.OK
