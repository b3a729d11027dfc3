"""Agents that a configuration describes as programs."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightning_core import evaluate, fit, load_config
from lightning_core.config import dump_config
from lightning_core.errors import ConfigError, InfrastructureError, RewardError, TrainingError
from lightning_core.propagation import ProgramResult
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.entry_points import check_tasks, load_agent
from tests.propagation.test_launch import is_gone
from tests.rollouts.command_runs import ASKS, roll_out

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX")

ANSWERS = """
task = json.load(open(os.environ["LIGHTNING_TASK_FILE"]))
answer = ask(task["question"])
print(json.dumps({ "reward": float(answer == task["answer"]) }))
"""
TASKS = [{"id": str(n), "question": f"What is {n}?", "answer": f"{n}"} for n in range(3)]


def program(text: str, **fields: Any) -> dict[str, Any]:
    return {"agent": {"command": [sys.executable, "-c", ASKS + text], "name": "coder", **fields}}


def last_number(prompt: str) -> str:
    return prompt.rpartition("What is ")[2][0]


@pytest.mark.parametrize(
    "executor", ["auto", *(pytest.param(name, marks=pytest.mark.long) for name in ("process", "command"))]
)
def test_a_program_is_trained_without_any_code(tmp_path: Path, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    rollouts = roll_out(tmp_path, {**program(ANSWERS), "rollouts": {"executor": executor}}, TASKS, answer=last_number)
    assert [(r.status, r.reward, r.error) for r in rollouts] == [("ok", 1.0, None)] * 3
    assert [[(c.agent, c.trained) for c in r.trace.calls] for r in rollouts] == [[("coder", True)]] * 3
    assert list(temporary.iterdir()) == []


def test_placeholders_are_fields_of_the_task_and_a_reward_function_gets_how_the_program_ended_and_its_files(
    tmp_path: Path,
) -> None:
    show = program(
        "print(json.dumps({ 'reward': 1, 'args': sys.argv[1:], 'in': sys.stdin.read(), 'x': os.environ['X'], 'f': open('f').read() }))\n"
        "open('out', 'w').write(ask('hi'))\nassert sys.argv[3] == os.environ['OPENAI_BASE_URL']\nsys.exit(2)\n"
    )["agent"]
    section = {
        **show,
        "command": [*show["command"], "{task[a][b]}", "{task[list][1]}{task}", "{url}", '{"json": 1}', "${HOME}"],
        "stdin": "{task[a]}",
        "environment": {"X": "x={task[n]}"},
        "files": {"f": "{task[text]}{{url}}${url}{{task[x]}}"},
    }
    task = {"id": "1", "a": {"b": "ä {url}"}, "list": [1, {"c": 2}], "n": 3, "text": "{task}"}
    (rollout,) = roll_out(tmp_path, {"agent": section, "reward": "tests.rollouts.test_commands:shown"}, [task])
    assert (rollout.status, rollout.reward, rollout.error) == ("ok", 0.25, None)


def shown(task: dict[str, Any], result: ProgramResult) -> float:
    import json

    found = json.loads(result.stdout)
    del found["args"][2]
    expected = {
        "reward": 1,
        "args": ["ä {url}", '{"c": 2}' + json.dumps(task, ensure_ascii=False), '{"json": 1}', "${HOME}"],
        "in": '{"b": "ä {url}"}',
        "x": "x=3",
        "f": "{task}{url}${url}{task[x]}",
    }
    assert found == expected, found
    assert (result.exit_code, (result.folder / "out").read_text()) == (2, "yes")
    return 0.25


TASK = "task = json.load(open(os.environ['LIGHTNING_TASK_FILE'])); ask('hi');"


def run_each(folder: Path, codes: dict[str, str], **fields: Any) -> dict[str, Rollout]:
    """The rollouts of several programs, by their names, in one run."""
    tasks = [{"id": name, "code": code} for name, code in codes.items()]
    rollouts = roll_out(folder, program(f"{TASK} exec(task['code'])", task_fields=["code"], **fields), tasks)
    return dict(zip(codes, rollouts, strict=True))


NO_NUMBERS = ('"much"', "null", "NaN", "1e400", "9" * 400, "[" * 100_000, "true and false")
LINES = ['{"reward": 0}', "42", '{"reward": 0.5, "why": "a\u2028b"}', 'not {"reward": 3}', "done"]
NO_FILES = {
    "os.symlink('/etc/passwd', 'r')": "r is a link that leads out of the working folder",
    "os.symlink('/dev/zero', 'r')": "r is a link that leads out of the working folder",
    "os.mkfifo('r')": "r is not a file",
    "os.mkdir('r')": "r is not a file",
    "open('r', 'wb').write(b'\\xff')": "expected a finite number",
}


def in_reward(value: str) -> str:
    return f'{{"reward": {value}}}'


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rollout]:
    """Rollouts of programs that print their rewards, or none."""
    codes = {
        "lines": f"sys.stdout.buffer.write({chr(10).join(LINES)!r}.encode())",
        "fields": "print(json.dumps({'reward': len(task)}))",
        "exits": "sys.exit('the tests\\n do not pass')",
        "our words": "sys.exit('RuntimeError: Event loop is closed')",
        **{value: f"print({in_reward(value)!r}); sys.exit(1)" for value in NO_NUMBERS},
    }
    return run_each(tmp_path_factory.mktemp("printed"), codes)


@pytest.fixture(scope="module")
def in_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rollout]:
    """Rollouts of programs that write their rewards to the file ``r``."""
    codes = {
        **{value: f"open('r', 'w').write({value!r})" for value in ("0.5", '{"reward": 2, "why": "x"}')},
        **{value: f"open('r', 'w').write({in_reward(value)!r}); sys.exit(1)" for value in NO_NUMBERS},
        **{code: code for code in NO_FILES},
    }
    return run_each(tmp_path_factory.mktemp("in_files"), codes, reward_file="r")


@pytest.mark.parametrize(("text", "reward"), [("0.5", 0.5), ('{"reward": 2, "why": "x"}', 2.0)])
def test_a_reward_in_a_file(in_files: dict[str, Rollout], text: str, reward: float) -> None:
    assert (in_files[text].status, in_files[text].reward) == ("ok", reward)


def test_the_last_line_with_a_reward_counts(printed: dict[str, Rollout]) -> None:
    assert printed["lines"].reward == 0.5


def test_what_is_no_number_is_the_programs_failure(printed: dict[str, Rollout], in_files: dict[str, Rollout]) -> None:
    """The model may have written it, so it must not stop the run."""
    for rollouts in (printed, in_files):
        assert [(rollouts[value].status, rollouts[value].reward) for value in NO_NUMBERS] == [("failed", 0.0)] * 7


def test_a_reward_file_that_is_none_is_the_programs_failure(in_files: dict[str, Rollout]) -> None:
    for code, message in NO_FILES.items():
        assert in_files[code].status == "failed"
        assert message in str(in_files[code].error)


def test_a_program_that_fails_has_failed(printed: dict[str, Rollout]) -> None:
    assert (printed["exits"].status, printed["exits"].reward) == ("failed", 0.0)
    assert printed["exits"].error == "ProgramError: python ended with exit code 1: the tests do not pass".replace(
        "python", Path(sys.executable).name
    )
    assert printed["our words"].status == "failed"


@pytest.mark.parametrize(
    ("end", "fields", "message"),
    [
        ("; print('done')", {}, r'ended without a reward: expected a last line {"reward": NUMBER}.*found .done'),
        pytest.param(
            "",
            {"reward_file": "r.txt"},
            r"expected a number in r.txt, or a reward function",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_program_without_a_reward_is_a_mistake(
    tmp_path: Path, end: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        roll_out(tmp_path, program(f"ask('hi'){end}", **fields))


def test_the_task_file_has_only_the_chosen_fields(printed: dict[str, Rollout]) -> None:
    assert printed["fields"].reward == 1


def test_at_the_time_limit_a_program_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Also what ignores SIGTERM, in a session of its own, and outlives its parent."""
    file = tmp_path / "pid"
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
    )
    text = f"""
import subprocess, time
ask("hi")
child = subprocess.Popen([sys.executable, "-c", {stubborn!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.read(1)
open({str(file)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(1000)
"""
    (rollout,) = roll_out(tmp_path, {**program(text), "rollouts": {"timeout_seconds": 4}})
    assert rollout.status == "failed"
    assert "timeout_seconds = 4 s" in str(rollout.error)
    assert all(is_gone(int(pid)) for pid in file.read_text().split())


def test_the_programs_url_is_the_public_one(tmp_path: Path) -> None:
    text = """
url = os.environ["OPENAI_BASE_URL"]
assert url == "http://127.0.0.2:PORT/v1" and os.environ["ANTHROPIC_BASE_URL"] == "http://127.0.0.2:PORT", url
ask("hi")
print('{ "reward": 1 }'.replace(" ", ""))
"""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = {"host": "0.0.0.0", "port": port, "public_url": f"http://127.0.0.2:{port}/"}
    (rollout,) = roll_out(tmp_path, {**program(text.replace("PORT", str(port))), "endpoint": endpoint})
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another host or port"):
            roll_out(tmp_path, {**program(text), "endpoint": {"port": port}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"agent": {"command": []}}, "agent.command: found [], expected at least one item"),
        ({"agent": {"name": "x"}}, "agent.command: missing"),
        ({"agent": {"command": ["a"], "nam": "x"}}, "agent.nam: unknown key; did you mean 'name'?"),
        ({"agent": {"command": ["a", "{task.q}"]}}, "agent.command[1]: found '{task.q}', expected {task}, {task[FIELD]} or"),
        ({"agent": {"command": ["a"], "stdin": "say {task['q']}"}}, "in place of {task['q']}"),
        ({"agent": {"command": ["a"], "files": {"../x": ""}}}, "agent.files.../x: found '../x', expected a path in"),
        ({"agent": {"command": ["a"], "reward_file": "/etc/r"}}, "agent.reward_file: found '/etc/r', expected a path"),
        ({"agent": {"command": ["a"], "reward_file": "~/r"}}, "agent.reward_file: found '~/r', expected a path in the work"),
        ({"agent": {"command": ["a"], "environment": {"A=B": "x"}}}, "expected the name of an environment variable"),
        ({"agent": {"command": ["a"], "reward_file": "r"}, "reward": "m:f"}, "has no effect with a reward function"),
        ({"agent": {"command": ["a"], "container": {"runtime": "lxc"}}}, "expected 'docker' or 'podman'"),
        ({"agent": {"command": ["a"]}, "rollouts": {"executor": "task"}}, "the agent is a program"),
        ({"agent": "m:f", "rollouts": {"executor": "command"}}, "which is for agents that are programs"),
        ({"agent": 3}, "agent: found 3, expected a string"),
        ({"endpoint": {"public_url": "host:80"}}, "endpoint.public_url"),
        ({"endpoint": {"port": 70000}}, "endpoint.port"),
        ({"endpoint": {"port": 80}, "trainer": {"name": "verl"}}, "endpoint.port: with trainer.name: verl every worker"),
    ],
)  # fmt: skip
def test_mistakes_in_the_configuration(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"policy": {"model": "m"}, **sections})
    assert message in str(raised.value)


def test_mistakes_that_are_found_before_anything_runs(tmp_path: Path) -> None:
    def config(**fields: Any) -> Any:
        return load_config({"agent": {"command": ["true"], **fields}, "policy": {"model": "m"}})

    with pytest.raises(ConfigError, match="there is no program 'no-such-program' on this machine"):
        load_agent(config(command=["no-such-program"]))
    (tmp_path / "agent.sh").touch(mode=0o755)
    load_agent(config(command=["./agent.sh"], workspace=str(tmp_path)))
    load_agent(config(command=["agent.sh"], environment={"PATH": str(tmp_path)}))
    for fields in ({}, {"workspace": str(tmp_path.parent)}):
        with pytest.raises(
            ConfigError, match=r"no program '\./agent\.sh' in agent\.workspace; relative paths start in"
        ):
            load_agent(config(command=["./agent.sh"], **fields))
    with pytest.raises(ConfigError, match=r"agent\.workspace: there is no folder 'nowhere'"):
        load_agent(config(workspace="nowhere"))
    asks = config(stdin="{task[q]}")
    for start in (
        lambda: fit(config=asks, tasks=[{"id": "7", "question": "x"}]),
        lambda: evaluate(config=asks, tasks=[{"id": "7", "question": "x"}], folder=tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"agent: task '7': there is no field 'q'; it has 'id', 'question'"):
            start()
    with pytest.raises(ConfigError, match="there is no field 'answer'"):
        check_tasks(config(task_fields=["answer"]), [{"id": "7"}])
    with pytest.raises(ConfigError, match=r"found \{q\} in the command, expected \{task\[q\]\} for the field 'q'"):
        check_tasks(config(stdin="answer {q}"), [{"id": "7", "q": "x"}])
    check_tasks(config(stdin="{task[a][0]} {q} ${id}", files={"f": "{id}"}), [{"id": "7", "a": ["x"]}])
    whole = config(command=["true", "{task[q]}"])
    for value, message in (("x" * 200_000, "200,000 bytes"), ("a\0b", "NUL"), ("\ud800", "half a character")):
        with pytest.raises(ConfigError, match=message):
            check_tasks(whole, [{"id": "7", "q": value}])
    check_tasks(config(stdin="{task[q]}", files={"f": "{task[q]}"}), [{"id": "7", "q": "x" * 200_000}])


def test_a_configuration_with_a_program_is_written_and_read_back() -> None:
    section = {"command": ["claude", "-p", "{task[q]}"], "container": {"image": "i", "args": ["--memory=4g"]}}
    config = load_config({"agent": section, "policy": {"model": "m"}})
    import yaml

    assert load_config(yaml.safe_load(dump_config(config))) == config
    assert config.agent is not None
    assert not isinstance(config.agent, str)
    assert config.agent.agent == "claude"


@pytest.mark.long
def test_a_run_in_which_all_programs_fail_stops_with_the_first_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the first error: ProgramError: .* ended with exit code 3: broken"):
        roll_out(tmp_path, program("sys.stderr.write('broken'); sys.exit(3)"), TASKS)


def test_folders_that_cannot_be_filled_are_no_failure_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    os.mkfifo(tmp_path / "project/pipe")
    with pytest.raises(InfrastructureError, match=r"could not be filled: .*is a named pipe"):
        roll_out(tmp_path, program("", workspace=str(tmp_path / "project")))


ROLES = """
for role in ("writer", "judge"):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({ "model": "any", "messages": [{ "role": "system", "content": "You are a " + role },
            { "role": "user", "content": "hi" }] }).encode(),
        { "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"] },
    )
    urllib.request.urlopen(request).read()
print(json.dumps({ "reward": 1 }))
"""


def test_the_roles_of_a_named_program_are_one_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (rollout,) = roll_out(tmp_path, program(ROLES))
    assert [(c.agent, c.trained) for c in rollout.trace.calls] == [("coder", True)] * 2
    assert caplog.text.count("all roles of the program 'coder' are trained as one agent: ") == 1


@pytest.mark.long
def test_the_configuration_tells_the_roles_of_a_program_apart(tmp_path: Path) -> None:
    """A program has no mark and no framework."""
    with pytest.raises(ConfigError, match=r"2 roles in one rollout: .*'You are a writer'.*'You are a judge'"):
        roll_out(tmp_path, program(ROLES, name=None))
    named = [{"name": role, "contains": f"You are a {role}"} for role in ("writer", "judge")]
    agents = {"train": ["writer"], "frozen": {"judge": "base"}, "named": named}
    (rollout,) = roll_out(tmp_path, {**program(ROLES), "agents": agents})
    assert [(c.agent, c.trained) for c in rollout.trace.calls] == [("writer", True), ("judge", False)]
