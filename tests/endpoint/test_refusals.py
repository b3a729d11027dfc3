"""A request that the endpoint refuses is a failed call in the trace: its reason is seen, and it trains nothing."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from rich.console import Console

from lightning_core import assign_credit, reward, trace_to_transitions, transitions_to_rows
from lightning_core.endpoint.server import Limits
from lightning_core.rollouts.attempt import Job, Rollout
from lightning_core.rollouts.jobs import to_episodes
from lightning_core.signals.air.keys import Air
from lightning_core.signals.air.rewards import with_air
from lightning_core.signals.air.tool_outcomes import tool_outcomes
from lightning_core.signals.judge.scores import judge_prompt
from lightning_core.tools.cli.tree import make_tree
from lightning_core.transitions import refused_calls
from tests.endpoint.serving import HI, WRITER, client_in_rollout, client_in_scope, serve, serve_backend
from tests.endpoint.test_hanging_up import Endless
from tests.endpoint.test_safety import key_of

CHAT = "/chat/completions"
LONG: list[Any] = [{"role": "user", "content": "x" * 800}]
CASES: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    "a refused field": (CHAT, {"json": {"model": "base", "messages": HI, "top_logprobs": 2}}, 400, "base", "top_logprobs"),
    "a field of the wrong type": ("/messages", {"json": {"model": "base", "thinking": 1}}, 400, "base", "thinking"),
    "a model that is not served": ("/responses", {"json": {"model": "gpt-x", "input": "hi"}}, 404, "gpt-x", "not served"),
    "a model in the URL": ("/models/gem:generateContent", {"json": {"contents": []}}, 404, "gem", "not served"),
    "no JSON": (CHAT, {"content": b'{"model": '}, 400, "", "not JSON"),
    "a list": (CHAT, {"json": []}, 400, "", "expected an object"),
    "a model that is no string": (CHAT, {"json": {"model": 5}}, 400, "", "model is 5"),
    "too large": (CHAT, {"content": b" " * 2000}, 413, "", "1000 bytes"),
    "too many messages": (CHAT, {"json": {"model": "base", "messages": HI * 9}}, 400, "base", "9 messages"),
    "a prompt beyond the context": (CHAT, {"json": {"model": "base", "messages": LONG}}, 400, "base", "context length"),
    "an unknown path": ("/images/generations", {"json": {"model": "dall-e"}}, 404, "", "no POST /v1/images/generations"),
    "an unknown path of Google's": ("/models/imagen:predict", {"json": {}}, 404, "", "no POST"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_refused_request_is_a_call_with_its_reason(case: str):
    path, sent, status, model, reason = CASES[case]
    limits = Limits(body_bytes=1000, messages=8)
    headers = {"lightning-agent": "critic"}
    with serve(limits=limits, max_context=512) as endpoint, client_in_rollout(endpoint) as (run, client):
        answer = client.post(path, headers=headers, **sent)
        assert answer.status_code == status
    (call,) = run.trace.calls
    assert reason in answer.json()["error"]["message"]
    assert call.refused == " ".join(answer.json()["error"]["message"].split())[:500]
    assert (call.agent, call.model) == ("critic", model)
    kind = "ContextOverflowError" if case == "a prompt beyond the context" else "PolicyRequestError"
    assert call.error == f"{kind}: {call.refused}"[:500]
    assert (call.output_ids, call.response, call.context) == (None, None, None)
    span = next(span for span in run.spans if span.span_id == call.id)
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes.get("url.path", f"/v1{path}") == f"/v1{path}"
    assert not [name for name in span.attributes if "token_ids" in name]
    assert run.infrastructure == []


def test_a_span_that_was_open_already_is_not_joined_by_another():
    with (
        serve(max_context=512) as endpoint,
        client_in_scope(endpoint, WRITER) as (run, client),
        pytest.raises(openai.BadRequestError, match="context length"),
    ):
        client.chat.completions.create(model="m", messages=LONG, n=2)
    assert ["context length" in (call.refused or "") for call in run.trace.calls] == [True, True], (
        "one for each response"
    )


def test_too_many_requests_are_recorded():
    backend = Endless()
    with (
        serve_backend(backend, limits=Limits(requests_per_rollout=1, requests=2)) as endpoint,
        ThreadPoolExecutor() as pool,
        client_in_rollout(endpoint) as (run, client),
        client_in_rollout(endpoint) as (_, second),
        client_in_rollout(endpoint) as (third_run, third),
    ):
        body = {"model": "base", "messages": HI}
        waiting = [pool.submit(one.post, CHAT, json=body) for one in (client, second)]
        for _ in waiting:
            backend.wait_for(backend.begun)
        assert client.post(CHAT, json=body).status_code == 429
        assert third.post(CHAT, json=body).status_code == 429
        endpoint.close(key_of(client))
        endpoint.close(key_of(second))
        for future in waiting:
            future.result(10)
    assert [call.refused is not None and "requests in progress" in call.refused for call in run.trace.calls] == [
        False,
        True,
    ]
    (overload,) = third_run.trace.calls
    assert "policy endpoint has 2 requests" in (overload.refused or "")
    assert len(third_run.infrastructure) == 1


def test_what_is_no_model_call_is_no_refused_call():
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        assert client.get("/images/generations").status_code == 404
        assert client.get("/models/unknown").status_code == 404
        assert httpx.post(f"{endpoint.url}{CHAT}", json={"model": "base"}).status_code == 401
        assert client.post("/embeddings", json={"model": "e", "input": "hi"}).status_code == 404
    assert run.trace.calls == ()
    (embeddings,) = [event for event in run.trace.events if event.kind == "other"]
    assert "compute no embeddings" in str(embeddings.attributes["lightning.refused"])


def test_a_request_after_the_rollout_leaves_nothing():
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        endpoint.close(key_of(client))
        assert client.post(CHAT, json={"model": 5}).status_code == 401
    assert run.trace.calls == ()


def test_refused_calls_train_nothing_and_break_nothing():
    """Next to a good call of the same agent: credit, tool signals, judge and tree work, and only the good call is trained."""
    with serve() as endpoint, client_in_scope(endpoint, WRITER) as (run, client):
        client.chat.completions.create(model="m", messages=HI)
        for wrong in ({"top_logprobs": 2}, {"messages": []}):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(**{"model": "m", "messages": HI, **wrong})  # type: ignore[call-overload]
        client.chat.completions.create(model="m", messages=HI)
        reward(1.0)
    trace = run.trace
    assert [refusal.kind for refusal in refused_calls(trace, agents={"writer"})] == ["refused", "refused"]
    assert "top_logprobs" in refused_calls(trace, agents={"writer"})[0].reason
    attempt = Rollout(
        job=Job(task={"id": "t"}, task_id="t", seed=0),
        attempt=1,
        status="ok",
        trace=trace,
        spans=(),
        error=None,
        seconds=0.1,
    )
    (episode,) = to_episodes([attempt], {"writer"})
    transitions = trace_to_transitions(trace, agents={"writer"})
    assert [t.call for t in transitions] == [call.id for call in trace.calls if call.refused is None]
    assert len(transitions_to_rows(transitions)) == 2
    assert [t.call for t in episode.transitions] == [t.call for t in transitions]
    assert tool_outcomes(trace) == ()
    assert "hello" in judge_prompt([trace, trace], None)
    credit = assign_credit(with_air([episode], Air(truncated=-1.0, tool_error=-1.0), solved=1.0))
    assert set(credit.values) == {t.call for t in transitions}


def test_the_tree_shows_the_reason():
    with serve() as endpoint, client_in_rollout(endpoint) as (run, client):
        client.post(CHAT, json={"model": "base", "functions": [1]}, headers={"lightning-agent": "writer"})
        client.post("/rerank", json={}, headers={"lightning-agent": "writer"})
    console = Console(file=io.StringIO(), width=120)
    console.print(make_tree(run.trace))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines() if "call of" in line]
    assert lines[0].startswith("call of writer  base  refused: functions is [1], which is not supported: use tools")
    assert lines[1].startswith("call of writer  refused: the policy endpoint has no POST /v1/rerank; it supports POST")
