"""Carries the current scope into a child process that runs Python.

A `ChildScope` travels with the work, by pickle or by fork. Entering it in the child installs the patches there and opens the scope
for as long as the work runs, so a worker process keeps nothing of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

from lightning_core.capture.context import current_scope
from lightning_core.capture.integration import installed_integrations
from lightning_core.capture.run import ActiveRollout
from lightning_core.capture.scope import current_rollout
from lightning_core.propagation.children.remote_run import attached

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _no_patches(integrations: Iterable[str]) -> None:
    """The parent has no patches."""


_prepare: Callable[[Iterable[str]], None] = _no_patches


def prepare_children_with(prepare: Callable[[Iterable[str]], None]) -> None:
    """Call ``prepare``, a function of a module, in child processes before work runs there."""
    global _prepare
    _prepare = prepare


@dataclass(frozen=True, slots=True)
class ChildScope:
    """The scope in which it was made. Can be pickled; ``with child_scope(): …`` enters it."""

    run: ActiveRollout
    enter: Callable[[], AbstractContextManager[None]]
    integrations: frozenset[str]
    """The integrations that the parent has installed."""
    prepare: Callable[[Iterable[str]], None]
    """Installs the patches and those integrations in the child."""

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Run the body in the scope."""
        self.prepare(self.integrations)
        with attached(self.run), self.enter():
            yield


@dataclass(frozen=True, slots=True)
class ChildCall:
    """A function that runs in ``scope`` when another process calls it."""

    function: Callable[..., Any]
    scope: ChildScope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with self.scope():
            return self.function(*args, **kwargs)


def child_scope() -> ChildScope:
    """The current scope, for a child process. Raises RuntimeError outside a rollout."""
    run = current_rollout()
    if run is None:
        raise RuntimeError("there is no rollout here to carry into a child process")
    return ChildScope(run, current_scope(), installed_integrations(), _prepare)


def bind_for_process(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, bound to the current scope; unlike with `bind`, the result can be pickled and called in another process.

    For job systems that Lightning does not patch: ``client.submit(bind_for_process(job), item)``. Outside a rollout it is
    ``function`` itself.
    """
    return function if current_rollout() is None else cast("Callable[_P, _T]", ChildCall(function, child_scope()))
