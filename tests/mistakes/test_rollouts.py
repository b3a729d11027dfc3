"""Mistakes that a run shows only when the agent runs: one message, the agent's lines, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers  # noqa: F401 - see test_models

from lightning_core.records.statistics.intervals import MIN_TASKS
from lightning_core.tools.cli.main import main
from tests.mistakes.conftest import AGENT
from tests.mistakes.try_command import Try, write
from tests.tiny_model import make_tiny_model

TRAIN = ["train", "lightning.yaml", "tasks.eval="]

WRONG = f"""{AGENT}

def fails(task):
    talk("x")
    return helper(task)
def helper(task):
    return task["answer"]
def fails_first(task):
    raise ConnectionError("no database at db:5432")
def nothing(task):
    talk("x")
def text(task):
    return talk("x") and "good" or "good"
def nan(task):
    talk("x")
    return float("nan")
def mapping(task):
    talk("x")
    return {{"reward": 1}}
def twice(task):
    from lightning_core import reward
    talk("x")
    reward(1.0)
    return 1.0
def no_call(task):
    return 1.0
def exits(task):
    import sys
    talk("x")
    sys.exit("done")
def calls_again(task):
    for _ in range(3):
        try:
            talk("x")
        except Exception:
            pass
    return 1.0
def prints(task):
    import subprocess
    print("printed by the agent")
    subprocess.run(["echo", "printed by its child"])
    return solve(task)
def no_key(task):
    OpenAI()
def other_server(task):
    own = OpenAI(api_key="k", base_url="http://127.0.0.1:9/v1", max_retries=0)
    own.chat.completions.create(model="gpt", messages=[{{"role": "user", "content": "x"}}])
    return 1.0
def too_long(task):
    import time
    talk("x")
    time.sleep(30)
def scores(task, result):
    return task["answer"] == result
def long_text(task):
    talk("x")
    raise ValueError("\\n".join("x" * 1000 for _ in range(1000)))
"""

LIGHT = """
def fails(task):
    return helper(task)
def helper(task):
    return task["answer"]
"""
"""For a worker process, which then imports no SDK."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["agent=wrong:fails"], 1, ["wrong.py:20, in fails: return helper(task)", "in helper: return task", "all 2 rollouts failed"]),
        (["agent=wrong:fails_first"], 1, ["in fails_first", "ConnectionError: no database at db:5432", "no trained agent made a call"]),
        (["agent=wrong:nothing"], 1, ["ended without a reward: the agent returned None. Return a number"]),
        pytest.param(["agent=wrong:text"], 1, ["the agent returned 'good'. Return a number, call reward"], marks=pytest.mark.long),
        pytest.param(["agent=wrong:nan"], 1, ["a reward must be a finite number"], marks=pytest.mark.long),
        pytest.param(["agent=wrong:mapping"], 1, ["the agent returned {'reward': 1}. Return a number"], marks=pytest.mark.long),
        pytest.param(["agent=wrong:twice"], 1, ["reward() was called as well; give the reward once"], marks=pytest.mark.long),
        (["agent=wrong:no_call"], 1, ["no trained agent made a call in 2 rollouts", "the agent calls no model, or uses a cache"]),
        (["agent=wrong:exits"], 1, ["in exits: ", "SystemExit('done')"]),
        (["agent=wrong:no_key"], 1, ["in no_key: OpenAI()", "OPENAI_API_KEY"]),
        (["agent=wrong:other_server"], 1, ["a model call of an agent without a name failed", "could not reach http://127.0.0.1:9/v1"]),
        pytest.param(["agent=wrong:too_long", "rollouts.timeout_seconds=1"], 1, ["rollouts.timeout_seconds = 1 s"], marks=pytest.mark.long),
        (["agent=wrong:long_text"], 1, ["auto: tasks.sampling is curriculum", "ValueError: ", "characters) …", "996 lines more"]),
        (["reward=wrong:scores"], 1, ["task 'train", "the reward function failed", "in scores: ", "KeyError: 'answer'"]),
        (["agents={train: [talkre]}"], 2, ["agents.train names 'talkre', but the agents of this program are ['talker']. Did you mean"]),
        pytest.param(
            ["agents={frozen: {talkre: base}}"], 2, ["agents.frozen names 'talkre'", "Did you mean 'talker'?"], marks=pytest.mark.long
        ),
        pytest.param(["agents={frozen: {talker: base}}"], 1, ["no trained agent made a call"], marks=pytest.mark.long),
        (["rollouts.executor=auto", "agent=light:fails"], 1, ["in fails: return helper(task)", "in helper: "]),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)  # fmt: skip
def test_a_mistake_of_the_agent_is_one_message(
    model: Path, home: Path, attempt: Try, no_marks: None, settings: list[str], code: int, words: list[str]
) -> None:
    (home / "model").symlink_to(model)
    write({"wrong.py": WRONG, "light.py": LIGHT})
    attempt([*TRAIN, "rollouts.retries=0", *settings], code, *words)


def test_a_program_without_marks_cannot_name_its_agents(model: Path, home: Path, attempt: Try, no_marks: None) -> None:
    (home / "model").symlink_to(model)
    write({"plain.py": AGENT.replace('@trainable("talker")\n', "")})
    words = ["agents.train names 'talker', but no agent of this program has a name", "@trainable"]
    attempt([*TRAIN, "agent=plain:solve", "agents={train: [talker]}"], 2, *words)


@pytest.mark.parametrize(
    ("options", "code"), [pytest.param([], 0, marks=pytest.mark.long), (["--require-improvement"], 3)]
)
def test_a_run_without_improvement_is_complete_and_exits_with_3_only_if_asked(
    model: Path, home: Path, attempt: Try, no_marks: None, options: list[str], code: int
) -> None:
    (home / "model").symlink_to(model)
    (home / "eval.jsonl").write_text("".join(f'{{"id": "e{i}", "prompt": "say 1{i}"}}\n' for i in range(MIN_TASKS)))
    attempt(["train", "lightning.yaml", "trainer.learning_rate=1e-9", *options], code, "Not significant")


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.long)])
def test_what_an_agent_prints_is_not_in_the_trace(
    model: Path, home: Path, no_marks: None, capfd: pytest.CaptureFixture[str], executor: str
) -> None:
    (home / "model").symlink_to(model)
    write({"wrong.py": WRONG})
    assert main(["trace", "lightning.yaml", "--json", "agent=wrong:prints", f"rollouts.executor={executor}"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["rollout"]["task_id"] == "train0"
    assert "printed by the agent" in shown.err
    assert "printed by its child" in shown.err


def test_an_error_of_all_calls_is_shown_once_with_its_number(
    model: Path, home: Path, no_marks: None, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "model").symlink_to(model)
    write({"wrong.py": WRONG})
    upstream = "policy={model: ./model, upstream: {base_url: 'http://127.0.0.1:9/v1'}}"
    options = ["agent=wrong:calls_again", "agents={frozen: {talker: other}}", "rollouts.retries=0", upstream]
    assert main(["trace", "lightning.yaml", *options]) == 1
    tree = [line for line in capfd.readouterr().out.splitlines() if "failed: " in line]
    assert [line.endswith("(3 times)") for line in tree] == [True, True] + [False] * 4
    assert [line.endswith("failed: as above") for line in tree] == [False, False] + [True] * 4
