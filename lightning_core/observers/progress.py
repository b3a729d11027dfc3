"""Progress displays of a run: live on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichBars
from rich.text import Text

from lightning_core.errors import visible


class Progress(Protocol):
    """Receives the loop's progress. Methods are thread-safe; terminal errors are not raised."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase of ``total`` units starts (None: unknown), such as ``rollouts``."""
        ...

    def advance(self, n: int = 1, tokens: int = 0) -> None:
        """``n`` units of the phase are done, with ``tokens`` sampled tokens."""
        ...

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` of ``total_steps`` (from 1) is complete. ``total_steps`` is an estimate if a budget ends the run."""
        ...

    def message(self, text: str) -> None:
        """Print a line that stays on the screen."""
        ...

    def close(self) -> None:
        """Restore the terminal. Closing twice does nothing."""
        ...


_LONG_PHASE = 5.0
"""Seconds after which the time left of a phase is shown."""
_SURE = 0.1
"""The share of a phase that must be done: the first rollouts end late, and the first ends of many together."""
_LINE_EVERY = 20.0
"""Seconds between lines about a phase."""
_PREPARATIONS = ("loading", "starting")
"""First words of the phases before the first step, which can take minutes."""


class SilentProgress:
    """Shows nothing."""

    def phase(self, name: str, total: int | None = None) -> None: ...

    def advance(self, n: int = 1, tokens: int = 0) -> None: ...

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class Pace:
    """Time left, and sampled tokens per second.

    The first from the steps so far, the second from the phases that sample.

    A step takes as long as its phases. Loading, evaluations and checkpoints are not part of it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase_began = clock()
        self._in_step = False
        self._step_seconds = 0.0
        self._durations: list[float] = []
        self._tokens = self._phase_tokens = 0
        self._sampling_seconds = 0.0
        self.done, self.total = 0, 0
        """Units of the running phase; a total of 0 is unknown."""

    def phase(self, name: str, total: int | None = None) -> None:
        """End the running phase and start the phase ``name`` of ``total`` units. Evaluations and preparations do not count
        towards a step."""
        self._end_phase()
        self._in_step = not name.startswith(("eval", *_PREPARATIONS))
        self.done, self.total = 0, total or 0

    def _end_phase(self) -> None:
        now = self._clock()
        seconds = now - self._phase_began
        if self._in_step:
            self._step_seconds += seconds
        if self._phase_tokens:
            self._sampling_seconds += seconds
            self._tokens += self._phase_tokens
        self._phase_began, self._phase_tokens, self._in_step = now, 0, False

    def advance(self, n: int, tokens: int) -> None:
        """``n`` units of the running phase are done, with ``tokens`` sampled tokens."""
        self.done += n
        self._phase_tokens += tokens

    def phase_left(self) -> str:
        """The time left of a long phase, such as ``1m35s left``; empty at its start and end, and if its units are not known."""
        seconds, units = self._clock() - self._phase_began, self.total - self.done
        if seconds < _LONG_PHASE or units <= 0 or self.done < _SURE * self.total:
            return ""
        return f"{format_seconds(seconds / self.done * units)} left"

    def live_tokens_per_second(self) -> float:
        """Tokens per second of the running phase."""
        return self._phase_tokens / max(self._clock() - self._phase_began, 1e-9)

    def step(self, steps_left: int) -> tuple[float, float]:
        """Tokens per second, and the seconds that ``steps_left`` steps will take.

        The rate counts the time spent sampling since the last step."""
        self._end_phase()
        rate = self._tokens / self._sampling_seconds if self._sampling_seconds else 0.0
        self._durations = [*self._durations, self._step_seconds][-10:]
        self._step_seconds, self._tokens, self._sampling_seconds = 0.0, 0, 0.0
        return rate, steps_left * sum(self._durations) / len(self._durations)


def step_line(step: int, total_steps: int, metrics: Mapping[str, float], rate: float, left: float) -> str:
    """The line of a finished step. ``rate``: tokens per second. ``left``: seconds."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3f}")
    if rate:
        parts.append(f"{rate:,.0f} tokens/s")
    parts.append(f"{format_seconds(left)} left" if step < total_steps else "done")
    return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """``95`` as ``1m35s``, ``8000`` as ``2h13m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


class PlainProgress:
    """One line per step, and lines about phases that take long, for logs and CI."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._pace = Pace(clock)
        self._name = ""
        self._line_at = clock()

    def phase(self, name: str, total: int | None = None) -> None:
        self._pace.phase(name, total)
        self._name = name
        self._line_at = self._clock() + _LINE_EVERY
        if name.startswith(_PREPARATIONS):
            self.message(name)

    def advance(self, n: int = 1, tokens: int = 0) -> None:
        self._pace.advance(n, tokens)
        if self._clock() >= self._line_at and (left := self._pace.phase_left()):
            self._line_at = self._clock() + _LINE_EVERY
            self.message(f"{self._name} {self._pace.done}/{self._pace.total}  {left}")

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        self.message(step_line(step, total_steps, metrics, *self._pace.step(total_steps - step)))

    def message(self, text: str) -> None:
        self._stream.write(f"{visible(text, lines=False)}\n")
        self._stream.flush()

    def close(self) -> None: ...


class _DoneColumn(MofNCompleteColumn):
    """Units that are done, ``3/16``; of a phase whose units are not known, the time that it has taken."""

    def render(self, task: Task) -> Text:
        """See `MofNCompleteColumn`."""
        if task.total is None:
            return Text(format_seconds(task.elapsed or 0.0), style="progress.download")
        return super().render(task)


class LiveProgress:
    """A live display of the step, its reward and the time left, and of the current phase."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = Pace(clock)
        self._bars = RichBars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _DoneColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._steps: TaskID | None = None
        self._phase = self._bars.add_task("starting", total=None, note="")
        self._bars.start()

    def phase(self, name: str, total: int | None = None) -> None:
        self._pace.phase(name, total)
        self._bars.remove_task(self._phase)
        self._phase = self._bars.add_task(name, total=total, note="")

    def advance(self, n: int = 1, tokens: int = 0) -> None:
        self._pace.advance(n, tokens)
        rate = self._pace.live_tokens_per_second() if tokens else 0.0
        notes = [f"{rate:,.0f} tokens/s"] if rate else []
        if left := self._pace.phase_left():
            notes.append(left)
        if notes:
            self._bars.update(self._phase, advance=n, note="  ".join(notes))
        else:
            self._bars.update(self._phase, advance=n)

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        rate, left = self._pace.step(total_steps - step)
        reward = f"reward {metrics['reward']:.3f}  " if "reward" in metrics else ""
        note = f"{reward}{format_seconds(left)} left"
        if self._steps is None:
            self._steps = self._bars.add_task("steps", total=total_steps, note=note)
        self._bars.update(self._steps, completed=step, total=total_steps, note=note)
        self.message(step_line(step, total_steps, metrics, rate, left))

    def message(self, text: str) -> None:
        # A Text, because square brackets in a string would be parsed as markup.
        self._bars.console.print(Text(visible(text, lines=False)), soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


def show_progress(stream: TextIO | None = None) -> Progress:
    """The display for ``stream`` (standard error): live on a terminal, else plain lines."""
    stream = stream or sys.stderr
    console = Console(file=stream)
    return LiveProgress(console) if console.is_terminal and not console.is_dumb_terminal else PlainProgress(stream)
