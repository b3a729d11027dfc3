"""Starts the recording of a program; see `lightning_core.tools.record.programs`. Imported by Python when it starts.

Loads nothing itself: the recording starts when the program imports an HTTP client.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys

_CLIENTS = ("httpx", "httpx2", "requests", "aiohttp", "urllib3")


class _StartWithClient(importlib.abc.MetaPathFinder):
    """Starts the recording before a client is imported, and then finds it as Python does."""

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name in _CLIENTS and self in sys.meta_path:
            sys.meta_path.remove(self)
            _start()
            return importlib.util.find_spec(name)  # again: finders that patch the client may be new
        return None


def _note_unused(finder, started) -> None:  # type: ignore[no-untyped-def]
    """At the end of the program, say that nothing was recorded if it has imported no client."""
    if finder in sys.meta_path and os.getpid() == started and sys.stderr is not None:
        sys.stderr.write(f"lightning-rl record: 0 calls recorded, the program imported none of {', '.join(_CLIENTS)}\n")


def _start() -> None:
    try:
        from lightning_core.tools.record.programs import start_program

        start_program()
    except Exception as error:  # noqa: BLE001 - never in the way of the program
        if sys.stderr is not None:
            sys.stderr.write(
                f"lightning-rl record: this process is not recorded; {sys.executable} raised {type(error).__name__}: {error}. "
                "Install lightning-rl for this Python\n"
            )


def _run_next() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    own = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path or ".") != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "LIGHTNING_RECORD" in os.environ:
    _finder = _StartWithClient()
    sys.meta_path.insert(0, _finder)
    atexit.register(_note_unused, _finder, json.loads(os.environ["LIGHTNING_RECORD"]).get("started"))
_run_next()
