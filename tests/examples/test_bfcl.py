"""The BFCL example without a model: the wheel's checker on gold and wrong calls, parallel rollouts, forks, hostile arguments, splits."""

# ruff: noqa: E402 - the imports below the skips need the wheel

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath"

pytest.importorskip("bfcl_eval", reason=f"the wheel is not installed: {INSTALL}")
pytest.importorskip("mpmath", reason=f"mpmath is not installed: {INSTALL}")

from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

from examples.bfcl import agent, tasks, wheel
from examples.bfcl.schemas import schemas
from examples.bfcl.world import SHARED_LISTS, World
from lightning_core import load_config, trace_to_transitions, transitions_to_rows
from lightning_core.rollouts.tasks import load_tasks
from lightning_core.testing import open_playground, playground, tool_call
from lightning_core.trace import Trace
from tests.bench.forks import BFCL, example_config, measure
from tests.examples.bfcl_gold import gold_calls, gold_script, next_gold, written

ALL = [task for split in tasks.SPLITS for task in getattr(tasks, split)()]
FILES = "multi_turn_base_1"
"""Four turns over the file system."""


def _task(name: str, **options: Any) -> dict[str, Any]:
    split = getattr(tasks, tasks.split_of()[name])
    return next(task for task in split(**options) if task["id"] == name)


def _play(task: dict[str, Any], script: Sequence[str]) -> tuple[float, Trace]:
    """The sum of all rewards, and the trace."""
    agent.model.cache_clear()  # its client belongs to the event loop that used it first
    with playground(list(script), train=[agent.NAME]) as run:
        returned = asyncio.run(agent.solve(task))
    return returned + math.fsum(r.value for r in run.trace.rewards), run.trace


def _config(task: dict[str, Any]) -> dict[str, Any]:
    return wheel.entries()[task["id"]]["initial_config"]


def _make(world_: World, turns: Sequence[Sequence[tuple[str, dict[str, Any]]]]) -> list[str]:
    """Make calls turn by turn; return their results."""
    results: list[str] = []
    for turn in turns:
        world_.begin_turn()
        results += [world_.call(name, json.dumps(arguments)) for name, arguments in turn]
    return results


def _world(task: dict[str, Any]) -> World:
    return World(task["id"], tuple(task["functions"]))


OTHER_PROCESS = """
import json, sys
from examples.bfcl.world import World
results = []
for name, functions, turns in json.load(sys.stdin):
    world, made = World(name, tuple(functions)), []
    for turn in turns:
        world.begin_turn()
        made += [world.call(function, json.dumps(arguments)) for function, arguments in turn]
    results.append(made)
json.dump(results, sys.stdout)
"""


# --- the verdict


def test_gold_calls_are_right_and_no_calls_are_wrong_for_every_task() -> None:
    for task in ALL:
        right, idle = _world(task), _world(task)
        _make(right, gold_calls(task["id"]))
        _make(idle, [[] for _ in task["turns"]])
        assert right.verdict() == {"valid": True}, task["id"]
        assert idle.verdict()["error_type"] == "multi_turn:empty_turn_model_response", task["id"]


def test_the_state_and_the_results_are_checked_after_each_turn() -> None:
    turns = gold_calls(FILES)
    other_state = [turns[0], [*turns[1], ("touch", {"file_name": "new.txt"})], *turns[2:]]
    other_result = [[("pwd", {})], *turns[1:]]
    for calls, error in ((other_state, "instance_state_mismatch"), (other_result, "execution_response_mismatch")):
        made = _world(_task(FILES))
        _make(made, calls)
        assert made.verdict()["error_type"] == f"multi_turn:{error}"
    superfluous = _world(_task(FILES))
    _make(superfluous, [[*turn, ("pwd", {}), ("cd", {"folder": "nowhere"})] for turn in turns])
    assert superfluous.verdict()["valid"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("script", "earned"), [(next_gold, 1.0), (lambda prompt: "Done.", 0.0)])
def test_the_agent_earns_1_for_the_gold_calls_and_0_for_none(script: Callable[[str], str], earned: float) -> None:
    async def play() -> dict[str, float]:
        rewards: dict[str, float] = {}
        for task in ALL[::4]:
            with opened.rollout(task, train=[agent.NAME]):
                rewards[task["id"]] = await agent.solve(task)
        return rewards

    agent.model.cache_clear()
    with open_playground(script) as opened:
        assert asyncio.run(play()) == {task["id"]: earned for task in ALL[::4]}


def test_the_agent_earns_1_for_the_gold_calls_of_the_first_turn() -> None:
    for task in tasks.test(turns=1, calls=1, tools="needed")[:3]:
        assert _play(task, gold_script(task["id"]))[0] == 1.0
        assert _play(task, ["Done."])[0] == 0.0


# --- the program


def test_turns_are_one_conversation_and_one_row_with_rewards_of_turns() -> None:
    earned, trace = _play(_task(FILES, turn_reward=0.5), gold_script(FILES))
    assert earned == 1.0
    assert [call.context for call in trace.calls] == ["new"] + ["clean"] * 9
    last = [trace.calls[index].id for index in (1, 4, 7, 9)]
    assert [(r.call, r.value, r.name) for r in trace.rewards] == [(call, 0.125, "turn") for call in last]
    (row,) = transitions_to_rows(trace_to_transitions(trace, agents={agent.NAME}))
    assert row.mask.sum() == sum(len(call.output_ids) for call in trace.calls if call.output_ids is not None)
    assert [m["content"] for m in trace.calls[-1].messages if m["role"] == "user"] == _task(FILES)["turns"]


@pytest.mark.parametrize(
    ("script", "earned", "calls"),
    [
        ([tool_call("pwd"), "Done."], 0.0, 2),
        ([tool_call("ls", a=True), "Done.", "Done."], 0.125, 3),
        ([tool_call("no_such"), tool_call("ls", a="yes", b=1), tool_call("ls", a=True), "Done.", "Done."], 0.125, 5),
        ([tool_call("ls", a=True)] * 4, 0.0, 4),
        (["<tool_call>{broken"], 0.0, 1),
    ],
)
def test_a_wrong_turn_ends_the_rollout(script: list[str], earned: float, calls: int) -> None:
    got, trace = _play(_task(FILES, turn_reward=0.5, steps=4), script)
    assert (got, len(trace.calls)) == (earned, calls)


def test_calls_of_one_response_run_in_its_order() -> None:
    turns = gold_calls(FILES)
    script = [text for turn in turns for text in ("\n".join(map(written, turn)), "Done.")]
    earned, trace = _play(_task(FILES), script)
    assert (earned, len(trace.calls)) == (1.0, 8)


def test_the_prompt_has_the_functions_of_the_task() -> None:
    _, trace = _play(_task(FILES, tools="needed", examples=True), ["Done."])
    solved = ["user", "assistant", "tool", "assistant"] * len(agent.EXAMPLES)
    assert [m["role"] for m in trace.calls[0].messages] == ["system", *solved, "user"]
    assert trace.calls[0].messages[-1]["content"].endswith(agent.REMINDER)
    assert not {name for _, name, *_ in agent.EXAMPLES} & {name for task in ALL for name in task["functions"]}
    assert set(_task(FILES, tools="needed")["functions"]) == {"ls", "cd", "mv", "grep", "tail"}
    assert len(_task(FILES)["functions"]) == 18


# --- parallel rollouts


def test_rollouts_of_the_same_tasks_do_not_touch_each_other() -> None:
    """Four rollouts of each task in eight threads, each call in a random place among the others."""
    chosen = ALL[::8]
    alone = {task["id"]: _make(_world(task), gold_calls(task["id"])) for task in chosen}
    jobs = [task for task in chosen for _ in range(4)]
    random.Random(0).shuffle(jobs)
    with ThreadPoolExecutor(8) as pool:
        worlds = [_world(task) for task in jobs]
        together = list(pool.map(lambda job: _make(job[0], gold_calls(job[1]["id"])), zip(worlds, jobs, strict=True)))
        verdicts = list(pool.map(World.verdict, worlds))
    assert all(verdict == {"valid": True} for verdict in verdicts)
    for task, results in zip(jobs, together, strict=True):
        assert results == alone[task["id"]], task["id"]


def test_nothing_of_a_rollout_stays_in_the_wheel() -> None:
    before = set(vars(wheel.multi_turn_utils))
    made = _world(_task(FILES))
    _make(made, gold_calls(FILES))
    made.verdict()
    assert set(vars(wheel.multi_turn_utils)) == before


def test_results_do_not_depend_on_the_process() -> None:
    here = [_make(_world(task), gold_calls(task["id"])) for task in ALL]
    jobs = [(task["id"], task["functions"], gold_calls(task["id"])) for task in ALL]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS],
        env={"PYTHONPATH": ":".join((str(ROOT), *filter(None, sys.path))), "PYTHONHASHSEED": "77"},
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == here


def test_no_other_function_of_the_wheel_shares_a_list_between_rollouts() -> None:
    names = {name for entry in wheel.entries().values() for name in entry["involved_classes"]}
    shared: set[str] = set()
    for name in names:
        module = importlib.import_module(CLASS_FILE_PATH_MAPPING[name])
        for method, function in inspect.getmembers(getattr(module, name), inspect.isfunction):
            defaults = [parameter.default for parameter in inspect.signature(function).parameters.values()]
            shared |= {method} if any(isinstance(default, list | dict | set) for default in defaults) else set()
    assert shared == set(SHARED_LISTS)


def test_a_tweet_has_the_mentions_of_its_own_rollout() -> None:
    """`mention` appends to the list that is the wheel's default of `post_tweet`."""
    task = next(task for task in ALL if "TwitterAPI" in task["classes"] and "TwitterAPI" not in _config(task))
    login = {"username": "john", "password": "john123"}
    for _ in range(2):
        *_, posted, _ = _make(
            _world(task),
            [
                [
                    ("authenticate_twitter", login),
                    ("post_tweet", {"content": "hi"}),
                    ("mention", {"tweet_id": 0, "mentioned_usernames": ["@ann"]}),
                ]
            ],
        )
        assert json.loads(posted)["mentions"] == []


@pytest.mark.long
def test_every_decision_point_can_be_forked() -> None:
    few_processes = BFCL._replace(overrides=(*BFCL.overrides, "rollouts.concurrency=4"))
    found = measure(example_config(few_processes), few_processes.answer, points=12, batch=4)
    assert (found.restored, found.reasons) == (found.points, Counter())
    assert found.points == 12


# --- hostile arguments


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("ls", '{"a=print(1), b": 1}', "is not the name of an argument"),
        ("ls", '{"lambda": 1}', "is not the name of an argument"),
        ("ls", "[1]", "expected an object"),
        ("ls", "{", "invalid arguments"),
        ("ls", '{"a": ' + "9" * 5000 + "}", "invalid arguments"),
        ("_load_scenario", '{"scenario": {}}', "there is no function"),
        ("rm) or print", "{}", "there is no function"),
        ("power", '{"base": 9, "exponent": 1000000000}', "exponent must be a number between"),
        ("square_root", '{"number": 2, "precision": 1e9}', "precision must be a number between"),
        ("logarithm", '{"value": 2, "base": 3, "precision": NaN}', "precision must be a number between"),
        ("logarithm", '{"value": 2, "base": 3, "precision": "1000000000"}', "precision must be a number between"),
    ],
)
def test_hostile_calls_are_refused_and_not_recorded(name: str, arguments: str, error: str) -> None:
    task = next(task for task in ALL if task["classes"] == ["GorillaFileSystem", "MathAPI"])
    made = _world(task)
    made.begin_turn()
    assert error in json.loads(made.call(name, arguments))["error"]
    assert made.calls == [[]]


def test_text_that_looks_like_code_stays_text() -> None:
    made = _world(_task("multi_turn_base_0"))
    text = "'); import os; os.system('echo 1') #\n\"\"\" {x} \\"
    _make(made, [[("touch", {"file_name": "a.txt"}), ("echo", {"content": text, "file_name": "a.txt"})]])
    assert json.loads(made.call("cat", '{"file_name": "a.txt"}')) == {"file_content": text}


# --- the tasks


def test_splits_are_fixed_disjoint_and_have_every_class() -> None:
    splits = {name: getattr(tasks, name)() for name in tasks.SPLITS}
    assert {name: len(split) for name, split in splits.items()} == {"train": 120, "validation": 40, "test": 40}
    for one, other in combinations(splits.values(), 2):
        assert not {task["id"] for task in one} & {task["id"] for task in other}
        assert not {task["turns"][0] for task in one} & {task["turns"][0] for task in other}
    assert [task["id"] for task in splits["test"]][:3] == [f"multi_turn_base_{n}" for n in (138, 21, 78)]
    for split in splits.values():
        assert {name for task in split for name in task["classes"]} == {
            name for entry in wheel.entries().values() for name in entry["involved_classes"]
        }


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"classes": 1}, (40, 13, 12)),
        ({"turns": 1}, (120, 40, 40)),
        ({"turns": 1, "calls": 2}, (101, 30, 28)),
        ({"turns": 1, "calls": 1}, (61, 18, 19)),
        ({"turns": 1, "calls": 1, "classes": 1}, (18, 8, 9)),
    ],
)
def test_subsets_have_the_documented_sizes(options: dict[str, int], counts: tuple[int, ...]) -> None:
    assert tuple(len(getattr(tasks, split)(**options)) for split in tasks.SPLITS) == counts
    assert all(task["turns"] == _task(task["id"])["turns"][: options.get("turns")] for task in tasks.train(**options))


@pytest.mark.parametrize("options", [{"tools": "all"}, {"turn_reward": 2.0}, {"turns": 0}, {"steps": 0}, {"calls": 0}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        tasks.train(**options)


def test_schemas_have_the_types_of_json_schema() -> None:
    def types(schema: dict[str, Any]) -> set[str]:
        inner = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
        return {schema["type"]}.union(*map(types, inner))

    found = {
        name for task in ALL for schema in schemas(tuple(task["functions"])) for name in types(schema["parameters"])
    }
    assert found == {"object", "string", "number", "integer", "boolean", "array"}


@pytest.mark.parametrize("name", ["lightning.yaml", "lightning_gpu.yaml"])
def test_the_configurations_fit_the_program(name: str) -> None:
    config = load_config(ROOT / "examples" / "bfcl" / name, needs=("agent", "tasks.train", "tasks.eval"))
    assert config.agents.train == (agent.NAME,)
    assert config.tasks.train is not None
    assert config.tasks.eval is not None
    trained = {task["id"] for task in load_tasks(config.tasks.train)}
    assert trained
    assert not trained & {task["id"] for task in load_tasks(config.tasks.eval)}
