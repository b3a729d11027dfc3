"""Sends a run's metrics and results to its trackers, each on its own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from lightning_core.config import Config
from lightning_core.errors import describe
from lightning_core.observers.trackers.registry import TrackerFactory, tracker_factories
from lightning_core.observers.trackers.tracker import TrackedRun, Tracker
from lightning_core.observers.trackers.values import without_credentials
from lightning_core.records.observer import ObservedRun, Observer, RunState
from lightning_core.records.results import Evaluation, Result
from lightning_core.records.run_folder.checkpoints import checkpoint_step
from lightning_core.records.store import Phase

logger = logging.getLogger(__name__)

_GIVE_UP_AFTER = 3
"""Number of successive errors after which a tracker gets nothing but `Tracker.on_end`, which closes it."""
_NOTICE_SECONDS = 5.0
"""Seconds after which the wait for the trackers at the end of a run is announced."""
_WAIT_SECONDS = 600.0
"""Seconds after which that wait ends by default: an unattended run must not hold its machine for a server that does not answer."""

_Report = Callable[[Tracker], None]


class Trackers(Observer):
    """The trackers of ``run.report_to``."""

    only_reports = True

    def __init__(self, config: Config, factories: Mapping[str, TrackerFactory] | None = None) -> None:
        """``factories``: default: ``run.report_to``; raises as `tracker_factories` does."""
        self._factories = tracker_factories(config) if factories is None else factories
        self._threads: list[_TrackerThread] = []
        self._seconds = config.run.report_seconds or _WAIT_SECONDS

    def open(self, run: ObservedRun) -> None:
        """Start the trackers."""
        tracked = TrackedRun(
            folder=run.folder,
            name=run.folder.name,
            config=without_credentials(run.config.model_dump(mode="json")),
            tags=run.config.run.tags,
            steps_done=0 if run.checkpoint is None else checkpoint_step(run.checkpoint),
            resumed=run.checkpoint is not None,
            with_checkpoint=run.config.run.report_checkpoint,
        )
        self._threads = [_TrackerThread(name, factory, tracked) for name, factory in self._factories.items()]

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.on_step`."""
        values = dict(metrics)
        self._send(lambda tracker: tracker.on_step(step, values))

    def on_evaluation(self, step: int, phase: Phase, evaluation: Evaluation) -> None:
        """See `Tracker.on_evaluation`."""
        self._send(lambda tracker: tracker.on_evaluation(step, phase, evaluation))

    def close(self, state: RunState, result: Result | None) -> None:
        """End the trackers and wait until they have sent everything, for a limited time. An interrupt ends the wait."""
        try:
            for thread in self._threads:
                thread.end(lambda tracker: tracker.on_end(state, result))
            began = time.monotonic()
            for thread in self._threads:
                thread.join(began, self._seconds)
        except KeyboardInterrupt:
            if state != "finished":
                raise
            logger.warning("run.report_to: the wait was interrupted: trackers may lack what was reported last")

    def _send(self, report: _Report) -> None:
        for thread in self._threads:
            thread.send(report)


class _TrackerThread:
    """Creates and calls one tracker."""

    def __init__(self, name: str, factory: TrackerFactory, run: TrackedRun) -> None:
        self._name = name
        self._factory = factory
        self._run = run
        self._tracker: Tracker | None = None
        # A daemon, so a server that does not answer cannot keep an interrupted process alive.
        self._thread = threading.Thread(target=self._work, name=f"lightning-tracker-{name}", daemon=True)
        self._reports: SimpleQueue[tuple[_Report, bool]] = SimpleQueue()
        self._errors = self._in_a_row = 0
        self._thread.start()

    def send(self, report: _Report) -> None:
        self._reports.put((report, False))

    def end(self, report: _Report) -> None:
        self._reports.put((report, True))

    def join(self, began: float, seconds: float) -> None:
        """Wait until everything is sent, or until ``seconds`` after ``began``, a time of the monotonic clock."""
        self._thread.join(max(0.0, began + _NOTICE_SECONDS - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("run.report_to: waiting for the tracker %s; Ctrl-C ends the wait", self._name)
            self._thread.join(max(0.0, began + seconds - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "run.report_to: tracker %s did not shut down in time; its last values may be missing", self._name
            )
        if self._errors > 1:
            logger.warning("run.report_to: %d errors of the tracker %s; the first is above", self._errors, self._name)

    def _work(self) -> None:
        self._try(self._open)
        waiting: list[_Report] = []
        last = False
        while not last:
            report, last = self._reports.get()
            waiting.append(report)
            if self._tracker is None and self._in_a_row < _GIVE_UP_AFTER:
                self._try(self._open)
            if self._tracker is not None:
                self._deliver(waiting, self._tracker, last=last)
            if self._tracker is not None or self._in_a_row >= _GIVE_UP_AFTER:
                waiting.clear()

    def _deliver(self, reports: Sequence[_Report], tracker: Tracker, *, last: bool) -> None:
        """Report in order. After too many errors only the end is reported, which is the last of ``reports`` if ``last``."""
        for number, report in enumerate(reports, start=1):
            if self._in_a_row < _GIVE_UP_AFTER or (last and number == len(reports)):
                self._try(report, tracker)

    def _open(self) -> None:
        tracker = self._factory(self._run)
        if not callable(getattr(tracker, "on_step", None)):
            raise TypeError(
                f"expected an object with on_step, on_evaluation and on_end, found {type(tracker).__name__}"
            )
        self._tracker = tracker

    def _try(self, act: Callable[..., None], *arguments: object) -> None:
        try:
            act(*arguments)
            self._in_a_row = 0
        except (Exception, SystemExit) as error:
            self._errors += 1
            self._in_a_row += 1
            if self._errors == 1:
                logger.warning(
                    "run.report_to: tracker %s failed and will miss these values; training continues: %s",
                    self._name,
                    describe(error),
                    exc_info=logger.isEnabledFor(logging.DEBUG),
                )
