"""A signal ends a run even where Python discards exceptions."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from lightning_core.rollouts.interrupts import Interrupted, interruptible


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Target:
    """Something to refer to."""


class Ending:
    def __del__(self) -> None:
        terminate()


def in_a_callback() -> None:
    target = Target()
    reference = weakref.ref(target, terminate)
    del target
    assert reference() is None


def in_a_finalizer() -> None:
    ending = Ending()
    del ending


@pytest.mark.parametrize("discarded", [in_a_callback, in_a_finalizer])
def test_a_signal_whose_exception_is_discarded_arrives_again(
    discarded: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        with interruptible():
            discarded()
            time.sleep(30)

    hook = sys.unraisablehook
    with pytest.raises(Interrupted, match="SIGTERM"):
        run()
    assert sys.unraisablehook is hook
    assert "Exception ignored" not in capsys.readouterr().err


def test_other_discarded_exceptions_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda discarded: reported.append(discarded.exc_value))

    def fail(_: object) -> None:
        raise ValueError("in a callback")

    with interruptible():
        target = Target()
        reference = weakref.ref(target, fail)
        del target
        assert reference() is None
    assert [str(error) for error in reported] == ["in a callback"]


def test_a_hook_that_the_body_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with interruptible():
        sys.unraisablehook = print
    assert sys.unraisablehook is print
