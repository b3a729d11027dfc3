"""Worker processes: how they start, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.config import Config, load_config
from lightning_core.endpoint.server import PolicyEndpoint
from lightning_core.errors import ConfigError
from lightning_core.observers.progress import SilentProgress
from lightning_core.records.observer import Observers
from lightning_core.rollouts.attempt import Job
from lightning_core.rollouts.entry_points import load_agent
from lightning_core.rollouts.executors.commands import COMMAND, KILL, START, CommandSender
from lightning_core.rollouts.executors.executor import Executor
from lightning_core.rollouts.executors.first_thread import starts_after_fork
from lightning_core.rollouts.executors.pool import Pool, WorkerHandle
from lightning_core.rollouts.executors.reference import FunctionReference
from lightning_core.rollouts.executors.worker import to_settings
from lightning_core.rollouts.local_agents import capturing, importing_agents, open_agents
from lightning_core.rollouts.prepare import Inputs
from lightning_core.trainers.open_run import open_run
from lightning_core.trainers.plan import Plan
from tests.rollouts import executor_agents as agents
from tests.rollouts import opens_a_connection, starts_a_pool, starts_a_thread, uses_openai
from tests.rollouts.executor_runs import ROUTING, exists, finish, numbered, open_endpoint, run, running, wait_until_gone

endpoint = pytest.fixture(open_endpoint)

NUMBER = to_settings(FunctionReference(name="tests.rollouts.executor_agents:number"), None, frozenset())


def with_pool(use: Any) -> Any:
    """The result of ``use(pool)``, with a pool of workers that is then closed."""

    async def work() -> Any:
        pool = Pool(NUMBER)
        try:
            return await asyncio.wait_for(use(pool), 120)
        finally:
            await pool.close()

    return asyncio.run(work())


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def launcher() -> int:
    """The process that starts workers, which is a child. Its command line is empty until the kernel has set its arguments."""
    end = time.monotonic() + 10
    while True:
        found = [
            pid for pid in children(os.getpid()) if b"executors.launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        if found or time.monotonic() > end:
            (one,) = found
            return one
        time.sleep(0.001)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_more_starts_at_once_than_the_connection_holds_reach_their_workers() -> None:
    async def use(pool: Pool) -> list[WorkerHandle]:
        await pool.ready()
        os.kill(launcher(), signal.SIGSTOP)
        starts = [pool.start() for _ in range(320)]
        await asyncio.sleep(1.0)  # most commands are waiting
        os.kill(launcher(), signal.SIGCONT)
        workers = await asyncio.gather(*starts)
        assert {worker.pid for worker in workers} == {*children(launcher())}
        workers[7].hang_up()  # it ends, and no other does
        assert await asyncio.wait_for(workers[7].exited, 60) == -signal.SIGKILL
        assert all(exists(worker.pid or 0) for worker in workers if worker is not workers[7])
        return workers

    assert len(with_pool(use)) == 320


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
@pytest.mark.parametrize("exits", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_a_rollout_leaves_running_is_ended_when_it_ends(
    endpoint: PolicyEndpoint, tmp_path: Path, exits: bool
) -> None:
    file = tmp_path / "pids"
    with running(endpoint, agents.leaves_processes, concurrency=1) as runner:
        rollouts = finish(runner, numbered(3, file=str(file), exits=exits))
        assert {r.status for r in rollouts} == {"infrastructure" if exits else "ok"}
        pids = [int(line) for line in file.read_text().splitlines()]
        assert len(pids) == 6
        wait_until_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_processes_that_have_ended_do_not_add_up(endpoint: PolicyEndpoint) -> None:
    rollouts = run(endpoint, agents.counts_zombies, numbered(5), concurrency=1)
    assert [r.reward for r in rollouts] == [0.0] * 5


def test_a_start_that_is_cancelled_or_fails_takes_no_worker_of_another() -> None:
    async def use(pool: Pool) -> None:
        first, second, third = (pool.start() for _ in range(3))
        await pool.ready()
        await asyncio.sleep(0)
        second.cancel()
        workers = [await first, await third]
        for worker in workers:
            worker.hang_up()
            await asyncio.wait_for(worker.exited, 60)

    with_pool(use)


def test_commands_are_sent_in_order_when_the_connection_is_full() -> None:
    async def use() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        sender = CommandSender(ours)
        loop = asyncio.get_running_loop()
        starts: dict[int, asyncio.Future[None]] = {}
        for number in range(200):
            if number % 2:
                sender.end(KILL, number)
            else:
                starts[number] = loop.create_future()
                with socket.socket() as connection:
                    sender.start(number, connection.dup(), starts[number])
        expected = [(KILL if number % 2 else START, number) for number in range(200)]
        with theirs:
            found: list[Any] = []
            for _ in expected:
                data, fds, _, _ = await asyncio.to_thread(socket.recv_fds, theirs, COMMAND.size, 1)
                found.append((COMMAND.unpack(data), len(fds)))
                for fd in fds:
                    os.close(fd)
        assert found == [((letter, number), int(letter == START)) for letter, number in expected]
        assert not any(started.done() for started in starts.values())
        sender.start(200, socket.socket(), lost := loop.create_future())
        with pytest.raises(RuntimeError, match="a worker process could not be started"):
            await lost
        sender.close()
        ours.close()

    asyncio.run(use())


def test_retries_add_no_workers(endpoint: PolicyEndpoint, tmp_path: Path) -> None:
    """A retry runs in a new worker, and the one before it can still be used."""
    options: dict[str, Any] = {"reward_function": agents.fails_once, "concurrency": 2, "retries": 1}
    with running(endpoint, agents.number, **options) as runner:
        rollouts = finish(runner, numbered(12, folder=str(tmp_path)))
        assert [(r.status, r.attempt) for r in rollouts] == [("ok", 1)] * 12
        deadline = time.monotonic() + 30
        while (workers := len(children(launcher()))) > 4 and time.monotonic() < deadline:
            time.sleep(0.1)  # workers that end
        assert workers <= 4, "two rollouts at once, and two spares"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
@pytest.mark.parametrize(
    ("agent", "first", "name"),
    [
        (starts_a_thread, "the thread 'monitor'", "monitor']"),
        (starts_a_pool, "a thread of a pool", "ThreadPoolExecutor-"),
    ],
)
def test_workers_share_the_import_up_to_its_first_thread(
    endpoint: PolicyEndpoint, caplog: pytest.LogCaptureFixture, agent: Any, first: str, name: str
) -> None:
    with caplog.at_level("INFO", "lightning_core.rollouts.executors.pool"):
        rollouts = run(endpoint, agent.shares, numbered(4), concurrency=2)
    if not starts_after_fork():
        assert [(r.status, r.reward) for r in rollouts] == [("ok", 0.0)] * 4, [r.error for r in rollouts]
        assert f"importing the agent started threads: ['{name}" in caplog.text
        return
    assert [(r.status, r.reward) for r in rollouts] == [("ok", 1.0)] * 4, [r.error for r in rollouts]
    assert f"importing the agent starts {first} (" in caplog.text
    assert f"{Path(agent.__file__).name}:" in caplog.text


@pytest.mark.long
def test_workers_that_import_the_agent_themselves_say_why(
    endpoint: PolicyEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = run(endpoint, opens_a_connection.number, numbered(2), concurrency=1)
    assert [r.status for r in rollouts] == ["ok"] * 2
    assert "each worker process imports the agent itself" in caplog.text
    if sys.platform == "linux":
        assert "importing the agent left files or connections open: ['socket:" in caplog.text


def early_config(agent: str, model: str = "scripted") -> Config:
    return load_config({"agent": agent, "policy": {"model": model}, "rollouts": {"executor": "process"}})


def reward_of_3(config: Config, executor: Executor) -> float | None:
    """The reward of the task 3, with the process of ``executor`` that imports the agent."""
    backend = ScriptedBackend(lambda prompt: "answer")
    chats = dict.fromkeys(backend.models, Chat(backend.tokenizer))
    with open_agents(config, load_agent(config), backend, chats, executor=executor) as agents:
        job = Job(task={"id": 3}, task_id="3", seed=1)
        (rollout,) = asyncio.run(agents.roll_out([job], ROUTING, lambda attempts: None))
        assert launcher()
    return rollout.reward


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_the_agent_is_imported_before_there_is_a_model() -> None:
    config = early_config("tests.rollouts.executor_agents:number")
    with capturing(config), importing_agents(config, load_agent(config)) as executor:
        early = launcher()
        assert reward_of_3(config, executor) == 3.0
        assert not exists(early)
    assert early not in children(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_run_imports_the_agent_while_it_loads_its_model(tmp_path: Path) -> None:
    found = list[int]()

    class AtLoad(SilentProgress):
        def phase(self, name: str, total: int | None = None) -> None:
            if name == "loading the model":
                found.append(launcher())

    config = early_config("tests.rollouts.executor_agents:number", model=str(tmp_path / "missing"))
    plan = Plan(
        config=config,
        folder=tmp_path,
        checkpoint=None,
        inputs=Inputs(solve=load_agent(config)),
        observers=Observers([AtLoad()]),
    )
    with pytest.raises(ConfigError, match="missing"), open_run(plan):
        pass
    assert len(found) == 1
    assert not exists(found[0])


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_nothing_is_left_of_an_import_if_the_model_cannot_be_loaded() -> None:
    config = early_config("tests.rollouts.starts_a_program:solve")
    early = list[int]()

    def load_model() -> None:
        with capturing(config), importing_agents(config, load_agent(config)):
            early.append(launcher())
            while not (programs := children(early[0])):
                time.sleep(0.01)
            early.extend(programs)
            raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        load_model()
    wait_until_gone(early)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_an_import_that_was_killed_is_repeated_before_the_first_rollout() -> None:
    config = early_config("tests.rollouts.executor_agents:number")
    with capturing(config), importing_agents(config, load_agent(config)) as executor:
        early = launcher()
        os.kill(early, signal.SIGKILL)
        os.waitid(os.P_PID, early, os.WEXITED | os.WNOWAIT)
        assert reward_of_3(config, executor) == 3.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shares what is imported")
def test_workers_share_what_clients_import_with_their_first_request(endpoint: PolicyEndpoint) -> None:
    (rollout,) = run(endpoint, uses_openai.first_request, numbered(1))
    assert (rollout.error, rollout.reward) == (None, 0.0)
