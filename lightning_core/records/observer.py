"""The protocol of a run's observers, and the calls to all of them.

`lightning_core.observers.open` lists the observers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from lightning_core.config import Config
from lightning_core.errors import describe
from lightning_core.records.ledger import NewRoutes
from lightning_core.records.report import Summary
from lightning_core.records.results import Evaluation, Recorded, Result
from lightning_core.records.shared_state import SharedState
from lightning_core.records.store import Phase
from lightning_core.trace import Trace

logger = logging.getLogger(__name__)

RunState = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A run as its observers get it when its folder exists."""

    config: Config
    folder: Path
    checkpoint: Path | None
    """The checkpoint that a resumed run continues from; None for a new run."""
    steps: int
    """Number of steps after which it ends."""
    show: Callable[[str], None]
    """Shows a message to the user; see `Observer.message`."""


class Observer(Protocol):
    """Watches a run. A class that derives from it defines the methods that it needs; the others do nothing.

    ``advance``, ``phase`` and ``message`` may be called from any thread.
    """

    only_reports: ClassVar[bool] = False
    """Whether the run does not depend on it: it is dropped after an error, and may get steps and evaluations after the run."""

    def open(self, run: ObservedRun) -> None:
        """The folder of the run exists; its model is not loaded yet."""

    def start(self, recorded: Recorded) -> None:
        """The first step is next. ``recorded``: what the earlier steps of a resumed run recorded; the next ones are added to it."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase of ``total`` rollouts, or micro-batches of an update, starts (None: unknown)."""

    def advance(self, tokens: int) -> None:
        """A rollout of the phase ended, the last attempt at its task, in which the models sampled ``tokens``; or a micro-batch."""

    def message(self, text: str) -> None:
        """Show ``text`` to the user."""

    def measure(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        """Metrics to add to ``step``'s, which are not recorded yet."""
        return {}

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """``step`` updates are done; ``metrics``: the values of its line in ``metrics.jsonl``, which is written."""

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        """Held-out tasks were evaluated after ``step`` updates; the rollouts are recorded."""

    def stop_reason(self) -> str | None:
        """The reason the run ends before its next step, or None."""

    def summarize(self, summary: Summary, recorded: Recorded) -> Summary:
        """``summary`` of the finished run with what the observer adds. With verl, `start` was not called."""
        return summary

    def close(self, state: RunState, result: Result | None) -> None:
        """The run ended; ``result`` is None unless it finished. The last call."""


class Observers:
    """The observers of a run. Each method calls every observer's, in order."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self._result: Result | None = None
        self._routes = NewRoutes()
        self._shared = SharedState()

    @contextmanager
    def watching(
        self, config: Config, folder: Path, checkpoint: Path | None = None, *, steps: int | None = None
    ) -> Generator[None]:
        """Open the observers for the run in ``folder``; close them after the body. ``steps``: default ``trainer.steps``."""
        run = ObservedRun(
            config=config,
            folder=folder,
            checkpoint=checkpoint,
            steps=config.trainer.steps if steps is None else steps,
            show=self.message,
        )
        try:
            self._each(lambda observer: observer.open(run))
            yield
        except KeyboardInterrupt:
            self._close("interrupted")
            raise
        except BaseException:
            self._close("failed")
            raise
        self._close("finished")

    def start(self, recorded: Recorded) -> None:
        self._each(lambda observer: observer.start(recorded))

    def phase(self, name: str, total: int | None = None) -> None:
        self._each(lambda observer: observer.phase(name, total))

    def advance(self, trace: Trace) -> None:
        """A rollout of the phase ended. Its routes are shown if they are new."""
        if routes := self._routes.of(trace):
            self.message(routes)
        self._shared.add(trace)
        tokens = sum(len(call.output_ids) for call in trace.calls if call.output_ids is not None)
        self._each(lambda observer: observer.advance(tokens))

    def on_batch(self, done: int, total: int) -> None:
        """``done`` of the ``total`` micro-batches of a step's updates are done; 0 starts the phase."""
        if done:
            self._each(lambda observer: observer.advance(0))
        else:
            self.phase("update", total)

    def message(self, text: str) -> None:
        self._each(lambda observer: observer.message(text))

    def measure(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """The metrics that all observers add, and what is known of the rollouts since the last call."""
        shared = self._shared.take()
        added: dict[str, float] = {} if shared is None else {"shared_state": shared}
        self._each(lambda observer: added.update(observer.measure(step, metrics)))
        return added

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._each(lambda observer: observer.on_step(step, metrics))

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        self._each(lambda observer: observer.on_evaluation(step, phase, evaluation))

    def stop_reason(self) -> str | None:
        """The first reason that an observer has."""
        return next((reason for observer in self._observers if (reason := observer.stop_reason()) is not None), None)

    def summarize(self, summary: Summary, recorded: Recorded) -> Summary:
        """``summary`` with what all observers add."""
        for observer in self._observers:
            summary = observer.summarize(summary, recorded)
        return summary

    def reporters(self) -> Observers:
        """The observers that only report."""
        return Observers(observer for observer in self._observers if observer.only_reports)

    def finished(self, result: Result) -> Result:
        """Keep ``result`` for the end; returns it."""
        self._result = result
        return result

    def _close(self, state: RunState) -> None:
        self._each(lambda observer: observer.close(state, self._result))

    def _each(self, call: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                call(observer)
            except Exception as error:
                if not observer.only_reports:
                    raise
                self._observers.remove(observer)
                logger.warning(
                    "%s is dropped, and the run goes on without it: %s",
                    type(observer).__name__,
                    describe(error),
                    exc_info=logger.isEnabledFor(logging.DEBUG),
                )
