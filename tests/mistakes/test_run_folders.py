"""Paths that are no run, or a damaged one, and folders and ports that cannot be used."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lightning_core import load_config
from lightning_core.config import dump_config
from lightning_core.tools.served_model import resolve_served
from tests.mistakes.try_command import Try


@pytest.fixture
def runs(home: Path) -> Path:
    """A run that ended before its first checkpoint, and one whose files are damaged."""
    for name in ("first", "damaged"):
        folder = home / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(load_config("lightning.yaml")))
    (home / "runs" / "damaged" / "store.db").write_bytes(b"not a database" * 100)
    (home / "runs" / "latest").symlink_to("first")
    (home / "notes").mkdir()
    (home / "unmounted").symlink_to("disk")
    return home / "runs"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace", "runs/typo"], ["'runs/typo' does not exist; expected a run's folder such as runs/latest", "lightning-rl runs runs"]),
        (["trace", "first"], ["'first' does not exist", "pass 'runs/first' for the run of this name"]),
        (["trace", "notes"], ["'notes' is a folder, but not a run's: expected config.yaml"]),
        (["trace", "runs/first"], ["no store at 'runs/first/store.db'"]),
        (["trace", "runs/damaged"], ["'runs/damaged/store.db' cannot be opened as a run's store"]),
        (["trace", "nosuch.jsonl"], ["'nosuch.jsonl' does not exist"]),
        (["trace", "train.jsonl"], ["no traces could be read from 'train.jsonl'", "expected OTLP/JSON", "['id', 'prompt']"]),
        (["credit", "runs/typo"], ["'runs/typo' does not exist; expected a run's folder", "lightning-rl runs runs"]),
        (["sft", "runs/typo"], ["'runs/typo' does not exist; expected a run's folder", "lightning-rl runs runs"]),
        (["credit", "first"], ["'first' does not exist", "pass 'runs/first'"]),
        (["sft", "latest"], ["'latest' does not exist", "pass 'runs/latest'"]),
        (["credit", "lightning.yaml"], ["'lightning.yaml' is a file; expected a run's folder"]),
        (["credit", "runs/first"], ["no store at"]),
        (["credit", "runs/first", "--rule", "nosuch"], ["credit.rewards: found 'nosuch', expected"]),
        (["credit", "runs/first", "trainer.steps=1"], ["recorded rollouts cannot be reconfigured"]),
        (["eval", "runs/typo"], ["there is no run 'runs/typo'", "lightning-rl runs runs", "a run's folder or a configuration file"]),
        (["eval", "first"], ["there is no run 'first'; pass 'runs/first' for the run of this name. Expected"]),
        (["eval", "runs/typo.yaml"], ["no configuration file at 'runs/typo.yaml'"]),
        (["eval", "runs/first"], ["'runs/first' has no checkpoint yet"]),
        (["eval", "runs/first", "--checkpoint", "step-5"], ["'runs/first' has no checkpoint yet"]),
        (["eval", "notes"], ["'notes' is a folder, but not a run's"]),
        (["serve", "runs/typo"], ["there is no run 'runs/typo'", "lightning-rl runs runs"]),
        (["serve", "runs/first"], ["'runs/first' has no checkpoint yet"]),
        (["serve", "notes"], ["neither a run's folder (config.yaml) nor a model's (config.json)"]),
        (["serve", "lightning.yaml"], ["'lightning.yaml' is a configuration; expected a run's folder"]),
        (["serve", "notes", "--host", "0.0.0.0"], ["neither a run's folder"]),
        (["view", "nosuch"], ["there is no folder 'nosuch' in '", "lightning-rl train"]),
        (["view", "first"], ["there is no folder 'first'", "or of one run; pass 'runs/first'"]),
        (["view", "lightning.yaml"], ["'lightning.yaml' is a file; expected the folder of runs"]),
        (["runs", "nosuch"], ["there is no folder 'nosuch'"]),
        (["runs", "compare", "first"], ["found one run, 'first'; expected two or more"]),
        (["runs", "compare", "first", "typo"], ["no run 'typo', neither as a path nor in 'runs'"]),
        (["runs", "compare", "a", "b", "--dir", "notes"], ["no run 'a'", "no run yet: start one with `lightning-rl train`", "--dir"]),
        (["runs", "compare", "a", "b", "--dir", "no"], ["no run 'a'", "no run yet"]),
        (["runs", "remove", "typo", "--yes"], ["'typo' is not the name of a run in 'runs'"]),
        (["runs", "remove", "latest", "--yes"], ["'latest' is a link to 'first'; name that run itself"]),
        (["runs", "remove", "first"], ["add --yes to remove first"]),
        (["train", "lightning.yaml", "--resume", "run.name=frist"], ["no run 'frist'", "did you mean 'first'?"]),
        (["train", "lightning.yaml", "--resume", "run.name=x"], ["no run 'x'", "it has 'first', 'damaged'"]),
        (["train", "lightning.yaml", "--resume", "run.dir=no"], ["there is no run in '", "start one without resume"]),
        (["train", "lightning.yaml", "run.name=first"], ["'runs/first' exists; set another run.name, or resume"]),
        (["train", "lightning.yaml", "run.dir=train.jsonl"], ["cannot create the run's folder", "Set run.dir"]),
        (["train", "lightning.yaml", "run.dir=unmounted"], ["cannot create the run's folder: File exists ('unmounted')", "Set run.dir"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)  # fmt: skip
def test_a_wrong_path_is_named(runs: Path, attempt: Try, arguments: list[str], words: list[str]) -> None:
    attempt(arguments, 2, *words)


def test_a_served_name_may_be_a_models_although_a_run_has_it(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    config, checkpoint = resolve_served("first", None, [])
    assert (config.policy.model, checkpoint) == ("first", None)


@pytest.mark.parametrize("out", ["notes", "runs/first"])
def test_export_needs_a_run_with_a_checkpoint(runs: Path, attempt: Try, out: str) -> None:
    pytest.importorskip("torch")
    (runs.parent / "notes" / "text.md").write_text("mine")
    attempt(["export", "runs/typo", "out"], 2, "there is no run 'runs/typo'", "lightning-rl runs runs")
    attempt(["export", "first", "out"], 2, "there is no run 'first'; pass 'runs/first'")
    attempt(["export", "notes", "out"], 2, "'notes' is not a run's folder")
    attempt(["export", "runs/first", "out"], 2, "has no checkpoint yet")
    attempt(["export", "runs/first", out], 2, f"'{out}' exists and is not an empty folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(runs: Path, attempt: Try) -> None:
    runs.chmod(0o500)
    attempt(["train", "lightning.yaml"], 2, "cannot create the run's folder: Permission denied", "Set run.dir")


def test_a_run_folder_on_a_special_file_system_is_named(attempt: Try) -> None:
    attempt(["train", "lightning.yaml", "run.dir=/proc/nosuch"], 2, "cannot create the run's folder", "/proc/nosuch")


def test_a_port_in_use_is_named(runs: Path, attempt: Try) -> None:
    pytest.importorskip("starlette")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = attempt(["view", "runs", "--no-browser", "--port", str(port)], 2, f"port {port} on 127.0.0.1", "--port")
        assert "http://" not in text
