"""All exceptions of Lightning, and how each is handled.

*Inside an agent's process* (``capture``, ``propagation``, the integrations), Lightning must not
break the host: it never raises, never swallows the host's exception, never changes its result.
Failures there go through ``capture.record()``, which counts them on the rollout and logs the first. A strict
rollout (the default in ``fit``) then raises `CaptureError` at its end, so lost training data
does not go unnoticed.

*On the training side* (``transitions``, ``credit``, ``trainers``, ``loop``) exceptions propagate.

An agent's own exception is data: the runner stores it on the rollout, which counts as failed,
with its reward. An infrastructure failure (`InfrastructureError`) is retried, then left out of
baseline and loss, and counted. ``rollouts/outcome.py`` decides which one it is.

Each class also inherits from the matching built-in exception.

At the end are the functions that read values of the agent and show them and errors to people, and the count of messages that repeat.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sysconfig
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, SupportsFloat, cast

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, a quota or a limit on the size of files."""


_USER = re.compile(r"(?<=://)[^\s/?#'\"]*@")
_SECRET = re.compile(r"(?i)(?<=[?&;])([\w.-]*(?:key|token|sig|signature|secret|passwo?r?d|credential)=)[^&#;\s'\"<>]+")


def redact_urls(text: str) -> str:
    """``text`` with ``***`` for the credentials in its URLs: users, passwords, and values such as of ``?key=``."""
    text = _USER.sub("***@", text) if "://" in text else text
    return _SECRET.sub(r"\1***", text) if "=" in text else text


class LightningError(Exception):
    """Base class of all exceptions that Lightning raises deliberately. Messages do not contain the credentials in URLs."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact_urls(arg) if isinstance(arg, str) else arg for arg in args))

    def __reduce__(self) -> str | tuple[Any, ...]:
        plain = type(self).__init__ is LightningError.__init__  # others have other arguments than the message
        return super().__reduce__() if plain else (LightningError, (str(self),))


class ConfigError(LightningError, ValueError):
    """Invalid configuration or arguments. Raised before anything runs."""


class MissingExtra(LightningError, ImportError):
    """A package of an optional extra is not installed."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(f"{why} needs the package {package!r}: pip install 'lightning-rl[{extra}]'")
        self.package = package
        self.extra = extra


class IntegrationUnavailable(LightningError, ImportError):
    """A requested integration is unavailable: its framework is missing or out of range."""


class CaptureError(LightningError, RuntimeError):
    """A strict rollout ended with recording failures."""


class ProgramError(LightningError, RuntimeError):
    """An agent that is a program failed: no reward and an exit code other than 0, or a reward that is not a number."""


class RewardError(LightningError, ValueError):
    """A reward is missing, given twice, not a finite float32 number, or of a call or agent that cannot be determined."""


class MissingRewardError(RewardError):
    """A rollout ended without a reward."""


class CreditError(LightningError, ValueError):
    """A credit rule does not support the request or its input."""


class InfrastructureError(LightningError, RuntimeError):
    """A failure outside the agent: the endpoint, an upstream server, a time limit of a run."""


class TimeLimitError(InfrastructureError):
    """A rollout exceeded ``rollouts.timeout_seconds``, which is ``seconds``, without the time in which it waited for model calls."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the rollout was stopped after rollouts.timeout_seconds = {seconds:g} s of its own time")
        self.seconds = seconds

    def __reduce__(self) -> tuple[object, ...]:
        return (TimeLimitError, (self.seconds,))


class WholeTimeLimitError(InfrastructureError):
    """A rollout exceeded ``rollouts.total_seconds``, which is ``seconds``; ``waited``: seconds of these that it waited for others."""

    def __init__(self, seconds: float, *, waited: float = 0.0) -> None:
        why = f"the rollout was stopped after rollouts.total_seconds = {seconds:g} s"
        super().__init__(f"{why}, of which it waited {waited:.1f} s for model calls or for a processor")


class StrayCallError(InfrastructureError):
    """A model call was refused: it belongs to no live rollout, or not to exactly one agent, or its routing failed."""


class UpstreamError(InfrastructureError):
    """An upstream model server is unreachable, or its response is invalid."""


class UpstreamRefusal(UpstreamError):
    """The upstream returned an HTTP error, which is passed through to the agent."""

    def __init__(
        self, message: str, *, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.headers = dict(headers or {})

    @property
    def is_request_error(self) -> bool:
        """Whether the agent's request caused it (a client error, not an infrastructure failure)."""
        return self.status in (400, 413, 422)

    @property
    def is_permanent(self) -> bool:
        """Whether every attempt gets it: the key, the model or the URL is wrong."""
        return self.status in (401, 402, 403, 404, 405, 410)


class UpstreamStreamError(UpstreamError):
    """A stream of the upstream has an error event, ``event``, which is passed through to the agent."""

    def __init__(self, message: str, *, event: bytes, is_request_error: bool) -> None:
        """``is_request_error``: see `UpstreamRefusal.is_request_error`."""
        super().__init__(message)
        self.event = event
        self.is_request_error = is_request_error


class OverloadError(InfrastructureError):
    """The policy endpoint's limit on concurrent requests is exceeded."""


class PolicyRequestError(LightningError, ValueError):
    """An invalid request to the policy endpoint; returned as an HTTP error with this message."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        # It may quote a value as long as the body.
        super().__init__(message if len(message) <= 2000 else f"{message[:2000]} … ({len(message)} characters)")
        self.status = status
        self.param = param


class ConstraintError(PolicyRequestError):
    """The response cannot be constrained to the JSON schema of a request; the endpoint adds the name of its field."""


class ContextOverflowError(PolicyRequestError):
    """The prompt of a request fills the context of the model."""


class HostedToolError(PolicyRequestError):
    """A request with a tool that runs at a provider. Every attempt gets it, so it is an infrastructure failure."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(
            f"{message}. Give the agent a function that its client runs, or put it under agents.frozen with a model of the provider",
            param=param,
        )


class CallLimitError(PolicyRequestError):
    """A rollout has made ``rollouts.max_calls`` model calls, which is ``limit``. Clients do not retry the status."""

    def __init__(self, limit: int) -> None:
        why = f"this rollout has made {limit} model calls, which is the limit rollouts.max_calls"
        super().__init__(f"{why}. End the agent here: further model calls are refused", status=403)


class TrainingError(LightningError, RuntimeError):
    """The trainer cannot take a step: non-finite loss, an incompatible checkpoint."""


class ProofError(TrainingError):
    """Training data differs from what was sampled. The weights are unchanged."""


class NonFiniteError(TrainingError):
    """The loss or the gradient of an update is not finite. The weights are unchanged."""


class OutOfMemoryError(TrainingError, MemoryError):
    """An update does not fit the memory, even with the smallest micro-batches. The weights are unchanged."""


class RecordError(LightningError, RuntimeError):
    """A file of a run cannot be read or written: its store, its metrics."""


def os_problem(error: OSError) -> str:
    """The error's message and path on one line, without its number."""
    path = "" if error.filename is None else f" ({str(error.filename)!r})"
    return f"{error.strerror or error}{path}"


def text_of(value: object, convert: Callable[[object], str] = str) -> str:
    """``convert(value)`` as text that can be encoded, even if a method of ``value`` raises."""
    try:
        text = convert(value)
    except Exception as error:  # noqa: BLE001 - code of the agent
        text = f"(a {type(value).__name__}; showing it raised {type(error).__name__})"
    return text.encode(errors="backslashreplace").decode()


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
"""Control characters of terminals, those that turn the direction of text, and halves of surrogate pairs."""


def visible(text: str, *, lines: bool = True) -> str:
    """``text`` with control characters as escapes such as ``\\x1b``. With ``lines``, line breaks and tabs are kept."""
    escaped = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
    return escaped if lines else escaped.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")


def plural(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(text: str, most: int) -> str:
    """``text``, with an ellipsis in place of its end if it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def fold(text: str, most: int = 480) -> str:
    """``text`` on one line, with its middle left out if it has more than ``most`` characters."""
    head, tail = most * 3 // 4, most // 4
    line = " ".join((text if len(text) <= most * 20 else f"{text[: most * 10]}{text[-most * 10 :]}").split())
    return line if len(line) <= most else f"{line[:head]} … ({len(text)} characters) … {line[-tail:]}"


def as_number(value: object) -> float | None:
    """``value`` as a float; None if it is not a number. Calls the value's own ``__float__``."""
    if isinstance(value, str) or not hasattr(value, "__float__"):  # NumPy's strings convert too
        return None
    try:
        return float(cast("SupportsFloat", value))
    except OverflowError:  # an integer or a fraction beyond float64
        return math.inf
    except Exception:  # noqa: BLE001 - such as a tensor of several elements
        return None


def show(value: object) -> str:
    """The ``repr`` of a value of the agent, for messages."""
    return fold(text_of(value, repr), 200)


def did_you_mean(words: str | Iterable[str], known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``did you mean 'steps'?`` with the nearest of ``known`` to each of ``words``; empty if none is near."""
    candidates = list(known)
    wanted = [words] if isinstance(words, str) else words
    near = dict.fromkeys(match for word in wanted for match in get_close_matches(word, candidates, 1, cutoff))
    return f"did you mean {', '.join(map(repr, near))}?" if near else ""


def describe(error: BaseException) -> str:
    """``Type: message`` on one line, for spans and summaries. Long messages are folded."""
    text = fold(redact_urls(text_of(error)))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages; the second is Debian's."""
_MOST_FRAMES = 5
_MOST_LINES = 4


def explain(error: BaseException) -> str:
    """The lines of the user's code that led to ``error``, the innermost last, then its type and message; indented.

    Frames of Lightning, of Python and of installed packages are left out.
    """
    text = redact_urls(text_of(error, lambda _: "".join(traceback.format_exception_only(error)))).rstrip().splitlines()
    if len(text) > _MOST_LINES:
        text = [*text[:_MOST_LINES], f"… {len(text) - _MOST_LINES} lines more"]
    return "\n".join(f"  {line if len(line) <= 300 else fold(line, 300)}" for line in (*user_lines(error), *text))


def user_lines(error: BaseException) -> list[str]:
    """The lines of the user's code that led to ``error``, the innermost last; see `explain`."""
    chain: list[BaseException] = []
    shown: BaseException | None = error
    while shown is not None and not _user_frames(shown) and all(shown is not one for one in chain):
        chain.append(shown)
        shown = shown.__cause__ if shown.__suppress_context__ else shown.__context__  # as a traceback shows them
    frames = [] if shown is None else _user_frames(shown)[-_MOST_FRAMES:]
    return [f"{_relative(f.filename)}:{f.lineno}, in {f.name}: {f.line or '?'}" for f in frames]


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", *_other_folders()))
        and not any(folder in frame.filename for folder in _INSTALLED)
    ]


def _relative(path: str) -> str:
    """``path`` relative to the working directory if it is below it."""
    here = f"{Path.cwd()}{os.sep}"
    return path.removeprefix(here)


@cache
def _other_folders() -> tuple[str, ...]:
    """The folders of Lightning and of Python's standard library."""
    folders = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
    return tuple(f"{folder}{os.sep}" for folder in folders)


_CELL = '<{0} style="text-align:left;vertical-align:top;white-space:pre-wrap;padding:0 1em 0 0">{1}</{0}>'
_MOST_ROWS = 20


def html_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of ``rows`` for notebooks. All text is escaped, rows after the 20th are counted only, and long cells are cut."""
    head, *body = (
        f"<tr>{''.join(_CELL.format(tag, escape(shorten(_cell_text(value), 200))) for value in values)}</tr>"
        for tag, values in (("th", columns), *(("td", row) for row in rows[:_MOST_ROWS]))
    )
    more = f"<p>… {len(rows) - _MOST_ROWS} rows more</p>" if len(rows) > _MOST_ROWS else ""
    table = f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
    return f"<p><b>{escape(caption)}</b></p>{table}{more}"


def _cell_text(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


COUNTED: Mapping[str, object] = {"is_counted": True}
"""The ``extra`` of a message whose repeats are counted with `Repeats`, so `FirstOfEach` prints each one."""


class Repeats:
    """Counts by cause. Each power of ten is due to be logged. Thread-safe. A forked child counts from 0."""

    def __init__(self) -> None:
        self.clear()
        _of_process.add(self)

    def count(self, cause: Hashable, times: int = 1) -> str | None:
        """Count ``cause``; return the text to add to the message about it, or None if it is not to be logged this time."""
        with self._lock:
            before = self._counts[cause]
            number = self._counts[cause] = before + times
        if before and len(str(number)) == len(str(before)):
            return None
        return "" if number == 1 else f" ({number} times so far)"

    def clear(self) -> None:
        """Forget all causes."""
        self._lock = threading.RLock()  # reentrant for finalizers and signal handlers
        self._counts: Counter[Hashable] = Counter()


_of_process: weakref.WeakSet[Repeats] = weakref.WeakSet()


def _clear_in_child() -> None:
    for repeats in tuple(_of_process):
        repeats.clear()  # a thread of the parent may hold its lock


if hasattr(os, "register_at_fork"):  # POSIX
    os.register_at_fork(after_in_child=_clear_in_child)
