"""``lightning-rl sft``: supervised fine-tuning on recorded rollouts."""

from __future__ import annotations

import argparse
from contextlib import suppress

from lightning_core.errors import ConfigError, MissingExtra
from lightning_core.tools import exits
from lightning_core.tools.cli.arguments import DEFAULT_CONFIG, default_config
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.numbers import finite, whole
from lightning_core.tools.cli.trace import PHASES


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="a run's folder such as runs/latest, or FOLDER:PHASE; a file of traces (.json, .jsonl, .pb), or a folder of such files",
    )
    parser.add_argument("-c", "--config", metavar="CONFIG", help=f"YAML file (default: {DEFAULT_CONFIG})")
    parser.add_argument("--epochs", metavar="N", type=whole(1), default=1, help="passes over the rollouts (default: 1)")
    parser.add_argument("--batch", metavar="N", type=whole(1), default=16, help="rollouts of an update (default: 16)")
    parser.add_argument(
        "--held-out",
        metavar="X",
        type=finite,
        default=0.1,
        help="share of tasks whose rollouts are held out to measure the loss, below 1 (default: 0.1)",
    )
    chosen = parser.add_argument_group("which rollouts")
    chosen.add_argument(
        "--min-reward",
        metavar="X",
        type=finite,
        help="only those with at least this reward (default: eval.solved; traces without rewards are used too)",
    )
    chosen.add_argument("--best", metavar="K", type=whole(1), help="at most K of each task, with the highest rewards")
    chosen.add_argument(
        "--phase",
        choices=PHASES,
        default="train",
        help="of runs without :PHASE: rollouts of this phase (default: train)",
    )


def sft(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from lightning_core.config import load_config

    config = load_config(options.config or default_config("-c"), options.overrides)
    if not 0 <= options.held_out < 1:
        raise ConfigError(f"--held-out {options.held_out:g}: expected a share from 0 to less than 1, such as 0.1")
    try:
        from lightning_core.tools.sft import train as training
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "torch", "lightning-rl sft") from error
    from lightning_core.observers.progress import show_progress
    from lightning_core.tools.sft.examples import Selection

    selection = Selection(
        min_reward=options.min_reward, solved=config.eval.solved, best=options.best, phase=options.phase
    )
    progress = show_progress()
    try:
        result = training.sft(
            options.sources,
            config=config,
            selection=selection,
            options=training.SftOptions(epochs=options.epochs, batch=options.batch, held_out=options.held_out),
            progress=progress,
        )
    finally:
        with suppress(OSError):
            progress.close()
    if result.losses:
        say(f"held-out loss: {result.losses[0]:.4f} before, {result.losses[-1]:.4f} after, in nats per token")
    say(f"run: {result.folder}\ncheckpoint: {result.checkpoint}")
    return exits.OK
