"""Finds integrations, checks the installed frameworks, and installs the patches.

An integration is an object that satisfies `Integration`, registered under the entry-point group ``lightning_core.integrations``.
Its name is also the name of an extra of the distribution that registers it. That extra is the only place where the supported
versions of the framework are stated.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, entry_points, version
from types import CodeType, FrameType
from typing import Any, Protocol

from packaging.requirements import Requirement

from lightning_core.capture.marks import TrainSpec
from lightning_core.capture.patching import Patches
from lightning_core.capture.scope import current_rollout
from lightning_core.errors import IntegrationUnavailable

logger = logging.getLogger(__name__)

GROUP = "lightning_core.integrations"


class Integration(Protocol):
    """The integration of one framework. Only its methods may load the framework."""

    name: str
    """Name of the entry point and of the extra."""
    hosts: frozenset[str]
    """Top-level packages; `mark` accepts instances of their classes."""
    deactivates: frozenset[str]
    """Integrations whose patches this one includes; they are not installed in addition to it."""

    def install(self, patches: Patches) -> None:
        """Add this integration's wraps to ``patches``. `Patches.undo` removes them."""
        ...

    def mark(self, obj: Any, spec: TrainSpec) -> Any:
        """A copy of ``obj`` that the host accepts and that runs as the agent ``spec.name``."""
        ...

    def mark_members(self, obj: Any, specs: Sequence[TrainSpec]) -> Any:
        """A copy of ``obj`` whose parts with these exact names run as agents.

        Raises ConfigError for an unknown name, listing the names of all parts.
        """
        ...


@dataclass(frozen=True, slots=True)
class Conflict:
    """A requirement of an integration that the environment does not satisfy."""

    required: str
    found: str | None

    def __str__(self) -> str:
        return f"requires {self.required!r}, found {'nothing' if self.found is None else repr(self.found)}"


@cache
def discover() -> Mapping[str, EntryPoint]:
    """The registered integrations by name, not loaded. The first of each name wins."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found


@cache
def requirements_of_extra(distribution: Distribution | None, extra: str) -> Sequence[Requirement]:
    """The requirements that only the extra ``extra`` of ``distribution`` has.

    Read once for each object: reading takes 10 ms or more, and the distributions of `discover` are kept anyway.
    """
    requirements = [Requirement(text) for text in (distribution.requires if distribution else None) or ()]
    return [
        requirement
        for requirement in requirements
        if (marker := requirement.marker) is not None
        and marker.evaluate({"extra": extra})
        and not marker.evaluate({"extra": ""})
    ]


def find_conflicts(distribution: Distribution | None, extra: str) -> list[Conflict]:
    """The unmet requirements of the extra ``extra`` of ``distribution``."""
    conflicts: list[Conflict] = []
    for requirement in requirements_of_extra(distribution, extra):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = None
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            conflicts.append(Conflict(f"{requirement.name}{requirement.specifier}", found))
    return conflicts


def find_framework_conflicts(entry: EntryPoint, hosts: frozenset[str]) -> list[Conflict]:
    """The obstacles to the integration of ``entry``: missing ``hosts`` and unsupported versions.

    The clients that its extra brings may be missing, since agents can use others.
    """
    absent = [Conflict(f"the package {host}", None) for host in sorted(hosts) if not _is_importable(host)]
    return [c for c in find_conflicts(entry.dist, entry.name) if absent or c.found is not None] + absent


class Installed:
    """The installed integrations.

    Installs are counted: an integration's patches are removed when each of its installs is undone.
    Patches are inert outside a rollout, so an installed integration costs a running program almost nothing.
    """

    def __init__(
        self,
        registered: Mapping[str, EntryPoint] | None = None,
        *,
        enabled: Callable[[], bool] = lambda: current_rollout() is not None,
    ) -> None:
        self._registered = discover() if registered is None else registered
        self._enabled = enabled
        self._loaded: dict[str, Integration] = {}
        self._checked: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._patches: dict[str, Patches] = {}
        self._lock = threading.RLock()

    def load(self, name: str) -> Integration:
        """The integration ``name``.

        Raises `IntegrationUnavailable` if it does not exist, or the installed framework is missing or unsupported.
        """
        with self._lock:
            integration, entry = self._get(name), self._registered[name]
            if name not in self._checked:
                if conflicts := find_framework_conflicts(entry, integration.hosts):
                    distribution = entry.dist.name if entry.dist else "lightning-rl"
                    raise IntegrationUnavailable(
                        f"the integration {name!r} {'; '.join(map(str, conflicts))}: pip install '{distribution}[{name}]'"
                    )
                self._checked.add(name)
            return integration

    def install(self, *names: str, auto: bool = False) -> frozenset[str]:
        """Install the integrations ``names``.

        With ``auto``, or without names, also install all others that can be used.
        Returns the names installed by this call, to be passed to `uninstall`. Raises `IntegrationUnavailable`, without changing
        anything, if one of ``names`` cannot be used. Others that cannot be used are skipped and logged.
        """
        with self._lock:
            for name in names:
                self.load(name)
            self._add(names)
            done = set(names)
            if auto or not names:
                for name in [n for n in self._registered if n not in done]:
                    try:
                        self.load(name)
                        self._add([name])
                        done.add(name)
                    except IntegrationUnavailable as reason:
                        logger.info("%s", reason)
            return frozenset(done)

    def uninstall(self, *names: str) -> None:
        """Undo one `install` of each of ``names``, or of all that are installed."""
        with self._lock:
            for name in names or tuple(self._counts):
                if self._counts[name] > 0:
                    self._counts[name] -= 1
            self._counts = +self._counts
            self._apply()

    @contextmanager
    def installed(self, *names: str, auto: bool = False) -> Generator[None]:
        """Install for the duration of the body."""
        done = self.install(*names, auto=auto)
        try:
            yield
        finally:
            if done:
                self.uninstall(*done)

    @property
    def active(self) -> frozenset[str]:
        """The integrations whose patches are installed; those included in another's are not."""
        with self._lock:
            return frozenset(self._patches)

    @property
    def names(self) -> frozenset[str]:
        """The integrations that are installed, with those included in another's."""
        with self._lock:
            return frozenset(self._counts)

    def find_bypassed(self) -> tuple[str, str] | None:
        """An integration with a wrapped function that runs on this thread, although its wraps were never reached; and the function.

        Such an integration is active and cannot see its host: other code has replaced the wrap, or calls the function that it wraps.
        """
        running: list[CodeType] = []
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            running.append(frame.f_code)
            frame = frame.f_back
        for name, patches in list(self._patches.items()):
            if (function := patches.find_bypassed(running)) is not None:
                return name, function
        return None

    def hosts(self, name: str) -> frozenset[str]:
        """The top-level packages of the integration ``name``."""
        return self._get(name).hosts

    def find(self, obj: Any) -> Integration | None:
        """The integration that can mark ``obj``, or None.

        It is found by the package of the most derived class that belongs to one.
        Raises `IntegrationUnavailable` if there is one, but the installed framework is unsupported.
        """
        for cls in type(obj).__mro__:
            package = cls.__module__.partition(".")[0]
            for name in self._registered:
                if package in self._get(name).hosts:
                    return self.load(name)
        return None

    def _get(self, name: str) -> Integration:
        if name not in self._loaded:
            if name not in self._registered:
                raise IntegrationUnavailable(
                    f"there is no integration {name!r}; available are {sorted(self._registered)!r}"
                )
            self._loaded[name] = self._registered[name].load()
        return self._loaded[name]

    def _add(self, names: Sequence[str]) -> None:
        before = self._counts.copy()
        self._counts.update(names)
        try:
            self._apply()
        except BaseException:
            self._counts = before
            self._apply()
            raise

    def _apply(self) -> None:
        included = {inner for name in self._counts for inner in self._loaded[name].deactivates}
        target = [name for name in self._counts if name not in included]
        for name in [n for n in self._patches if n not in target]:
            self._patches.pop(name).undo()
        for name in target:
            if name not in self._patches:
                self._patches[name] = self._make_patches(name)

    def _make_patches(self, name: str) -> Patches:
        patches = Patches(self._enabled)
        try:
            self._loaded[name].install(patches)
        except (ImportError, AttributeError) as error:
            patches.undo()
            raise IntegrationUnavailable(
                f"the integration {name!r} could not be installed, although the version of its framework is supported: {error}"
            ) from error
        return patches


def _is_importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


_installed = Installed()

install = _installed.install
uninstall = _installed.uninstall
installed = _installed.installed
find_bypassed = _installed.find_bypassed
find_integration = _installed.find
find_hosts = _installed.hosts


def active_integrations() -> frozenset[str]:
    """Names of the integrations whose patches are installed in this process."""
    return _installed.active


def installed_integrations() -> frozenset[str]:
    """Names of the integrations that are installed in this process, with those included in another's."""
    return _installed.names
