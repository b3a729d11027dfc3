"""Texts of agents, tasks and errors reach the terminal without control characters, and JSON unchanged."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from lightning_core.capture import rollout, scope
from lightning_core.errors import TrainingError, visible
from lightning_core.observers.progress import LiveProgress, PlainProgress
from lightning_core.records.store import Store
from lightning_core.rollouts.log_format import FoldingFormatter
from lightning_core.tools.cli.console import show
from lightning_core.tools.cli.main import main
from lightning_core.tools.doctor import Finding
from tests.tools.cli.conftest import Install
from tests.tools.cli.recorded import call, keep
from tests.tools.cli.terminal import on_terminal

EVIL = "a\x1b[2J\x07\x00\x9b\x7f\u202eb\u2066"
SHOWN = r"a\x1b[2J\x07\x00\x9b\x7f\u202eb\u2066"
NAME = f"{EVIL}\nc"


@pytest.fixture
def evil_run(run_folder: Path) -> Path:
    """The run, with a third rollout whose texts are all `EVIL`."""
    with rollout(task={"id": NAME, "q": EVIL}) as run, scope(NAME):
        call(NAME, EVIL, {"role": "assistant", "content": EVIL})
    with Store(run_folder / "store.db") as store:
        keep(store, run, task_id=NAME, status="failed", error=f"ValueError: {EVIL}")
    return run_folder


def is_clean(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


@pytest.mark.parametrize("options", [[], ["--rollout", "3"], ["--rollout", "3", "--full"]])
def test_rollouts_are_shown_without_control_characters(
    evil_run: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "runs/one", *options]) == 0
    text = capsys.readouterr().out
    assert is_clean(text)
    assert f"ValueError: {SHOWN}" in text
    assert 'names for agents.train: "a\\u001b[2J' in text, "as YAML"
    assert f"{SHOWN} c" in text


def test_a_terminal_gets_styles_but_no_control_characters_of_texts(evil_run: Path) -> None:
    text = on_terminal(120, "trace", "runs/one", "--rollout", "3")
    assert is_clean(text)
    assert SHOWN in text


def test_json_has_the_texts_unchanged(evil_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "runs/one", "--rollout", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task_id"] == NAME


def test_what_is_shown_without_a_table_is_clean_too(capsys: pytest.CaptureFixture[str]) -> None:
    show(EVIL, Text(f"{EVIL}\n{EVIL}"))
    without_bell = SHOWN.replace(r"\x07", "")  # which rich removes
    assert capsys.readouterr().out == f"{without_bell}\n" * 3


def test_errors_and_the_log_are_clean(home: Path, loop: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> None:
        raise TrainingError(EVIL)

    loop(fail)
    assert main(["train", "c.yaml"]) == 1
    assert capsys.readouterr().err.endswith(f"lightning-rl: TrainingError: {SHOWN}\n")
    record = logging.LogRecord("agents", logging.WARNING, "", 1, "agent %s", (EVIL,), None)
    assert FoldingFormatter("%(levelname)s %(name)s: %(message)s").format(record) == f"WARNING agents: agent {SHOWN}"


def test_messages_of_the_progress_are_clean_and_on_one_line() -> None:
    plain, live = io.StringIO(), io.StringIO()
    PlainProgress(plain).message(NAME)
    progress = LiveProgress(Console(file=live, width=100))
    progress.message(NAME)
    progress.close()
    assert plain.getvalue() == rf"{SHOWN}\nc" + "\n"
    assert rf"{SHOWN}\nc" in live.getvalue()


def test_findings_are_clean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding(section="tasks", name="number", level="warning", found=EVIL, advice=EVIL)
    monkeypatch.setattr("lightning_core.tools.doctor.examine_environment", lambda: [finding])
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert is_clean(text)
    assert text.count(SHOWN) == 2


def test_line_breaks_of_windows_and_tabs_are_no_control_characters() -> None:
    assert visible("a\r\nb\tc\rd") == "a\r\nb\tc\\rd"
    assert visible("a\r\nb\tc", lines=False) == r"a\r\nb\tc"


def test_one_long_id_does_not_pad_the_other_rows_of_a_terminal(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rollout(task={"id": "x"}) as run:
        pass
    with Store(run_folder / "store.db") as store:
        keep(store, run, task_id=f"first-{'x' * 500}-last")
    _, ordinary, _, long, *_ = on_terminal(160, "trace", "runs/one").splitlines()
    assert len(ordinary) < 110
    assert "first-xxx" in long
    assert "…" in long
    assert "xxx-last" in long
    for whole in (["trace", "runs/one"], ["trace", "runs/one", "--json"]):
        assert main(whole) == 0
        assert f"first-{'x' * 500}-last" in capsys.readouterr().out, "nothing is cut in a pipe"
