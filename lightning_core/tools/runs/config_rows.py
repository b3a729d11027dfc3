"""A run's configuration as rows that can be searched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_core.records.run_folder.configs import leaves, show_value
from lightning_core.records.run_folder.runs import RunInfo


class Setting(NamedTuple):
    """One value of a configuration."""

    key: str
    """The key with dots, as on the command line: ``algorithm.clip_low``."""
    value: str


def settings(config: Mapping[str, Any]) -> list[Setting]:
    """All values of ``config``, in its order. An empty section is one value."""
    return [Setting(".".join(path), show_value(value)) for path, value in leaves(config)]


def matches(run: RunInfo, search: str) -> bool:
    """Whether every word of ``search`` is in the run's name, model, tags or configuration, regardless of case."""
    text = "\n".join(
        (run.name, run.model or "", *run.tags, *(f"{key}: {value}" for key, value in settings(run.config)))
    )
    return all(word in text.casefold() for word in search.casefold().split())
