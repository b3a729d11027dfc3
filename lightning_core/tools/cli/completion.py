"""``lightning-rl completion``: prints a shell's completion script.

shtab writes it from the parser once, so a completion is answered by the shell itself. argcomplete would start Python and import
this package each time that Tab is pressed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress

from lightning_core.errors import ConfigError
from lightning_core.tools import exits
from lightning_core.tools.cli.docs import page_files

_HOW_TO_INSTALL = """\
bash: lightning-rl completion bash > ~/.local/share/bash-completion/completions/lightning-rl
zsh:  lightning-rl completion zsh > ~/.zfunc/_lightning-rl, with "fpath+=~/.zfunc" before compinit in ~/.zshrc"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    parser.epilog = _HOW_TO_INSTALL
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the command; returns its exit code. ``parser``: the parser of all commands."""
    import shtab

    for action in _actions(parser):
        if action.option_strings or action.choices is not None:
            continue
        if action.dest == "page":
            with suppress(ConfigError):  # an installation without pages
                action.choices = list(page_files())
        else:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return exits.OK


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All options and arguments of ``parser`` and of its commands."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage] - argparse has no other way to list them
        yield action
        if isinstance(action.choices, Mapping):
            for command in action.choices.values():
                yield from _actions(command)
