"""The command line: exit codes, messages, and the views of a run, with a stand-in for the loop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_core import trace as tr
from lightning_core.capture import Run, current_address, reward, rollout, scope
from lightning_core.capture.spans import start_span
from lightning_core.cli.main import main
from lightning_core.config import Config, dump_config, load_config
from lightning_core.errors import ConfigError, InfrastructureError
from lightning_core.otel import spans_to_otlp
from lightning_core.records.intervals import compare
from lightning_core.records.report import Summary
from lightning_core.records.store import CallCredit, RolloutRecord, Store
from tests.core.terminal import on_terminal

COMMAND = ("-m", "lightning_core.cli.main")
CONFIG = """\
agent: some.module:solve
tasks: {train: train.jsonl, eval: eval.jsonl}
policy: {model: some/model}
"""


def call(agent: str, question: str, answer: Mapping[str, Any], *, version: int | None = 3, **more: Any) -> str:
    """Record one model call as the endpoint does; returns the call's id."""
    address = current_address()
    assert address is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    attributes: dict[str, Any] = {
        tr.SEQUENCE: 1,
        "gen_ai.response.model": "policy" if version is not None else "gpt-x",
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.output.messages": json.dumps([answer]),
        "gen_ai.response.finish_reasons": ("stop",),
    }
    if version is not None:
        attributes |= {
            tr.PROMPT_IDS: tr.pack(range(12), "<u4"),
            tr.OUTPUT_IDS: tr.pack(range(5), "<u4"),
            tr.LOGPROBS: tr.pack([-0.5] * 5, "<f4"),
            "lightning.policy_version": version,
            "lightning.context": "new",
        }
    span = start_span(address, "policy", "chat", agent=agent, attributes=attributes | more)
    span.end()
    return f"{span.get_span_context().span_id:016x}"


def try_it() -> tuple[Run, str]:
    """One rollout of a small agent: a writer with a tool inside a graph's node, then a frozen judge."""
    with rollout(task={"id": "q17", "q": "How many?"}) as run:
        with scope("write_query", kind="node"), scope("writer"):
            query = {"role": "assistant", "content": "SELECT\n  count(*)"}
            written = call("writer", "How many rows are in the table?\nAnswer in SQL.", query)
            with scope("run_sql", kind="tool"):
                pass
        wanted = {"function": {"name": "grade", "arguments": '{"points": 1}'}}
        call("judge", "Right?", {"role": "assistant", "content": None, "tool_calls": [wanted]}, version=None)
        reward(1.0)
        reward(0.25, call=written, name="syntax")
        reward(-0.5, agent="judge")
    return run, written


def keep(store: Store, run: Run, **changes: Any) -> None:
    values: dict[str, Any] = {
        "id": run.rollout,
        "step": 2,
        "task_id": "q17",
        "phase": "train",
        "attempt": 0,
        "status": "ok",
        "reward": 1.0,
        "error": None,
        "version": 3,
        "started_ns": 10**9,
        "ended_ns": 3 * 10**9,
    }
    store.add_rollout(RolloutRecord(**{**values, **changes}), run.spans)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "train.jsonl").write_text('{"id": "q17"}\n{"id": "q18"}\n')
    (tmp_path / "eval.jsonl").write_text('{"id": "e1"}\n')
    return tmp_path


@pytest.fixture
def run_folder(home: Path) -> Path:
    folder = home / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(load_config(home / "c.yaml")))
    (home / "runs" / "latest").symlink_to("one")
    with Store(folder / "store.db") as store:
        run, written = try_it()
        keep(store, run)
        store.add_credit(
            [
                CallCredit(
                    rollout=run.rollout, call=written, agent="writer", step=2, reward=1.25, advantage=0.5, tokens=5
                )
            ]
        )
        other, _ = try_it()
        error = "TimeoutError: 120 s " + "x" * 200
        keep(store, other, phase="eval_after", status="infrastructure", reward=None, error=error)
    return folder


Install = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the loop with a stand-in. Returns the list of its arguments."""

    def install(outcome: Callable[[dict[str, Any]], Any], checkpoints: Sequence[Path] = ()) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def act(**arguments: Any) -> Any:
            calls.append(arguments)
            return outcome(arguments)

        stand_in = ModuleType("lightning_core.loop")
        stand_in.fit = stand_in.evaluate = act  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lightning_core.loop", stand_in)
        for checkpoint in checkpoints:
            checkpoint.mkdir(parents=True)
        return calls

    return install


def summary(gain: float | None) -> Summary:
    if gain is None:
        compared = None
    else:
        before = {str(i): [0.1 * i] for i in range(10)}
        compared = compare(before, {task: [r[0] + gain] for task, r in before.items()})
    return Summary(eval=compared, steps=3, rollouts=9, tokens_sampled=10, tokens_trained=5, wall_seconds=61.0, seed=0)


@pytest.mark.parametrize(("gain", "code"), [(0.3, 0), (0.0, 1), (-0.3, 1), (None, 0)])
def test_train(home: Path, loop: Install, capsys: pytest.CaptureFixture[str], gain: float | None, code: int) -> None:
    result = SimpleNamespace(summary=summary(gain), folder=Path("runs/x"), checkpoint=Path("runs/x/checkpoints/s"))
    calls = loop(lambda _: result)
    assert main(["train", "c.yaml", "trainer.steps=3", "--resume", "run.seed=7"]) == code
    config = calls[0]["config"]
    assert isinstance(config, Config)
    assert (config.trainer.steps, config.run.resume, config.run.seed) == (3, True, 7)
    shown = capsys.readouterr()
    assert "3 steps, 9 rollouts" in shown.out
    assert "run: runs/x" in shown.out
    assert shown.err == ""


def test_a_wrong_configuration_is_one_message(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "c.yaml").write_text("agent: x\npolicy: {model: m}\n")
    assert main(["train", "c.yaml", "trainer.stepz=3"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lightning-rl: 3 problems in the configuration c.yaml:\n  c.yaml:1: agent: found 'x'")
    assert "override 'trainer.stepz=3': trainer.stepz: unknown key; did you mean 'steps'?" in shown.err
    assert "c.yaml: tasks.train: missing, but required by this command" in shown.err
    assert main(["train", "none.yaml"]) == 2
    assert capsys.readouterr().err == "lightning-rl: no configuration file at 'none.yaml'\n"


def test_evaluating_on_the_way_needs_tasks(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "c.yaml", "tasks.eval=", "eval.every=5"]) == 2
    assert (
        capsys.readouterr().err
        == "lightning-rl: eval.every is 5, but tasks.eval is not set; set it, or remove eval.every\n"
    )


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["train", "c.yaml", "--fast"], ["train", "c.yaml", "x"]])
def test_wrong_usage(home: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: lightning-rl" in capsys.readouterr().err


def test_our_errors_have_no_traceback_but_those_of_others_do(
    home: Path, loop: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(raises(InfrastructureError("the endpoint died")))
    assert main(["train", "c.yaml"]) == 1
    assert capsys.readouterr().err == "lightning-rl: InfrastructureError: the endpoint died\n"
    loop(raises(ZeroDivisionError("theirs")))
    with pytest.raises(ZeroDivisionError):
        main(["train", "c.yaml"])


def raises(error: BaseException) -> Callable[[dict[str, Any]], Any]:
    def outcome(_: dict[str, Any]) -> Any:
        raise error

    return outcome


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], "No checkpoint was written yet."),
        (
            [Path("runs/a/checkpoints/step-000010")],
            "The last checkpoint is runs/a/checkpoints/step-000010; to continue: lightning-rl train c.yaml run.name=a --resume",
        ),
    ],
)
def test_interrupted(
    home: Path, loop: Install, capsys: pytest.CaptureFixture[str], found: list[Path], expected: str
) -> None:
    loop(raises(KeyboardInterrupt()), found)
    assert main(["train", "c.yaml", "run.name=a"]) == 130
    assert capsys.readouterr().err == f"\nlightning-rl: interrupted. {expected}\n"


def test_eval_of_a_run(run_folder: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run_folder / "checkpoints" / "step-000002"
    evaluation = SimpleNamespace(rewards={"a": [1.0], "b": [0.0, 1.0]}, left_out=1)
    calls = loop(lambda _: evaluation, [run_folder / "checkpoints" / "step-000001", newest])
    assert main(["eval", "runs/latest", "eval.samples=2"]) == 0
    assert calls[0]["checkpoint"].resolve() == newest.resolve()
    assert calls[0]["folder"] == Path("runs/latest")
    assert calls[0]["config"].eval.samples == 2
    out = capsys.readouterr().out
    assert "held-out reward 0.750 [too few tasks] (95% interval) on 2 tasks" in out
    assert "1 rollouts were left out: infrastructure failures" in out


def test_eval_of_a_configuration(home: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    calls = loop(lambda _: SimpleNamespace(rewards={"a": [1.0]}, left_out=0))
    assert main(["eval", "c.yaml"]) == 0
    folder = calls[0]["folder"]
    assert folder.name.startswith("eval-")
    assert (folder / "config.yaml").is_file()
    assert calls[0]["checkpoint"] is None
    assert "policy: some/model" in capsys.readouterr().out


def test_eval_without_a_checkpoint(run_folder: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    loop(lambda _: None)
    assert main(["eval", "runs/one"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_the_list_of_rollouts(run_folder: Path) -> None:
    lines = on_terminal(110, *COMMAND, "trace", "runs/latest").splitlines()
    assert lines[0] == "N  phase       step  task  reward  calls  status"
    assert lines[1] == "1  train       2     q17   1.000   2      ok"
    assert lines[2].startswith("2  eval_after  2     q17   none    2      infrastructure: TimeoutError: 120 s xxx")
    assert lines[2].endswith("…")
    assert len(lines[2]) == 110
    assert lines[3:] == ["agents: judge 2 calls; writer 2 calls, trained", "show one: --rollout N"]


def test_of_many_rollouts_the_newest_are_listed(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(run_folder / "store.db") as store:
        for _ in range(50):
            keep(store, try_it()[0])
    for options, first, count in (([], 3, 50), (["--last", "1"], 52, 1), (["--last", "51"], 2, 51)):
        assert main(["trace", "runs/latest", *options]) == 0
        _, *listed, agents, hint = capsys.readouterr().out.splitlines()
        assert [int(line.split()[0]) for line in listed] == list(range(first, 53))
        assert agents == "agents: judge 52 calls; writer 52 calls, trained"
        assert hint == f"the newest {count} of 52 rollouts; list more: --last N; show one: --rollout N"
    assert main(["trace", "runs/latest", "--last", "52"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "show one: --rollout N"
    assert main(["trace", "runs/latest", "--rollout", "1"]) == 0
    assert capsys.readouterr().out.startswith("rollout 1 ")


def test_one_rollout_as_a_tree(run_folder: Path) -> None:
    assert on_terminal(110, *COMMAND, "trace", "runs/latest", "--rollout", "1") == (
        "rollout 1  train at step 2  reward 1.000  ok  2.0 s\n"
        'task q17: {"id": "q17", "q": "How many?"}\n'
        "reward -0.500 to agent judge\n"
        "node write_query\n"
        "└── agent writer\n"
        "    ├── call of writer  policy version 3  12 → 5 tokens  context new  reward 1.250, advantage +0.500, 5 train…\n"
        "    │     user: How many rows are in the table? Answer in SQL.\n"
        "    │     writer: SELECT count(*)\n"
        "    └── tool run_sql  (agent writer)\n"
        "call of judge  gpt-x\n"
        "  user: Right?\n"
        '  judge calls grade {"points": 1}\n'
        "agents: writer 1 call, trained; judge 1 call\n"
    )


def test_the_full_tree_has_every_message_and_line(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(run_folder / "store.db", read_only=True) as store:
        identity = store.rollout(1).id
    assert main(["trace", "runs/latest", "--rollout", identity, "--full"]) == 0
    out = capsys.readouterr().out
    assert "call reward 0.250 (syntax)\n" in out
    assert (
        "    │     system: Be brief.\n    │     user: How many rows are in the table?\n    │       Answer in SQL.\n"
        "    │     writer: SELECT\n    │         count(*)\n"
    ) in out


def test_a_pipe_gets_plain_lines_that_are_not_cut(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["trace", "runs/latest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"2  eval_after  2     q17   none    2      infrastructure: TimeoutError: 120 s {'x' * 200}"
    assert main(["trace", "runs/latest", "--rollout", "1"]) == 0
    out = capsys.readouterr().out
    assert "5 trained  call reward 0.250 (syntax)\n" in out
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_a_narrow_terminal_keeps_every_column(run_folder: Path) -> None:
    assert on_terminal(48, *COMMAND, "trace", "runs/latest").splitlines()[:3] == [
        "N  phase       step  task  reward  calls  status",
        "1  train       2     q17   1.000   2      ok",
        "2  eval_after  2     q17   none    2      infra…",
    ]
    out = on_terminal(30, *COMMAND, "trace", "runs/latest", "--rollout", "1", "--full")
    assert max(map(len, out.splitlines())) <= 30
    words = " ".join(out.replace("│", " ").split())
    assert "advantage +0.500, 5 trained" in words
    assert "How many rows are in the table? Answer in SQL." in words


def test_a_terminal_gets_styles(run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["trace", "runs/latest", "--rollout", "1"]) == 0
    assert "\x1b[1mcall of writer\x1b[0m  policy version 3" in capsys.readouterr().out


def test_text_in_square_brackets_and_deep_nesting_are_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rollout(task={"id": "[red]q[/red] :smile:"}) as run, ExitStack() as stack:
        for depth in range(500):
            stack.enter_context(scope(f"node {depth}", kind="node"))
        call("writer", "[bold]x[/bold]", {"role": "assistant", "content": "[/]"})
    Path("deep.json").write_text(json.dumps(spans_to_otlp(run.spans)))
    assert main(["trace", "deep.json", "--rollout", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == 'task [red]q[/red] :smile:: {"id": "[red]q[/red] :smile:"}'
    assert "".join(lines[-3].split()) == "user:[bold]x[/bold]"
    assert lines[-2].endswith("writer: [/]")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["runs/one", "--rollout", "9"], "--rollout 9: no rollout with ordinal 9; the store has 2, numbered from 1"),
        (["runs/one", "--rollout", "x"], "--rollout x: no rollout with id 'x'"),
        (["runs/one", "--task", "q17"], "--task and key=value are for a configuration"),
        (["runs"], "'runs' is a folder, but not a run's: expected config.yaml and store.db in it"),
        (
            ["c.yaml", "--rollout", "1"],
            "--rollout is for a run's folder or a file of traces; 'c.yaml' is a configuration: use --task",
        ),
        (["nowhere.json"], "no traces could be read from 'nowhere.json'"),
        (["c.jsonl"], "no traces could be read from 'c.jsonl'"),
        (["two.json", "--rollout", "3"], "--rollout 3: expected a number from 1 to 2, or a trace id"),
        (["runs/one", "--last", "0"], "--last 0: expected a number of rollouts, from 1"),
        (["two.json", "--task", "q17"], "--task and key=value are for a configuration"),
    ],
)
def test_trace_usage(run_folder: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.jsonl").write_text("some text", encoding="utf-8")
    write_traces("two.json", 2)
    assert main(["trace", *arguments]) == 2
    assert expected in capsys.readouterr().err


def write_traces(file: str, count: int) -> list[Run]:
    """A file of OTLP in JSON lines, as a collector writes it, with the given number of rollouts."""
    runs = [try_it()[0] for _ in range(count)]
    Path(file).write_text("\n".join(json.dumps(spans_to_otlp(run.spans)) for run in runs), encoding="utf-8")
    return runs


def test_stored_traces(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_traces("two.jsonl", 2)
    assert main(["trace", "two.jsonl"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "N  task  reward  calls  status",
        "1  q17   1.000   2      ok",
        "2  q17   1.000   2      ok",
        "agents: writer 2 calls; judge 2 calls",
        "show one: --rollout N",
    ]
    assert main(["trace", "two.jsonl", "--last", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "2  q17   1.000   2      ok",
        "agents: writer 2 calls; judge 2 calls",
        "the newest 1 of 2 rollouts; list more: --last N; show one: --rollout N",
    ]
    for chosen, run in (("1", first), ("2", second), (second.trace.rollout, second)):
        assert main(["trace", "two.jsonl", "--rollout", chosen]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"trace {run.trace.rollout}  reward 1.000  ok"
        assert (
            "    ├── call of writer  policy version 3  12 → 5 tokens  context new  call reward 0.250 (syntax)" in lines
        )
        assert lines[-1] == "agents: writer 1 call; judge 1 call"


def test_trace_of_one_task(home: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def outcome(arguments: dict[str, Any]) -> None:
        with Store(arguments["folder"] / "store.db") as store:
            keep(store, try_it()[0], phase="eval")

    calls = loop(outcome)
    assert main(["trace", "c.yaml", "--task", "q18"]) == 0
    assert calls[0]["tasks"] == [{"id": "q18"}]
    out = capsys.readouterr().out
    assert "call of writer" in out
    assert out.endswith("agents: writer 1 call; judge 1 call\n")
    assert main(["trace", "c.yaml", "--task", "q99"]) == 2
    assert "tasks.train has no task with the id 'q99'; the first is 'q17'" in capsys.readouterr().err


def test_trace_of_one_task_shows_the_tree_even_if_names_are_wrong(
    home: Path, loop: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome(arguments: dict[str, Any]) -> None:
        with Store(arguments["folder"] / "store.db") as store:
            keep(store, try_it()[0], phase="eval")
        raise ConfigError("agents.train names 'riter'")

    loop(outcome)
    assert main(["trace", "c.yaml"]) == 2
    shown = capsys.readouterr()
    assert "call of writer" in shown.out
    assert shown.err == "lightning-rl: agents.train names 'riter'\n"


def test_the_command_is_quick_to_start() -> None:
    heavy = "{'torch', 'transformers', 'matplotlib', 'langchain_core', 'rich', 'starlette', 'numpy', 'pydantic', 'opentelemetry'}"
    script = f"import sys, lightning_core.cli.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
