"""Budgets and options of ``lightning-rl improve``. tests/paid_model has the whole command."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lightning_core.backends.scripted import ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.config import load_config
from lightning_core.endpoint.server import Routing
from lightning_core.records.statistics.prices import Prices
from lightning_core.tools.cli.main import main
from lightning_core.tools.improve.pipeline import ImprovementLimits, ImprovementPipeline
from lightning_core.tools.improve.stage import Stage, StageFailed
from lightning_core.tools.runs.improvement import read_improvement
from lightning_core.tools.serving import ServingEndpoint
from tests.bandit_runs import settings
from tests.tiny_model import make_tiny_model
from tests.warm import Warm


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration whose provider solves every task."""
    backend = ScriptedBackend(lambda prompt: "abcd", models=["large"])
    monkeypatch.setenv("PROVIDER_KEY", "any")
    with ServingEndpoint(backend, Chat(backend.tokenizer), routing=Routing()) as provider:
        own: dict[str, Any] = settings(
            make_tiny_model(tmp_path / "model"),
            tmp_path / "runs",
            trainer={"steps": 4, "checkpoint_every": 0},
            agents={"train": ["talker"]},
        )
        own["policy"]["upstream"] = {"base_url": provider.url, "api_key_env": "PROVIDER_KEY"}
        path = tmp_path / "c.yaml"
        path.write_text(yaml.safe_dump(own))
        (tmp_path / "prices.yaml").write_text("large: {input: 10, output: 10}\n")
        yield path


def started(command: Sequence[str]) -> Warm:
    """The process of a stage."""
    program, *arguments = command
    assert program == sys.executable
    return Warm(arguments, merged=True)


def report(runs: Path) -> str:
    (found,) = runs.glob("improve-*/report.md")
    return found.read_text()


def rewards_of(text: str) -> dict[str, float]:
    """The held-out reward of each stage."""
    rows = re.findall(r"^\| ([^|]+?) \| (\d\.\d+) ", text, re.MULTILINE)
    return {name: float(reward) for name, reward in rows}


def test_money_and_time_leave_stages_out(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_core.tools.improve.stage.subprocess", SimpleNamespace(Popen=started))
    prices = str(tmp_path / "prices.yaml")
    budget = ["--usd", "0.000001", "--minutes", "0.001", "--prices", prices]
    assert main(["improve", str(config), "--model", "large", "--teach", "8", *budget]) == 0
    text = report(tmp_path / "runs")
    assert set(rewards_of(text)) == {"provider (large)", "policy"}
    for stage in ("prompts", "warm start", "train"):
        assert f"- {stage}: left out, the time is spent (--minutes 0.001)" in text
    (folder,) = (tmp_path / "runs").glob("improve-*")
    found = read_improvement(folder)
    assert (
        found.command
        == f"lightning-rl improve {config} --model large --prices {prices} --minutes 0.001 --usd 1e-06 --teach 8"
    )
    assert found.provider is not None
    assert found.provider.result is not None
    assert (found.provider.result.reward, found.state(folder), found.usd > 0) == (1.0, "finished", True)
    states = [(entry.name, entry.state) for entry in found.path("finished")]
    assert states[:2] == [("provider", "done"), ("policy", "done")]
    assert states[2:] == [("prompts", "left out"), ("warm start", "left out"), ("train", "left out")]
    found.write(folder)
    assert read_improvement(folder) == found


@pytest.mark.parametrize(
    ("rewards", "rounds", "best", "end"),
    [
        ([0.3, 0.4, 0.45], 3, 2, "ended with the budget; gain +0.250"),
        ([0.3, 0.3, 0.9], 2, 1, "ended, the last round gained nothing: +0.000"),
        ([0.45, 0.3, 0.9], 2, 0, "ended, the last round gained nothing: -0.150"),
        ([0.9, 1.0, 1.0], 1, 0, "ended, the policy is better than large: +0.400"),
    ],
)
def test_training_goes_on_in_rounds_as_long_as_it_gains(
    rewards: Sequence[float], rounds: int, best: int, end: str, tmp_path: Path
) -> None:
    """The provider has 0.5, the policy 0.2; a round resumes the run of the one before."""
    left = iter(rewards)

    def run(name: str, words: Sequence[str], runs: Path, prices: Prices, *, say: Callable[[str], None]) -> Stage:
        reward = {"provider": 0.5, "policy": 0.2}.get(name)
        value = next(left) if reward is None else reward
        tasks = {(f"t{i}", ""): value for i in range(40)}
        return Stage(name=name, words=words, folder=runs / "run", minutes=0.001, result=None, usd=None, rewards=tasks)

    pipeline = ImprovementPipeline(
        config=load_config({"policy": {"model": "m"}}),
        file="c.yaml",
        overrides=(),
        folder=tmp_path,
        limits=ImprovementLimits(minutes=10),
        prices=Prices(),
        model="large",
        skip=frozenset({"prompts", "warm start"}),
        say=lambda _: None,
        run_command=run,
    )
    pipeline.run()
    trained = [stage for stage in pipeline.stages if stage.name.startswith("train")]
    assert len(trained) == rounds
    assert ["--resume" in stage.words for stage in trained] == [False, True, True][:rounds]
    assert pipeline.notes[-2].stage == trained[-1].name
    assert pipeline.notes[-2].text.startswith(end)
    assert pipeline.notes[-1].text.startswith("used, its reward is higher")
    assert pipeline.best is trained[best]


def test_a_round_turns_off_what_needs_evaluations_of_its_own(tmp_path: Path) -> None:
    evaluated = {"eval": {"every": 5, "early_stop": {"reward": 1.0}}, "trainer": {"keep_best": True}}
    sections = {**evaluated, "monitors": {"stop": ["no_gradient", "reward_hacking"]}}
    settings: list[str] = []

    def run(name: str, words: Sequence[str], runs: Path, prices: Prices, *, say: Callable[[str], None]) -> Stage:
        settings[:] = [word for word in words if "=" in word]
        tasks = {(f"t{i}", ""): 0.2 for i in range(40)}
        return Stage(name=name, words=words, folder=runs / "run", minutes=0.001, result=None, usd=None, rewards=tasks)

    pipeline = ImprovementPipeline(
        config=load_config({"policy": {"model": "m"}, **sections}),
        file="c.yaml",
        overrides=(),
        folder=tmp_path,
        limits=ImprovementLimits(minutes=10),
        prices=Prices(),
        skip=frozenset({"prompts", "warm start"}),
        say=lambda _: None,
        run_command=run,
    )
    pipeline.run()
    trained = load_config({"policy": {"model": "m"}, **sections}, settings)
    assert (trained.eval.every, trained.trainer.keep_best, trained.monitors.stop) == (0, False, ("no_gradient",))


@pytest.mark.parametrize(("reward", "used"), [(0.6, True), (0.1, False)])
def test_prompts_are_used_if_an_evaluation_of_their_own_is_better(reward: float, used: bool, tmp_path: Path) -> None:
    """The search's run has rollouts of training tasks, which prove nothing."""

    def run(name: str, words: Sequence[str], runs: Path, prices: Prices, *, say: Callable[[str], None]) -> Stage:
        if name == "prompts":
            (runs / "prompts.yaml").write_text("{}")
        value = {"policy": 0.2, "prompts": 0.9, "prompts, evaluated": reward, "train": 1.0}[name]
        tasks = {(f"t{i}", ""): value for i in range(40)}
        return Stage(name=name, words=words, folder=runs / "run", minutes=0.001, result=None, usd=None, rewards=tasks)

    pipeline = ImprovementPipeline(
        config=load_config({"policy": {"model": "m"}}),
        file="c.yaml",
        overrides=(),
        folder=tmp_path,
        limits=ImprovementLimits(),
        prices=Prices(),
        say=lambda _: None,
        run_command=run,
    )
    pipeline.run()
    setting = f"prompts={tmp_path / 'prompts.yaml'}"
    assert [(stage.name, setting in stage.words) for stage in pipeline.stages] == [
        ("policy", False),
        ("prompts", False),
        ("prompts, evaluated", True),
        ("train", used),
    ]


@pytest.mark.parametrize("code", [1, 2])
def test_a_search_of_prompts_that_is_refused_is_left_out_and_one_that_fails_ends(code: int, tmp_path: Path) -> None:
    def run(name: str, words: Sequence[str], runs: Path, prices: Prices, *, say: Callable[[str], None]) -> Stage:
        if name == "prompts":
            raise StageFailed("the stage 'prompts' failed", code)
        return Stage(name=name, words=words, folder=runs / "run", minutes=0.001, result=None, usd=None)

    pipeline = ImprovementPipeline(
        config=load_config({"policy": {"model": "m"}}),
        file="c.yaml",
        overrides=(),
        folder=tmp_path,
        limits=ImprovementLimits(),
        prices=Prices(),
        say=lambda _: None,
        run_command=run,
    )
    with pytest.raises(StageFailed) if code == 1 else nullcontext():
        pipeline.run()
    assert any(note.stage == "prompts" and note.text.startswith("left out") for note in pipeline.notes) == (code == 2)


def test_only_the_teacher_s_run_is_read_as_an_evaluation(tmp_path: Path) -> None:
    """Those of --traces are read as rollouts of training: their evaluations may be of the held-out tasks."""

    def run(name: str, words: Sequence[str], runs: Path, prices: Prices, *, say: Callable[[str], None]) -> Stage:
        folder = tmp_path / name.replace(" ", "-")
        checkpoint = folder / "checkpoints" / "step-000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
        return Stage(name=name, words=words, folder=folder, minutes=0.001, result=None, usd=None)

    pipeline = ImprovementPipeline(
        config=load_config({"policy": {"model": "m"}, "tasks": {"train": "t.jsonl"}}),
        file="c.yaml",
        overrides=(),
        folder=tmp_path,
        limits=ImprovementLimits(),
        prices=Prices(),
        model="large",
        teach=4,
        traces=["runs/earlier"],
        skip=frozenset({"prompts", "train"}),
        say=lambda _: None,
        run_command=run,
    )
    pipeline.run()
    (learned,) = [stage.words for stage in pipeline.stages if stage.name == "warm start"]
    assert list(learned[1:3]) == ["runs/earlier", f"{tmp_path / 'teacher'}:eval_manual"]
    assert "--phase" not in learned


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--teach", "3"], "--teach requires --model"),
        (["--usd", "1"], "pass --model too"),
        (["--usd", "1", "--model", "large"], "--usd requires prices"),
        (["eval.tasks=5"], "found 5, expected 6 or more"),
        (["tasks.eval=nosuch.jsonl"], "nosuch.jsonl"),
        (["--minutes", "0"], "--minutes is 0; expected a number above 0"),
        (["--traces", "nosuch"], "--traces 'nosuch' does not exist"),
        (["--skip", "rl"], "--skip rl: expected one of prompts, warm, train"),
    ],
)
def test_options_that_do_not_fit(
    words: list[str], expected: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["improve", str(config), *words]) == 2
    assert expected in capsys.readouterr().err


def test_traces_of_a_missing_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = config.parent / "kept"
    (runs / "one").mkdir(parents=True)
    (runs / "one" / "config.yaml").touch()
    assert main(["improve", str(config), "--traces", str(runs / "typo")]) == 2
    assert f"or traces; `lightning-rl runs {runs}` lists the runs in {str(runs)!r}" in capsys.readouterr().err
