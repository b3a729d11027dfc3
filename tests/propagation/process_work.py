"""What the child processes of the tests do. A module of its own, since a spawned process imports it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from lightning_core import reward, trainable
from lightning_core.capture import current_address, current_rollout, note_elsewhere, record, scope
from lightning_core.capture import run as runs
from lightning_core.propagation import endpoint_environment

CHAT = "https://api.openai.com/v1/chat/completions"
started: list[str] = []


def ask(text: str) -> str:
    """One model call with a client that knows nothing of the endpoint. It imports fast."""
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": text}]}
    response = httpx2.post(CHAT, json=body, headers={"authorization": "Bearer sk-own"}, trust_env=False, timeout=60)
    if response.status_code != 200:
        raise RuntimeError(response.text)
    return response.json()["choices"][0]["message"]["content"]


def ask_both(first: str, second: str) -> str:
    return f"{ask(first)}; {ask(second)}"


def ask_in_thread(text: str) -> str:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask, text).result()


def ask_openai(text: str) -> str:
    """As `ask`, with OpenAI's client."""
    import openai

    with openai.OpenAI(api_key="sk-own", max_retries=0) as client:
        response = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": text}])
    return response.choices[0].message.content or ""


@trainable("inner")
def ask_as_inner(text: str) -> str:
    return ask(text)


def ask_nested(text: str) -> str:
    """Calls inside and outside a marked function, a tool, and rewards."""
    answer = ask_as_inner(f"inner {text}")
    with scope("search", kind="tool"):
        reward(0.5, name="found")
    return f"{answer}; {ask(text)}"


def kept() -> tuple[bool, int, tuple[str, ...]]:
    """What a process knows of rollouts between two pieces of work: variables that a rollout sets, not those of the user."""
    live = runs._live  # pyright: ignore[reportPrivateUsage]
    names = {name for name in os.environ if name.startswith("LIGHTNING_")} - {"LIGHTNING_CACHE", "LIGHTNING_DEBUG"}
    return current_rollout() is None, len(live), tuple(sorted(names))


def address() -> str | None:
    found = current_address()
    return None if found is None else found.agent


def initialize(word: str) -> None:
    started.append(word)


def initialized() -> list[str]:
    ask("after initializer")
    return started


def fail(text: str) -> None:
    ask(text)
    raise KeyError(text)


def exit_with(code: int) -> None:
    ask("before exit")
    raise SystemExit(code)


def put(queue: Any, text: str) -> None:
    queue.put(ask(text))


class OwnProcess(multiprocessing.get_context("spawn").Process):
    """A process with a ``run`` of its own."""

    def __init__(self, text: str) -> None:
        super().__init__(daemon=True)
        self.text = text
        self.number = threading.get_ident()

    def run(self) -> None:
        ask(self.text)


def ask_late(go: Any, queue: Any) -> None:
    """Calls the model when ``go`` is set; puts the error."""
    go.wait()
    try:
        queue.put(ask("late"))
    except RuntimeError as error:
        queue.put(str(error))


def load_and_call(pickled: bytes, *args: Any) -> Any:
    return pickle.loads(pickled)(*args)


async def reward_many(number: int) -> None:
    """Rewards named 0, 1, …. They do not wait for the endpoint."""
    for index in range(number):
        reward(1.0, name=str(index))


def reward_and_return(number: int) -> None:
    asyncio.run(reward_many(number))


def reward_and_end(end: str, recorded: Any, receipt: Any) -> None:
    """Records rewards in an event loop, and ends or hands on a result in the way ``end``."""
    asyncio.run(reward_many(3))
    recorded.set()
    match end:
        case "os._exit":
            os._exit(0)
        case "os.execv":
            os.execv("/bin/true", ["true"])
        case "os.execve":
            os.execve("/bin/true", ["true"], {})
        case "SystemExit":
            raise SystemExit(0)
        case "send":
            receipt.send("done")
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            receipt.put("done")
            signal.pause()


def reward_while_ticking(ticked: Any) -> None:
    """Sets ``ticked`` when the event loop has run for a while after a reward."""

    async def main() -> None:
        await reward_many(1)
        for _ in range(10):
            await asyncio.sleep(0.01)
        ticked.set()

    asyncio.run(main())


def reward_and_wait(recorded: Any) -> None:
    """Sends one reward, puts 1000 others, and never ends."""
    reward(0.5)
    asyncio.run(reward_many(1000))
    recorded.set()
    signal.pause()


def note_many(number: int) -> None:
    for _ in range(number):
        note_elsewhere("example.com", "connection by other code")


def fail_many(number: int) -> None:
    """Counts infrastructure failures of the current rollout."""
    run = current_rollout()
    assert run is not None
    for _ in range(number):
        run.count_infrastructure_failure("refused", permanent=True)


def count_twice() -> None:
    for _ in range(2):
        with record("something"):
            raise ValueError("boom")


def key_of_a_program() -> str:
    return endpoint_environment({"OPENAI_API_KEY": "sk-own"})["OPENAI_API_KEY"]
