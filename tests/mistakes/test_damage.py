"""Damaged run folders: every command ends with a documented exit code and a message, never with a traceback."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_core.tools.cli.main import main
from tests.mistakes.conftest import write_home
from tests.mistakes.try_command import Try
from tests.tiny_model import make_tiny_model

pytest.importorskip("torch")


def overwrite(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).write_bytes(content)

    return damage


def cut(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).write_bytes((run / name).read_bytes()[:-20])

    return damage


def remove(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink()

    return damage


def to_folder(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return damage


def zero_pages(run: Path) -> None:
    content = bytearray((run / "store.db").read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    (run / "store.db").write_bytes(content)


CHECKPOINT = "checkpoints/step-000001"
DAMAGES: dict[str, Callable[[Path], None]] = {
    "metrics: a damaged line": overwrite("metrics.jsonl", b'{"step": 1, "rew\n{"step": 2}\n'),
    "metrics: not text": overwrite("metrics.jsonl", b"\xff\xfe\n\x00\n"),
    "metrics: not metrics": overwrite("metrics.jsonl", b'[1]\n"step"\n{}\n'),
    "metrics: missing": remove("metrics.jsonl"),
    "config: not YAML": overwrite("config.yaml", b"agent: [\n"),
    "config: not text": overwrite("config.yaml", b"\xff\xfe\x00"),
    "config: empty": overwrite("config.yaml", b""),
    "store: damaged pages": zero_pages,
    "store: not a database": overwrite("store.db", b"not a database" * 100),
    "store: empty": overwrite("store.db", b""),
    "store: missing": remove("store.db"),
    "store: a folder": to_folder("store.db"),
    "checkpoint: torn facts": cut(f"{CHECKPOINT}/trainer.json"),
    "checkpoint: torn weights": cut(f"{CHECKPOINT}/model.safetensors"),
    "checkpoint: torn optimizer": cut(f"{CHECKPOINT}/trainer/optimizer.safetensors"),
    "summary: torn": cut("summary.json"),
}
COMMANDS = {
    "trace": ["trace", "runs/run"],
    "trace one": ["trace", "runs/run", "--rollout", "1"],
    "credit": ["credit", "runs/run"],
    "eval": ["eval", "runs/run"],
    "serve": ["serve", "runs/run", "--port"],
    "export": ["export", "runs/run", "out"],
    "list": ["runs", "runs"],
    "compare": ["runs", "compare", "run", "other"],
    "sft": ["sft", "runs/run", "-c", "lightning.yaml", "--min-reward", "0", "run.name=tuned"],
    "resume": ["train", "lightning.yaml", "--resume", "run.name=run"],
    "remove": ["runs", "remove", "run", "--yes"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an agent and its trained run."""
    folder = tmp_path_factory.mktemp("trained")
    make_tiny_model(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        write_home(folder, patch)
        assert main(["train", "lightning.yaml", "run.name=run"]) == 0
        shutil.copytree("runs/run", "runs/other", symlinks=True)
    return folder


@pytest.fixture
def copied(trained: Path, home: Path) -> Path:
    """The run in a copy of the folder."""
    (home / "model").symlink_to(trained / "model")
    shutil.copytree(trained / "runs", home / "runs", symlinks=True)
    return home / "runs" / "run"


STORE = "'runs/run/store.db'"
EXPECTED = [
    ("trace", "store: damaged pages", 1, f"the run's store {STORE} is damaged"),
    ("trace one", "store: not a database", 2, f"{STORE} cannot be opened as a run's store"),
    ("credit", "store: missing", 2, f"no store at {STORE}"),
    ("credit", "config: not YAML", 2, "runs/run/config.yaml:2: not valid YAML"),
    ("serve", "config: not text", 2, "cannot read the configuration 'runs/run/config.yaml'"),
    ("sft", "store: damaged pages", 1, f"the run's store {STORE} is damaged"),
    ("compare", "store: damaged pages", 0, "cannot be compared"),
    ("list", "metrics: not metrics", 0, "run"),
]
"""Command, damage, exit code, and words of the message."""
ALL = [
    pytest.param(command, damage, marks=() if command == "list" else pytest.mark.long)
    for command in COMMANDS
    for damage in DAMAGES
]


LOADED = [
    (
        "eval",
        "checkpoint: torn facts",
        2,
        "the run 'runs/run' has no checkpoint that can be used; expected one: 'runs/run/checkpoints/step-000001' cannot be used: its file "
        "'trainer.json' has",
    ),
    ("export", "store: damaged pages", 0, "of runs/run/checkpoints/step-000001 as hf"),
    ("resume", "metrics: a damaged line", 0, "line 1 of 'runs/run/metrics.jsonl' is damaged"),
    ("resume", "config: not text", 0, "runs/run/config.yaml is missing or damaged"),
    ("resume", "store: damaged pages", 1, f"the run's store {STORE} is damaged"),
]


@pytest.mark.parametrize(
    ("command", "damage", "code", "words"),
    [*EXPECTED, *(pytest.param(*case, marks=pytest.mark.long) for case in LOADED)],
)
def test_the_damaged_file_is_named(
    copied: Path, attempt: Try, command: str, damage: str, code: int, words: str
) -> None:
    DAMAGES[damage](copied)
    attempt(COMMANDS[command] + ["0"] * (command == "serve"), code, words)


@pytest.mark.parametrize("damage", ["metrics: missing", "metrics: a damaged line"])
def test_lost_metrics_are_restored_from_the_store(copied: Path, attempt: Try, damage: str) -> None:
    before = (copied / "metrics.jsonl").read_text()
    DAMAGES[damage](copied)
    attempt(COMMANDS["resume"], 0)
    assert [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()] == [json.loads(before)]


def test_other_held_out_tasks_are_found_before_the_run_continues(copied: Path, attempt: Try) -> None:
    Path("eval.jsonl").write_text('{"id": "eval10", "prompt": "say 10"}\n{"id": "new", "prompt": "say"}\n')
    attempt(
        [*COMMANDS["resume"], "trainer.steps=2"], 2, "1 task new, such as 'new' and 2 tasks missing, such as 'eval11'"
    )
    assert len((copied / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(("command", "damage"), ALL)
def test_a_damaged_run_is_a_message(copied: Path, capfd: pytest.CaptureFixture[str], command: str, damage: str) -> None:
    DAMAGES[damage](copied)
    with socket.socket() as taken:  # a server that finds nothing wrong cannot wait for its end
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = [str(taken.getsockname()[1])] if command == "serve" else []
        assert main([*COMMANDS[command], *port]) in (0, 1, 2)
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
