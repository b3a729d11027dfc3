"""The one configuration: typed, frozen, and refused with ``file:line`` where it says something that cannot be honoured.

`load_config` reads YAML or a dict, applies ``key.sub=value`` overrides and lists every problem at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from lightning_core.config.checks import impossible
from lightning_core.config.policies import derive_agents
from lightning_core.config.problems import IMPOSSIBLE, validate
from lightning_core.config.sections import Sections
from lightning_core.config.source import KeyPath, Source, apply_overrides, dotted, read_yaml, to_yaml

_SHORT_FORMS: dict[KeyPath, str] = {("tasks", "train"): "source", ("tasks", "eval"): "source"}


class Config(Sections):
    """One training run. `load_config` makes it from a file with good errors; made directly, it raises pydantic's."""

    @model_validator(mode="before")
    @classmethod
    def _agents_of_policies(cls, data: object) -> object:
        return derive_agents(data)

    @model_validator(mode="after")
    def _possible(self) -> Config:
        found = list(impossible(self))
        if found:
            text = "; ".join(f"{dotted(path)}: {text}" for path, text in found)
            raise PydanticCustomError(IMPOSSIBLE, "{text}", {"text": text, "found": found})
        return self


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, needs: Collection[str] = ()
) -> Config:
    """Read a configuration from a YAML file or a dict; ``overrides`` (``key.sub=value``, YAML values) win over it.

    ``needs`` names optional keys that the caller cannot do without, such as ``tasks.train``. Raises `ConfigError` with every
    problem in it, one a line, each with its place, key, what was found and what was expected.
    """
    if isinstance(source, Mapping):
        read = Source(name="config", data=dict(source))
    else:
        read = read_yaml(Path(source))
    return validate(Config, apply_overrides(read, overrides, short_forms=_SHORT_FORMS), needs=needs)


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, every default written out; `load_config` reads it back equal."""
    return to_yaml(config.model_dump(mode="json"))
