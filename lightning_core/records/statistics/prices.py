"""Prices of models, in a YAML file of the user (``prices``). None are built in: they differ by provider and contract, and change.

# USD per million tokens
some-model*: {input: 1.0, cached_input: 0.5, output: 4.0}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from lightning_core.capture.selectors import find_selector
from lightning_core.errors import ConfigError
from lightning_core.records.failures import need_path

_MILLION = 1_000_000


class Price(BaseModel):
    """The price of a model, in USD per million tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    cached_input: float | None = Field(default=None, ge=0)
    """Of input tokens that the provider read from its prompt cache; None: the price of the others."""

    def cost(self, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """The price of these tokens in USD. ``cached_tokens``: of the input tokens."""
        cached = self.input if self.cached_input is None else self.cached_input
        plain = input_tokens - cached_tokens
        return (plain * self.input + cached_tokens * cached + output_tokens * self.output) / _MILLION


class Prices:
    """The prices by model name; a ``*`` in a name matches any characters but ``/``. An exact name precedes a pattern."""

    def __init__(self, by_model: Mapping[str, Price] | None = None) -> None:
        self._by_model = by_model or {}

    def __bool__(self) -> bool:
        return bool(self._by_model)

    def of(self, *names: str) -> Price | None:
        """The price of the model with one of these ``names``, the first that has one; None if it has no price."""
        selectors = (find_selector(self._by_model, name) for name in names if name)
        return next((self._by_model[selector] for selector in selectors if selector is not None), None)


_FILE = TypeAdapter(dict[str, Price])


def read_prices(path: Path | str | None) -> Prices:
    """The prices in the YAML file ``path``; none without a file. Raises `ConfigError` if it cannot be read or has anything else."""
    if path is None:
        return Prices()
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"prices: no file at {str(path)!r}; the working directory is {str(Path.cwd())!r}. Correct the path, or set prices=null"
        )
    with need_path("read the prices", "Change its permissions, or use a copy"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        data: Any = yaml.safe_load(text)
        return Prices(_FILE.validate_python({} if data is None else data))
    except yaml.YAMLError as error:
        raise ConfigError(f"prices: {path} is not valid YAML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(
            f"prices: {path}: {place}: {first['msg']}, found {first['input']!r}; expected a model name or pattern with "
            "{input: USD, output: USD}, and optionally cached_input, per million tokens"
        ) from None
