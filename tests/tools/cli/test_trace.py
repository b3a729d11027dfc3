"""The views of a run, of stored traces and of one task."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest

from lightning_core.capture import ActiveRollout, rollout, scope
from lightning_core.errors import ConfigError
from lightning_core.otel import spans_to_otlp
from lightning_core.records.store import CallCredit, Phase, Status, Store
from lightning_core.tools.cli import trace as cli_trace
from lightning_core.tools.cli.main import main
from lightning_core.tools.runs.browse import ORDERS
from tests.records.test_store import record, root
from tests.tools.cli.conftest import Install
from tests.tools.cli.recorded import call, keep, try_it
from tests.tools.cli.terminal import on_terminal

HEADER = "agent   requests  result    where"
NAMES = "names for agents.train: judge, writer"


def test_the_list_of_rollouts(run_folder: Path) -> None:
    lines = on_terminal(110, "trace", "runs/latest").splitlines()
    assert lines[0] == "N  phase       step  task  reward  calls  status"
    assert lines[1] == "1  train       2     q17   1.000   2      ok"
    assert lines[2].startswith("2  eval_after  2     q17   none    2      infrastructure: TimeoutError: 120 s xxx")
    assert lines[2].endswith("…")
    assert len(lines[2]) == 110
    assert lines[3:] == [
        "",
        *calls(2),
        "",
        NAMES,
        "show one: --rollout N",
    ]


def test_of_many_rollouts_the_newest_are_listed(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(run_folder / "store.db") as store:
        for _ in range(50):
            keep(store, try_it()[0])
    for options, first, end, page in (
        ([], 3, 52, 1),
        (["--last", "1"], 52, 52, 1),
        (["--last", "51"], 2, 52, 1),
        (["--page", "2"], 1, 2, 2),
        (["--last", "20", "--page", "2"], 13, 32, 2),
    ):
        assert main(["trace", "runs/latest", *options]) == 0
        rollouts, ledger, names = capsys.readouterr().out.split("\n\n")
        assert [int(line.split()[0]) for line in rollouts.splitlines()[1:]] == list(range(first, end + 1))
        count = str(end + 1 - first)
        assert [line.split()[:2] for line in ledger.splitlines()[1:]] == [["judge", count], ["writer", count]], "theirs"
        next_page = f"--page {page + 1} or " if first > 1 else ""
        hint = f"page {page}, {count} of 52 rollouts; more: {next_page}--last N; show one: --rollout N"
        assert names.splitlines()[-1] == hint
    assert main(["trace", "runs/latest", "--page", "9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "page 9 is empty: there are 52 rollouts, 50 on a page"
    assert main(["trace", "runs/latest", "--last", "52"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "show one: --rollout N"
    assert main(["trace", "runs/latest", "--rollout", "1"]) == 0
    assert capsys.readouterr().out.startswith("rollout 1 ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [1, 2]),
        (["--phase", "train"], [1]),
        (["--status", "infrastructure"], [2]),
        (["--task-id", "q17", "--step", "2", "--agent", "judge", "--min-reward", "0.5"], [1]),
        (["--max-reward", "0.5"], []),
        (["--text", "timeouterror: 120"], [2]),
        (["--sort", "reward"], [1, 2]),
        (["--reverse"], [2, 1]),
        (["--sort", "reward", "--last", "1", "--page", "2"], [2]),
    ],
)
def test_rollouts_are_filtered_and_sorted(
    run_folder: Path, options: list[str], expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "runs/one", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rollout["ordinal"] for rollout in found["rollouts"]] == expected
    assert found["total"] == (2 if "--last" in options else len(expected))
    assert main(["trace", "runs/one", *options]) == 0
    table = capsys.readouterr().out
    assert [int(line.split()[0]) for line in table.split("\n\n")[0].splitlines()[1 : 1 + len(expected)]] == expected
    assert expected or table.splitlines()[-1] == "no rollout matches"


def test_the_reward_of_a_rollout_that_counts_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("policy: {model: m}\n")
    with Store(tmp_path / "store.db") as store:
        for number, status in enumerate(("masked", "refused")):
            ended = record(f"{number:032x}", status=status, reward=None, error="it was refused")
            store.add_rollout(ended, [root(f"{number:032x}")])
    assert main(["trace", str(tmp_path)]) == 0
    counted, left_out = capsys.readouterr().out.splitlines()[1:3]
    assert "0.000 (not given)" in counted
    assert "masked: it was refused" in counted
    assert "none" in left_out
    assert main(["trace", str(tmp_path), "--rollout", "1"]) == 0
    assert "reward 0.000 (not given)  masked: it was refused" in capsys.readouterr().out


def test_a_rollout_without_spans_is_listed_and_shown_as_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its worker was lost before the agent ran."""
    (tmp_path / "config.yaml").write_text("policy: {model: m}\n")
    with Store(tmp_path / "store.db") as store:
        store.add_rollout(record(status="infrastructure", error="the worker was lost"), [])
    assert main(["trace", str(tmp_path)]) == 0
    assert "infrastructure: the worker was lost" in capsys.readouterr().out
    assert main(["trace", str(tmp_path), "--rollout", "1"]) == 2
    error = capsys.readouterr().err
    assert "Nothing was recorded in this rollout" in error
    assert "infrastructure: the worker was lost" in error


def test_the_names_of_filters_are_those_of_the_store() -> None:
    assert (get_args(Phase), get_args(Status)) == (cli_trace.PHASES, cli_trace.STATUSES)
    assert cli_trace.ORDERS == ORDERS


def test_one_rollout_in_json_has_everything(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "runs/one", "--rollout", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rollout"]["ordinal"], found["rollout"]["status"], found["task"]["q"]) == (1, "ok", "How many?")
    writer, judge = found["calls"]
    assert (writer["prompt_ids"], writer["output_ids"], writer["logprobs"]) == (
        list(range(12)), list(range(5)), [-0.5] * 5,
    )  # fmt: skip
    assert writer["messages"][0] == {"role": "system", "content": "Be brief."}
    assert writer["response"]["content"] == "SELECT\n  count(*)"
    assert (writer["context"], writer["credit"]) == ("new", {"reward": 1.25, "advantage": 0.5, "tokens": 5})
    assert (judge["credit"], judge["target"]) == (None, ["api.openai.com", "your key"])
    assert {(event["kind"], event["name"]) for event in found["events"]} >= {("tool", "run_sql"), ("agent", "writer")}
    assert [reward["value"] for reward in found["rewards"]] == [1.0, 0.25, -0.5]
    assert {(entry["agent"], entry["requests"]) for entry in found["ledger"]} == {("writer", 1), ("judge", 1)}


def test_stored_traces_in_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, _ = write_traces("three.json", 3)
    assert main(["trace", "three.json", "--json", "--last", "2", "--page", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["total"], [(t["number"], t["id"]) for t in found["traces"]]) == (3, [(1, first.rollout)])
    assert main(["trace", "three.json", "--json", "--rollout", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["rollout"] == {"id": second.rollout}


def test_one_rollout_as_a_tree(run_folder: Path) -> None:
    assert on_terminal(110, "trace", "runs/latest", "--rollout", "1") == (
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
        '  judge calls grade {"points": 1}\n' + "\n".join(["", *calls(1), "", NAMES, ""])
    )


def test_a_call_with_advantage_0_does_not_count_as_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    with Store(tmp_path / "store.db") as store:
        run, written = try_it()
        keep(store, run)
        credit = CallCredit(rollout=run.rollout, call=written, agent="writer", step=2, reward=1, advantage=0, tokens=5)
        store.add_credit([credit])
    assert main(["trace", str(tmp_path), "--rollout", "1"]) == 0
    assert "advantage +0.000, 5 without gradient from rewards" in capsys.readouterr().out


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
    assert on_terminal(48, "trace", "runs/latest").splitlines()[:3] == [
        "N  phase       step  task  reward  calls  status",
        "1  train       2     q17   1.000   2      ok",
        "2  eval_after  2     q17   none    2      infra…",
    ]
    out = on_terminal(30, "trace", "runs/latest", "--rollout", "1", "--full")
    assert max(map(len, out.partition("\n\n")[0].splitlines())) <= 30, "the tree; tables keep their columns"
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
    tree = lines[: lines.index("")]
    assert "".join(tree[-2].split()) == "user:[bold]x[/bold]"
    assert tree[-1].endswith("writer: [/]")


def test_messages_of_any_shape_are_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rollout(task={"id": "q"}) as run:
        odd = [
            {"role": "user", "content": ["a", {"text": "b"}, 3]},
            {"role": "assistant", "tool_calls": ["x", {"function": 1}]},
        ]
        call("writer", odd, {"role": "assistant", "content": "fine"})
    Path("odd.json").write_text(json.dumps(spans_to_otlp(run.spans)))
    assert main(["trace", "odd.json", "--rollout", "1", "--full"]) == 0
    out = capsys.readouterr().out
    assert "user: a" in out
    assert "assistant calls ? x" in out


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
        (
            ["nowhere.json"],
            "'nowhere.json' does not exist; expected a run's folder such as runs/latest, a file of traces",
        ),
        (["runs/typo"], "'runs/typo' does not exist; expected a run's folder such as runs/latest"),
        (
            ["runs/one", "--rollout", "1", "--page", "2"],
            "--page selects a part of the list of rollouts, but --rollout selects one rollout",
        ),
        (["c.yaml", "--page", "2"], "--page selects a part of the list of rollouts, but 'c.yaml' is a configuration"),
        (["two.json", "--rollout", "1", "--last", "50"], "--last selects a part of the list of rollouts, but"),
        (["runs/one", "--min-reward", "2", "--max-reward", "1"], "--min-reward 2: expected at most --max-reward 1"),
        (["runs/one", "--rollout", "9" * 31], "no rollout with id '999"),
        (
            ["runs/one", "--rollout", "1", "--phase", "eval"],
            "--phase filters or sorts the rollouts of a run's folder, but",
        ),
        (
            ["two.json", "--min-reward", "1"],
            "--min-reward filters or sorts the rollouts of a run's folder, but 'two.json'",
        ),
        (
            ["c.yaml", "--reverse"],
            "--reverse filters or sorts the rollouts of a run's folder, but 'c.yaml' is a config",
        ),
        (["c.jsonl"], "no traces could be read from 'c.jsonl'"),
        (["two.json", "--rollout", "3"], "--rollout 3: expected a number from 1 to 2, or a trace id"),
        (["two.json", "--task", "q17"], "--task and key=value are for a configuration"),
    ],
)
def test_trace_usage(run_folder: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.jsonl").write_text("some text", encoding="utf-8")
    write_traces("two.json", 2)
    assert main(["trace", *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trace", "runs/one", "--page", "0"], "--page: found '0', expected a whole number from 1 to 1,000,000,000"),
        (["trace", "runs/one", "--page", "9" * 23], "expected a whole number from 1 to 1,000,000,000"),
        (["trace", "runs/one", "--last", "9" * 5000], "expected a whole number from 1 to 1,000,000,000"),
        (["trace", "runs/one", "--step", "-1"], "--step: found '-1', expected a whole number from 0 to"),
        (["trace", "runs/one", "--min-reward", "nan"], "--min-reward: found 'nan', expected a finite number"),
        (["trace", "runs/one", "--max-reward", "inf"], "--max-reward: found 'inf', expected a finite number"),
        (["runs", "compare", "one", "two", "--tasks", "-1"], "--tasks: found '-1', expected a whole number from 0"),
        (["credit", "runs/one", "--calls", "-1"], "--calls: found '-1', expected a whole number from 0"),
        (["view", "--port", "99999"], "--port: found '99999', expected a port from 0 to 65535"),
        (["serve", "runs/one", "--port=-1"], "--port: found '-1', expected a port from 0 to 65535"),
    ],
)
def test_numbers_out_of_range_are_refused(
    run_folder: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err


def write_traces(file: str, count: int) -> list[ActiveRollout]:
    """A file of OTLP in JSON lines, as a collector writes it, with the given number of rollouts."""
    runs = [try_it()[0] for _ in range(count)]
    Path(file).write_text("\n".join(json.dumps(spans_to_otlp(run.spans)) for run in runs), encoding="utf-8")
    return runs


def calls(number: int) -> list[str]:
    """The ledger of so many calls of each agent."""
    return [
        HEADER,
        f"judge          {number}  answered  api.openai.com (gpt-x, your key)",
        f"writer         {number}  answered  policy (trained)",
    ]


def test_stored_traces(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_traces("two.jsonl", 2)
    assert main(["trace", "two.jsonl"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "N  task  reward  calls  status",
        "1  q17   1.000   2      ok",
        "2  q17   1.000   2      ok",
        "",
        *calls(2),
        "",
        NAMES,
        "show one: --rollout N",
    ]
    assert main(["trace", "two.jsonl", "--last", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "2  q17   1.000   2      ok",
        "",
        *calls(2),
        "",
        NAMES,
        "page 1, 1 of 2 rollouts; more: --page 2 or --last N; show one: --rollout N",
    ]
    for chosen, run in (("1", first), ("2", second), (second.trace.rollout, second)):
        assert main(["trace", "two.jsonl", "--rollout", chosen]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"trace {run.trace.rollout}  reward 1.000  ok"
        assert (
            "    ├── call of writer  policy version 3  12 → 5 tokens  context new  call reward 0.250 (syntax)" in lines
        )
        assert lines[-5:] == [*calls(1), "", NAMES]


def test_agents_that_share_a_name_are_listed_with_their_paths(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"role": "assistant", "content": "yes"}
    with rollout(task={"id": "q17"}) as run:
        for team in ("red", "blue"):
            with scope(team, kind="node"), scope("writer", kind="node"):
                call("writer", "Right?", answer)
    Path("one.json").write_text(json.dumps(spans_to_otlp(run.spans)), encoding="utf-8")
    with Store("store.db") as store:
        keep(store, run)
    Path("config.yaml").touch()
    for source in (["one.json"], ["one.json", "--rollout", "1"], ["."], [".", "--rollout", "1"]):
        assert main(["trace", *source]) == 0
        expected = "names for agents.train: writer (one place only: blue/writer, red/writer)\n"
        assert expected in capsys.readouterr().out


def test_trace_of_one_task(home: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def outcome(arguments: dict[str, Any]) -> None:
        with Store(arguments["folder"] / "store.db") as store:
            keep(store, try_it()[0], phase="eval")

    given = loop(outcome)
    assert main(["trace", "c.yaml", "--task", "q18"]) == 0
    assert given[0]["tasks"] == [{"id": "q18"}]
    out = capsys.readouterr().out
    assert "call of writer" in out
    assert out.splitlines()[-5:] == [*calls(1), "", NAMES]
    assert main(["trace", "c.yaml", "--task", "q99"]) == 2
    assert "tasks.train has no task with the id 'q99'; the first is 'q17'" in capsys.readouterr().err


def test_trace_of_one_task_that_fails_exits_with_1(
    home: Path, loop: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome(arguments: dict[str, Any]) -> None:
        with Store(arguments["folder"] / "store.db") as store:
            keep(store, try_it()[0], phase="eval", status="failed", error="ValueError: no")

    loop(outcome)
    assert main(["trace", "c.yaml"]) == 1
    assert "failed: ValueError: no" in capsys.readouterr().out


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
