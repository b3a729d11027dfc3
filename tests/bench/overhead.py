"""Measures the cost of capture for an agent whose model answers in 10 ms: decorated against plain.

    python -m tests.bench.overhead [--calls 50] [--repeats 5]

Each host runs the same agent, one model call per run, in three ways. *plain*: against a small server that waits 10 ms. *captured*: marked
and in a rollout, with all integrations installed, against the same server. *endpoint*: the same, but routed to the policy endpoint, whose
scripted model waits 10 ms and which tokenises and records every call. Prints the median milliseconds of a run and the ratios to plain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import agents
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from openai import AsyncOpenAI

from lightning_core import rollout, trainable
from lightning_core.rollouts.local_agents import patched
from lightning_core.testing import Playground
from lightning_core.testing.contract import answer_prompt

ANSWER_SECONDS = 0.010
WAYS = ("plain", "captured", "endpoint")

Run = Callable[[], Awaitable[Any]]


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(ANSWER_SECONDS)
        message = {"role": "assistant", "content": "hello"}
        body = json.dumps(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": "policy",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve_plain() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def by_hand(url: str | None, marked: bool) -> Run:
    client = AsyncOpenAI(base_url=url, api_key="k", max_retries=0)

    async def run() -> Any:
        return await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])

    return trainable("agent")(run) if marked else run


def langgraph(url: str | None, marked: bool) -> Run:
    model = ChatOpenAI(model="policy", base_url=url, api_key="k", max_retries=0)

    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", trainable("agent")(node) if marked else node)
    graph.add_edge(START, "agent")
    app = graph.compile()
    return lambda: app.ainvoke({"messages": [("user", "hello")]})


def openai_agents(url: str | None, marked: bool) -> Run:
    client = AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
    agent = agents.Agent(name="agent", model=agents.OpenAIChatCompletionsModel("policy", openai_client=client))
    agent = trainable(agent, name="agent") if marked else agent
    config = agents.RunConfig(tracing_disabled=True)
    return lambda: agents.Runner.run(agent, "hello", run_config=config)


def autogen(url: str | None, marked: bool) -> Run:
    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": "unknown",
        "structured_output": False,
    }
    place = {} if url is None else {"base_url": url}
    client = OpenAIChatCompletionClient(model="policy", api_key="k", model_info=info, max_retries=0, **place)

    async def run() -> Any:
        agent = AssistantAgent("agent", model_client=client)
        return await (trainable(agent, name="agent") if marked else agent).run(task="hello")

    return run


async def measure(run: Run, calls: int) -> float:
    """Milliseconds of one run."""
    start = time.perf_counter()
    for _ in range(calls):
        await run()
    return (time.perf_counter() - start) * 1000 / calls


async def compare(
    make: Callable[[str | None, bool], Run], plain_url: str, endpoint: Playground, options: Any
) -> list[float]:
    runs = (make(plain_url, False), make(plain_url, True), make(None, True))
    times: list[list[float]] = [[], [], []]
    for repeat in range(options.repeats + 1):
        for i, run in enumerate(runs):
            with ExitStack() as stack:
                if i:
                    stack.enter_context(patched())
                    stack.enter_context(rollout("task") if i == 1 else endpoint.rollout())
                took = await measure(run, options.calls)
            if repeat:  # the first run warms up
                times[i].append(took)
    return [statistics.median(t) for t in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'':14s}" + "".join(f"{way:>12s}" for way in WAYS) + "    captured/plain  endpoint/plain")
    with serve_plain() as url, Playground(answer_prompt, delay=ANSWER_SECONDS) as endpoint:
        for make in (by_hand, langgraph, openai_agents, autogen):
            plain, captured, routed = asyncio.run(compare(make, url, endpoint, options))
            cells = "".join(f"{ms:9.2f} ms" for ms in (plain, captured, routed))
            print(f"{make.__name__:14s}{cells}    {captured / plain:13.2f}x {routed / plain:14.2f}x", flush=True)


if __name__ == "__main__":
    main()
