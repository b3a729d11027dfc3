"""``lightning-rl`` and ``python -m lightning_core.tools.cli``: handles Ctrl-C while they load."""

from __future__ import annotations

import signal
import sys

from lightning_core.tools import exits


def run() -> int:
    """Run one command and return its exit code."""
    try:
        from lightning_core.tools.cli.main import main

        return main()
    except KeyboardInterrupt:  # outside a command; `main` reports interrupts of commands
        print("\nlightning-rl: interrupted.", file=sys.stderr)
        return exits.SIGNAL + signal.SIGINT


if __name__ == "__main__":
    sys.exit(run())
