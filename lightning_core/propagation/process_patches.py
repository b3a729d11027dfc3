"""The patches of one process: HTTP clients, threads, queues, processes and programs.

They do nothing while no rollout runs in the process, except the patches of `transports`.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

import wrapt

from lightning_core.capture import bypassed, caller
from lightning_core.capture.context import is_capturing
from lightning_core.capture.integration import find_hosts, install
from lightning_core.capture.patching import Patches
from lightning_core.errors import ConfigError
from lightning_core.propagation.children.processes import install_processes
from lightning_core.propagation.children.programs import install_programs
from lightning_core.propagation.children.ray_tasks import install_ray
from lightning_core.propagation.children.scope import prepare_children_with
from lightning_core.propagation.clients import install_client
from lightning_core.propagation.queues import install_queues
from lightning_core.propagation.signal_handlers import install_signal_handlers
from lightning_core.propagation.sockets import install_sockets
from lightning_core.propagation.threads import install_threads
from lightning_core.propagation.transports import install_transports

logger = logging.getLogger(__name__)

_lock = threading.RLock()
_installed = 0
_child: Patches | None = None
_watched: set[str] = set()


@contextmanager
def process_patches() -> Generator[None]:
    """Patch HTTP clients, threads, processes and programs for the duration of the body.

    Raises ConfigError if gevent has replaced Python's threads.
    """
    global _installed
    _check_gevent()
    patches = Patches(is_capturing)
    try:
        with _lock:
            _installed += 1
            _install(patches)
        yield
    finally:
        with _lock:
            _installed -= 1
            if not _installed:
                caller.repeats.clear()
                bypassed.repeats.clear()
        patches.undo()


def _check_gevent() -> None:
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and (monkey.is_module_patched("threading") or monkey.is_module_patched("queue")):
        raise ConfigError(
            "found gevent's monkey patches, expected Python's own threads and queues: Lightning follows agents through these. Remove "
            "gevent.monkey.patch_all() from this process, or run the part of the program that needs it in a process of its own"
        )


def ensure_patched(integrations: Iterable[str]) -> None:
    """In a child process: install the patches for as long as it lives, and each integration once its framework is imported."""
    global _child
    with _lock:
        if _installed:
            return  # a fork of a process that has them
        if _child is None:
            _child = Patches(is_capturing)
            _install(_child)
        new = [name for name in integrations if name not in _watched]
        _watched.update(new)
    # Without the lock: this may import, and another thread may hold the lock of an import while it waits for this one.
    for name in new:
        install_on_import(name)


def _install(patches: Patches) -> None:
    install_client(patches)
    install_sockets(patches)
    install_transports(patches)
    install_threads(patches)
    install_signal_handlers(patches)
    install_queues(patches)
    install_processes(patches)
    install_programs(patches)
    install_ray(patches)


def install_on_import(integration: str, install: Callable[[str], object] = install) -> None:
    """Install ``integration`` when a host of it is imported, which a worker may never do; at once if it has no hosts.

    ``install``: installs it, and may raise.
    """
    hosts = find_hosts(integration)
    done = False

    def install_once(module: ModuleType | None = None) -> None:
        nonlocal done
        if done or (module is not None and _is_being_imported(module)):
            return
        done = True
        try:
            install(integration)
        except Exception:
            logger.exception("the integration %r could not be installed", integration)

    if not hosts:
        install_once()
    for host in hosts:
        for module in _loaded_modules(host):
            wrapt.register_post_import_hook(install_once, module)


def _loaded_modules(host: str) -> list[str]:
    """The modules to watch for an import of ``host``: its submodules if it is a namespace package such as langgraph."""
    spec = find_spec(host)
    if spec is None or spec.origin is not None or spec.submodule_search_locations is None:
        return [host]
    return [f"{host}.{module.name}" for module in pkgutil.iter_modules(spec.submodule_search_locations)]


def _is_being_imported(module: ModuleType) -> bool:
    """Whether other modules of the same package are only partly loaded, so patches cannot import them yet."""
    package = module.__name__.partition(".")[0]
    # Private: ``_initializing``, with which the import system of CPython 3.11 to 3.14 marks such modules.
    return any(
        getattr(getattr(other, "__spec__", None), "_initializing", False)
        for name, other in list(sys.modules.items())
        if other is not module and name.startswith(f"{package}.")
    )


prepare_children_with(ensure_patched)
