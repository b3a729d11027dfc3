"""What other servers get from a switch, and what it makes of their odd responses."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_core.errors import ConfigError
from lightning_core.otel import read_traces
from lightning_core.records.statistics.prices import Prices
from lightning_core.testing.recording_server import serve_app
from lightning_core.tools.record.responses import find_id
from lightning_core.tools.switch.arm import Arm
from lightning_core.tools.switch.plan import SwitchPlan
from lightning_core.tools.switch.recorded import SwitchTraces
from lightning_core.tools.switch.report import arm_rows
from lightning_core.tools.switch.server import PlanCheck, SwitchServer
from lightning_core.tools.switch.store import FILE, SwitchStore
from tests.endpoint.closing_server import closing_server

USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


class Upstream:
    """A server whose models behave by their names."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.released = threading.Event()
        """Until then, the models "held" and "held-failing" do not end their responses."""

    async def answer(self, request: Request) -> Response:
        response = await self.respond(request)
        response.headers["set-cookie"] = "session=1"
        return response

    async def respond(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append((str(request.url), dict(request.headers), body))
        model = body.get("model", "")
        usage, identity = {**USAGE}, f"chatcmpl-{len(self.requests)}"
        if model == "constant":
            identity = "chatcmpl-1"
        if model == "odd":
            usage, identity = {"prompt_tokens": -5, "completion_tokens": 1 << 70}, "id-\udce9"
        if model == "error in 200":
            return JSONResponse({"error": {"message": "no capacity", "code": 503}})
        if model == "wrong":
            return JSONResponse({"error": "wrong"}, status_code=400)
        if model == "broken":
            return StreamingResponse(self.breaking(), status_code=503)
        if model == "held-failing":
            await self.release()
        if model in ("failing", "held-failing"):
            return JSONResponse({"error": "busy"}, status_code=503)
        if model.startswith("titled"):
            kind = "text/event-stream" if model == "titled stream" else "application/json"
            response = Response(b"data: [DONE]\n\n" if "stream" in model else b"{}", media_type=kind)
            response.raw_headers += [(b"x-title", "\u65e5\u672c".encode()), (b"vary", b"a"), (b"vary", b"b")]
            return response
        if model == "hanging":
            await anyio.sleep(600)
        if model in ("long", "held"):
            return StreamingResponse(self.long() if model == "long" else self.held(), media_type="text/event-stream")
        if model == "unended":
            event = 'data: {"id": "unended", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}'
            return Response(event, media_type="text/event-stream")
        if "streamGenerateContent" in request.url.path:
            parts = [{"candidates": [{"content": {"parts": [{"text": text}]}}], "responseId": "array"} for text in "ab"]
            return JSONResponse(parts)
        if model == "erring":
            error = {"error": {"message": "overloaded", "type": "server_error"}}
            return StreamingResponse(iter([f"data: {json.dumps(error)}\n\n"]), media_type="text/event-stream")
        message = {"role": "assistant", "content": model}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return Response(
            json.dumps(
                {"id": identity, "object": "chat.completion", "model": model, "choices": [choice], "usage": usage}
            ),
            media_type="application/json",
        )

    async def long(self) -> AsyncIterator[str]:
        for text, finish in (*[("x" * (1 << 20), None)] * 6, ("", "stop")):
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
            yield f"data: {json.dumps({'id': 'long', 'choices': [choice], 'usage': USAGE if finish else None})}\n\n"

    async def held(self) -> AsyncIterator[str]:
        for text, finish in (("begin", None), ("end", "stop")):
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
            yield f"data: {json.dumps({'id': 'held', 'choices': [choice]})}\r\n\r\n"
            await self.release()

    async def release(self) -> None:
        await anyio.to_thread.run_sync(self.released.wait, 20)

    async def breaking(self) -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionError("the server dies here")


@pytest.fixture
def upstream() -> Iterator[tuple[str, Upstream]]:
    served = Upstream()
    with serve_app(Starlette(routes=[Route("/{path:path}", served.answer, methods=["POST", "GET", "DELETE"])])) as url:
        yield url, served


def arm(url: str, model: str, **more: Any) -> Arm:
    return Arm(name=model, base_url=f"{url}/v1", model=model, **more)


def switch_of(folder: Path, arms: list[Arm], agents: dict[str, Any], **options: Any) -> SwitchServer:
    return SwitchServer(plan_of(folder, arms, agents), {one.name: one for one in arms}, **options)


def plan_of(folder: Path, arms: list[Arm], agents: dict[str, Any]) -> SwitchPlan:
    models = {one.name: {"base_url": one.base_url} for one in arms}
    return SwitchPlan.model_validate({"models": models, "agents": agents, "folder": str(folder)})


class Reloads:
    """Reloads to a plan with these ``arms``, and keeps those that are closed."""

    def __init__(self, folder: Path, arms: list[Arm], agents: dict[str, Any]) -> None:
        self.plan, self.arms = plan_of(folder, arms, agents), arms
        self.closed: list[Arm] = []

    def reload(self, arms: Mapping[str, Arm], check: PlanCheck) -> tuple[SwitchPlan, Mapping[str, Arm]]:
        if not self.arms:
            raise RuntimeError("a mistake in the switch itself")
        return self.plan, {one.name: one for one in self.arms}

    def close(self, arm: Arm) -> None:
        self.closed.append(arm)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen within 20 s"
        time.sleep(0.02)


def ask(switch: SwitchServer, agent: str, text: str = "hi", **more: Any) -> httpx.Response:
    url = switch.url.replace("/v1", f"/a/{agent}/v1/chat/completions")
    body = {"model": "gpt", "messages": [{"role": "user", "content": text}], **more.pop("body", {})}
    return httpx.post(url, json=body, **{"timeout": 20, **more})


def test_keys_and_headers_reach_only_the_server_that_they_are_for(tmp_path: Path, upstream: tuple[str, Upstream]):
    url, served = upstream
    arms = [arm(url, "keyed", api_key="theirs"), arm(url, "open", gets_request_key=True), arm(url, "closed")]
    agents = {name: name for name in ("keyed", "open", "closed")}
    headers = {
        "authorization": "Bearer mine",
        "openai-organization": "org",
        "cookie": "c=1",
        "x-title": "caf\u00e9".encode(),
    }
    with switch_of(tmp_path, arms, agents) as switch:
        for name in agents:
            assert ask(switch, name, headers=headers).json()["choices"][0]["message"]["content"] == name
        google = switch.url.replace("/v1", "/a/keyed/v1beta/models/x:generateContent?key=mine&alt=sse")
        httpx.post(google, json={"contents": []})
        for method, path in (
            ("DELETE", "/a/keyed/v1/files/1"),
            ("POST", "/a/keyed/v1/files"),
            ("GET", "/a/keyed/v1/chat/completions"),
        ):
            refused = httpx.request(method, switch.url.replace("/v1", path))
            assert refused.status_code == 404
        outside = "/a/keyed/v1/../../v1/chat/completions"
        assert (
            httpx.post(f"{switch.url.removesuffix('/v1')}{outside.replace('..', '%2e%2e')}", json={}).status_code == 404
        )
    keyed, opened, closed, gemini = served.requests
    assert (keyed[1]["authorization"], opened[1]["authorization"]) == ("Bearer theirs", "Bearer mine")
    assert "authorization" not in closed[1]
    assert [("openai-organization" in one[1], "cookie" in one[1]) for one in (keyed, opened, closed)] == [
        (False, False),
        (True, False),
        (False, False),
    ]
    assert gemini[1]["x-goog-api-key"] == "theirs"
    assert gemini[0].endswith("/v1/models/keyed:generateContent?alt=sse")


def test_a_key_is_not_sent_to_a_server_that_it_is_not_for(tmp_path: Path):
    first, second = (Arm(name=n, base_url=f"https://{n}.test/v1", gets_request_key=True) for n in ("a", "b"))
    with pytest.raises(ConfigError, match=r"models.a and models.b are on different servers and have no api_key_env"):
        switch_of(tmp_path, [first, second], {"writer": "a"})
    with pytest.raises(ConfigError, match=r"models.a has no api_key_env, so it would get the API key of the switch"):
        switch_of(tmp_path, [first], {"writer": "a"}, api_key="ours")


def test_odd_responses_stop_neither_the_answer_nor_the_record(tmp_path: Path, upstream: tuple[str, Upstream]):
    url, _ = upstream
    names = ("odd", "good", "broken", "failing", "erring")
    arms = [arm(url, name) for name in names]
    agents: dict[str, Any] = {name: {"arms": {name: 1.0}} for name in names}
    agents["broken"]["fallback"] = agents["failing"]["fallback"] = "good"
    with switch_of(tmp_path, arms, agents) as switch:
        assert ask(switch, "odd").status_code == 200
        assert ask(switch, "erring", body={"stream": True}).status_code == 200
        for name in ("good", "broken", "failing"):
            assert ask(switch, name).json()["model"] == "good"
        last = ask(switch, "good").headers["lightning-call"]
        assert httpx.post(f"{switch.url}/feedback", json={"response": last, "reward": 10**400}).status_code == 400
        assert (
            httpx.post(f"{switch.url}/feedback", json={"response": last, "reward": 1, "comment": "\u00e9"}).status_code
            == 200
        )
        metrics = httpx.get(switch.url.replace("/v1", "/metrics")).text
    assert 'lightning_requests_in_progress{arm="broken"} 0.0' in metrics
    rows = {(row.agent, row.arm): (row.calls, row.failed, row.rated) for row in arm_rows(tmp_path, Prices())}
    assert rows == {
        ("odd", "odd"): (1, 0, 0),
        ("erring", "erring"): (1, 1, 0),
        ("good", "good"): (2, 0, 1),
        ("broken", "broken"): (1, 1, 0),
        ("broken", "good"): (1, 0, 0),
        ("failing", "failing"): (1, 1, 0),
        ("failing", "good"): (1, 0, 0),
    }


def test_the_end_of_an_idle_connection_to_a_model_costs_no_request(tmp_path: Path):
    with (
        closing_server(lambda *place: "reset" if place == (0, 1) else "answer") as (url, seen),
        switch_of(tmp_path, [Arm(name="far", base_url=url)], {"a": "far"}) as switch,
    ):
        assert [ask(switch, "a").status_code for _ in range(2)] == [200, 200]
    assert seen == [(0, 0), (0, 1), (1, 0)]
    assert [(row.calls, row.failed) for row in arm_rows(tmp_path, Prices())] == [(2, 0)]


@pytest.mark.parametrize("model", ["titled", "titled stream"])
def test_headers_of_any_bytes_reach_the_client(tmp_path: Path, upstream: tuple[str, Upstream], model: str):
    with switch_of(tmp_path, [arm(upstream[0], model)], {"a": model}) as switch:
        response = ask(switch, "a")
        metrics = httpx.get(switch.url.replace("/v1", "/metrics")).text
    assert (response.status_code, response.headers["x-title"], response.headers["vary"]) == (
        200,
        "\u65e5\u672c",
        "a, b",
    )
    assert f'lightning_requests_in_progress{{arm="{model}"}} 0.0' in metrics


def test_only_failures_of_a_model_are_logged_as_such(
    tmp_path: Path, upstream: tuple[str, Upstream], caplog: pytest.LogCaptureFixture
):
    with switch_of(
        tmp_path, [arm(upstream[0], name) for name in ("wrong", "failing")], {"a": "wrong", "b": "failing"}
    ) as switch:
        assert [ask(switch, name).status_code for name in "ab"] == [400, 503]
    assert [record.getMessage() for record in caplog.records if "failed" in record.message] == [
        'model \'failing\' failed for b: status 503: {"error":"busy"}'
    ]


def test_an_error_with_the_status_200_is_a_failure(tmp_path: Path, upstream: tuple[str, Upstream]):
    arms = [arm(upstream[0], name) for name in ("error in 200", "good")]
    agents: dict[str, Any] = {"a": {"arms": {"error in 200": 1.0}, "fallback": "good"}, "b": "error in 200"}
    with switch_of(tmp_path, arms, agents) as switch:
        assert [ask(switch, name).headers["lightning-arm"] for name in "ab"] == ["good", "error%20in%20200"]
    failed = {(row.agent, row.arm): (row.calls, row.failed) for row in arm_rows(tmp_path, Prices())}
    assert failed == {("a", "error in 200"): (1, 1), ("a", "good"): (1, 0), ("b", "error in 200"): (1, 1)}


def test_feedback_by_an_id_that_several_responses_have_is_refused(tmp_path: Path, upstream: tuple[str, Upstream]):
    def give(response: str) -> httpx.Response:
        return httpx.post(f"{switch.url}/feedback", json={"response": response, "reward": 1})

    for _ in range(2):  # from memory, and from the file
        with switch_of(tmp_path, [arm(upstream[0], "constant")], {"a": "constant"}) as switch:
            calls = [ask(switch, "a").headers["lightning-call"] for _ in range(2)]
            refused = give("chatcmpl-1")
            assert (refused.status_code, [give(call).status_code for call in calls]) == (409, [200, 200])
            assert "lightning-call" in refused.text
    with switch_of(tmp_path, [arm(upstream[0], "constant")], {"a": "constant"}) as switch:
        assert give("chatcmpl-1").status_code == 409


def test_feedback_after_a_restart_is_in_the_traces(tmp_path: Path, upstream: tuple[str, Upstream]):
    @contextmanager
    def restarted() -> Generator[SwitchServer]:
        traces = SwitchTraces(tmp_path / "traces")
        with switch_of(tmp_path, [arm(upstream[0], "good")], {"a": "good"}, traces=traces) as switch:
            yield switch
        traces.close()

    with restarted() as switch:
        response = ask(switch, "a").json()["id"]
    with restarted() as switch:
        httpx.post(f"{switch.url}/feedback", json={"response": response, "reward": 0.5}).raise_for_status()
    (trace,) = read_traces(tmp_path / "traces")
    assert [(reward.value, reward.call) for reward in trace.rewards] == [(0.5, trace.calls[0].id)]


def test_a_request_ends_when_its_client_leaves(tmp_path: Path, upstream: tuple[str, Upstream]):
    with switch_of(tmp_path, [arm(upstream[0], "hanging")], {"a": "hanging"}) as switch:
        with pytest.raises(httpx.ReadTimeout):
            ask(switch, "a", timeout=0.5)
        wait_for(lambda: 'in_progress{arm="hanging"} 0.0' in httpx.get(switch.url.replace("/v1", "/metrics")).text)
    (row,) = arm_rows(tmp_path, Prices())
    assert (row.calls, row.failed, row.left) == (1, 0, 1)


def test_nothing_is_lost_while_another_program_locks_the_file(
    tmp_path: Path, upstream: tuple[str, Upstream], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from lightning_core.tools.switch import store

    monkeypatch.setattr(store, "_LOCKED_SECONDS", 0.1)
    with (
        switch_of(tmp_path, [arm(upstream[0], "good")], {"a": "good"}) as switch,
        closing(sqlite3.connect(tmp_path / FILE)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        for _ in range(6):
            call = ask(switch, "a").headers["lightning-call"]
            httpx.post(f"{switch.url}/feedback", json={"response": call, "reward": 1}).raise_for_status()
        wait_for(lambda: "is locked by another program" in caplog.text)
        other.rollback()
    (row,) = arm_rows(tmp_path, Prices())
    assert (row.calls, row.rated) == (6, 1)
    assert "was lost" not in caplog.text


def test_a_locked_file_does_not_keep_the_switch_from_ending(
    tmp_path: Path, upstream: tuple[str, Upstream], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from lightning_core.tools.switch import store

    monkeypatch.setattr(store, "_LOCKED_SECONDS", 0.1)
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        with switch_of(tmp_path, [arm(upstream[0], "good")], {"a": "good"}) as switch:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(20):
                ask(switch, "a").raise_for_status()
            began = time.monotonic()
        assert time.monotonic() - began < 10
    assert "was lost" in caplog.text


def test_a_long_name_of_a_conversation_is_not_kept(tmp_path: Path, upstream: tuple[str, Upstream]):
    with switch_of(tmp_path, [arm(upstream[0], "good")], {"a": "good"}) as switch:
        for user in ("u" * 100_000, "u" * 100_000, "v" * 100_000):
            call = ask(switch, "a", body={"user": user}).headers["lightning-call"]
            feedback = switch.url.replace("/v1", "/a/a/v1/feedback")
            httpx.post(feedback, json={"response": call, "reward": 1}).raise_for_status()
    (row,) = arm_rows(tmp_path, Prices())
    assert (row.calls, row.conversations, row.rated) == (3, 2, 2)
    assert (tmp_path / FILE).stat().st_size < 100_000


def test_a_long_stream_is_recorded_as_a_whole(tmp_path: Path, upstream: tuple[str, Upstream]):
    url, _ = upstream
    traces = SwitchTraces(tmp_path / "traces")
    plan = SwitchPlan.model_validate({
        "models": {"long": {"base_url": f"{url}/v1"}}, "default": "long", "folder": str(tmp_path / "switch")
    })  # fmt: skip
    with SwitchServer(plan, {"long": arm(url, "long")}, traces=traces) as switch:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        assert len(httpx.post(f"{switch.url}/chat/completions", json=body).content) > 6 << 20
    assert traces.close() == f"1 call recorded in {tmp_path / 'traces'}, none left out"
    ((call,),) = (trace.calls for file in (tmp_path / "traces").iterdir() for trace in read_traces(file))
    assert (len((call.response or {})["content"]), call.error) == (6 << 20, None)
    (row,) = arm_rows(tmp_path / "switch", Prices())
    assert (row.failed, row.output_tokens) == (0, 2)


def test_shadows_end_with_the_switch_and_never_copy_to_the_answering_model(
    tmp_path: Path, upstream: tuple[str, Upstream], monkeypatch: pytest.MonkeyPatch
):
    from lightning_core.tools.switch import proxy

    monkeypatch.setattr(proxy, "_SHADOW_SECONDS", 0.2)
    url, served = upstream
    arms = [arm(url, "good"), arm(url, "hanging")]
    agents = {"a": {"arms": {"good": 1.0}, "shadow": "hanging"}, "b": {"arms": {"good": 1.0}, "shadow": "good"}}
    with switch_of(tmp_path, arms, agents) as switch:
        assert ask(switch, "a").status_code == 200
        assert ask(switch, "b").status_code == 200
        began = time.monotonic()
    assert time.monotonic() - began < 30, "it would wait 600 s"
    assert sorted(body["model"] for _, _, body in served.requests) == ["good", "good", "hanging"]
    assert {(row.agent, row.shadow): row.failed for row in arm_rows(tmp_path, Prices())} == {
        ("a", False): 0,
        ("a", True): 1,
        ("b", False): 0,
    }


def test_a_conversation_that_the_server_keeps_stays_where_it_is(tmp_path: Path, upstream: tuple[str, Upstream]):
    url, served = upstream
    arms = [arm(url, "one"), arm(url, "two")]
    with switch_of(tmp_path, arms, {"a": {"arms": {"one": 0.5, "two": 0.5}}}) as switch:
        first = [ask(switch, "a", f"q{i}") for i in range(12)]
        for i, response in enumerate(first):
            again = ask(switch, "a", f"and {i}", body={"previous_response_id": response.json()["id"]})
            assert again.headers["lightning-arm"] == response.headers["lightning-arm"]
        named = {
            ask(switch, "a", f"q{i}", body={"conversation": {"id": "c"}}).headers["lightning-arm"] for i in range(8)
        }
    assert len({response.headers["lightning-arm"] for response in first}) == 2
    assert len(named) == 1
    assert len(served.requests) == 32


def test_rollbacks_go_further_back_and_two_switches_share_no_folder(tmp_path: Path, upstream: tuple[str, Upstream]):
    url, _ = upstream
    arms = [arm(url, name) for name in ("one", "two", "three")]

    def change(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{switch.url}/switch/a", json=body)

    with switch_of(tmp_path, arms, {"a": "one"}) as switch:
        change({"promote": "two"})
        change({"promote": "three"})
        with pytest.raises(ConfigError, match="another switch uses the folder"):
            switch_of(tmp_path, arms, {"a": "one"})
        assert change({"rollback": True}).json()["arms"] == {"two": 1.0}
    with switch_of(tmp_path, arms, {"a": "one"}) as switch:
        assert switch.shares == {"a": {"two": 1.0}}
        assert change({"rollback": True}).json()["arms"] == {"one": 1.0}
        assert change({"rollback": True}).status_code == 409
    assert (tmp_path / "switch.db").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kept", [True, False], ids=["moved", "removed"])
def test_a_request_falls_back_to_the_server_of_the_plan_that_it_began_with(
    tmp_path: Path, upstream: tuple[str, Upstream], kept: bool
):
    """So that no other server gets its key."""
    url, served = upstream
    first, failing = arm(url, "b", gets_request_key=True), arm(url, "held-failing")
    moved = [arm(f"{url}/other", "b", gets_request_key=True)] if kept else []
    agents: dict[str, Any] = {"a": {"arms": {"held-failing": 1.0}, "fallback": "b"}}
    loader = Reloads(tmp_path, [failing, *moved], agents if kept else {"a": "held-failing"})
    with switch_of(tmp_path, [failing, first], agents, loader=loader) as switch, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, switch, "a", headers={"authorization": "Bearer mine"})
        wait_for(lambda: served.requests)
        httpx.post(f"{switch.url}/switch", json={"reload": True}).raise_for_status()
        time.sleep(0.5)
        assert not loader.closed, "the request may need it"
        served.released.set()
        assert answer.result().json()["model"] == "b"
        wait_for(lambda: loader.closed == [first])
    assert [(to, headers.get("authorization")) for to, headers, _ in served.requests] == [
        (f"{url}/v1/chat/completions", None),
        (f"{url}/v1/chat/completions", "Bearer mine"),
    ]


def test_a_removed_model_is_closed_after_its_last_stream(tmp_path: Path, upstream: tuple[str, Upstream]):
    url, served = upstream
    held, good = arm(url, "held"), arm(url, "good")
    loader = Reloads(tmp_path, [good], {"a": "good"})
    with switch_of(tmp_path, [held, good], {"a": "held"}, loader=loader) as switch:
        address = switch.url.replace("/v1", "/a/a/v1/chat/completions")
        body = {"model": "gpt", "messages": [], "stream": True}
        with httpx.stream("POST", address, json=body, timeout=20) as response:
            parts = response.iter_text()
            assert '"begin"' in next(parts)
            given = httpx.post(f"{switch.url}/feedback", json={"response": "held", "reward": 1})
            assert given.json().get("arm") == "held", "its events end in CRLF"
            httpx.post(f"{switch.url}/switch", json={"reload": True}).raise_for_status()
            assert ask(switch, "a").json()["model"] == "good"
            time.sleep(0.5)
            assert not loader.closed
            served.released.set()
            assert '"end"' in "".join(parts)
        wait_for(lambda: loader.closed == [held])


def test_a_mistake_of_the_switch_is_not_reported_as_one_of_the_file(tmp_path: Path, upstream: tuple[str, Upstream]):
    arms = [arm(upstream[0], "good")]
    loader = Reloads(tmp_path, arms, {"a": "good"})
    loader.arms = []
    with switch_of(tmp_path, arms, {"a": "good"}, loader=loader) as switch:
        assert httpx.post(f"{switch.url}/switch", json={"reload": True}).status_code == 500
        assert ask(switch, "a").status_code == 200


def test_the_ids_of_a_stream_without_an_end_and_of_geminis_json_array_are_recorded(
    tmp_path: Path, upstream: tuple[str, Upstream]
):
    arms = [arm(upstream[0], name) for name in ("unended", "array")]
    with switch_of(tmp_path, arms, {one.name: one.name for one in arms}) as switch:
        assert ask(switch, "unended", body={"stream": True}).status_code == 200
        google = switch.url.replace("/v1", "/a/array/v1beta/models/x:streamGenerateContent")
        content = httpx.post(google, json={"contents": []}).content
    assert find_id(content, is_stream=False) == "array"
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        assert {*database.execute("SELECT arm, response FROM calls")} == {(one.name, one.name) for one in arms}


def test_a_failed_deletion_does_not_end_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with SwitchStore(tmp_path, days=10**400) as store:
        store.feedback("call", 1.0, None)
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        assert database.execute("SELECT count(*) FROM feedback").fetchone() == (1,)
    assert "old calls cannot be deleted" in caplog.text
