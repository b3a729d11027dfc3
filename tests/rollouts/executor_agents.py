"""Agents that `test_executors` runs in worker processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np

from lightning_core import reward, trainable
from lightning_core.capture import scope
from lightning_core.errors import TimeLimitError
from tests.rollouts import faulty_agents
from tests.rollouts.faulty_agents import ask, ask_async

imported_in = os.getpid()


@trainable("writer")
def write(text: str) -> str:
    return faulty_agents.client.post(faulty_agents.URL, json=faulty_agents.body(text)).json()["choices"][0]["message"][
        "content"
    ]


def number(task: dict[str, Any]) -> float:
    return float(task["id"])


def any_of(task: dict[str, Any]) -> Any:
    """The agent of this module that the task names."""
    return globals()[task["agent"]](task)


def whole(task: dict[str, Any]) -> float:
    """Two agents, a tool and rewards."""
    with scope("planner"):
        assert (write if task.get("other") else ask)(f"plan {task['id']}") == "answer"
    with scope("search", kind="tool"):
        ask(task["id"])
    reward(0.5, agent="a", name="style")
    return float(task["id"])


async def whole_async(task: dict[str, Any]) -> float:
    with scope("planner"):
        await asyncio.gather(*(ask_async(f"{task['id']} {n}") for n in range(2)))
    reward(0.25)
    return reward(0.5) or None  # type: ignore[return-value]


def forks(task: dict[str, Any]) -> float:
    """Its child does not end by itself, but with ``task["end"]``, while its parent waits for it or for the next rollout."""
    ask(task["id"])
    end, child = task.get("end"), 0
    if end is not None and (child := os.fork()) == 0:
        time.sleep(0.2)
        if end == "exit":
            sys.exit(7)
        if end == "raise":
            raise ValueError("of the child")
        return -5.0
    if task.get("wait"):
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == {"exit": 7, "raise": 1, "return": 0}[task["end"]], code
    return 1.0


async def cancels_itself(task: dict[str, Any]) -> float:
    await ask_async(task["id"])
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)
    return 1.0


def out_of_memory(task: dict[str, Any], result: Any = None) -> float:
    """An agent, and a reward function."""
    raise MemoryError("no memory")


class Callable:
    """An instance that is called, with an asynchronous method."""

    async def __call__(self, task: dict[str, Any]) -> float:
        await asyncio.sleep(0)
        return number(task)


instance = Callable()


class _Slow:
    def __del__(self) -> None:
        time.sleep(0.5)


_local = threading.local()


def ends_late(task: dict[str, Any]) -> float:
    """An agent without a name, whose thread ends half a second after its result is known."""
    _local.slow = _Slow()
    faulty_agents.client.post(faulty_agents.URL, json=faulty_agents.body(task["id"])).raise_for_status()
    return 1.0


class Rude(Exception):
    """An exception that cannot be pickled or shown."""

    def __init__(self, lock: object) -> None:
        self.lock = lock

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> str:
        raise TypeError("no pickle")


def rude(task: dict[str, Any]) -> float:
    try:
        raise httpx.ConnectError("cause: \ud83d")
    except httpx.ConnectError as error:
        raise Rude(threading.Lock()) from error


def changes_everything(task: dict[str, Any]) -> str:
    """What it finds, before it changes it."""
    found = f"{Path.cwd().name} {os.environ.get('LEFT')} {random.random():.6f} {np.random.random():.6f}"
    os.chdir("/")
    os.environ["LEFT"] = "behind"
    random.seed(0)
    np.random.seed(0)
    globals()["left"] = True
    return found


def finds_globals(task: dict[str, Any]) -> float:
    found = "left" in globals()
    globals()["left"] = True
    return float(found)


def returned(task: dict[str, Any], result: Any) -> float:
    """A reward function that records what the agent returned."""
    with Path(task["file"]).open("a") as file:
        file.write(f"{result}\n")
    return 1.0


def changes_task(task: dict[str, Any]) -> dict[str, Any]:
    task["id"] = "changed"
    return task


def task_is_whole(task: dict[str, Any], result: Any) -> bool:
    return task["id"] != "changed" and result["id"] == "changed"


def bad_score(task: dict[str, Any], result: Any) -> float:
    if task["id"] == "1":
        os._exit(1)
    if task["id"] == "2":
        time.sleep(3600)
    if task["id"] == "3":
        raise KeyError("no such score")
    return 1.0


def spoils_its_process(task: dict[str, Any]) -> float:
    """The first rollout of a process makes all later ones fail."""
    if globals().get("spoilt"):
        raise RuntimeError("spoilt by an earlier rollout")
    globals()["spoilt"] = True
    return 1.0


def leaves_children(task: dict[str, Any]) -> float:
    """Starts a child in its group and one in a session of its own, ignores SIGTERM, and hangs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for own_session in (False, True):
        child = os.fork()
        if child == 0:
            if own_session:
                os.setsid()
            time.sleep(3600)
        with Path(task["file"]).open("a") as file:
            file.write(f"{child}\n")
    with Path(task["file"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(3600)
    return 1.0


def prints(task: dict[str, Any]) -> float:
    sys.stdout.write("printed by the agent\n")
    sys.stderr.write("an error of the agent\n")
    return 1.0


def forked(task: dict[str, Any]) -> float:
    """Whether this process is a fork of the one that imported the module."""
    return float(imported_in != os.getpid())


async def keeps_client(task: dict[str, Any]) -> float:
    return float(await ask_async(task["id"]) == "answer")


async def blocks(task: dict[str, Any]) -> float:
    """Blocks the event loop that it shares with others if the task says so."""
    await asyncio.sleep(0.5)
    if task["fault"]:
        await asyncio.create_task(_block())
    return 1.0


async def _block() -> None:
    time.sleep(3600)


async def blocks_once_in_a_callback(task: dict[str, Any]) -> float:
    """Blocks the loop that it shares with others for 6 s, outside any task, when it runs first."""
    await ask_async(task["id"])
    if task["file"] and not Path(task["file"]).exists():
        Path(task["file"]).touch()
        asyncio.get_running_loop().call_soon(time.sleep, 6)
    await asyncio.sleep(0.5)
    return 1.0


async def blocks_for_a_time(task: dict[str, Any]) -> float:
    await ask_async(task["id"])
    if task["block"]:
        time.sleep(task["block"])
    else:
        await asyncio.sleep(2)
    return 1.0


def kills_parent_once(task: dict[str, Any]) -> float:
    if task["file"] and not Path(task["file"]).exists():
        Path(task["file"]).touch()
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.2)
    return 1.0


def leaks(task: dict[str, Any]) -> float:
    kept = globals().setdefault("kept", [])
    kept.append(np.ones(32 << 17))  # 32 MiB
    return float(len(kept))


def leaves_processes(task: dict[str, Any]) -> float:
    """Leaves a child, and a process in a session of its own whose parent has ended."""
    child = subprocess.Popen(["sleep", "3600"])
    program = "import subprocess; print(subprocess.Popen(['sleep', '3600'], start_new_session=True, stdout=-3).pid)"
    daemon = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    with Path(task["file"]).open("a") as file:
        file.write(f"{child.pid}\n{int(daemon)}\n")
    if task.get("exits"):
        os._exit(1)
    return 1.0


def counts_zombies(task: dict[str, Any]) -> float:
    """The processes of earlier rollouts of this worker that nothing has waited for, and leaves one."""
    children = Path("/proc/self/task").glob("*/children")
    found = sum(len(path.read_text().split()) for path in children)
    code = "import os; os._exit(0) if os.fork() else os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return float(found)


def raises_time_limit(task: dict[str, Any]) -> float:
    """Raises the error of Lightning's own time limit."""
    if task["id"] == "1":
        raise TimeLimitError(5)
    return 1.0


class Waits:
    """Its methods wait until ``released``, for at most 20 s."""

    began, released = threading.Event(), threading.Event()

    def __repr__(self) -> str:
        self.began.set()
        return "released" if self.released.wait(20) else "blocked"


def returns_what_waits(task: dict[str, Any]) -> Any:
    """The first result is shown when the third rollout runs, which waits for the end of the second."""
    if task["id"] == "0":
        return Waits()
    if task["id"] == "1":
        Waits.began.wait(60)
    else:
        Waits.released.set()
    return 1.0


class Copied:
    """A part of a task: copying or pickling the first one waits for the second."""

    found: ClassVar[list[bool]] = []
    released = threading.Event()

    def __init__(self, number: int, step: str) -> None:
        self.number = number
        self.step = step

    def __deepcopy__(self, memo: object) -> Copied:
        if self.step == "copy":
            self.wait()
        return self

    def __reduce__(self) -> Any:
        if self.step == "pickle":
            self.wait()
        return (Copied, (self.number, ""))

    def wait(self) -> None:
        if self.number == 1:
            self.released.set()
        self.found.append(self.released.wait(20))


def gives_number_like_rewards(task: dict[str, Any]) -> None:
    """One for each type that converts to float."""
    for value in (Decimal("0.5"), Fraction(1, 4), np.float32(2), np.array(4.0)):
        reward(value)


async def scores_later(task: dict[str, Any], result: Any) -> float:
    """An asynchronous reward function with a model call."""
    with scope("planner"):
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(faulty_agents.URL, json=faulty_agents.body("score"))
    await asyncio.to_thread(answer.raise_for_status)
    return float(task["id"]) + result


def scores_within_a_second(task: dict[str, Any], result: Any) -> float:
    """As math_verify: the answer is wrong if it cannot be compared."""
    try:
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    except ValueError:
        return 0.0
    signal.signal(signal.SIGALRM, before)
    return 1.0


def fails_once(task: dict[str, Any], result: float) -> float:
    """A reward function that raises at the first attempt at a task."""
    seen = Path(task["folder"], task["id"])
    if not seen.exists():
        seen.touch()
        raise ConnectionError("the judge is busy")
    return result


def says_good(task: dict[str, Any], result: float) -> str:
    """A reward function without a number."""
    return "good"
