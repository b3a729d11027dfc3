"""The configurations of a run.

``config.yaml`` is the newest. One that a resume replaced has the last step that it was used for in its name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_core.config import Config, dump_config, load_config
from lightning_core.config.signal_sections import signal_sections
from lightning_core.errors import redact_urls, shorten
from lightning_core.records.atomic import write_atomically

logger = logging.getLogger(__name__)

_NEWEST = "config.yaml"
_EARLIER = re.compile(r"config-until-step-(\d+)\.yaml")
_MOST_LOGGED = 200
"""Characters of a changed value in the log."""
_IDENTITY = frozenset({"run.name", "run.resume"})
"""Keys that identify the run and do not affect its training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A configuration key whose value is not the same in all runs."""

    key: str
    """The key with dots: ``algorithm.clip_low``."""
    values: Mapping[str, Any]
    """The value by run. Runs without the key are left out."""


def record_config(folder: Path, config: Config, *, step: int) -> None:
    """Make ``config`` the configuration of the run in ``folder``, resumed after ``step`` updates, if it is another one.

    The settings that differ are logged. Raises `ConfigError` as `dump_config` does.
    """
    newest = folder / _NEWEST
    before = newest.read_text(encoding="utf-8", errors="replace") if newest.is_file() else ""
    earlier = _settings(before)
    if not earlier:
        logger.warning("%s is missing or damaged, so changed settings are not listed; it is written again", newest)
    # ``name`` and ``resume`` select the run; they are not settings.
    run = config.run.model_copy(update={"resume": False, "name": dict(leaves(earlier)).get(("run", "name"))})
    text = dump_config(config.model_copy(update={"run": run}))
    _forget_after(folder, step)
    if text == before:
        return
    changed = config_differences({"before": earlier, "now": _settings(text)}) if earlier else []
    if changed:
        listed = ", ".join(f"{d.key}: {_clip(d.values.get('before'))} → {_clip(d.values.get('now'))}" for d in changed)
        logger.warning("run.resume: the run continues after step %d with other settings: %s", step, listed)
    kept = _until(folder, step)
    if before and not kept.exists():  # otherwise no step of the newest one is left
        write_atomically(kept, before)
    created = newest.stat() if newest.is_file() else None  # its time is the run's start
    write_atomically(newest, text, times=None if created is None else (created.st_atime_ns, created.st_mtime_ns))


def changed_settings(folder: Path, config: Config, *, without: Sequence[str], but: Collection[str] = ()) -> list[str]:
    """The keys whose values in ``config`` are not those of the run in ``folder``.

    Keys that begin with one of ``without`` are left out, ``but`` for these.
    """
    file = folder / _NEWEST
    recorded = _settings(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = config_differences({"recorded": recorded, "now": _settings(dump_config(config))})
    return [d.key for d in found if d.key in but or not d.key.startswith(tuple(without))]


def config_of_step(folder: Path, step: int) -> Path:
    """The file with the configuration of the ``step``-th update of the run in ``folder``, counted from 1."""
    usable = {last: path for last, path in _replaced(folder).items() if last >= step}
    return usable[min(usable)] if usable else folder / _NEWEST


def _replaced(folder: Path) -> Mapping[int, Path]:
    """The files of configurations that were replaced, by the last step that each was used for."""
    matches = [(path, _EARLIER.fullmatch(path.name)) for path in folder.iterdir() if not path.is_symlink()]
    return {int(match[1]): path for path, match in matches if match}


def _forget_after(folder: Path, step: int) -> None:
    """Drop what the configurations of the run in ``folder`` say about steps after ``step``, which are taken anew."""
    later = {last: path for last, path in _replaced(folder).items() if last > step}
    if later and not (kept := _until(folder, step)).exists():
        later.pop(min(later)).rename(kept)
    for path in later.values():
        path.unlink()


def _until(folder: Path, step: int) -> Path:
    return folder / f"config-until-step-{step:06d}.yaml"


def load_recorded(file: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a run recorded in ``file``, with ``overrides``. Raises `ConfigError` as `load_config` does.

    Keys that the run did not know have the value that it used, see `SignalSection.unrecorded`, or else their default.
    """
    recorded = _settings(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else {}
    earlier = [
        f"{own.section}.{key}={json.dumps(value)}"
        for own in signal_sections().values()
        for key, value in own.unrecorded.items()
        if _lacks(recorded, (own.section, *key.split(".")))
    ]
    return load_config(file, [*earlier, *overrides])


def _lacks(values: Mapping[str, Any], key: Sequence[str]) -> bool:
    """Whether ``values`` have the section of ``key``, but not the key."""
    section: Any = values
    for name in key[:-1]:
        section = section.get(name) if isinstance(section, Mapping) else None
    return isinstance(section, Mapping) and key[-1] not in section


def read_settings(folder: Path) -> Mapping[str, Any]:
    """The newest configuration of the run in ``folder`` as plain data; empty if it is lost or damaged."""
    newest = folder / _NEWEST
    return _settings(newest.read_text(encoding="utf-8", errors="replace") if newest.is_file() else "")


def _settings(text: str) -> Mapping[str, Any]:
    """The configuration ``text`` as plain data; empty if it is damaged."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def config_differences(configs: Mapping[str, Mapping[str, Any]]) -> list[Difference]:
    """The keys that differ between ``configs``, plain data by run name, in the order of the first configuration.

    A list is one value. An empty section or null counts as absent where another run has keys below it.
    """
    flat = {run: dict(leaves(config)) for run, config in configs.items()}
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    sections = {key[:n] for key in keys for n in range(1, len(key))}
    differences: list[Difference] = []
    for key in keys:
        values = {run: settings[key] for run, settings in flat.items() if key in settings}
        if key in sections:
            values = {run: value for run, value in values.items() if value not in (None, {})}
        if values and ".".join(key) not in _IDENTITY and not _all_equal(list(values.values()), len(configs)):
            differences.append(Difference(key=".".join(key), values=values))
    return differences


def leaves(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of ``config`` below its nested mappings, with their paths. An empty mapping is a value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def show_value(value: Any) -> str:
    """``value`` as a configuration has it, without credentials in URLs: strings as they are, the rest as JSON."""
    return redact_urls(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _clip(value: Any) -> str:
    """`show_value`, short enough for a log: prompts are settings too."""
    return shorten(show_value(value), _MOST_LOGGED)


def _all_equal(values: Sequence[Any], expected: int) -> bool:
    # As JSON: 1 and True are equal in Python, but not the same setting.
    return len(values) == expected and len({json.dumps(value, sort_keys=True, default=str) for value in values}) == 1
