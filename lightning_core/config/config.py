"""The configuration of a run: typed, frozen and validated.

`load_config` reads YAML or a dict, applies ``key.sub=value`` overrides, and reports all problems at once with file and line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from lightning_core.config.checks import check_sections
from lightning_core.config.policies import derive_agents
from lightning_core.config.problems import INVALID_COMBINATION, validate
from lightning_core.config.rule_names import with_importable_rules
from lightning_core.config.sections import Sections
from lightning_core.config.source import KeyPath, Source, apply_overrides, dotted, read_yaml, to_yaml

_SHORT_FORMS: dict[KeyPath, str] = {("tasks", "train"): "source", ("tasks", "eval"): "source"}


class Config(Sections):
    """The configuration of one training run.

    `load_config` reports errors with file and line; the constructor raises pydantic's errors.
    """

    @model_validator(mode="before")
    @classmethod
    def _agents_of_policies(cls, data: object) -> object:
        return derive_agents(data)

    @model_validator(mode="after")
    def _check(self) -> Config:
        found = list(check_sections(self))
        if found:
            text = "; ".join(f"{dotted(path)}: {text}" for path, text in found)
            raise PydanticCustomError(INVALID_COMBINATION, "{text}", {"text": text, "found": found})
        return self


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, needs: Collection[str] = ()
) -> Config:
    """Read a configuration from a YAML file or a dict, then apply ``overrides``.

    ``overrides``: ``key.sub=value`` with YAML values. ``needs``: optional keys that the caller requires, such as ``tasks.train``.
    Raises `ConfigError` with all problems, one per line, each with position, key, found and expected value.
    """
    if isinstance(source, Mapping):
        read = Source(name="config", data=dict(source))
    else:
        read = read_yaml(Path(source))
    return validate(Config, apply_overrides(read, overrides, short_forms=_SHORT_FORMS), needs=needs)


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, including defaults; `load_config` reads it back in any process.

    The names of rules that custom code declares become ``module:callable``. Raises `ConfigError` for a rule that cannot be imported.
    """
    return to_yaml(with_importable_rules(config.model_dump(mode="json")))
