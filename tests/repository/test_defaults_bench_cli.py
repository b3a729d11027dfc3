"""The command line of the bench of defaults: wrong options are errors before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.defaults import __main__ as bench
from tests.bench.defaults.queue import Run
from tests.bench.defaults.results import append, read
from tests.bench.defaults.variant import CORES
from tests.repository.test_defaults_bench import FAST, row


@pytest.fixture(autouse=True)
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that would have been made; none is, and the model is not loaded."""
    found: list[Run] = []

    def run_all(runs: Sequence[Run], *_: Any, **__: Any) -> int:
        found.extend(runs)
        return 0

    def untrained() -> None:
        raise AssertionError("the model is not loaded")

    monkeypatch.setattr(bench, "run_all", run_all)
    monkeypatch.setattr("tests.bench.defaults.starts.untrained", untrained)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    for own in (
        row("query"),
        row("query", variant=FAST),
        replace(row("facts"), suite="second", variant="other", changes=["a.b=1"]),
    ):
        append(path, own)
    return path


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of the error, with nothing printed before it."""
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "")
    return printed.err.partition(": error: ")[2].strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--starts", "0"], "--starts: found 0, expected 1 or more tasks"),
        (["--starts", "-1"], "--starts: found -1, expected 1 or more tasks"),
        (["--minutes", "0"], "--minutes: found 0, expected a finite number above 0"),
        (["--minutes", "-1"], "--minutes: found -1, expected a finite number above 0"),
        (["--minutes", "nan"], "--minutes: found nan, expected a finite number above 0"),
        (["--seeds", "0"], "--seeds: found 0, expected 1 or more"),
        (["--jobs", "0"], f"--jobs: found 0, expected 1 to {CORES}"),
    ],
)
def test_numbers_out_of_range_are_errors(
    capsys: pytest.CaptureFixture[str], trained: list[Run], arguments: list[str], message: str
) -> None:
    assert error_of(capsys, *arguments) == message
    assert trained == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "--list"], "argument --list: not allowed with argument --report"),
        (["--report", "--starts"], "argument --starts: not allowed with argument --report"),
        (["--list", "--starts"], "argument --starts: not allowed with argument --list"),
        (
            ["--report", "--jobs", "2", "--seeds", "3"],
            "--report: found --seeds and --jobs, without effect there; leave out --seeds and --jobs",
        ),
        (["--report", "--change", "a.b=1"], "--report: found --change, without effect there; leave out --change"),
        (["--starts", "--minutes", "3"], "--starts: found --minutes, without effect there; leave out --minutes"),
        (["--list", "--against", "defaults"], "--list: found --against, without effect there; leave out --against"),
    ],
)
def test_options_without_effect_are_errors(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert error_of(capsys, *arguments) == message


def test_the_report_is_of_the_given_suite_and_agents(capsys: pytest.CaptureFixture[str], rows: Path) -> None:
    def report_of(*arguments: str) -> str:
        assert bench.main(["--report", "--results", str(rows), *arguments]) == 0
        return capsys.readouterr().out

    assert [suite in report_of() for suite in ("The first suite", "The second suite")] == [True, True]
    assert [suite in report_of("--suite", "first") for suite in ("The first suite", "The second suite")] == [
        True,
        False,
    ]
    assert [agent in report_of("--agents", "facts") for agent in ("query", "facts")] == [False, True]
    assert "defaults against fast, 1 paired run of 1 agent\n" in report_of("--against", "fast")


def test_the_report_needs_rows_that_exist(capsys: pytest.CaptureFixture[str], rows: Path, tmp_path: Path) -> None:
    def report_error(*arguments: str, path: Path = rows) -> str:
        return error_of(capsys, "--report", "--results", str(path), *arguments)

    assert (
        report_error("--against", "nosuch") == "--against: found 'nosuch', expected one of 'defaults', 'fast', 'other'"
    )
    assert report_error("--against", "fast", "--suite", "second").endswith("expected one of 'defaults', 'other'")
    assert report_error("--agents", "nosuch") == "--agents: found 'nosuch', expected one of 'query', 'facts'"
    assert "found no file" in report_error(path=tmp_path / "nosuch.jsonl")
    assert "which is not a file" in report_error(path=tmp_path)
    (tmp_path / "empty.jsonl").touch()
    assert "found no rows" in report_error(path=tmp_path / "empty.jsonl")


def test_a_variant_of_the_report_has_the_changes_in_its_name_if_others_share_it(
    capsys: pytest.CaptureFixture[str], rows: Path
) -> None:
    append(rows, replace(row("query", variant=FAST), changes=["trainer.learning_rate=1e-4"]))
    assert bench.main(["--report", "--results", str(rows), "--against", "fast (trainer.learning_rate=1e-4)"]) == 0
    assert "defaults against fast (trainer.learning_rate=1e-4)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainer.learning_ratee=3", "trainer.learning_ratee: unknown key; did you mean 'learning_rate'?"),
        ("trainer.learning_rate=abc", "trainer.learning_rate: found 'abc', expected a number"),
        ("credit.advantage=nosuch:rule", "credit.advantage: no module 'nosuch'"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--list"]])
def test_a_change_that_no_run_could_have_is_an_error(
    capsys: pytest.CaptureFixture[str], trained: list[Run], tmp_path: Path, change: str, message: str, mode: list[str]
) -> None:
    given = [*mode, "--results", str(tmp_path / "new.jsonl"), "--agents", "route"]
    assert message in error_of(capsys, *given, "--change", change)
    found = error_of(capsys, *given, "--variant", f"mine: trainer.weight_decay=0 {change}")
    assert found.startswith("'mine' does not fit the agent 'route'")
    assert message in found
    assert trained == []


def test_a_change_without_a_value_is_named_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "--change", "abc").startswith("--change: found 'abc', expected key=value")
    assert error_of(capsys, "--variant", "abc").startswith("--variant: found 'abc', expected 'name: key=value")


def test_the_runs_that_are_left_need_no_results_file(
    capsys: pytest.CaptureFixture[str], trained: list[Run], tmp_path: Path
) -> None:
    rule = "credit.advantage=tests.bench.defaults.failed_groups:ngrpo"  # a colon is not the end of a name here
    given = ["--results", str(tmp_path / "new.jsonl"), "--agents", "route", "--seeds", "1", "--change", rule]
    assert bench.main(["--list", *given]) == 0
    assert capsys.readouterr().out == f"route, seed 0, defaults\nroute, seed 0, {rule}\n"
    assert trained == []
    assert bench.main([*given, "--against", rule]) == 0
    assert [run.variant.changes for run in trained] == [(), (rule,)]
    capsys.readouterr()
    assert "'nosuch', expected one of 'defaults', " in error_of(capsys, *given, "--against", "nosuch")


def test_the_help_explains_every_option_and_the_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m tests.bench.defaults [-h]")
    assert "The shipped rows were made with ``--jobs 2``, so ``--jobs 1`` repeats them." in text
    assert {own.threads for own in read(bench.RESULTS)} == {CORES // 2}
    assert [a.option_strings for a in bench.options_parser()._actions if not a.help] == []
    assert {a.dest for a in bench.options_parser()._actions} - {"help"} == set(bench.DEFAULTS)
