"""The sender of records: it loses nothing silently, and neither blocks nor breaks what calls it."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from lightning_core.capture import ActiveRollout, outside_rollout, scope
from lightning_core.propagation.children import sender as sending
from lightning_core.propagation.children.sender import Destination, Sender
from lightning_core.testing import Playground
from tests.propagation.gate import Gate, gate_to


@pytest.fixture
def gate(playground: Playground) -> Iterator[Gate]:
    with gate_to(playground.url) as gate:
        yield gate


def destination(run: ActiveRollout) -> Destination:
    return Destination(run.rollout, run.endpoint, run.api_key, run.secret)


def span(run: ActiveRollout, name: str) -> dict[str, Any]:
    """The record of a span."""
    with scope("source", kind="tool"):
        pass
    return {"span": asdict(run.spans[-1]) | {"name": name, "span_id": f"{len(run.spans):016x}"}}


@pytest.fixture
def own(playground: Playground) -> Iterator[tuple[Sender, ActiveRollout]]:
    """A sender in this process, and a rollout to send to."""
    with playground.rollout(strict=False) as run, scope("writer"):
        sender = Sender()
        yield sender, run
        sender.close()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, without the last sentence, which is always the same."""
    return [record.getMessage().partition(". What is not sent")[0] for record in caplog.records]


def test_refused_records_are_logged_with_their_reason_and_number_and_the_others_are_added(
    own: tuple[Sender, ActiveRollout], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    sender, run = own
    good = [span(run, name) for name in ("first", "second")]
    run.endpoint = gate.url
    to = destination(run)
    sender.put(to, "declared", {"declared": []})
    assert gate.reached.wait(60)  # so that the others are one batch
    for record in (good[0], *[{"declared": 1}] * 11, {"declared": float("nan")}, good[1]):
        sender.put(to, "span" if "span" in record else "declared", record)
    gate.open.set()
    sender.flush()
    sender.put(to, "declared", {"declared": 1})
    sender.put(to, "span", {"span": object()})
    sender.flush()
    assert [s.name for s in run.spans if s.name in ("first", "second")] == ["first", "second"]
    lost = "a child process could not send a record (declared) to its rollout"
    schema, json, unsent = messages(caplog)
    assert schema.startswith(f"{lost} (11 times so far): not a record of a child process: declared: Input should be")
    assert json.startswith(f"{lost}: the request body is not JSON: ")
    assert "(span)" in unsent
    assert "not JSON serializable" in unsent


def test_the_end_of_a_rollout_is_logged_unless_its_runner_ends_this_process_too(
    playground: Playground, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Sender()
    with playground.rollout(strict=False) as run, scope("writer"):
        record, to = span(run, "late"), destination(run)
    with sender.supervised(run.rollout):
        sender.put(to, "span", record)
        sender.flush()
    assert messages(caplog) == []
    with sender.supervised("another"):
        sender.put(to, "span", record)
        sender.flush()
    sender.close()
    (ended,) = messages(caplog)
    assert ended == "a child process could not send a record (span) to its rollout: the rollout has ended"


def test_names_that_are_not_unicode_arrive(own: tuple[Sender, ActiveRollout], caplog: pytest.LogCaptureFixture) -> None:
    sender, run = own
    sender.add(destination(run), "infrastructure", "thread 'w-\udc80é' failed", False, times=1)
    sender.put(destination(run), "declared", {"declared": ["\ud800 \u2028 \0"]})
    sender.flush()
    assert run.infrastructure == ["thread 'w-?é' failed"]
    assert run.declared == {"? \u2028 \0"}
    assert messages(caplog) == []


def test_a_full_queue_makes_its_producer_wait(
    own: tuple[Sender, ActiveRollout], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, run = own
    monkeypatch.setattr(sending, "_QUEUE_BYTES", 1000)
    run.endpoint = gate.url
    records = [span(run, f"span {index}") for index in range(20)]

    def produce() -> None:
        for record in records:
            sender.put(destination(run), "span", record)

    with outside_rollout():
        producer = threading.Thread(target=produce)
        producer.start()
    producer.join(0.3)
    assert producer.is_alive()
    gate.open.set()
    producer.join()
    sender.flush()
    assert [s.name for s in run.spans][-20:] == [f"span {index}" for index in range(20)]


def test_an_endpoint_that_is_gone_loses_records_with_one_error(
    own: tuple[Sender, ActiveRollout], caplog: pytest.LogCaptureFixture
) -> None:
    sender, run = own
    with socket.create_server(("127.0.0.1", 0)) as closed:
        run.endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    for _ in range(3):
        sender.put(destination(run), "reward", {"infrastructure": ["x", False, 1]})
        sender.flush()
    assert [message.partition(" [")[0] for message in messages(caplog)] == [
        "a child process could not send a record (reward) to its rollout: ConnectionRefusedError:"
    ]


def test_waiting_for_an_endpoint_that_does_not_answer_ends_with_an_error_for_each_record(
    own: tuple[Sender, ActiveRollout], gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, run = own
    run.endpoint = gate.url
    sender.put(destination(run), "reward", {"declared": ["sent"]})
    assert gate.reached.wait(60)
    sender.put(destination(run), "reward", {"declared": ["queued"]})
    monkeypatch.setattr(sending, "_TIMEOUT_SECONDS", 0.1)
    sender.flush()
    monkeypatch.setattr(sending, "_QUEUE_BYTES", 1)
    sender.put(destination(run), "span", {"declared": ["no space"]})
    gate.open.set()
    monkeypatch.undo()
    sender.flush()
    assert messages(caplog) == [
        "a child process could not send a record (reward) to its rollout (2 times so far): no answer within 30 s",
        "a child process could not send a record (span) to its rollout: no answer within 30 s",
    ]
    assert run.declared == {"sent", "queued"}


def test_a_log_handler_may_record_while_another_thread_logs_a_loss(
    own: tuple[Sender, ActiveRollout], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, run = own
    run.endpoint = gate.url
    to = destination(run)
    losing = threading.Event()
    handling = threading.Event()

    class Recording(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "agent":
                handling.set()
                assert losing.wait(60)
                sender.add(to, "elsewhere", None, "logs.example", "not a model call", times=1)

    def note(_: logging.LogRecord) -> bool:
        losing.set()
        return True

    sender.put(to, "reward", {"declared": ["a"]})
    assert gate.reached.wait(60)
    monkeypatch.setattr(sending, "_TIMEOUT_SECONDS", 0.1)
    handler = Recording()
    logging.getLogger().addHandler(handler)
    sending.logger.addFilter(note)
    try:
        with outside_rollout():
            threads = [
                threading.Thread(target=logging.getLogger("agent").warning, args=("x",), daemon=True),
                threading.Thread(target=sender.flush, daemon=True),
            ]
        threads[0].start()
        assert handling.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        sending.logger.removeFilter(note)
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("runs", [False, True])
def test_a_record_is_sent_although_a_signal_handler_raised_while_the_thread_started(
    own: tuple[Sender, ActiveRollout], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    sender, run = own
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if runs:
            start(thread)
        raise TimeoutError("the agent's own")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(TimeoutError, match="the agent's own"):
            sender.add(destination(run), "count", "something", None, times=1)
    sender.flush()
    assert run.counters["something"] == 1
    assert messages(caplog) == []


class Interrupting(str):
    """A name whose hash runs code, as a signal handler may at this point."""

    interrupts: Iterator[Callable[[], None]] = iter(())

    def __hash__(self) -> int:
        next(Interrupting.interrupts, lambda: None)()
        return super().__hash__()

    __eq__ = str.__eq__


def test_a_count_is_complete_although_a_signal_handler_counts_too(own: tuple[Sender, ActiveRollout]) -> None:
    sender, run = own
    name = Interrupting("something")

    def add() -> None:
        sender.add(destination(run), "count", name, None, times=1)

    Interrupting.interrupts = iter([lambda: None, add] * 10)
    for _ in range(10):
        add()
    sender.flush()
    assert run.counters["something"] == 20


def test_threads_that_record_after_the_sender_was_closed_share_its_connection(
    own: tuple[Sender, ActiveRollout], caplog: pytest.LogCaptureFixture
) -> None:
    sender, run = own
    sender.close()

    def declare(thread: int) -> None:
        for index in range(50):
            sender.put(destination(run), "declared", {"declared": [f"{thread} {index}"]})

    with outside_rollout():
        threads = [threading.Thread(target=declare, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(run.declared) == 200
    assert messages(caplog) == []


SHUTDOWN = """
import sys
from lightning_core.propagation.children.sender import Destination, sender

class Late:
    def __init__(self, put): self.put = put
    def __del__(self): self.put("late")

to = Destination(*sys.argv[1:])
def put(text, put=sender.put, to=to): put(to, "infrastructure", {"infrastructure": [text, False, 1]})
late = Late(put)
put("early")
"""


def test_records_are_sent_while_the_interpreter_shuts_down(own: tuple[Sender, ActiveRollout]) -> None:
    _, run = own
    to = destination(run)
    arguments = [to.rollout, str(to.endpoint), str(to.api_key), to.secret]
    done = subprocess.run(
        [sys.executable, "-c", SHUTDOWN, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert run.infrastructure == ["early", "late"]
