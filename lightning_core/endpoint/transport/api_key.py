"""API keys, which are read from environment variables."""

from __future__ import annotations

import os

from lightning_core.errors import ConfigError


def read_api_key(variable: str | None, setting: str) -> str | None:
    """The key in the environment variable ``variable``, which the configuration's ``setting`` names; None if it names none.

    Raises `ConfigError` if the variable is not set, or has characters other than ASCII.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"{setting} is {variable!r}, but that environment variable is not set")
    if not key.isascii():
        raise ConfigError(
            f"the key in the environment variable {variable!r} ({setting}) has characters other than ASCII, which no header can contain; "
            "copy it again"
        )
    return key
