"""Wrong arguments: exit code 2, and the right form of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.try_command import Try

TRAIN = ["train", "lightning.yaml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["the following arguments are required: COMMAND"]),
        (["trian"], ["invalid choice: 'trian'", "train"]),
        (["eval"], ["required: CONFIG"]),
        (["train", "--config", "lightning.yaml"], ["unexpected argument '--config'"]),
        ([*TRAIN, "trainer.steps"], ["unexpected argument 'trainer.steps'", "key=value", "trainer.steps=VALUE"]),
        ([*TRAIN, "trainer.steps", "5"], ["without spaces", "trainer.steps=5"]),
        ([*TRAIN, "trainer.steps", "=", "5"], ["without spaces", "trainer.steps=5"]),
        ([*TRAIN, "--trainer.steps=5"], ["without spaces and dashes", ": trainer.steps=5"]),
        ([*TRAIN, "--trainer.steps", "5"], ["without spaces and dashes", ": trainer.steps=5"]),
        ([*TRAIN, "--steps", "5"], ["unexpected argument '--steps'", "trainer.steps=5"]),
        ([*TRAIN, "--learning-rate", "1e-5"], ["trainer.learning_rate=1e-5"]),
        ([*TRAIN, "--fast"], ["unexpected argument '--fast'", "see --help", "trainer.steps=10"]),
        ([*TRAIN, "fast"], ["unexpected argument 'fast'", "key=value"]),
        ([*TRAIN, "trainer.stepz=3"], ["override 'trainer.stepz=3'", "unknown key; did you mean 'steps'?"]),
        ([*TRAIN, "steps=3"], ["steps: unknown key; did you mean 'trainer.steps'?"]),
        ([*TRAIN, "credit.rewards=grpo"], ["'grpo' is a value of credit.advantage"]),
        ([*TRAIN, "steps=3"], ["override 'steps=3'", "unknown key", "trainer"]),
        ([*TRAIN, "trainer.steps="], ["override 'trainer.steps='", "found nothing (null), expected a whole number"]),
        ([*TRAIN, "trainer.steps=ten"], ["found 'ten', expected a whole number"]),
        ([*TRAIN, "trainer.steps.x=1"], ["trainer.steps is", "expected a section"]),
        (["eval", "eval.tasks=5"], ["in place of the configuration", "lightning-rl eval lightning.yaml eval.tasks=5"]),
        (["doctor", "trainer.steps=5"], ["pass its file: lightning-rl doctor CONFIG key=value"]),
        (["doctor", "lightning.yaml", "--tasks", "0"], ["--tasks 0: expected 1 or more"]),
        ([*TRAIN, "--require-improvement", "tasks.eval="], ["--require-improvement needs held-out tasks", "tasks.eval"]),
        ([*TRAIN, "--require-improvement"], ["needs 6 held-out tasks or more, but tasks.eval has 3", "exit with 3"]),
        ([*TRAIN, "--require-improvement", "eval.tasks=2"], ["but eval.tasks selects 2", "no improvement is significant"]),
        (["trace", "lightning.yaml", "--rollout", "1"], ["--rollout is for a run's folder", "use --task"]),
        (["trace", "lightning.yaml", "--task", "nosuch"], ["no task with the id 'nosuch'", "'train0'"]),
        (["trace", "lightning.yaml", "--status", "bad"], ["invalid choice: 'bad'", "failed"]),
        (["trace", "lightning.yaml", "--status", "failed"], ["--status filters", "is a configuration"]),
        (["eval", "lightning.yaml", "--checkpoint", "best"], ["--checkpoint requires a run's folder"]),
        (["eval", "lightning.yaml", "tasks.eval="], ["tasks.eval: missing, but required by this command"]),
        (["export", "runs/latest"], ["required: OUT"]),
        (["export", "runs/latest", "out", "--format", "onnx"], ["invalid choice: 'onnx'", "gguf"]),
        (["serve", "model", "--port", "http"], ["argument --port: found 'http', expected a port from 0 to 65535"]),
        (["runs", "compare"], ["required: RUN"]),
        (["runs", "delete", "x"], ["unexpected argument 'x' for 'runs'"]),
        (["view", "runs", "trainer.steps=1"], ["unexpected argument 'trainer.steps=1' for 'view'"]),
        (["completion", "fish"], ["invalid choice: 'fish'"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)  # fmt: skip
def test_a_wrong_argument_shows_the_right_one(attempt: Try, arguments: list[str], words: list[str]) -> None:
    attempt(arguments, 2, *words)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("lightening.yaml", ["no configuration file at 'lightening.yaml'", "did you mean 'lightning.yaml'?"]),
        ("nowhere/lightning.yaml", ["no configuration file at 'nowhere/lightning.yaml'", "the working directory is"]),
        (
            "my_agent.py",
            ["'my_agent.py' is not a configuration; expected a YAML file; found 'binary.yaml', 'lightning.yaml'"],
        ),
        ("train.jsonl", ["'train.jsonl' is not a configuration"]),
        (".", ["is a folder, expected a YAML file; did you mean 'lightning.yaml'?"]),
        ("run", ["'run' is a run's folder", "--resume", "run/config.yaml"]),
        ("binary.yaml", ["cannot read the configuration 'binary.yaml'", "not UTF-8"]),
    ],
)
def test_a_path_that_is_no_configuration_shows_what_was_found(
    home: Path, attempt: Try, path: str, words: list[str]
) -> None:
    (home / "run").mkdir()
    (home / "run" / "config.yaml").write_text("policy: {model: m}\n")
    (home / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    attempt(["train", path], 2, *words)
