"""What child processes record arrives in order, exactly once, and without making the agent wait."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightning_core.capture import Run, endpoint_environment, outside_rollout, scope
from lightning_core.capture.children import sender as sending
from lightning_core.capture.children.keys import read_key
from lightning_core.capture.children.sender import Destination, Sender
from lightning_core.testing.playground import Playground
from tests import process_work as work
from tests.core.requests_elsewhere import elsewhere

FORK = multiprocessing.get_context("fork")


class Gate:
    """A TCP proxy to the endpoint, which forwards while it is open and counts requests for records."""

    def __init__(self, target: str) -> None:
        self.open = threading.Event()
        self.posts = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        url = urlsplit(self._target)
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((url.hostname or "", url.port or 0))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.open.wait()
                self.posts += data.count(b"POST /v1/lightning/records")
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def gate(playground: Playground) -> Iterator[Gate]:
    gate = Gate(playground.url)
    yield gate
    gate.open.set()
    gate.close()


@contextmanager
def gated(playground: Playground, gate: Gate) -> Generator[Run]:
    """A rollout whose child processes reach the endpoint through ``gate``."""
    with playground.rollout(strict=False) as run, scope("writer"):
        run.endpoint = gate.url
        yield run


def names(run: Run) -> list[str | None]:
    return [reward.name for reward in run.trace.rewards]


def destination(run: Run) -> Destination:
    return Destination(run.rollout, run.endpoint, run.api_key, run.secret)


def span(run: Run, name: str) -> dict[str, Any]:
    """The record of a span."""
    with scope("source", kind="tool"):
        pass
    return {"span": asdict(run.spans[-1]) | {"name": name, "span_id": f"{len(run.spans):016x}"}}


@pytest.fixture
def own(playground: Playground) -> Iterator[tuple[Sender, Run]]:
    """A sender in this process, and a rollout to send to."""
    with playground.rollout(strict=False) as run, scope("writer"):
        sender = Sender()
        yield sender, run
        sender.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_many_records_arrive_in_order_and_once(playground: Playground, method: str) -> None:
    expected = [str(index) for index in range(500)]
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool,
        playground.rollout() as run,
        scope("writer"),
    ):
        pool.submit(work.reward_and_return, 500).result()
        assert names(run) == expected
    with multiprocessing.get_context(method).Pool(1) as pool, playground.rollout() as run, scope("writer"):
        pool.apply(work.reward_and_return, (500,))
        assert names(run) == expected


@pytest.mark.parametrize("end", ["os._exit", "os.execv", "os.execve", "SystemExit", "send", "put"])
def test_a_process_sends_what_it_recorded_before_it_ends_or_returns_a_result(
    playground: Playground, gate: Gate, end: str
) -> None:
    recorded = FORK.Event()
    queue: Any = FORK.Queue()
    reader, writer = FORK.Pipe(duplex=False)
    with gated(playground, gate) as run:
        for environment in (None, {}):  # else the child waits when it sends these on
            endpoint_environment(environment)
        process = FORK.Process(target=work.reward_and_end, args=(end, recorded, queue if end == "put" else writer))
        process.start()
        assert recorded.wait(60)
        process.join(0.3)
        assert process.is_alive(), "it waits for the endpoint"
        gate.open.set()
        if end == "send":
            assert reader.recv() == "done"
        elif end == "put":
            assert queue.get(timeout=60) == "done"
            process.kill()
        else:
            process.join()
            assert process.exitcode == 0
        assert names(run) == ["0", "1", "2"]
        process.join()


def test_an_event_loop_runs_on_while_the_endpoint_is_slow(playground: Playground, gate: Gate) -> None:
    ticked = FORK.Event()
    with gated(playground, gate) as run:
        process = FORK.Process(target=work.reward_while_ticking, args=(ticked,))
        process.start()
        assert ticked.wait(25), "the endpoint has not answered yet, and a request times out after 30 s"
        gate.open.set()
        process.join()
    assert names(run) == ["0"]


def test_a_killed_process_loses_only_what_was_not_sent(playground: Playground, gate: Gate) -> None:
    gate.open.set()
    recorded = FORK.Event()
    with gated(playground, gate) as run:
        process = FORK.Process(target=work.reward_and_wait, args=(recorded,))
        process.start()
        assert recorded.wait(60)
        process.kill()
        process.join()
        FORK.Pool(1).apply(work.reward_and_return, (1,))
    assert run.trace.rewards[0].value == 0.5
    assert names(run)[-1] == "0"
    assert names(run)[1:-1] == [str(index) for index in range(len(run.trace.rewards) - 2)]


def test_requests_elsewhere_are_summed_before_they_are_sent(playground: Playground, gate: Gate) -> None:
    gate.open.set()
    with gated(playground, gate) as run:
        process = FORK.Process(target=work.note_many, args=(10_000,))
        process.start()
        process.join()
    assert elsewhere(run)["writer", "example.com", "connection by other code"] == 10_000
    assert 1 <= gate.posts <= 50


def test_failures_to_record_in_a_child_are_counted(playground: Playground) -> None:
    with playground.rollout(strict=False) as run, scope("writer"), FORK.Pool(1) as pool:
        pool.apply(work.count_twice)
    assert run.counters["something"] == 2
    assert run.failures == ["something: ValueError: boom"]


def test_the_endpoint_knows_the_provider_of_a_program_of_a_child(playground: Playground) -> None:
    with playground.rollout() as run, scope("writer"), FORK.Pool(1) as pool:
        found = read_key(pool.apply(work.key_of_a_program), lambda *_: True)
        assert found is not None
        assert run.origin(found[1].origin or "") == {"OPENAI_API_KEY": "sk-own"}


def test_a_bad_record_is_refused_and_logged_once_and_the_others_are_added(
    own: tuple[Sender, Run], caplog: pytest.LogCaptureFixture
) -> None:
    sender, run = own
    good = [span(run, name) for name in ("first", "second")]
    for record in (good[0], {"span": {}}, {"infrastructure": float("nan")}, {"infrastructure": "\udc80"}, good[1]):
        sender.put(destination(run), "span", record)
    sender.put(destination(run), "span", {"span": object()})
    sender.flush()
    sender.put(destination(run), "span", {"span": {}})
    sender.flush()
    assert [s.name for s in run.spans if s.name in ("first", "second")] == ["first", "second"]
    assert run.infrastructure == []
    unsent, *refused = [record.getMessage() for record in caplog.records]
    assert "(span: 1)" in unsent
    assert "not JSON serializable" in unsent
    assert len(refused) == 1
    assert "status 400" in refused[0]


def test_a_full_queue_makes_its_producer_wait(
    own: tuple[Sender, Run], gate: Gate, monkeypatch: pytest.MonkeyPatch
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
    own: tuple[Sender, Run], caplog: pytest.LogCaptureFixture
) -> None:
    sender, run = own
    with socket.create_server(("127.0.0.1", 0)) as closed:
        run.endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    for _ in range(3):
        sender.put(destination(run), "reward", {"infrastructure": "x"})
        sender.flush()
    assert [record.getMessage().partition(" [")[0] for record in caplog.records] == [
        "a child process could not send all that it recorded (reward: 1) to its rollout: ConnectionRefusedError:"
    ]


SHUTDOWN = """
import sys
from lightning_core.capture.children.sender import Destination, sender

class Late:
    def __init__(self, put): self.put = put
    def __del__(self): self.put("late")

to = Destination(*sys.argv[1:])
def put(text, put=sender.put, to=to): put(to, "infrastructure", {"infrastructure": text})
late = Late(put)
put("early")
"""


def test_records_are_sent_while_the_interpreter_shuts_down(own: tuple[Sender, Run]) -> None:
    _, run = own
    to = destination(run)
    arguments = [to.rollout, str(to.endpoint), str(to.api_key), to.secret]
    done = subprocess.run(
        [sys.executable, "-c", SHUTDOWN, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert run.infrastructure == ["early", "late"]
    run.infrastructure.clear()
