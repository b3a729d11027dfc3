"""``lightning-rl init``: each template is complete, its test passes, and it trains."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from lightning_core.config import load_config
from lightning_core.rollouts.tasks import held_out_tasks, shared_tasks, training_tasks
from lightning_core.tools.cli.init import TEMPLATES, template_files
from lightning_core.tools.cli.main import main
from tests import warm
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def environment() -> dict[str, str]:
    """With the path of this interpreter."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}


def need(template: str) -> None:
    for package in TEMPLATES[template].imports:
        pytest.importorskip(package)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_test_of_each_template_passes(template: str, folder: Path, environment: dict[str, str]) -> None:
    need(template)
    assert main(["init", template]) == 0
    # Assertions in pytest's own plugins, which are imported already, are not rewritten.
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    done = warm.run(command, env=environment)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "warning" not in done.stdout


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_configuration_is_valid_and_no_held_out_task_is_trained_on(
    template: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", template, "mine"]) == 0
    assert {path.relative_to("mine") for path in Path("mine").rglob("*") if path.is_file()} == set(
        template_files(template)
    )
    monkeypatch.chdir("mine")
    config = load_config("lightning.yaml", needs=("agent", "tasks.train", "tasks.eval"))
    train, held_out = training_tasks(config), held_out_tasks(config)
    assert (len(train), len(held_out)) == (240, 100)
    assert shared_tasks(train, held_out) == {}
    assert not {task["order"] for task in train} & {task["order"] for task in held_out}
    assert all(task["message"].count(task["order"]) == 1 for task in (*train, *held_out))


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", [pytest.param(t, marks=() if t in ("plain", "langgraph") else pytest.mark.long) for t in TEMPLATES]
)
def test_each_template_trains_as_it_is(template: str, folder: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("torch")
    need(template)
    model = make_tiny_model(folder / "model")
    assert main(["init", template, "mine"]) == 0
    tiny = [f"policy.model={model}", "policy.train_layers=1", "policy.max_context=2048", "eval.tasks=2"]
    steps = ["trainer.steps=1", "rollouts.tasks_per_step=2", "rollouts.group_size=2"]
    command = ["-m", "lightning_core.tools.cli", "train", *tiny, *steps]
    done = warm.run(command, cwd=folder / "mine", env=environment)
    assert re.search(r"8 +answered +policy \(trained\)", done.stdout), done.stdout + done.stderr
    summary = json.loads((folder / "mine" / "runs" / "latest" / "summary.json").read_text())
    assert (summary["steps"], summary["rollouts"], summary["eval_tasks"]) == (1, 4, 2)
    assert summary["tokens_sampled"] > 0


def test_the_default_is_the_template_without_a_framework(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    assert "@trainable" in Path("agent.py").read_text()
    shown = capsys.readouterr().out
    assert shown.startswith("wrote agent.py, eval.jsonl, lightning.yaml, test_agent.py, train.jsonl\n\nnext:\n")
    commands = [line.strip() for line in shown.splitlines() if line.startswith("  ")]
    assert [command.partition("  ")[0] for command in commands][-4:] == [
        "python -m pytest",
        "lightning-rl doctor lightning.yaml",
        "lightning-rl train",
        "lightning-rl view",
    ]
    assert not any(command.startswith("cd ") for command in commands)


def test_no_file_is_overwritten_and_then_none_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.jsonl").write_text("mine")
    Path("agent.py").symlink_to("nowhere.py")
    assert main(["init", "langgraph"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "lightning-rl: agent.py, train.jsonl exist: nothing was written. "
        "Choose another folder, such as: lightning-rl init langgraph my-agent\n"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["agent.py", "train.jsonl"]
    assert Path("train.jsonl").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert main(["init", "plain", "file/agent"]) == 2
    assert capsys.readouterr().err == (
        "lightning-rl: cannot write the template: Not a directory ('file/agent'). Choose another folder\n"
    )


def test_a_missing_framework_is_named_with_its_extra_and_the_files_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "langgraph", None)
    assert main(["init", "langgraph", "my agent"]) == 0
    assert "\n  cd 'my agent'\n  pip install \"lightning-rl[langgraph,torch]\"\n" in capsys.readouterr().out
    assert Path("my agent", "agent.py").is_file()


def test_a_name_that_is_not_a_template_lists_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "my-agent"]) == 2
    assert capsys.readouterr().err == (
        "lightning-rl: 'my-agent' is not a template: expected plain, langgraph, langchain, openai-agents, autogen, command. "
        "For a folder of this name: lightning-rl init plain my-agent\n"
    )
    assert list(folder.iterdir()) == []


def test_a_misspelt_template_suggests_the_nearest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "langgrph"]) == 2
    assert capsys.readouterr().err.endswith("autogen, command. Did you mean 'langgraph'?\n")
    assert list(folder.iterdir()) == []


def test_the_quickstart_shows_the_agent_as_it_is_written() -> None:
    agent = template_files("plain")[Path("agent.py")].read_text(encoding="utf-8")
    assert f"```python\n{agent}```\n" in (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


def test_help_describes_each_template_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["init", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, template in TEMPLATES.items():
        assert f"  {name:13}  {template.description}" in lines


@pytest.mark.parametrize("options", [[], ["--resume"], ["trainer.steps=2"]])
def test_train_reads_lightning_yaml_if_no_configuration_is_named(
    folder: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *options]) == 2
    assert capsys.readouterr().err == (
        f"lightning-rl: no lightning.yaml in {str(folder)!r}: pass the path of a configuration, "
        "or write a new one: lightning-rl init\n"
    )
    Path("lightning.yaml").write_text("policy: {model: m}\nagent: a:b\n")
    assert main(["train", *options]) == 2
    assert "lightning.yaml: tasks.train: missing" in capsys.readouterr().err


def test_options_and_settings_may_come_before_the_configuration(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", "trainer.steps=2", "other.yaml"]) == 2
    assert "lightning-rl: no configuration file at 'other.yaml'" in capsys.readouterr().err
    assert main(["doctor", "--no-model", "other.yaml"]) == 2
    assert "lightning-rl: no configuration file at 'other.yaml'" in capsys.readouterr().err
