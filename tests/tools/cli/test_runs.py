"""``lightning-rl runs``: the list, the comparison and the removal of runs; the completion of shells."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_core.config import dump_config, load_config
from lightning_core.records.report import MetricsLog, Summary
from lightning_core.records.run_folder.lock import running
from lightning_core.records.statistics.intervals import compare
from lightning_core.tools.cli.main import main
from tests.tools.cli.terminal import on_terminal
from tests.tools.runs.test_compare import make_store

BEFORE, AFTER = {f"t{n}": [0.25] for n in range(8)}, {f"t{n}": [0.5] for n in range(8)}


def make_run(name: str, *, seed: int, age: float, gain: float = 0.0, tags: list[str] | None = None) -> Path:
    """A finished run in ``runs``; ``gain``: what its last evaluation has more than 0.5 in its last task."""
    after = {**AFTER, "t7": [0.5 + gain]}
    folder = make_store(Path("runs", name), {("eval_before", 0): BEFORE, ("eval_after", 2): after})
    settings = {"policy": {"model": "tiny"}, "trainer": {"steps": 2}, "run": {"seed": seed, "tags": tags or []}}
    config = folder / "config.yaml"
    config.write_text(dump_config(load_config(settings)))
    os.utime(config, (1_700_000_000 - age, 1_700_000_000 - age))
    log = MetricsLog(folder / "metrics.jsonl")
    log.append(1, {"reward": 0.75, "loss": 0.5})
    log.append(2, {"reward": 0.5, "loss": None, "entropy": seed + 0.5})
    Summary(
        eval=compare(BEFORE, after), steps=2, rollouts=1, tokens_sampled=1, tokens_trained=1, wall_seconds=1.0, seed=seed,
    ).write(folder / "summary.json")  # fmt: skip
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    (tmp_path / "runs").mkdir()
    make_run("first", seed=0, age=7200, tags=["base"])
    make_run("second", seed=1, age=0, gain=0.25, tags=["base", "demo"])
    Path("runs/latest").symlink_to("second")
    Path("runs/notes").mkdir()
    return tmp_path


def names(*options: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["runs", *options, "--json"]) == 0
    return [run["name"] for run in json.loads(capsys.readouterr().out)]


def test_runs_are_listed_the_newest_first(home: Path) -> None:
    lines = on_terminal(140, "runs").splitlines()
    assert lines[0].split("  ")[0] == "name"
    assert lines[1].split() == (
        [
            "second",
            "finished",
            "2023-11-14",
            "22:13",
            "tiny",
            "2/2",
            "0.5",
            "0.25",
            "[0.16,",
            "0.53]",
            "→",
            "0.53",
            "[0.33,",
            "0.71]",
            "base,",
            "demo",
        ]
    )
    assert lines[2].split()[:4] == ["first", "finished", "2023-11-14", "20:13"]
    assert len(lines) == 3


def test_on_a_narrow_terminal_no_line_is_longer_than_it(home: Path) -> None:
    lines = on_terminal(60, "runs").splitlines()
    assert [len(lines), max(map(len, lines)) <= 60] == [3, True]
    assert [line.split()[0] for line in lines] == ["name", "second", "first"]
    narrow = on_terminal(30, "runs").splitlines()
    assert [len(narrow), max(map(len, narrow)) <= 30] == [3, True]


def test_damaged_files_of_runs_are_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert "damaged" not in capsys.readouterr().out
    with Path("runs/first/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    Path("runs/second/summary.json").write_text('{"steps": ')
    Path("runs/second/config.yaml").write_text("policy: {model")
    assert main(["runs"]) == 0
    table, note = capsys.readouterr().out.split("\n\n")
    assert len(table.splitlines()) == 3
    expected = "runs/second/config.yaml, runs/second/summary.json, runs/first/metrics.jsonl"
    assert sorted(note.strip().removeprefix("damaged, or not complete: ").split(", ")) == sorted(expected.split(", "))
    with running(Path("runs/first")):
        assert main(["runs", "runs/first", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["damaged"] == [], "a line may be in the middle of being written"


def test_with_a_damaged_store_settings_and_metrics_are_compared(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Path("runs/second/store.db")
    for damaged in (b"no database", store.read_bytes()[:4096] + b"x" * 40_000):
        store.write_bytes(damaged)
        assert main(["runs", "compare", "first", "second"]) == 0
        held_out, evaluations, settings, _, equal = capsys.readouterr().out.split("\n\n")
        assert "run.seed" in settings
        assert [line.split()[-1] for line in evaluations.splitlines()[1:]] == ["–"] * 3, "those of the damaged store"
        assert "reward, last step 0.5" in equal
        assert held_out.startswith("held-out reward of first and second: cannot be compared: ")


def test_runs_are_found_by_text_and_tags(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(capsys=capsys) == ["second", "first"]
    assert names("runs/first", capsys=capsys) == ["first"]
    assert names("--tag", "base", capsys=capsys) == ["second", "first"]
    assert names("--tag", "base", "--tag", "demo", capsys=capsys) == ["second"]
    assert names("list", "runs", "--search", "FIRS", capsys=capsys) == ["first"]
    assert names("--search", "Demo seed:", capsys=capsys) == ["second"]
    assert names("--search", "neither", capsys=capsys) == []
    assert main(["runs", "--search", "neither"]) == 0
    assert capsys.readouterr().out == "no run in 'runs' matches; it has 2\n"
    assert main(["runs", "elsewhere"]) == 2
    assert "there is no folder 'elsewhere'" in capsys.readouterr().err


def test_a_run_in_json_has_its_summary(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "runs/first", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["started"], run["steps"], run["tags"]) == ("2023-11-14T20:13:20+00:00", 2, ["base"])
    assert run["summary"]["eval"]["improvement"] == 0.25


def test_runs_are_compared_by_settings_metrics_and_tasks(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "compare", "first", "runs/second"]) == 0
    held_out, evaluations, settings, metrics, equal = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in evaluations.splitlines()] == [
        ["last", "held-out", "evaluation", "first", "second"],
        ["reward", "0.500", "0.531"],
        ["95%", "interval", "[0.315,", "0.685]", "[0.333,", "0.713]"],
        ["solved", "tasks", "0", "of", "8", "0", "of", "8"],
    ]
    assert [line.split() for line in settings.splitlines()] == [
        ["setting", "first", "second"],
        ["run.seed", "0", "1"],
        ["run.tags", '["base"]', '["base",', '"demo"]'],
    ]
    same = "metrics that are equal: state finished, steps 2, reward, best step 0.750 (step 1), reward, last step 0.5\n"
    assert equal == same
    assert [line.split() for line in metrics.splitlines()] == [["metric", "first", "second"], ["entropy", "0.5", "1.5"]]
    assert held_out.splitlines()[0] == (
        "held-out reward on 8 common tasks: first 0.500 (eval_after after 2 steps), second 0.531 (eval_after after 2 steps)"
    )
    assert held_out.splitlines()[1].startswith("difference, paired by task: +0.031 [")
    assert [line.split() for line in held_out.splitlines()[3:]] == [["t7", "0.500", "0.750", "+0.250"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "first", "third"], "no run 'third', neither as a path nor in 'runs'"),
        (["compare", "second", "latest"], "found one run, 'second'; expected two or more different ones"),
        (["remove", "third", "--yes"], "'third' is not the name of a run in 'runs'"),
        (["remove", "notes", "--yes"], "'notes' is not the name of a run in 'runs'"),
        (["remove", "../runs/first", "--yes"], "'../runs/first' is not the name of a run in 'runs'"),
        (["remove", "..", "--yes"], "'..' is not the name of a run in 'runs'"),
        (["remove", ".", "--yes"], "'.' is not the name of a run in 'runs'"),
        (["remove", "first", "latest", "--yes"], "'latest' is a link to 'second'; name that run itself"),
        (["remove", "first"], "standard input is not a terminal to ask on: add --yes to remove first"),
    ],
)
def test_wrong_runs_are_refused_and_nothing_is_removed(
    home: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["runs", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["first", "latest", "notes", "second"]


def test_settings_are_no_arguments_of_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["runs", "runs", "run.seed=1"])
    assert caught.value.code == 2
    assert "unexpected argument 'run.seed=1' for 'runs'" in capsys.readouterr().err


def test_a_run_is_removed_and_latest_is_the_newest_of_the_rest(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (Path("runs/second") / "checkpoints" / "step-000002").mkdir(parents=True)
    assert main(["runs", "remove", "second", "--yes"]) == 0
    assert capsys.readouterr().out == "removed second\n"
    assert Path("runs/latest").readlink() == Path("first")
    assert main(["runs", "remove", "first", "--yes"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["notes"], "no link to nothing"


@pytest.mark.skipif(sys.platform == "win32", reason="no file locks")
def test_a_running_run_is_not_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(Path("runs/first")):
        assert main(["runs", "remove", "second", "first", "--yes"]) == 2
    assert "the run 'first' is being trained" in capsys.readouterr().err
    assert Path("runs/second/config.yaml").exists(), "all are checked before one is removed"


@contextmanager
def answering(text: str) -> Iterator[None]:
    """A terminal as standard input, on which ``text`` was typed."""
    ours, theirs = os.openpty()
    os.write(ours, text.encode())
    saved = os.dup(0)
    os.dup2(theirs, 0)
    try:
        with os.fdopen(os.dup(0)) as stdin, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            yield
    finally:
        os.dup2(saved, 0)
        for fd in (ours, theirs, saved):
            os.close(fd)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), ("no\n", 1)])
def test_a_terminal_is_asked_first(home: Path, answer: str, code: int) -> None:
    with answering(answer):
        assert main(["runs", "remove", "first"]) == code
    assert Path("runs/first").exists() == (code == 1)


BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="no bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lightning-rl tra", ["train", "trace", "traces"]),
        ("lightning-rl runs rem", ["remove"]),
        ("lightning-rl trace --max-", ["--max-reward"]),
        ("lightning-rl trace runs --sort ta", ["task_id"]),
        ("lightning-rl completion ", ["bash", "zsh"]),
        ("lightning-rl train runs/fir", ["runs/first"]),
        ("lightning-rl docs guides/b", ["guides/baseline"]),
    ],
)
def test_bash_completes_commands_options_and_paths(
    home: Path, line: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert BASH is not None
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = line.split(" ")
    ask = f"""
    COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; COMP_POINT={len(line)}
    complete -p lightning-rl >/dev/null && _shtab_lightning_rl lightning-rl "${{COMP_WORDS[COMP_CWORD]}}"
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run([BASH, "--norc", "-c", script + ask], capture_output=True, text=True, check=True)
    assert [found.rstrip("/ ") for found in done.stdout.splitlines()] == expected
