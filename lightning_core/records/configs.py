"""The configurations of a run.

``config.yaml`` is the newest. One that a resume replaced has the last step that it was used for in its name.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_core.config import Config, dump_config
from lightning_core.records.compare import config_differences, leaves
from lightning_core.records.settings import show_value

logger = logging.getLogger(__name__)

_NEWEST = "config.yaml"
_EARLIER = re.compile(r"config-until-step-(\d+)\.yaml")


def record_config(folder: Path, config: Config, *, step: int) -> None:
    """Make ``config`` the configuration of the run in ``folder``, resumed after ``step`` updates, if it is another one.

    The settings that differ are logged. Raises `ConfigError` as `dump_config` does.
    """
    newest = folder / _NEWEST
    before = newest.read_text(encoding="utf-8") if newest.is_file() else ""
    earlier = _settings(before)
    # The name and the resume select the run; they are not settings of it.
    run = config.run.model_copy(update={"resume": False, "name": dict(leaves(earlier)).get(("run", "name"))})
    text = dump_config(config.model_copy(update={"run": run}))
    if text == before:
        return
    changed = config_differences({"before": earlier, "now": _settings(text)}) if earlier else []
    if changed:
        listed = ", ".join(
            f"{d.key}: {show_value(d.values.get('before'))} → {show_value(d.values.get('now'))}" for d in changed
        )
        logger.warning("run.resume: the run continues after step %d with other settings: %s", step, listed)
    kept = folder / f"config-until-step-{step:06d}.yaml"
    if before and not kept.exists():  # otherwise no step of the newest one is left
        kept.write_text(before, encoding="utf-8")
    scratch = folder / f".{_NEWEST}.new"
    scratch.write_text(text, encoding="utf-8")
    if newest.is_file():  # its time is the run's start
        created = newest.stat()
        os.utime(scratch, ns=(created.st_atime_ns, created.st_mtime_ns))
    scratch.replace(newest)


def config_of_step(folder: Path, step: int) -> Path:
    """The file with the configuration of the ``step``-th update of the run in ``folder``, counted from 1."""
    earlier = {
        int(found[1]): path
        for path in folder.iterdir()
        if (found := _EARLIER.fullmatch(path.name)) and not path.is_symlink()
    }
    return earlier[min(usable)] if (usable := [last for last in earlier if last >= step]) else folder / _NEWEST


def _settings(text: str) -> Mapping[str, Any]:
    """The configuration ``text`` as plain data; empty if it is damaged."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
