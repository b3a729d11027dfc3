"""Finds the integrations, checks that they fit the installed frameworks, and puts their patches on and off.

An integration is an object that satisfies `Integration`, announced under the entry-point group ``lightning_core.integrations``.
Its name is also the name of the extra, in the distribution that announces it, that says which versions of the framework it
supports: the range is written there and nowhere else.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, Protocol

from packaging.requirements import Requirement

from lightning_core.capture.patching import Patches
from lightning_core.capture.scope import current_run
from lightning_core.errors import IntegrationUnavailable

logger = logging.getLogger(__name__)

GROUP = "lightning_core.integrations"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """What a mark says about an agent."""

    name: str
    policy: str | None = None
    """The policy that plays this agent, where there are several; None is the only one."""


class Integration(Protocol):
    """What a framework's integration offers. Making and importing it loads no framework; its methods may."""

    name: str
    """Name of the entry point and of the extra."""
    hosts: frozenset[str]
    """Top-level packages whose classes' instances `mark` accepts."""
    deactivates: frozenset[str]
    """Names of integrations whose patches this one's include: they are not put on beside it, so nothing is recorded twice."""

    def install(self, patches: Patches) -> None:
        """Wrap what has to be wrapped. Takes nothing off: `Patches.undo` does."""
        ...

    def mark(self, obj: Any, spec: TrainSpec) -> Any:
        """A copy of ``obj`` that the host accepts in its place and that runs as the agent ``spec.name``."""
        ...

    def mark_members(self, obj: Any, specs: Sequence[TrainSpec]) -> Any:
        """A copy of ``obj`` whose parts of these exact names run as agents. Raises ConfigError, listing the names that there are."""
        ...


@dataclass(frozen=True, slots=True)
class Conflict:
    """One requirement of an integration that the environment does not meet."""

    required: str
    found: str | None

    def __str__(self) -> str:
        return f"requires {self.required!r}, found {'nothing' if self.found is None else repr(self.found)}"


@cache
def discover() -> Mapping[str, EntryPoint]:
    """The announced integrations by name, none of them loaded. The first of several with one name wins."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found


def requirements_of_extra(distribution: Distribution | None, extra: str) -> list[Requirement]:
    """What the extra ``extra`` of ``distribution`` requires beyond what the distribution requires anyway."""
    requirements = [Requirement(text) for text in (distribution.requires if distribution else None) or ()]
    return [
        requirement
        for requirement in requirements
        if (marker := requirement.marker) is not None
        and marker.evaluate({"extra": extra})
        and not marker.evaluate({"extra": ""})
    ]


def find_conflicts(distribution: Distribution | None, extra: str) -> list[Conflict]:
    """What the extra ``extra`` of ``distribution`` requires and the environment lacks."""
    conflicts: list[Conflict] = []
    for requirement in requirements_of_extra(distribution, extra):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = None
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            conflicts.append(Conflict(f"{requirement.name}{requirement.specifier}", found))
    return conflicts


class Installed:
    """Which integrations are in force. Installing is counted: each is taken off when it was uninstalled as often as installed.

    Patches are inert outside a rollout, so an installed integration costs a running program next to nothing.
    """

    def __init__(
        self,
        announced: Mapping[str, EntryPoint] | None = None,
        *,
        enabled: Callable[[], bool] = lambda: current_run() is not None,
    ) -> None:
        self._announced = discover() if announced is None else announced
        self._enabled = enabled
        self._loaded: dict[str, Integration] = {}
        self._checked: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._patches: dict[str, Patches] = {}
        self._lock = threading.RLock()

    def load(self, name: str) -> Integration:
        """The integration of that name. Raises `IntegrationUnavailable` if there is none, or its framework does not fit."""
        with self._lock:
            integration, entry = self._get(name), self._announced[name]
            if name not in self._checked:
                conflicts = find_conflicts(entry.dist, name)
                conflicts += [
                    Conflict(f"the package {host}", None) for host in sorted(integration.hosts) if not _exists(host)
                ]
                if conflicts:
                    distribution = entry.dist.name if entry.dist else "lightning-rl"
                    raise IntegrationUnavailable(
                        f"the integration {name!r} {'; '.join(map(str, conflicts))}: pip install '{distribution}[{name}]'"
                    )
                self._checked.add(name)
            return integration

    def install(self, *names: str, auto: bool = False) -> frozenset[str]:
        """Install the integrations ``names``, and with ``auto``, or without any names, all others that fit as well.

        Returns the names installed by this call; hand them to `uninstall`. Raises `IntegrationUnavailable`, having changed nothing, if
        one that was asked for by name does not fit; the others are then skipped with a line in the log.
        """
        with self._lock:
            for name in names:
                self.load(name)
            self._add(names)
            done = set(names)
            if auto or not names:
                for name in [n for n in self._announced if n not in done]:
                    try:
                        self.load(name)
                        self._add([name])
                        done.add(name)
                    except IntegrationUnavailable as reason:
                        logger.info("%s", reason)
            return frozenset(done)

    def uninstall(self, *names: str) -> None:
        """Undo one `install` of each of ``names``, or of all; more often than it was installed does nothing."""
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
        """The integrations whose patches are on: installed, and not contained in another one's."""
        with self._lock:
            return frozenset(self._patches)

    @property
    def owners(self) -> tuple[Any, ...]:
        """The modules and classes that carry patches now."""
        with self._lock:
            return tuple(owner for patches in self._patches.values() for owner in patches.owners)

    def find(self, obj: Any) -> Integration | None:
        """The integration that can mark ``obj``: the one that claims the most derived class's package, or None.

        Raises `IntegrationUnavailable` if it is known but does not fit the installed framework.
        """
        for cls in type(obj).__mro__:
            package = cls.__module__.partition(".")[0]
            for name in self._announced:
                if package in self._get(name).hosts:
                    return self.load(name)
        return None

    def _get(self, name: str) -> Integration:
        if name not in self._loaded:
            if name not in self._announced:
                raise IntegrationUnavailable(f"no integration {name!r}; there are {sorted(self._announced)!r}")
            self._loaded[name] = self._announced[name].load()
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
        contained = {inner for name in self._counts for inner in self._loaded[name].deactivates}
        target = [name for name in self._counts if name not in contained]
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
                f"the integration {name!r} does not fit the installed framework, although its version is in range: {error}"
            ) from error
        return patches


def _exists(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


_installed = Installed()

install = _installed.install
uninstall = _installed.uninstall
installed = _installed.installed
find_integration = _installed.find


def active_integrations() -> frozenset[str]:
    """Names of the integrations whose patches are on in this process."""
    return _installed.active


def patched_owners() -> tuple[Any, ...]:
    """The modules and classes that the process's integrations have patched; for tests."""
    return _installed.owners
