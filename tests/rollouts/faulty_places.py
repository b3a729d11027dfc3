"""An agent with two model calls and a tool, and a fault at every place where time or an answer can get lost.

A task's ``plan`` names a fault for some places. `ideal` is an independent statement of the reward: that of the same agent without
faults that lie outside it. A rollout may be left out, but never counts with another reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_core import trainable
from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import scope
from lightning_core.chat.chat import Chat
from lightning_core.config.sections import Rollouts
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.testing.recording_server import serve_app

LIMIT = 2.0
"""Seconds of its own that an agent may take."""
TOTAL = 12.0
SLOW = 3.0
"""Seconds that are more than `LIMIT`."""
NEVER = 3600.0
CONTEXT = 4096

PLACES: Mapping[str, Sequence[str]] = {
    "agent": ("raises", "hangs", "slow"),
    "tool": ("slow",),
    "sampler": ("slow", "fails", "fails once", "never answers"),
    "upstream": (
        *("slow", "fails", "fails once", "never answers", "drops", "garbage", "refuses", "wrong key"),
        *("error in the stream", "error first in the stream", "cut stream"),
    ),
    "client": ("times out", "gives up", "cancels", "another key"),
    "endpoint": ("overflow", "refuses"),
    "worker": ("killed",),
    "reward": ("raises", "slow", "hangs"),
}
"""The faults of each place."""
AGENTS_OWN = ("raises", "hangs")
ROUTING = Routing(trained=frozenset({"writer"}))


def ideal(plan: Mapping[str, str]) -> float:
    """The reward of a rollout that counts."""
    return 0.0 if plan.get("agent") in AGENTS_OWN else 1.0


def settings(**options: Any) -> Rollouts:
    """The settings of the rollouts."""
    return Rollouts(timeout_seconds=LIMIT, total_seconds=TOTAL, **options)


class FaultyBackend(ScriptedBackend):
    """Does what the plan in the prompt says."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "answer", max_context=CONTEXT)
        self._seen: Counter[str] = Counter()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        prompt = self.tokenizer.decode(list(prompt_ids), skip_special_tokens=True)
        task = json.loads(prompt[prompt.index("{") : prompt.rindex("}") + 1])
        fault = task["plan"].get("sampler")
        if task["plan"].get("client") in ("times out", "gives up", "cancels"):
            await asyncio.sleep(SLOW)
        await _delay(fault)
        self._seen[task["id"]] += 1
        if fault == "fails" or (fault == "fails once" and self._seen[task["id"]] == 1):
            raise RuntimeError("the sampler failed")
        async for delta in super().generate(prompt_ids, params, model=model, stream=stream):
            yield delta


async def _delay(fault: str | None) -> None:
    await asyncio.sleep({"slow": SLOW, "never answers": NEVER}.get(fault or "", 0.0))


def provider() -> Starlette:
    """The provider of the agent that is not trained."""
    seen: Counter[str] = Counter()

    async def complete(request: Request) -> Response:
        body = await request.json()
        task = json.loads(body["messages"][0]["content"])
        fault = task["plan"].get("upstream")
        await _delay(fault)
        seen[task["id"]] += 1
        error = {"error": {"message": "the provider's own", "type": "server_error"}}
        if fault == "fails" or (fault == "fails once" and seen[task["id"]] == 1):
            return JSONResponse(error, 503, {"retry-after-ms": "1"})
        if fault == "drops":
            raise ConnectionResetError  # the server closes the connection without an answer
        if fault == "garbage":
            return Response(b"<html>", 200)
        if fault in ("refuses", "wrong key"):
            return JSONResponse(error, 400 if fault == "refuses" else 401)
        if body.get("stream"):
            return StreamingResponse(_events(fault, error), media_type="text/event-stream")
        message = {"role": "assistant", "content": "fine"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

    return Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])


async def _events(fault: str | None, error: Any) -> AsyncGenerator[bytes]:
    def event(data: Any) -> bytes:
        return f"data: {json.dumps(data)}\n\n".encode()

    def chunk(delta: Any, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        return event({**head, "choices": [choice]})

    if fault == "error first in the stream":
        yield event(error)
        return
    yield chunk({"role": "assistant", "content": "fi"})
    if fault == "error in the stream":
        yield event(error)
    if fault in ("error in the stream", "cut stream"):
        return
    yield chunk({"content": "ne"}, "stop")
    yield b"data: [DONE]\n\n"


@contextmanager
def places() -> Generator[tuple[PolicyEndpoint, str]]:
    """An endpoint whose sampler has faults, and the URL of a provider that has them too."""
    backend = FaultyBackend()
    with serve_app(provider()) as url, PolicyEndpoint(backend, Chat(backend.tokenizer)) as endpoint:
        yield endpoint, url


def solve(task: dict[str, Any]) -> float:
    """The agent. With ``swallow`` it catches every error and returns 0."""
    if not task.get("swallow"):
        return _solve(task)
    try:
        return _solve(task)
    except Exception:  # noqa: BLE001 - as many agents do
        return 0.0


_threads = ThreadPoolExecutor(4096)
"""As many as there may be rollouts: those that hang keep theirs."""


async def solve_async(task: dict[str, Any]) -> float:
    """The same agent on an event loop, with its blocking code on threads."""
    run = contextvars.copy_context().run
    return await asyncio.get_running_loop().run_in_executor(_threads, run, solve, task)


async def wait(task: dict[str, Any]) -> float:
    """An agent that hangs in an asynchronous generator, before any model call."""
    async for _ in _silence():
        pass
    return 0.0


async def _silence() -> AsyncGenerator[None]:
    await asyncio.sleep(NEVER)
    yield


def score(task: dict[str, Any], result: Any) -> float:
    """The reward function."""
    fault = task["plan"].get("reward")
    time.sleep({"slow": LIMIT / 4, "hangs": NEVER}.get(fault, 0.0))
    if fault == "raises":
        raise KeyError("answer")
    return float(result)


def _solve(task: dict[str, Any]) -> float:
    plan = task["plan"]
    if plan.get("worker") == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    write(task)
    time.sleep(LIMIT / 4 if plan.get("tool") == "slow" else 0.0)
    criticize(task)
    fault = plan.get("agent")
    time.sleep({"slow": LIMIT / 4, "hangs": NEVER}.get(fault, 0.0))
    if fault == "raises":
        raise ValueError("the agent's own")
    return 1.0


@trainable("writer")
def write(task: dict[str, Any]) -> None:
    """The call of the trained agent."""
    fault = task["plan"].get("client")
    if fault == "cancels":
        asyncio.run(_cancel(task))
    elif fault == "gives up":
        sent, done = threading.Event(), threading.Event()

        def work() -> None:
            with contextlib.suppress(openai.OpenAIError):  # the rollout may have ended
                _write(task, None, sent)
                done.set()

        threading.Thread(target=work, daemon=True).start()
        sent.wait()
        if not done.wait(LIMIT / 4):
            raise TimeoutError("no answer in time")
    else:
        _write(task, fault)


async def _cancel(task: dict[str, Any]) -> None:
    sent = asyncio.Event()
    writing = asyncio.ensure_future(_write_async(task, sent))
    await sent.wait()
    await asyncio.wait_for(writing, LIMIT / 4)


async def _write_async(task: dict[str, Any], sent: asyncio.Event) -> None:
    async def note(request: httpx.Request) -> None:
        sent.set()

    text = json.dumps({"id": task["id"], "plan": task["plan"]})
    async with openai.AsyncOpenAI(
        api_key="sk-x",
        base_url=f"{task['provider']}/v1",
        http_client=httpx.AsyncClient(event_hooks={"request": [note]}, verify=False),  # loading certificates takes long
    ) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def _write(task: dict[str, Any], fault: str | None, sent: threading.Event | None = None) -> None:
    fault_of_endpoint = task["plan"].get("endpoint")
    text = json.dumps({"id": task["id"], "plan": task["plan"]})
    options: dict[str, Any] = {"temperature": "hot"} if fault_of_endpoint == "refuses" else {}
    if fault_of_endpoint == "overflow":
        text += " " * CONTEXT
    with _client(task, fault, sent) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **options)


def criticize(task: dict[str, Any]) -> None:
    """The call of the agent that is not trained."""
    stream = "stream" in task["plan"].get("upstream", "")
    text = json.dumps({"id": task["id"], "plan": task["plan"]})
    with scope("critic"), _client(task, None) as client:
        answer: Any = client.chat.completions.create(
            model="gpt", messages=[{"role": "user", "content": text}], stream=stream
        )
        for _ in answer if stream else ():
            pass


def _client(task: dict[str, Any], fault: str | None, sent: threading.Event | None = None) -> openai.OpenAI:
    def trace(name: str, info: dict[str, Any]) -> None:
        if name == "http11.send_request_headers.started":
            info["request"].headers[:] = [
                (key, b"Bearer mine" if key.lower() == b"authorization" else value)
                for key, value in info["request"].headers
            ]

    def own_key(request: httpx.Request) -> None:
        # Below all layers of the client that Lightning looks at.
        request.extensions = {**request.extensions, "trace": trace}

    hooks = {"request": [own_key]} if fault == "another key" else {}
    if sent is not None:
        hooks = {"request": [lambda request: sent.set()]}
    return openai.OpenAI(
        api_key="sk-x",
        base_url=f"{task['provider']}/v1",
        timeout=LIMIT / 4 if fault == "times out" else 60,
        max_retries=0 if fault == "times out" else 2,
        http_client=httpx.Client(event_hooks=hooks, verify=False),  # loading certificates takes long
    )
