"""Runs a function when a module is imported, or now if it was; never imports it.

Import hooks cannot be removed, so all installations that wait for a module share one.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import wrapt

from lightning_core.capture.patching import Patches

logger = logging.getLogger(__name__)

_lock = threading.RLock()
_waiting: dict[str, list[Callable[[Any], None]]] = {}
"""The functions that wait for a module; a module has an import hook as long as it is listed."""


def when_imported(patches: Patches, module: str, function: Callable[[Any], None]) -> None:
    """Call ``function`` with ``module`` once it is imported, unless ``patches`` were undone. Its errors are logged."""

    def call(found: Any) -> None:
        try:
            function(found)
        except Exception:
            logger.warning("%s could not be patched: its version may be unsupported", module, exc_info=True)

    if (found := sys.modules.get(module)) is not None:
        call(found)
        return
    with _lock:
        has_hook = module in _waiting
        _waiting.setdefault(module, []).append(call)
    patches.on_undo(lambda: _remove(module, call))
    if not has_hook:
        wrapt.register_post_import_hook(_call_waiting, module)


def _remove(module: str, call: Callable[[Any], None]) -> None:
    with _lock:
        if call in (waiting := _waiting.get(module, [])):
            waiting.remove(call)


def _call_waiting(module: Any) -> None:
    with _lock:
        waiting = _waiting.pop(module.__name__, [])
    # Without the lock: this runs inside an import, and another thread may hold the lock while it imports.
    for call in waiting:
        call(module)
