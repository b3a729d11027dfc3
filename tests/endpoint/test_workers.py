"""The endpoint in several processes: each rollout is answered by one of them, and recorded as by a single endpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from lightning_core import load_config, rollout, trace_to_transitions, transitions_to_rows
from lightning_core.backends.scripted import ByteTokenizer
from lightning_core.backends.vllm.backend import VllmBackend
from lightning_core.capture import scope
from lightning_core.capture.address import Address
from lightning_core.chat.chat import Chat
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.forwarding.upstream import UpstreamServer
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.endpoint.sessions import Session
from lightning_core.endpoint.transport.limits import Limits
from lightning_core.endpoint.workers.memory import ShardMemory
from lightning_core.endpoint.workers.messages import load
from lightning_core.endpoint.workers.process import ShardSessions
from lightning_core.endpoint.workers.shard import Shard
from lightning_core.endpoint.workers.sharded import ShardedEndpoint
from lightning_core.errors import ConfigError, InfrastructureError, OverloadError
from lightning_core.propagation.children.keys import KeyAddress, bind_key
from lightning_core.rollouts.attempt import Attempt, Rollout
from lightning_core.rollouts.local_agents import open_endpoint, patched
from lightning_core.testing.recording_server import RecordingServer
from lightning_core.trace import POLICY, Trace
from tests.endpoint.model_server import ModelServer, serve_model
from tests.endpoint.worker_agents import one_turn, two_turns, with_a_child
from tests.rollouts.executor_runs import finish, numbered, running, wait_until_gone

WRITER = Routing(trained=frozenset({"writer"}), temperature=0.7, max_tokens=64)
HERE = {"executor": "thread", "concurrency": 4, "retries": 0, "timeout_seconds": 60}

pytestmark = pytest.mark.usefixtures("no_marks")


@contextmanager
def workers(model: ModelServer) -> Iterator[tuple[VllmBackend, ShardedEndpoint]]:
    config = load_config({"policy": {"model": "m", "backend": "vllm"}, "endpoint": {"workers": 2}})
    backend = VllmBackend(model.url, model=POLICY)
    with open_endpoint(config, backend, {POLICY: Chat(ByteTokenizer())}, concurrency=4) as endpoint:
        assert isinstance(endpoint, ShardedEndpoint)
        pids = endpoint.pids
        yield backend, endpoint
    wait_until_gone([*pids, *endpoint.pids])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ModelServer, VllmBackend, ShardedEndpoint]]:
    with patched(()), serve_model() as model, workers(model) as (backend, endpoint):
        yield model, backend, endpoint


@pytest.fixture
def model(served: Any) -> ModelServer:
    return served[0]


@pytest.fixture
def endpoint(served: Any) -> ShardedEndpoint:
    return served[2]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def content(ended: Rollout) -> Any:
    """What a rollout recorded, without ids and times."""
    spans = [
        (span.name, {k: v for k, v in span.attributes.items() if k != "lightning.sequence"}, span.error)
        for span in ended.spans
    ]
    calls = [
        (c.agent, c.digest, c.context, c.finish_reason, tuple(c.messages), c.response, c.policy_version)
        for c in ended.trace.calls
    ]
    return (
        ended.status,
        ended.trace.reward,
        calls,
        sorted(spans, key=lambda s: repr((s[0], sorted(s[1].items()), s[2]))),
    )


def arrays(trace: Trace) -> list[np.ndarray[Any, Any]]:
    rows = transitions_to_rows(trace_to_transitions(trace, agents={"writer"}))
    return [array for row in rows for array in (row.token_ids, row.logprobs, row.mask)]


def test_rollouts_of_all_workers_are_as_of_one_endpoint(
    served: tuple[ModelServer, VllmBackend, ShardedEndpoint],
) -> None:
    _, backend, endpoint = served
    used: set[str] = set()

    def solve(task: dict[str, Any]) -> float:
        used.update(str(shard.pid) for shard in endpoint._shards if shard.keys)
        return two_turns(task)

    with running(endpoint, solve, settings=HERE) as runner:
        several = finish(runner, numbered(4), routing=WRITER)
    with (
        PolicyEndpoint(backend, Chat(ByteTokenizer())) as one,
        running(one, two_turns, settings=HERE) as runner,
    ):
        single = finish(runner, numbered(4), routing=WRITER)
    assert len(used) == 2
    assert [content(r) for r in several] == [content(r) for r in single]
    assert [len(r.trace.calls) for r in several] == [2] * 4
    for ours, theirs in zip(several, single, strict=True):
        assert len({span.span_id for span in ours.spans}) == len(ours.spans)
        for a, b in zip(arrays(ours.trace), arrays(theirs.trace), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_worker_that_ends_costs_its_own_rollouts_one_attempt(
    model: ModelServer,
    endpoint: ShardedEndpoint,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, counted = endpoint._shards[0], list[list[str]]()
    exit_text = lost.exit_text

    def wait_for_the_end() -> str:
        counted.extend(o.run._infrastructure for o in endpoint._open.values() if o.shard is lost and o.run)
        return exit_text()

    monkeypatch.setattr(lost, "exit_text", wait_for_the_end)
    attempts: list[Attempt] = []
    before, asked = endpoint.pids, model.asked
    model.let_answer.clear()
    with running(endpoint, one_turn, settings={**HERE, "retries": 1}) as runner:
        ended: list[Rollout] = []
        run = threading.Thread(
            target=lambda: ended.extend(finish(runner, numbered(4), routing=WRITER, on_attempt=attempts.append))
        )
        run.start()
        wait_until(lambda: model.asked == asked + 4)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(attempts) == 2)
        model.let_answer.set()
        run.join()
    assert [attempt.rollout.error for attempt in attempts[:2]] == ["a worker of the policy endpoint ended"] * 2
    assert counted == [["a worker of the policy endpoint ended"]] * 2
    assert [attempt.rollout.status for attempt in attempts[:2]] == ["infrastructure"] * 2
    assert [(r.status, r.reward, len(r.trace.calls)) for r in ended] == [("ok", 1.0, 1)] * 4
    assert "a worker of the policy endpoint ended (signal 9), with 2 rollouts; another one is started" in caplog.text
    wait_until(lambda: endpoint.pids[0] != before[0])
    assert endpoint.pids[1] == before[1]
    with running(endpoint, one_turn, settings=HERE) as runner:
        assert [r.status for r in finish(runner, numbered(4), routing=WRITER)] == ["ok"] * 4


def test_a_worker_is_replaced_until_one_works(
    served: tuple[ModelServer, VllmBackend, ShardedEndpoint],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, backend, endpoint = served
    before, attach, begin = endpoint.pids, backend.gate.attach, Shard.begin

    def refuse(shard: Shard, _: bytes) -> None:
        shard.end()
        raise ConfigError("no port is free")

    def attach_late(follower: Any) -> None:
        monkeypatch.setattr(backend.gate, "attach", attach)
        os.kill(follower.__self__.pid, signal.SIGKILL)
        wait_until(lambda: follower.__self__._gone)
        attach(follower)

    monkeypatch.setattr(Shard, "begin", refuse)
    endpoint._shards[0]._handle(b"no message")
    wait_until(lambda: endpoint._not_replaced)
    assert "because a message of it cannot be read" in caplog.text
    assert "Traceback" in caplog.text
    assert "another one is started" in caplog.text
    assert "until the next rollout, which starts one again: ConfigError: no port is free" in caplog.text
    assert endpoint.pids == before
    monkeypatch.setattr(Shard, "begin", begin)
    monkeypatch.setattr(backend.gate, "attach", attach_late)
    assert endpoint._places[endpoint.new_key()].pid == before[1]
    wait_until(lambda: endpoint.pids[0] != before[0] and not endpoint._shards[0].ended)
    assert len(backend.gate._followers) == 2
    with running(endpoint, one_turn, settings=HERE) as runner:
        assert [r.status for r in finish(runner, numbered(2), routing=WRITER)] == ["ok"] * 2


def test_an_interrupt_ends_workers_that_start(
    served: tuple[ModelServer, VllmBackend, ShardedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_core.endpoint.workers.shard.command", lambda *_: ["sleep", "600"])
    upstream = UpstreamServer(base_url="http://127.0.0.1:1/v1", connections=5)
    endpoint = ShardedEndpoint(served[1], {}, workers=2, upstream=upstream)
    divided = load(endpoint._settings)[1][0].upstream
    assert divided == UpstreamServer(base_url=upstream.base_url, connections=2)
    with ThreadPoolExecutor(1) as threads:
        entered = threads.submit(endpoint.__enter__)
        wait_until(lambda: len(endpoint._starting) == 2)
        pids = [shard.pid for shard in endpoint._starting]
        endpoint.__exit__()
        with pytest.raises(InfrastructureError, match="ended, or did not start in time"):
            entered.result()
    wait_until_gone(pids)


def test_a_bound_key_of_a_rollout_elsewhere_names_its_agent(endpoint: ShardedEndpoint) -> None:
    """Its secret is unknown, as in one process."""
    key = endpoint.new_key()
    endpoint.open(key, Address(rollout="0" * 31 + "1", span="0" * 15 + "1"), WRITER)
    bound = bind_key(key, KeyAddress(agent="writer"), secret="of another process")
    url = f"{endpoint.url_of(key)}/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {bound}"}, timeout=60)
    endpoint.close(key)
    assert answer.status_code == 200, answer.text


def test_new_weights_are_those_of_all_workers(
    served: tuple[ModelServer, VllmBackend, ShardedEndpoint], tmp_path: Path
) -> None:
    """A response in a worker that the push interrupts continues from the new weights."""
    model, backend, endpoint = served
    asked = model.asked
    model.let_answer.clear()
    with running(endpoint, one_turn, settings=HERE) as runner:
        ended: list[Rollout] = []
        run = threading.Thread(target=lambda: ended.extend(finish(runner, numbered(2), routing=WRITER)))
        run.start()
        wait_until(lambda: model.asked == asked + 2)
        version = backend.version
        backend.push(tmp_path, version + 1)
        model.let_answer.set()
        run.join()
    calls = [call for r in ended for call in r.trace.calls]
    assert [(c.first_version, c.policy_version) for c in calls] == [(version, version + 1)] * 2
    assert [len(c.output_ids) for c in calls if c.output_ids is not None] == [15, 15]


def test_what_a_child_process_records_is_in_the_trace_when_the_agent_returns(endpoint: ShardedEndpoint) -> None:
    with running(endpoint, with_a_child, settings=HERE) as runner:
        (ended,) = finish(runner, numbered(1), routing=WRITER)
    assert (ended.status, ended.error, ended.reward) == ("ok", None, 0.75)
    assert sorted(span.name for span in ended.spans) == [
        "chat policy", "execute_tool search", "invoke_agent writer", "reward", "reward style", "rollout",
    ]  # fmt: skip


PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
"""


def test_a_program_of_an_agent_that_is_not_trained_reaches_its_provider(
    endpoint: ShardedEndpoint, server: RecordingServer
) -> None:
    """The worker has the provider's URL and key, which are kept in the process of the run, before the program's request."""
    key = endpoint.new_key()
    provider = {**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "sk-own"}
    with rollout({"id": "t"}, endpoint=endpoint.url_of(key), api_key=key) as run:
        endpoint.open(key, run.address, WRITER)
        with scope("reader"):
            subprocess.run([sys.executable, "-c", PROGRAM], env=provider, check=True)
        endpoint.close(key)
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer sk-own"]
    assert [(call.agent, call.error) for call in run.trace.calls] == [("reader", None)]


def test_the_limits_of_a_rollout_see_its_requests_in_a_worker(model: ModelServer, endpoint: ShardedEndpoint) -> None:
    key, asked = endpoint.new_key(), model.asked
    with rollout({"id": "t"}) as run:
        endpoint.open(key, run.address, WRITER)
        endpoint.begin(key)
        assert not endpoint.silence(key).spoke
        model.let_answer.clear()
        call = threading.Thread(target=post, args=(endpoint, key, "writer"))
        call.start()
        wait_until(lambda: model.asked == asked + 1)
        before = endpoint.waited(key)
        assert endpoint.silence(key) == (True, 0.0, endpoint.silence(key).longest)
        assert endpoint.calls(key)[0] == 1
        wait_until(lambda: endpoint.waited(key) > before)
        model.let_answer.set()
        call.join()
        wait_until(lambda: endpoint.calls(key)[0] == 0)
        waited = endpoint.waited(key)
        wait_until(lambda: endpoint.silence(key).seconds > 0.05)
        endpoint.close(key)
    assert before < waited
    assert len(run.trace.calls) == 1


def test_agents_that_one_worker_knows_are_known_to_all() -> None:
    listed = Routing(trained=frozenset({"writer"}), confirm=True)
    with serve_model() as model, workers(model) as (_, endpoint):
        assert [status for _, status in conversation(endpoint, listed, ["writer"])] == [200]
        # Of another worker. Were the writer unknown there, the policy would answer, and the attempt be repeated.
        assert conversation(endpoint, listed, ["reader"]) == [("keep", 404)]
        marked = Routing(select="marked")
        cook, poet = "You are a cook. You cook all day.", "You are a poet. You write all night."
        ((verdict, _), _) = conversation(endpoint, marked, [None, None], systems=[cook, poet])
        assert isinstance(verdict, ConfigError)
        assert "2 roles in one rollout" in str(verdict)


def test_a_conversation_of_another_workers_rollout_is_named(endpoint: ShardedEndpoint) -> None:
    said: list[Any] = [{"role": "user", "content": "what leaks?"}]
    reasons: list[str | None] = []
    for _ in range(2):  # of different workers
        key = endpoint.new_key()
        with rollout({"id": "t"}) as run:
            endpoint.open(key, run.address, WRITER)
            body = {"model": "m", "messages": said}
            url = f"{endpoint.url_of(key).removesuffix('/v1')}/a/writer/v1/chat/completions"
            answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
            said += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
            endpoint.close(key)
        reasons += [call.context_reason for call in run.trace.calls]
    first, second = reasons
    assert first is None
    assert (second or "").startswith("leaked: message 1 (assistant) was sampled in another rollout")


def test_the_requests_of_all_workers_count() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(ShardMemory.size(2))
        ends = [ShardMemory(file.fileno(), 2) for _ in range(2)]
    workers = [ShardSessions(Limits(requests=2), end) for end in ends]
    sessions = [Session(root=Address(rollout="1" * 32, span="1" * 16), routing=WRITER, seed=None) for _ in range(2)]
    for place, one in enumerate(workers):
        one.memory.take(place)
        one.changed = lambda _: None
    with workers[0].admit(sessions[0]), workers[1].admit(sessions[1]):
        for one, session in zip(workers, sessions, strict=True):
            with pytest.raises(OverloadError, match="has 2 requests in progress"), one.admit(session):
                pass
        ends[0].clear(1)
        with workers[0].admit(sessions[0]):
            assert ends[1].requests == 2
    assert ends[0].requests == 0


def conversation(
    endpoint: ShardedEndpoint, routing: Routing, agents: Sequence[str | None], systems: Sequence[str] = ("",)
) -> list[tuple[Any, int]]:
    """The verdict on a rollout, beside the status of each of its calls."""
    key = endpoint.new_key()
    statuses: list[int] = []
    with rollout({"id": "t"}) as run:
        endpoint.open(key, run.address, routing)
        for number, agent in enumerate(agents):
            statuses.append(post(endpoint, key, agent, systems[number % len(systems)]))
        verdict = endpoint.verdict(key)
        endpoint.close(key)
    return [(verdict, status) for status in statuses]


def post(endpoint: ShardedEndpoint, key: str, agent: str | None = None, system: str = "") -> int:
    """The status of a request of ``agent``."""
    messages = [{"role": "user", "content": "hi"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    path = "" if agent is None else f"/a/{agent}"
    url = f"{endpoint.url_of(key).removesuffix('/v1')}{path}/v1/chat/completions"
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(url, json={"model": "m", "messages": messages}, headers=headers, timeout=60).status_code


GONE = """
import sys, time
from tests.endpoint.model_server import serve_model
from tests.endpoint.test_workers import workers
with serve_model() as model, workers(model) as (_, endpoint):
    print(*endpoint.pids, flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_workers_end_with_their_run() -> None:
    with subprocess.Popen([sys.executable, "-c", GONE], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        run.kill()
    assert len(pids) == 2
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "endpoint.workers: found 2, expected 1 with policy.backend: torch, which samples in the run's own process"),
        ({"trainer": {"name": "verl"}}, "endpoint.workers: found 2, expected 1 with trainer.name: verl; use trainer.rollout_workers"),
        ({"policy": {"backend": "vllm"}, "endpoint": {"port": 8100}}, "endpoint.port: each of the 2 endpoint.workers has a port"),
        ({"policy": {"backend": "vllm"}, "endpoint": {"workers": 0}}, "endpoint.workers: found 0"),
    ],
)  # fmt: skip
def test_workers_that_cannot_be_are_refused(sections: dict[str, Any], message: str) -> None:
    policy = {"model": "m", **sections.pop("policy", {})}
    with pytest.raises(ConfigError) as raised:
        load_config({"policy": policy, **sections, "endpoint": {"workers": 2, **sections.get("endpoint", {})}})
    assert message in str(raised.value)
