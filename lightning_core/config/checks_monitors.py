"""Checks of the section ``monitors``."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config.monitor_registry import MONITORS
from lightning_core.config.rule_names import argument_problems
from lightning_core.config.sections import Sections
from lightning_core.config.source import KeyPath
from lightning_core.errors import did_you_mean


def check_monitors(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield monitors that are named twice or not used, and unknown arguments."""
    m = c.monitors
    own = {name for name, rule in MONITORS.items() if rule.is_builtin}
    for name in m.disable:
        if name not in own:
            yield (
                ("monitors", "disable"),
                f"found {name!r}, which is not one of Lightning's monitors; remove it from monitors.add",
            )
    for key in ("stop", "args"):
        for name in getattr(m, key):
            path = ("monitors", key, name) if key == "args" else ("monitors", key)
            if name in m.disable:
                yield path, f"{name!r} is in monitors.disable too; remove it from one of them"
            elif name not in own and name not in m.add:
                advice = did_you_mean(name, m.add) or "add it there"
                yield path, f"found {name!r}, which is not in monitors.add; {advice}"
    for name, args in m.args.items():
        if name in own:
            yield from argument_problems(MONITORS[name], args, ("monitors", "args", name))
