"""A rollout in a process that is not its own.

An `ActiveRollout` that is pickled arrives in another process as a `RemoteRollout`, and one that a fork copies becomes one. It sends
what it records to the endpoint of the rollout, which adds it to the trace. A process keeps a rollout only while it works for it.
"""

from __future__ import annotations

import asyncio
import copyreg
import os
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from lightning_core.capture import run as runs
from lightning_core.capture import spans
from lightning_core.capture.run import ActiveRollout, printable
from lightning_core.capture.scope import current_rollout
from lightning_core.propagation.children.sender import Destination, sender
from lightning_core.trace import OPERATION, SpanRecord

# Not the task: it may be an object that cannot be pickled.
_SETTINGS = ("task_id", "agents", "endpoint", "public_endpoint", "api_key", "ignore_hosts", "secret", "folder", "tools")
_users: Counter[str] = Counter()
"""The number of work items of each rollout in this process."""
_lock = threading.Lock()


class RemoteRollout(ActiveRollout):
    """A rollout that runs in another process. What is recorded here is sent there; see `sender`."""

    def attach(self) -> None:
        """Receive the spans of the rollout that end in this process."""
        runs.register(self)
        spans.listen(self.rollout, self._append)

    def detach(self) -> None:
        """Receive no more spans, and send the failures that no retry recovered."""
        self.ended = True
        self.count_waiting()
        for failure in self.sent.unanswered:
            self.count_infrastructure_failure(failure)
        spans.stop_listening(self.rollout)
        runs.unregister(self)

    def close(self, error: BaseException | None) -> None:
        """Leave the rollout, in a fork that leaves the rollout's own scope. It goes on in its own process, which ends its trace."""
        self.detach()
        sender.flush()

    def declare(self, names: Iterable[str]) -> None:
        """See `ActiveRollout.declare`; each name is sent once."""
        with self._lock:
            new = {name.strip() for name in names} - self._declared
            self._declared |= new
        if new:
            self._send("declared", sorted(new))

    def add_origin(self, name: str, variables: Mapping[str, str]) -> None:
        """See `ActiveRollout.add_origin`; returns when the endpoint knows it, since the program's first request needs it."""
        super().add_origin(name, variables)
        self._send("origin", [name, dict(variables)])
        sender.flush()

    def note_elsewhere(self, agent: str | None, host: str, why: str, *, times: int = 1) -> None:
        """See `ActiveRollout.note_elsewhere`."""
        sender.add(self._destination(), "elsewhere", agent, printable(host), why, times=times)

    def count(self, what: str, *, detail: str | None = None, times: int = 1) -> None:
        """See `ActiveRollout.count`."""
        super().count(what, detail=detail, times=times)
        sender.add(self._destination(), "count", what, detail, times=times)

    def count_infrastructure_failure(
        self, detail: str, *, times: int = 1, kind: str | None = None, permanent: bool = False
    ) -> None:
        """See `ActiveRollout.count_infrastructure_failure`. Only the endpoint knows a ``kind``."""
        sender.add(self._destination(), "infrastructure", detail, permanent, times=times)

    def _append(self, span: SpanRecord) -> None:
        is_reward = span.attributes.get(OPERATION) == "reward"
        self._send("span", asdict(span), what="reward" if is_reward else "span")
        if is_reward and asyncio._get_running_loop() is None:
            # The agent's next line may pass its result on in a way that is not seen here, and end the rollout.
            sender.flush()

    def _send(self, field: str, record: Any, *, what: str | None = None) -> None:
        sender.put(self._destination(), what or field, {field: record})

    def _destination(self) -> Destination:
        return Destination(self.rollout, self.endpoint, self.api_key, self.secret)


@contextmanager
def attached(run: ActiveRollout) -> Generator[None]:
    """Record spans of ``run`` in the body; a no-op in the process that runs the rollout."""
    if not isinstance(run, RemoteRollout):
        yield
        return
    with _lock:
        _users[run.rollout] += 1
        if _users[run.rollout] == 1:
            run.attach()
    try:
        yield
    finally:
        with _lock:
            _users[run.rollout] -= 1
            if not _users[run.rollout]:
                del _users[run.rollout]
                run.detach()
        sender.flush()  # before the work returns its result


def _load(rollout: str, settings: Mapping[str, Any]) -> ActiveRollout:
    """The rollout in this process: the run itself where it runs, else a `RemoteRollout`."""
    known = runs.find_rollout(rollout)
    if known is not None:
        return known
    run = RemoteRollout(task=None, **settings, strict=False)
    run.rollout = rollout
    return run


def _reduce(run: ActiveRollout) -> tuple[Any, ...]:
    return _load, (run.rollout, {name: getattr(run, name) for name in _SETTINGS})


def _after_fork_in_child() -> None:
    """Keep the current rollout, as a remote one, and none of the others."""
    global _lock
    _lock = threading.Lock()
    _users.clear()
    current = current_rollout()
    known = runs.forget_all()
    for run in known:
        spans.stop_listening(run.rollout)
    if current is not None and current in known and not current.ended:
        # Scopes and generators that the fork copied refer to the same object.
        current.__class__ = RemoteRollout
        assert isinstance(current, RemoteRollout)
        current.renew_lock()
        current.mirror = None  # its socket is the parent's
        _users[current.rollout] = 1
        current.attach()


copyreg.pickle(ActiveRollout, _reduce)
copyreg.pickle(RemoteRollout, _reduce)
if hasattr(os, "register_at_fork"):  # POSIX
    os.register_at_fork(after_in_child=_after_fork_in_child)
