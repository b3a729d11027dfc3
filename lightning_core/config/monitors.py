"""The configuration's section ``monitors``, and the monitors that it selects."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from lightning_core.config.imports import import_callable
from lightning_core.config.monitor_registry import MONITORS, Watched, watched
from lightning_core.config.rule_names import NameOf, argument_problems
from lightning_core.config.types import CallableName, Section
from lightning_core.errors import ConfigError, CreditError


def _monitor_name(text: str) -> str:
    return NameOf(MONITORS)(text)


MonitorName = Annotated[str, AfterValidator(_monitor_name)]
MonitorNames = Annotated[tuple[MonitorName, ...], Field(strict=False)]


class MonitorsSection(Section):
    """Checks of each step's metrics that report a run which does not learn.
    docs/monitors.md lists them with their arguments."""

    disable: MonitorNames = ()
    """Monitors that are not used."""
    stop: MonitorNames = ()
    """Monitors that end the run, as `eval.early_stop` does."""
    add: Annotated[tuple[CallableName, ...], Field(strict=False)] = ()
    """Monitors of your own: functions `monitor(history, held_out, *, …)` that return a message or null."""
    args: dict[MonitorName, dict[str, Any]] = {}
    """Arguments of monitors, by name: `{truncation: {at_least: 0.8}}`."""


def configured_monitors(m: MonitorsSection) -> list[Watched]:
    """The monitors that ``m`` selects.

    Raises `ConfigError` if a function cannot be imported, is not a monitor, or lacks an argument.
    """
    functions = {name: import_callable(name, key=f"monitors.add.{i}") for i, name in enumerate(m.add)}
    try:
        found = watched(disable=m.disable, args=m.args, add=functions)
    except CreditError as error:
        raise ConfigError(f"monitors: {error}") from error
    for one in found:
        for path, text in argument_problems(one.rule, one.arguments, ("monitors", "args", one.rule.name)):
            raise ConfigError(f"{'.'.join(map(str, path))}: {text}")
    return found


def stopping_monitors(m: MonitorsSection) -> set[str]:
    """The names of the monitors under ``stop``, as their alerts have them."""
    functions = {name: import_callable(name, key="monitors.add") for name in m.add if name in m.stop}
    return {MONITORS.find(functions.get(name, name)).name for name in m.stop}
