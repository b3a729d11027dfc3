"""The numbers of calls that were recorded and left out, by reason."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from lightning_core.errors import describe, plural

logger = logging.getLogger("lightning_core.tools.record")

SHARE = "outside the share"
REDACTED = "dropped by the redaction"
REDACTION_FAILED = "because the redaction failed"
QUEUE_FULL = "because the queue was full or its thread could not start"
FOLDER_FULL = "beyond the size limit of the folder"
UNWRITTEN = "because the folder could not be written"
TOO_LARGE = "larger than 32 MB"
OTHER_FORMAT = "in a wire format that is not read"
UNREAD_BODY = "with a body that is sent as a stream"
UNREAD_RESPONSE = "with a response that the client reads from the connection itself"
CONTINUED = "that continue a response that was not recorded"
FAILED = "because of an error of the recording"
UNFINISHED = "not written before the program ended"


class RecordCounts:
    """Counts of one process. Thread-safe, and safe to use in a finalizer."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a call on a thread that holds it.
        self._lock = threading.RLock()
        self.recorded = 0
        """Calls that were written."""
        self.left_out: Counter[str] = Counter()
        """Calls that were not, by reason."""
        self.rewards = 0
        """Rewards that were not written."""
        self._warned = False

    def add(self, recorded: int) -> None:
        """Count ``recorded`` more calls as written."""
        with self._lock:
            self.recorded += recorded

    def leave_out(self, reason: str, *, times: int = 1, error: BaseException | None = None) -> None:
        """Count calls as left out. The first time with an ``error`` is logged."""
        with self._lock:
            if times:
                self.left_out[reason] += times
            first, self._warned = error is not None and not self._warned, self._warned or error is not None
        if first and error is not None:
            logger.warning(
                "model calls are not recorded %s: %s. The program continues; further calls that are left out are counted",
                reason,
                describe(error),
            )

    def merge(self, other: Mapping[str, int]) -> None:
        """Add the counts of another process, as `as_dict` returns them."""
        with self._lock:
            for reason, number in other.items():
                if reason == "recorded":
                    self.recorded += number
                elif reason == "rewards":
                    self.rewards += number
                else:
                    self.left_out[reason] += number

    def as_dict(self) -> dict[str, int]:
        """The counts by reason, with ``recorded`` and ``rewards``."""
        with self._lock:
            return {**self.left_out, "recorded": self.recorded, "rewards": self.rewards}

    def summary(self, folder: object) -> str:
        """One line: the calls recorded in ``folder``, those left out, and why."""
        with self._lock:
            reasons = [f"{number:,} {reason}" for reason, number in self.left_out.most_common()]
            left_out = f"{self.left_out.total():,} left out ({', '.join(reasons)})" if reasons else "none left out"
            rewards = f", {plural(self.rewards, 'reward')} not recorded" if self.rewards else ""
            return f"{plural(self.recorded, 'call')} recorded in {folder}, {left_out}{rewards}"
