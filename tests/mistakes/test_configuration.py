"""Wrong configurations at the command: exit code 2, the line, what was found and what was expected. Combinations are in `tests/config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.conftest import CONFIG
from tests.mistakes.try_command import Try


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("trainer: {steps: 1}", "trainer: {steps: 1", ["lightning.yaml:", "not valid YAML"]),
        ("trainer: {steps: 1}", "trainer:\n\tsteps: 1", ["lightning.yaml:6", "not valid YAML", "'\\t'"]),
        ("trainer: {steps: 1}", "trainer:\n  steps: 1\n   name: torch", ["lightning.yaml:", "not valid YAML"]),
        ("agent: my_agent:solve", "agent:my_agent:solve", ["lightning.yaml:", "not valid YAML"]),
        ("trainer: {steps: 1}", "trainer: 5", ["lightning.yaml:5: trainer: found 5, expected a section with keys below it"]),
        ("trainer: {steps: 1}", "training: {steps: 1}", ["training: unknown key; did you mean 'trainer'?"]),
        ("steps: 1", "step: 1", ["trainer.step: unknown key; did you mean 'steps'?"]),
        ("model: ./model", "model: gpt-4o-mini", ["found 'gpt-4o-mini', expected a model with open weights", "policy.upstream"]),
        ("model: ./model", "model: anthropic/claude-sonnet-4", ["found 'anthropic/claude-sonnet-4', expected a model with open weights"]),
        ("steps: 1", "steps: 1.5", ["trainer.steps: found 1.5, expected a whole number"]),
        ("steps: 1", "steps: -1", ["trainer.steps: found -1, expected"]),
        ("steps: 1", "steps: 1, learning_rate: -1.0e-5", ["trainer.learning_rate: found -1e-05, expected greater than 0"]),
        ("steps: 1", "steps: 1, learning_rate: .nan", ["trainer.learning_rate"]),
        ("steps: 1", "steps: 1, name: pytorch", ["trainer.name: found 'pytorch', expected 'torch' or 'verl'"]),
        ("group_size: 2", "group_size: 2, timeout_seconds: 0", ["rollouts.timeout_seconds: found 0"]),
        ("executor: thread", "executor: docker", ["rollouts.executor: found 'docker', expected 'auto'"]),
        ("policy: {model: ./model}", "", ["policy: missing, but required"]),
        ("policy: {model: ./model}", "policy: ./model", ["policy: found './model', expected a section"]),
        ("policy: {model: ./model}", "policy: {name: ./model}", ["policy.model: missing", "policy.name: unknown key"]),
        ("./model}", "./model, device: gpu}", ["policy.device: found 'gpu', expected 'auto', 'cpu' or 'cuda'"]),
        ("./model}", "./model, upstream: {base_url: localhost:8000}}", ["policy.upstream.base_url: found 'localhost:8000'"]),
        ("./model}", "./model, max_context: 4}", ["rollouts.max_tokens: found 6, expected less than policy.max_context = 4"]),
        ("agent: my_agent:solve", "agent: [my_agent:solve]", ["agent: found ['my_agent:solve'], expected a string"]),
        ("agent: my_agent:solve", "agents: my_agent:solve", ["agents: found 'my_agent:solve'", "agent: missing"]),
        ("agent: my_agent:solve", "agent: my_agent:solve\nagents: {train: 5}", ["agents.train", "found 5"]),
        ("agent: my_agent:solve", "agent: my_agent:solve\nrun: {report_to: [wandbb]}", ["run.report_to", "found 'wandbb'", "wandb"]),
        ("agent: my_agent:solve", "agent: my_agent:solve\neval: {every: 5, tasks: 0}", ["eval.tasks: found 0, expected"]),
        ("agent: my_agent:solve", "agent: {command: python solve.py}", ["agent.command", "found 'python solve.py'"]),
        ("./model}", "$NO_SUCH/model}", ["policy.model: found '$NO_SUCH/model', but $NO_SUCH cannot be expanded"]),
        ("./model}", "~no-such-user/model}", ["policy.model", "but ~no-such-user cannot be expanded"]),
        ("train: train.jsonl", "train: '${NO_SUCH}/a.jsonl'", ["tasks.train.source", "${NO_SUCH} cannot be expanded: set the variable"]),
        ("agent: my_agent:solve", "agent: my_agent:solve\nrun: {dir: $NO_SUCH/runs}", ["run.dir", "$NO_SUCH cannot be expanded"]),
        ("group_size: 2,", "group_size: 2, <<: 5,", ["lightning.yaml:4: not valid YAML: expected a mapping or list of mappings"]),
        ("tasks: {train: train.jsonl,", "tasks: {", ["tasks.train: missing, but required by this command"]),
        ("train: train.jsonl", "train: train.csv", ["tasks.train.source: found 'train.csv'", ".jsonl, .json, .parquet"]),
        ("train: train.jsonl", "train: {path: train.jsonl}", ["tasks.train.source: missing", "tasks.train.path: unknown key"]),
    ],
)  # fmt: skip
def test_a_wrong_setting_shows_its_line_and_what_was_expected(
    home: Path, attempt: Try, old: str, new: str, words: list[str]
) -> None:
    assert old in CONFIG
    (home / "lightning.yaml").write_text(CONFIG.replace(old, new))
    attempt(["train", "lightning.yaml"], 2, *words)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "- agent: my_agent:solve\n", "solve"])
def test_a_file_without_sections_is_refused(home: Path, attempt: Try, text: str) -> None:
    (home / "lightning.yaml").write_text(text)
    attempt(
        ["train", "lightning.yaml"], 2, "lightning.yaml", "policy" if text[:1] in ("", "#") else "expected a mapping"
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("[nosuchprogram]", ["there is no program 'nosuchprogram' on this machine; install it"]),
        ("[python, '{prompt}']", ["found {prompt} in the command, expected {task[prompt]}"]),
        ("[python, '{task[promt]}']", ["there is no field 'promt'; it has 'id', 'prompt'"]),
    ],
)
def test_a_wrong_command_is_named(home: Path, attempt: Try, command: str, words: list[str]) -> None:
    (home / "lightning.yaml").write_text(
        CONFIG.replace("agent: my_agent:solve", f"agent: {{command: {command}}}").replace(", executor: thread", "")
    )
    attempt(["train", "lightning.yaml"], 2, *words)


def test_a_mapping_without_a_space_is_not_taken_for_nothing(attempt: Try) -> None:
    attempt(["train", "lightning.yaml", "agents.frozen={reply:base}"], 2, "write a space after the colon: reply: base")
