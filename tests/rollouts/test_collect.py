"""Collection of a step's data, with scripted agents."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from lightning_core import Config, evaluate, fit, load_config
from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.capture import current_rollout, scope
from lightning_core.chat.chat import Chat
from lightning_core.errors import ConfigError, InfrastructureError, TrainingError
from lightning_core.otel import spans_to_otlp
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.background import background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.jobs import make_jobs
from lightning_core.rollouts.local_agents import capturing, open_agents
from lightning_core.rollouts.prepare import Inputs, prepare_evaluation, prepare_training
from tests.rollouts.collected import Collected, ScriptedAgents, collect_step, open_scripted_signals

TASKS = [{"id": name} for name in "abcd"]


def config(**sections: Any) -> Config:
    base: dict[str, dict[str, Any]] = {
        "policy": {"model": "m"},
        "agents": {"train": ["writer"]},
        "rollouts": {"tasks_per_step": 2, "group_size": 2},
    }
    return load_config({key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}})


def test_the_callers_context_reaches_the_coroutine() -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    async def read() -> str:
        return variable.get()

    with background_loop() as background:
        variable.set("the caller's")
        assert background.call(read) == "the caller's"


def test_a_synchronous_agent_may_run_an_event_loop_with_anyio() -> None:
    """`anyio.run` cannot start in a context that is marked as inside an event loop."""

    async def answer() -> int:
        return 42

    async def on_a_thread() -> int:
        return await asyncio.to_thread(anyio.run, answer)

    with background_loop() as background:
        assert background.call(on_a_thread) == 42


@pytest.fixture
def interruptible() -> Iterator[None]:
    """The default handler of SIGINT: a process that a script started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_cancels_what_the_caller_waits_for() -> None:
    events: list[str] = []

    async def hang() -> None:
        events.append("started")
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    began = time.monotonic()
    with background_loop() as background:
        with pytest.raises(KeyboardInterrupt):
            background.call(hang)
        assert background.call(asyncio.sleep, 0, "the loop still runs") == "the loop still runs"
    assert events == ["started", "cancelled"]
    assert time.monotonic() - began < 30


def test_the_exception_of_the_coroutine_is_raised() -> None:
    async def fail() -> None:
        raise TrainingError("no loss")

    with background_loop() as background, pytest.raises(TrainingError, match="no loss"):
        background.call(fail)


def test_a_replaced_group_counts_as_rollouts_but_not_in_the_credit_metrics(tmp_path: Path) -> None:
    """Both groups of the step are equal. One is replaced by a group of another task with different attempts."""
    chosen = sorted({t for e in _collect(tmp_path / "0").episodes for t in [e.task_id]})
    agents = ScriptedAgents(reward=lambda task, copy: 1.0 if task in chosen else float(copy))
    batch = _collect(tmp_path / "1", agents, rollouts={"refill": 1})
    metrics = batch.metrics
    assert (metrics["rollouts"], metrics["groups_refilled"]) == (6, 1)
    assert (metrics["groups"], metrics["groups_equal"], metrics["groups_single"]) == (2, 1, 0)
    assert (metrics["rows"], metrics["rows_per_rollout"], metrics["context_new"]) == (4, 1, 6)
    assert metrics["reward"] == pytest.approx((4 * 1.0 + 0.0 + 1.0) / 6)


def test_replacements_without_a_call_stop_the_run(tmp_path: Path) -> None:
    chosen = {e.task_id for e in _collect(tmp_path / "0").episodes}
    others = frozenset("abcd") - chosen
    agents = ScriptedAgents(reward=lambda task, copy: 1.0, silent=others)
    with pytest.raises(TrainingError, match="no trained agent made a call in 4 rollouts"):
        _collect(tmp_path / "1", agents, rollouts={"refill": 2})


def test_nothing_is_judged_if_no_trained_agent_made_a_call(tmp_path: Path) -> None:
    agents = ScriptedAgents(silent=frozenset("abcd"))
    with pytest.raises(TrainingError, match="no trained agent made a call in 4 rollouts"):
        _collect(tmp_path, agents, credit={"judge": {"model": "j"}}, policy=UPSTREAM)
    assert agents.judged == []


def test_all_attempts_at_a_task_are_judged_together(tmp_path: Path) -> None:
    """A step of four groups from three tasks has one task twice."""
    agents = ScriptedAgents()
    sections = {"credit": {"judge": {"model": "j"}}, "policy": UPSTREAM, "rollouts": {"tasks_per_step": 4}}
    batch = _collect(tmp_path, agents, TASKS[:3], **sections)
    assert sorted(len(request) for request in agents.judged) == [2, 2, 4]
    assert all(len(set(request)) == 1 for request in agents.judged)
    assert len(batch.episodes) == 8


def test_repeated_tasks_of_a_step_have_seeds_of_their_own(tmp_path: Path) -> None:
    """A step of four groups from three tasks has one task twice. The seeds of first groups do not depend on that."""
    tasks = [{"id": name} for name in "abca"]
    repeated, single = (_seeds(tmp_path / str(len(some)), some) for some in (tasks, tasks[:3]))
    assert repeated[:3] == single
    seeds = [seed for group in repeated for seed in group]
    assert len(seeds) == len(set(seeds)) == 8


def test_the_seeds_of_a_run_do_not_change_between_versions() -> None:
    first, second = make_jobs(TASKS[0], config(), copies=2, phase="train", step=3)
    assert (first.seed, second.seed) == (8618822605667268, 71661592503645008)


def test_a_judge_that_fails_for_the_only_group_of_a_step_stops_the_run(tmp_path: Path) -> None:
    agents = ScriptedAgents(judge_error="HTTPError: 503")
    sections = {"credit": {"judge": {"model": "j"}}, "policy": UPSTREAM, "rollouts": {"tasks_per_step": 1}}
    with pytest.raises(InfrastructureError, match="the judge 'j' scored none of 1 groups; the first error: HTTPError"):
        _collect(tmp_path, agents, **sections)


def test_a_judge_that_is_not_required_may_fail_for_every_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With verl, groups are published one by one."""
    settings = config(credit={"judge": {"model": "j"}}, policy=UPSTREAM)
    agents = ScriptedAgents(judge_error="HTTPError: 503")

    async def run(collector: Collector) -> list[float]:
        groups = await collector.roll_out_all(TASKS[:2], "train", 0)
        episodes = await collector.annotate(groups, 0, required=False)
        return [e.reward for e in episodes]

    with Store(tmp_path / "store.db") as store:
        collector = Collector(settings, agents, store, signals=open_scripted_signals(settings, agents, store))
        assert asyncio.run(run(collector)) == [0.0, 1.0] * 2
    assert caplog.text.count("did not score a group: HTTPError: 503") == 2


def test_the_rollouts_of_a_lost_worker_are_left_out(tmp_path: Path) -> None:
    agents = ScriptedAgents(lost=frozenset("ab"))
    batch = _collect(tmp_path, agents, rollouts={"tasks_per_step": 4})
    assert (batch.metrics["rollouts"], batch.metrics["rollouts_left_out"], batch.metrics["groups"]) == (8, 4, 2)
    with pytest.raises(InfrastructureError, match="all 8 rollouts had an infrastructure failure; the first: the work"):
        _collect(tmp_path, ScriptedAgents(lost=frozenset("abcd")), rollouts={"tasks_per_step": 4})


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"credit": {"rewards": "tests.bandit:nothing"}}, "credit.rewards"),
        ({"credit": {"advantage": "tests.bandit:nothing"}}, "credit.advantage"),
        ({"credit": {"group_by": ["task", "tests.bandit:nothing"]}}, "credit.group_by"),
        ({"algorithm": {"loss": "tests.bandit:nothing"}}, "algorithm.loss"),
        ({"algorithm": {"loss": "tests.credit.own_rules:sapo", "clip_low": 0.1}}, "algorithm.clip_low"),
    ],
)
def test_a_rule_that_cannot_be_used_leaves_no_folder(tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    settings = config(**sections, run={"dir": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match=re.escape(key)):
        fit(lambda task: 0.0, config=settings, tasks=TASKS)
    assert not (tmp_path / "runs").exists()


def test_an_empty_list_of_tasks_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    settings = config(policy={"model": str(tmp_path / "none")}, run={"dir": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match=r"tasks: found an empty list, expected at least one .* use tasks\.train"):
        fit(lambda task: 0.0, config=settings, tasks=[])
    with pytest.raises(ConfigError, match=r"tasks: found an empty list, expected at least one .* use tasks\.eval"):
        evaluate(lambda task: 0.0, config=settings, folder=tmp_path / "evaluation", tasks=[])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tasks", "found"),
    [
        (lambda: iter(()), "found an iterable without tasks, expected at least one task"),
        (
            lambda: "tasks.jsonl",
            r"expected a list .* of tasks, found str: 'tasks.jsonl'; to use a file or a function, set tasks\.",
        ),
        (lambda: {"id": "a"}, "expected a list .* of tasks, found dict: .*; a single task is a list too"),
        (lambda: 7, r"expected a list .* of tasks, found int: 7; to use a file or a function, set tasks\."),
        (lambda: itertools.repeat({}), "found more than 1,000,000 tasks in an iterable that may never end"),
        (lambda: (1 / task for task in [0]), "iterating over the tasks failed:\n(.|\n)*ZeroDivisionError"),
    ],
)
def test_what_is_not_a_list_of_tasks_is_refused_before_anything_is_created(
    tmp_path: Path, tasks: Callable[[], Any], found: str
) -> None:
    settings = config(policy={"model": str(tmp_path / "none")}, run={"dir": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match=f"^tasks: {found}"):
        fit(lambda task: 0.0, config=settings, tasks=tasks())
    with pytest.raises(ConfigError, match=f"^tasks: {found}"):
        evaluate(lambda task: 0.0, config=settings, folder=tmp_path / "evaluation", tasks=tasks())
    assert list(tmp_path.iterdir()) == []


def test_tasks_may_be_any_iterable(tmp_path: Path) -> None:
    class Indexed:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Task:
            return TASKS[index]

    def inputs(tasks: Any, eval_tasks: Any = None) -> Inputs:
        return prepare_training(
            config(), solve=lambda task: 0.0, reward=None, tasks=tasks, eval_tasks=eval_tasks, in_process=True
        )

    held_out = [{"id": "held out"}]
    found = inputs((task for task in TASKS), iter(held_out))
    assert (found.tasks, found.eval_tasks) == (TASKS, held_out)
    assert inputs(Indexed()).tasks == TASKS[:2]
    assert inputs(TASKS, (task for task in list[Task]())).eval_tasks == []
    with pytest.raises(ConfigError, match=r"^eval_tasks: expected a list .*, found int: 3; .*, set tasks\.eval"):
        inputs(TASKS, 3)
    evaluated = prepare_evaluation(config(), solve=lambda task: 0.0, reward=None, tasks=iter(held_out))
    assert evaluated.eval_tasks == held_out


def test_a_missing_file_of_prices_leaves_no_folder(tmp_path: Path) -> None:
    run = {"dir": str(tmp_path / "runs")}
    settings = load_config({"policy": {"model": "m"}, "prices": str(tmp_path / "none.yaml"), "run": run})
    with pytest.raises(ConfigError, match=r"prices: no file at .*none\.yaml"):
        fit(lambda task: 0.0, config=settings, tasks=TASKS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        (
            {"monitors": {"stop": ["reward_hacking"]}},
            "monitors.stop has 'reward_hacking', which is evaluated on held-out",
        ),
        ({"monitors": {"stop": ["reward_hacking"]}, "eval": {"every": 5}}, None),
        (
            {"monitors": {"stop": ["reward_hacking"]}, "eval": {"every": 5}, "trainer": {"steps": 5}},
            "eval.every is 5 and trainer.steps 5",
        ),
        ({"monitors": {"stop": ["shaping_alone"]}}, "'shaping_alone', but there are no intermediate rewards"),
        ({"monitors": {"stop": ["shaping_alone"]}, "credit": {"air": {"tool_error": -0.1}}}, None),
        ({"credit": {"air": {"gate": False}}}, "all rewards and costs of credit.air are 0"),
        ({"credit": {"air": {"tool_errors": {"timeout": -0.1}}}}, None),
        (
            {"credit": {"group_by": ["task"], "advantage": "none"}},
            "credit.advantage: none does not compare within groups",
        ),
        (
            {"credit": {"group_by": ["task"], "advantage": "reinforce++"}},
            "credit.group_by is ['task'], but credit.advantage: rein",
        ),
        ({"credit": {"group_by": ["task", "agent"], "advantage": "reinforce++-baseline"}}, None),
        (
            {
                "policies": {
                    "a": {"agents": ["a"], "credit": {"advantage": "none", "group_by": ["task"]}},
                    "b": {"agents": ["b"]},
                }
            },
            "credit.group_by of policy a is",
        ),
        ({"trainer": {"steps": 5, "warmup_steps": 5}}, None),
        (
            {"trainer": {"steps": 5, "warmup_steps": 20}},
            "trainer.steps is 5: the learning rate rises to 25% of trainer",
        ),
    ],
)
def test_a_setting_without_effect_is_a_warning_when_a_run_starts(
    caplog: pytest.LogCaptureFixture, sections: dict[str, Any], warning: str | None
) -> None:
    settings = load_config({"policy": {"model": "m"}, **sections})
    prepare_training(settings, solve=lambda task: 0.0, reward=None, tasks=TASKS, eval_tasks=None, in_process=True)
    assert ("a setting has no effect" in caplog.text) is (warning is not None)
    assert (warning or "") in caplog.text


def test_a_step_without_groups_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        collector = Collector(config(), ScriptedAgents(), store)
        with pytest.raises(ConfigError, match="found no tasks to run, expected at least one"):
            asyncio.run(collector.roll_out_all([], "train", 0))


def test_missing_tasks_are_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    """A missing model would be another error."""
    with pytest.raises(ConfigError, match=r"tasks\.eval is missing"):
        evaluate(lambda task: 0.0, config=config(policy={"model": str(tmp_path / "none")}), folder=tmp_path)


@pytest.mark.parametrize("source", ["sampled tool call", "scope", "another process"])
def test_every_rollout_is_stored_whatever_text_and_times_one_of_them_has(tmp_path: Path, source: str) -> None:
    def answer(prompt: str) -> str:
        return '<tool_call>\n{"name": "t", "arguments": {"x": "\\ud83d"}}\n</tool_call>' if "call" in prompt else "ok"

    def solve(task: dict[str, str]) -> float:
        run = current_rollout()
        assert run is not None
        headers = {"authorization": f"Bearer {run.api_key}"}
        unusual = task["id"] == "c"
        with scope("writer"):
            tools = [{"type": "function", "function": {"name": "t", "parameters": {"type": "object"}}}]
            content = "call" if unusual and source == "sampled tool call" else "hi"
            body = {"model": "policy", "messages": [{"role": "user", "content": content}], "tools": tools}
            httpx.post(f"{run.endpoint}/chat/completions", json=body, headers=headers).raise_for_status()
        if unusual and source == "scope":
            with scope("t", kind="tool", attributes={"result": "\ud83d"}):
                pass
        if unusual and source == "another process":
            late = replace(run.spans[0], span_id="1" * 16, start_ns=1 << 63, end_ns=1 << 63)
            httpx.post(f"{run.endpoint}/traces", json=spans_to_otlp([late]), headers=headers).raise_for_status()
        return 1.0

    settings = config(policy={"model": "policy"}, rollouts={"retries": 0})
    backend = ScriptedBackend(answer)
    chats = {"policy": Chat(backend.tokenizer)}
    with (
        Store(tmp_path / "store.db") as store,
        capturing(settings),
        open_agents(settings, solve, backend, chats) as agents,
    ):
        collector = Collector(settings, agents, store)
        groups = asyncio.run(collector.roll_out_all(TASKS, "train", 0))
        assert [r.status for g in groups for r in g.rollouts] == ["ok"] * 8, [
            r.error for g in groups for r in g.rollouts
        ]
        assert store.count() == 8
        assert {len(store.trace(r.id).calls) for r in store.rollouts()} == {1}


def test_the_loop_loads_no_torch() -> None:
    program = (
        "import sys, lightning_core.loop; print(sorted({'torch', 'transformers', 'verl', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _seeds(folder: Path, tasks: list[dict[str, str]]) -> list[list[int]]:
    with Store(folder / "store.db") as store:
        groups = asyncio.run(Collector(config(), ScriptedAgents(), store).roll_out_all(tasks, "train", 0))
    return [[r.job.seed for r in group.rollouts] for group in groups]


UPSTREAM = {"upstream": {"base_url": "http://127.0.0.1:9/v1"}}


def _collect(
    folder: Path, agents: ScriptedAgents | None = None, tasks: list[dict[str, str]] = TASKS, **sections: Any
) -> Collected:
    return collect_step(config(**sections), agents or ScriptedAgents(), folder, tasks)


@pytest.mark.parametrize(("truncated", "rows"), [("train", 4), ("mask", 2)])
def test_truncated_responses_are_counted_and_can_be_masked(tmp_path: Path, truncated: str, rows: int) -> None:
    """The advantages stay those of all rollouts: ±√½ in each group of two."""
    tasks = TASKS[:2]
    agents = ScriptedAgents(truncated=frozenset("a"))
    batch = collect_step(config(algorithm={"truncated": truncated}), agents, tmp_path, tasks)
    assert (len(batch.rows), batch.metrics["calls_truncated"], batch.metrics["tokens_trained"]) == (rows, 2, rows)
    advantages = [float(row.advantages.max()) for row in batch.rows if row.advantages is not None]
    assert {round(abs(a), 3) for a in advantages if a} == {0.707}
    masked = {t.rollout for e in batch.episodes for t in e.transitions if e.task_id == "a"}
    assert (masked & {row.rollout for row in batch.rows} == set()) == (truncated == "mask")


def test_masked_rollouts_count_but_are_not_trained_on(tmp_path: Path) -> None:
    batch = collect_step(config(), ScriptedAgents(masked=frozenset("a")), tmp_path, TASKS[:2])
    counts = {name: batch.metrics[name] for name in ("rollouts", "rollouts_failed", "rollouts_masked", "reward")}
    assert counts == {"rollouts": 4, "rollouts_failed": 2, "rollouts_masked": 2, "reward": 0.5}
    assert batch.metrics["rollouts_left_out"] == 0
    calls = {t.call for e in batch.episodes for t in e.transitions if e.task_id == "a"}
    assert {round(batch.credit.advantages[call], 3) for call in calls} == {0.707, -0.707}
    trained = {segment.call for row in batch.rows for segment in row.segments}
    assert (len(trained), calls & trained) == (2, set())


def test_a_step_of_truncated_responses_only_is_reported_if_they_are_masked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agents = ScriptedAgents(truncated=frozenset("ab"))
    batch = collect_step(config(algorithm={"truncated": "mask"}), agents, tmp_path, TASKS[:2])
    assert (len(batch.rows), batch.metrics["rollouts"], batch.metrics["calls_truncated"]) == (0, 4, 4)
    assert "step 1: nothing to train on: all responses are masked: 4 reached their token limit" in caplog.text
