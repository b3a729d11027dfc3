"""Agents run by each executor, with real processes and a real endpoint."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_core import load_config
from lightning_core.config.sections import Rollouts
from lightning_core.endpoint.server import PolicyEndpoint, Routing
from lightning_core.errors import ConfigError
from lightning_core.rollouts.attempt import Attempt, Job, Rollout
from lightning_core.rollouts.executors import processes
from lightning_core.rollouts.runner import Runner
from lightning_core.trace import ANSWER
from tests.rollouts import executor_agents as agents
from tests.rollouts import faulty_agents
from tests.rollouts.executor_runs import ROUTING, finish, numbered, open_endpoint, run, running, wait_until_gone

endpoint = pytest.fixture(open_endpoint)


def shape(rollout: Rollout) -> Any:
    """All of a trace but ids and times."""
    names = {event.id: event.name for event in rollout.trace.events}
    return (
        rollout.status,
        sorted((r.value, r.agent, r.name) for r in rollout.trace.rewards),
        sorted((e.kind, e.name, str(e.agent), names.get(e.parent or "", "")) for e in rollout.trace.events),
        sorted(
            (str(c.agent), c.model, c.trained, names.get(c.parent or "", ""), str(c.messages))
            for c in rollout.trace.calls
        ),
    )


@pytest.mark.parametrize("solve", [agents.whole, pytest.param(agents.whole_async, marks=pytest.mark.long)])
def test_names_rewards_tools_and_spans_are_the_same_everywhere(
    endpoint: PolicyEndpoint, solve: Callable[[Any], Any]
) -> None:
    tasks = [*numbered(3), {"id": "3", "other": True}]
    here, there = ([shape(r) for r in run(endpoint, solve, tasks, executor=name)] for name in ("task", "process"))
    assert here == there
    assert {status for status, *_ in here} == {"ok"}


@pytest.mark.parametrize(
    ("executor", "solve"),
    [
        ("task", agents.number),
        ("thread", agents.number),
        pytest.param("process", agents.number, marks=pytest.mark.long),
        ("task", agents.instance),
        ("thread", agents.instance),
        ("process", agents.instance),
    ],
)
def test_results_are_in_the_order_of_the_jobs(
    endpoint: PolicyEndpoint, executor: str, solve: Callable[[Any], Any]
) -> None:
    name = "tests.rollouts.executor_agents:instance" if solve is agents.instance else None
    rollouts = run(endpoint, solve, numbered(10), executor=executor, agent_name=name)
    assert [r.reward for r in rollouts] == [float(n) for n in range(10)]


FAULTS = [
    "raise",
    "sys.exit",
    "os._exit",
    "segfault",
    "spin",
    "hang",
    "hang in tool",
    "lone surrogate",
    "chdir",
    "fork",
]


def test_faults_end_their_own_rollouts_only(endpoint: PolicyEndpoint) -> None:
    """Between two faults there are two healthy rollouts."""
    tasks = [{"id": f"{fault} {n}", "fault": "" if n else fault} for fault in FAULTS for n in range(3)]
    # One that spins gets a low priority: on a busy machine its own 3 seconds take many.
    rollouts = run(endpoint, faulty_agents.solve, tasks, timeout_seconds=3, total_seconds=200)
    healthy = [r for r in rollouts if not r.job.task["fault"]]
    assert [(r.status, r.reward, len(r.trace.calls)) for r in healthy] == [("ok", 1.0, faulty_agents.CALLS)] * 20
    found = {r.job.task["fault"]: r.status for r in rollouts if r.job.task["fault"]}
    assert found == {fault: faulty_agents.expected_status(fault) for fault in FAULTS}
    errors = {r.job.task["fault"]: str(r.error) for r in rollouts}
    assert "the agent's process ended with signal SIGSEGV" in errors["segfault"]
    assert "the agent's process ended with exit code 0" in errors["os._exit"]


def test_a_thread_of_the_runner_may_end_after_the_rollout(endpoint: PolicyEndpoint) -> None:
    with running(endpoint, agents.ends_late, executor="thread") as runner:
        (rollout,) = finish(runner, numbered(1), routing=Routing(trained=frozenset({"a"}), unnamed="a"))
    assert (rollout.status, rollout.reward, len(rollout.trace.calls)) == ("ok", 1.0, 1), rollout.error


@pytest.mark.parametrize(
    "faults",
    [
        ["", "swallow cancel"],
        pytest.param(["", "hang", "block loop", "", "hang threads", "swallow cancel", "", ""], marks=pytest.mark.long),
    ],
    ids=len,
)
def test_async_agents_that_hang_are_stopped_at_their_time_limit(endpoint: PolicyEndpoint, faults: list[str]) -> None:
    tasks = [{"id": str(n), "fault": fault} for n, fault in enumerate(faults)]
    rollouts = run(endpoint, faulty_agents.solve_async, tasks, timeout_seconds=12, concurrency=8)
    assert [r.status for r in rollouts] == ["failed" if fault else "ok" for fault in faults]


def test_folder_environment_and_random_numbers_are_reset_between_rollouts(
    endpoint: PolicyEndpoint, tmp_path: Path
) -> None:
    file = tmp_path / "found"
    tasks = numbered(4, file=str(file))
    with running(endpoint, agents.changes_everything, concurrency=1, reward_function=agents.returned) as runner:
        finish(runner, tasks)
        found = file.read_text().splitlines()
        finish(runner, tasks)
    assert {line.split()[0] for line in found} == {Path.cwd().name}
    assert {line.split()[1] for line in found} == {"None"}
    assert len({line.split()[2] for line in found}) == 4
    assert len({line.split()[3] for line in found}) == 4
    assert file.read_text().splitlines()[4:] == found, "the random numbers depend on the seed of the job"


def test_a_fresh_process_has_no_globals_of_earlier_rollouts(endpoint: PolicyEndpoint) -> None:
    fresh = run(endpoint, agents.finds_globals, numbered(5), concurrency=1, fresh=True)
    assert [r.reward for r in fresh] == [0.0] * 5


def test_an_agent_that_fails_because_of_an_earlier_rollout_runs_again_in_another_process(
    endpoint: PolicyEndpoint,
) -> None:
    rollouts = run(endpoint, agents.spoils_its_process, numbered(5), concurrency=1)
    assert [(r.status, r.attempt) for r in rollouts] == [("ok", 0)] * 5


@pytest.mark.parametrize("executor", ["task", "thread", pytest.param("process", marks=pytest.mark.long)])
def test_the_reward_function_gets_the_task_as_it_was(endpoint: PolicyEndpoint, executor: str) -> None:
    options: dict[str, Any] = {"executor": executor, "reward_function": agents.task_is_whole}
    rollouts = run(endpoint, agents.changes_task, numbered(3), **options)
    assert [r.reward for r in rollouts] == [1.0] * 3
    answers = [s.attributes[ANSWER] for r in rollouts for s in r.spans if s.parent_id is None]
    assert answers == ['{"id": "changed"}'] * 3, "what it scored is recorded"


def test_a_reward_function_that_ends_hangs_or_raises_is_no_failure_of_the_agent(endpoint: PolicyEndpoint) -> None:
    rollouts = run(endpoint, agents.number, numbered(5), reward_function=agents.bad_score, timeout_seconds=3)
    assert [r.status for r in rollouts] == ["ok", *["infrastructure"] * 3, "ok"]
    assert "exit code 1" in str(rollouts[1].error)
    assert "did not return within rollouts.timeout_seconds = 3 s" in str(rollouts[2].error)
    assert "the reward function raised KeyError: 'no such score'" in str(rollouts[3].error)


@pytest.mark.long
def test_at_the_time_limit_all_processes_that_the_agent_started_are_killed(
    endpoint: PolicyEndpoint, tmp_path: Path
) -> None:
    file = tmp_path / "pids"
    run(endpoint, agents.leaves_children, [{"id": "0", "file": str(file)}], timeout_seconds=10)
    pids = [int(line) for line in file.read_text().splitlines()]
    assert len(pids) == 3
    wait_until_gone(pids)


PROGRAM = """
    import sys, time
    from lightning_core.backends.scripted import ScriptedBackend
    from lightning_core.chat.chat import Chat
    from lightning_core.config.sections import Rollouts
    from lightning_core.endpoint.agents.routing import Routing
    from lightning_core.endpoint.server import PolicyEndpoint
    from lightning_core.rollouts.attempt import Job
    from lightning_core.rollouts.runner import Runner
    from tests.rollouts import executor_agents as agents

    backend = ScriptedBackend(lambda prompt: "answer")
    with (
        PolicyEndpoint(backend, Chat(backend.tokenizer)) as endpoint,
        Runner(agents.leaves_children, endpoint=endpoint, settings=Rollouts(executor="process")) as runner,
    ):
        work = runner.submit(
            [Job(task={"id": "0", "file": sys.argv[1]}, task_id="0", seed=0)], routing=Routing(trained=frozenset({"a"}))
        )
        while not work.done():
            time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_interrupted_or_killed(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pids"
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(file)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not file.exists() or file.read_text().count("\n") < 3):
            time.sleep(0.05)
        program.send_signal(number)
        program.communicate(timeout=30)
    finally:
        program.kill()
    pids = [int(line) for line in file.read_text().splitlines()]
    wait_until_gone(pids)


def test_a_function_without_a_name_is_refused_by_process_and_runs_here_with_auto(
    endpoint: PolicyEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    here = os.getpid()

    def solve(task: Any) -> float:
        return float(os.getpid() == here)

    with pytest.raises(ConfigError, match=r"agent: <function .*solve.* not at the top level of a module\. Move it"):
        run(endpoint, solve, numbered(1))
    with caplog.at_level(logging.WARNING, "lightning_core"):
        rollouts = run(endpoint, solve, numbered(3), executor="auto")
    assert [r.reward for r in rollouts] == [1.0] * 3
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "agents run in this process, without protection from crashes and hangs"
    ]


def test_a_task_that_cannot_be_sent_is_refused_by_process_and_stays_here_with_auto(endpoint: PolicyEndpoint) -> None:
    task = {"id": "1", "show": agents.Callable}
    assert [r.reward for r in run(endpoint, agents.number, [task])] == [1.0]
    task = {"id": "1", "show": lambda: 1}
    with pytest.raises(ConfigError, match="task '1' cannot be sent to a worker process"):
        run(endpoint, agents.number, [task])
    assert [r.reward for r in run(endpoint, agents.number, [task], executor="auto")] == [1.0]


def test_fresh_needs_processes() -> None:
    with pytest.raises(ConfigError, match=r"rollouts\.fresh: needs worker processes, but rollouts\.executor is 'task'"):
        load_config({"policy": {"model": "m"}, "rollouts": {"executor": "task", "fresh": True}})


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("starts_thread", "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"),
        pytest.param("keeps_connection", "ends = socket.socketpair()", marks=pytest.mark.long),
        pytest.param("is_plain", "", marks=pytest.mark.long),
    ],
)
def test_workers_are_forked_unless_the_agents_module_started_threads(
    endpoint: PolicyEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, statement: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = """
        import os, socket, threading, time
        {}
        imported_in = os.getpid()
        def solve(task): return float(imported_in != os.getpid())
    """
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(source).format(statement))
    module = __import__(name)
    rollouts = run(endpoint, module.solve, numbered(2))
    assert [r.reward for r in rollouts] == [1.0 if name == "is_plain" else 0.0] * 2


@pytest.mark.parametrize("executor", ["process", pytest.param("auto", marks=pytest.mark.long)])
def test_an_agent_that_only_this_process_can_import_is_refused_by_process_and_runs_here_with_auto(
    endpoint: PolicyEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_once.py").write_text("def solve(task): return 1.0\n")
    solve = __import__("imported_once").solve
    (tmp_path / "imported_once.py").write_text("raise ValueError('not again')\n")
    if executor == "auto":
        assert [r.reward for r in run(endpoint, solve, numbered(2), executor=executor)] == [1.0] * 2
        return
    with pytest.raises(ConfigError, match=r"a worker process cannot import the agent: .*ValueError: not again"):
        run(endpoint, solve, numbered(1))


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_a_run_goes_on_when_the_process_that_starts_workers_is_killed(endpoint: PolicyEndpoint, tmp_path: Path) -> None:
    tasks = [{"id": str(n), "file": str(tmp_path / "killed") if n == 2 else None} for n in range(6)]
    rollouts = run(endpoint, agents.kills_parent_once, tasks)
    assert [(r.status, r.attempt) for r in rollouts] == [("ok", 0)] * 6


def test_an_async_client_stays_connected_in_its_worker(endpoint: PolicyEndpoint) -> None:
    with Runner(agents.keeps_client, endpoint=endpoint, settings=Rollouts(executor="process", concurrency=2)) as runner:
        for _ in range(3):
            jobs = [Job(task=task, task_id=task["id"], seed=0) for task in numbered(4)]
            assert [(r.status, r.reward) for r in runner.submit(jobs, routing=ROUTING).result(60)] == [("ok", 1.0)] * 4


def test_output_of_a_worker_is_that_of_the_run(endpoint: PolicyEndpoint, capfd: pytest.CaptureFixture[str]) -> None:
    run(endpoint, agents.prints, numbered(2))
    output = capfd.readouterr()
    assert output.out.count("printed by the agent\n") == 2
    assert output.err.count("an error of the agent\n") == 2


def test_a_worker_that_leaks_is_replaced(endpoint: PolicyEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = run(endpoint, agents.leaks, numbered(5), concurrency=1)
    assert max(r.reward for r in rollouts) == 5
    monkeypatch.setattr(processes, "_MEMORY_SHARE", 1e-9)
    rollouts = run(endpoint, agents.leaks, numbered(5), concurrency=1)
    assert max(r.reward for r in rollouts) == 2


@pytest.mark.parametrize(
    "executor", ["task", *(pytest.param(name, marks=pytest.mark.long) for name in ("thread", "process"))]
)
def test_rollouts_that_hang_give_their_slots_to_others(endpoint: PolicyEndpoint, executor: str) -> None:
    tasks = [{"id": str(n), "fault": "hang" if n in (10, 11) else ""} for n in range(20)]
    order: list[str] = []

    def on_attempt(attempt: Attempt) -> None:
        order.append(attempt.rollout.job.task_id)

    rollouts = run(
        endpoint,
        faulty_agents.solve,
        tasks,
        executor=executor,
        concurrency=2,
        timeout_seconds=8,
        on_attempt=on_attempt,
    )
    assert {*order[-2:]} == {"10", "11"}
    assert sum(r.status == "ok" for r in rollouts) == 18


def test_one_rollout_at_a_time_is_one_even_if_it_hangs(endpoint: PolicyEndpoint) -> None:
    tasks = [{"id": str(n), "fault": "hang" if n == 10 else "", "calls": 1} for n in range(12)]
    order: list[str] = []

    def on_attempt(attempt: Attempt) -> None:
        order.append(attempt.rollout.job.task_id)

    run(
        endpoint,
        faulty_agents.solve_async,
        tasks,
        executor="task",
        concurrency=1,
        timeout_seconds=1,
        on_attempt=on_attempt,
    )
    assert order == [task["id"] for task in tasks]


def test_of_the_agents_on_a_blocked_loop_only_the_one_that_blocks_it_is_blamed(endpoint: PolicyEndpoint) -> None:
    tasks = [{"id": str(n), "fault": "block loop" if n == 3 else ""} for n in range(8)]
    rollouts = run(endpoint, agents.blocks, tasks, executor="task", concurrency=8, timeout_seconds=2)
    assert [(r.status, r.attempt) for n, r in enumerate(rollouts) if n != 3] == [("ok", 0)] * 7
    assert "TimeLimitError" in str(rollouts[3].error)


def test_nobody_is_blamed_for_a_loop_that_a_callback_blocks(endpoint: PolicyEndpoint, tmp_path: Path) -> None:
    tasks = [{"id": str(n), "file": str(tmp_path / "blocked") if n == 0 else None} for n in range(4)]
    rollouts = run(endpoint, agents.blocks_once_in_a_callback, tasks, executor="task", timeout_seconds=4)
    # The client that they share belongs to the old loop: one that runs again may not reach the endpoint with it.
    assert {r.status for r in rollouts} <= {"ok", "infrastructure"}, [(r.status, r.error) for r in rollouts]


def test_the_time_that_another_agent_blocks_the_loop_is_not_an_agents_own(endpoint: PolicyEndpoint) -> None:
    tasks = [{"id": str(n), "block": 0 if n else 2.5} for n in range(8)]
    rollouts = run(endpoint, agents.blocks_for_a_time, tasks, executor="task", concurrency=8, timeout_seconds=4)
    assert [(r.status, r.attempt) for r in rollouts] == [("ok", 0)] * 8
