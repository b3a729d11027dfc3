"""Old import paths, kept until 0.2. Each loads the new module, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    f"lightning_core.{old}": f"lightning_core.{new}"
    for old, new in {
        "integration": "capture.integration",
        "patching": "capture.patching",
        "policy.backend": "backends.backend",
        "policy.chat": "chat.chat",
        "policy.client": "capture.clients",
        "policy.dialects": "endpoint.dialects",
        "policy.endpoint": "endpoint.server",
        "policy.limits": "endpoint.limits",
        "policy.scripted": "backends.scripted",
        "policy.sessions": "endpoint.sessions",
        "report": "records.report",
        "runner": "rollouts.runner",
        "scoping": "capture.wrapping",
        "signals": "credit.signals",
        "spans": "capture.spans",
        "store": "records.store",
        "tasks": "rollouts.tasks",
        "threads": "capture.threads",
        "trainable": "capture.mark",
    }.items()
}
"""The new module of each old one."""


_PACKAGE = "lightning_core.policy"
"""An empty package: its former modules are now in several packages."""


class _OldPaths(MetaPathFinder, Loader):
    """Imports the new module under the old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _PACKAGE:
            return ModuleSpec(fullname, self, is_package=True)
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def get_code(self, fullname: str) -> None:
        """None: ``python -m`` with an old path ends with its usual message."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _PACKAGE:
            return
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(
            f"{old} has moved to {new}; the old path will be removed in 0.2", DeprecationWarning, stacklevel=2
        )
        sys.modules[old] = import_module(new)


def install() -> None:
    """Make the old paths importable."""
    # In place before it is imported: an import would replace the function ``lightning_core.trainable`` with the module.
    trainable = "lightning_core.trainable"
    lazy = sys.modules[trainable] = ModuleType(trainable)
    lazy.__getattr__ = lambda name: getattr(import_module(MOVED[trainable]), name)  # pyright: ignore[reportAttributeAccessIssue]
    sys.meta_path.insert(0, _OldPaths())
