"""Checks of ``key=value`` arguments, with suggestions for misspelt ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_core.errors import ConfigError

DEFAULT_CONFIG = "lightning.yaml"
"""The configuration that ``train`` and ``sft`` read if none is named."""


def default_config(option: str = "") -> str:
    """The configuration in this folder. Raises `ConfigError` if there is none; ``option``: takes another one's path."""
    if not Path(DEFAULT_CONFIG).is_file():
        how = f" with {option}" if option else ""
        raise ConfigError(
            f"no {DEFAULT_CONFIG} in {str(Path.cwd())!r}: pass the path of a configuration{how}, or write a new one: lightning-rl init"
        )
    return DEFAULT_CONFIG


def split_sources(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Separate the sources of ``sft`` from overrides, which argparse does not: a word without ``=``, or an existing path."""
    words = [*options.sources, *options.overrides]
    options.sources = [word for word in words if not word.startswith("-") and ("=" not in word or Path(word).exists())]
    options.overrides = [word for word in words if word not in options.sources]
    if not options.sources:
        parser.error("expected a SOURCE: a run's folder, or traces")


def check_overrides(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a usage error for an override without ``=``, and for one in place of the configuration."""
    config: str | None = getattr(options, "config", None)
    if config is not None and "=" in config and not Path(config).exists() and options.command in ("eval", "baseline"):
        parser.error(
            f"found {config!r} in place of the configuration; its file comes first: lightning-rl {options.command} lightning.yaml {config}"
        )
    for position, text in enumerate(options.overrides):
        if text.startswith(("-", "=")) or "=" not in text:
            parser.error(_unexpected(options.command, text, options.overrides[position + 1 :]))


def _unexpected(command: str, text: str, rest: Sequence[str]) -> str:
    name = text.lstrip("-").partition("=")[0]
    keys = _keys_like(name)
    values = [part for part in rest if part != "=" and not part.startswith("-")]
    value = text.partition("=")[2] or (values[0] if values and "=" not in values[0] else "VALUE")
    if keys:
        written = " or ".join(f"{key}={value}" for key in keys)
        return f"unexpected argument {text!r}: settings are written as key=value, without spaces and dashes: {written}"
    return f"unexpected argument {text!r}: expected an option of {command!r} (see --help) or key=value, such as trainer.steps=10"


def _keys_like(name: str) -> list[str]:
    """The settings called ``name``, with or without their section: ``trainer.steps`` for ``steps``; at most three."""
    from lightning_core.config.problems import key_paths
    from lightning_core.config.sections import Sections

    key_name = name.replace("-", "_")
    matches = [key for key in key_paths(Sections) if key == key_name or key.endswith(f".{key_name}")]
    return matches[:3] if key_name else []
