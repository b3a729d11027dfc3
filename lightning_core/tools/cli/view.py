"""``lightning-rl view``: shows runs in a browser."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_core.errors import MissingExtra
from lightning_core.tools import exits
from lightning_core.tools.cli.numbers import port
from lightning_core.tools.cli.serve import wait_for_signal


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "runs",
        metavar="RUNS",
        nargs="?",
        default="runs",
        help="the folder of runs, or one run's (default: %(default)s)",
    )
    parser.add_argument("--port", type=port, default=0, help="port to listen on (default: any free port)")
    parser.add_argument("--no-browser", action="store_true", help="only print the URL")


def view(options: argparse.Namespace) -> int:
    """Serve until interrupted or terminated; returns the exit code."""
    try:
        from lightning_core.tools.view.server import open_view
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightning_core"):
            raise
        raise MissingExtra(error.name, "view", "lightning-rl view") from None
    with (
        open_view(Path(options.runs), port=options.port) as url,
        TemporaryDirectory(prefix="lightning-view-") as scratch,
    ):
        print(f"{url}\nstop: Ctrl-C", flush=True)
        if not options.no_browser:
            webbrowser.open(page_to(url, Path(scratch)).as_uri())
        wait_for_signal()
    return exits.OK


def page_to(url: str, folder: Path) -> Path:
    """Write a page to ``folder`` that opens ``url``; returns its path.

    Other users can see a browser's arguments, and ``url`` has the token.
    """
    page = folder / "open.html"
    page.touch(mode=0o600)
    page.write_text(f'<!doctype html><title>Viewer</title><meta http-equiv="refresh" content="0; url={url}">')
    return page
