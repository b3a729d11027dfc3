"""Runs that keep their best checkpoint and end early."""

from __future__ import annotations

import itertools
import json
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_core import fit, load_config
from lightning_core.config import dump_config
from lightning_core.errors import ConfigError, RewardError
from lightning_core.loop import evaluate
from lightning_core.observers.progress import SilentProgress
from lightning_core.records.run_folder.checkpoints import best_checkpoint, checkpoints
from lightning_core.records.store import Store
from tests import bandit, warm
from tests.bandit_runs import settings
from tests.tiny_model import make_tiny_model

HELD_OUT = bandit.tasks(2, start=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def config(model: Path, runs: Path, **sections: dict[str, Any]) -> Any:
    base: dict[str, dict[str, Any]] = {
        "tasks": {"eval": None},
        "rollouts": {"tasks_per_step": 2, "group_size": 2},
        "trainer": {"steps": 6, "checkpoint_every": 0, "keep_checkpoints": 1},
        "eval": {"every": 1},
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}
    return load_config(settings(model, runs, **merged))


def scoring(rewards: Sequence[float]) -> Callable[[dict[str, Any]], float]:
    """The bandit, whose held-out reward is ``rewards``, one for each evaluation."""
    evaluations = Counter[str]()

    def solve(task: dict[str, Any]) -> float:
        value = bandit.solve(task)
        if task not in HELD_OUT:
            return value
        evaluations[task["id"]] += 1
        return rewards[evaluations[task["id"]] - 1]

    return solve


class Messages(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def summary(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_patience_ends_a_run_and_the_best_checkpoint_is_kept(model: Path, tmp_path: Path) -> None:
    """Before training 0.1; then 0.9, 0.3 and 0.2, which end the run after step 3; the last evaluation has 0.2 too."""
    own = config(model, tmp_path, trainer={"keep_best": True}, eval={"early_stop": {"patience": 2}})
    progress = Messages()
    fit(scoring([0.1, 0.9, 0.3, 0.2, 0.2]), config=own, eval_tasks=HELD_OUT, progress=progress)
    folder = tmp_path / "run"
    assert [path.name for path in checkpoints(folder)] == ["step-000001", "step-000003"]
    best = best_checkpoint(folder)
    assert best is not None
    assert best.name == "step-000001"
    reason = "the held-out reward has not risen above 0.900 for 2 evaluations (eval.early_stop.patience = 2)"
    assert [text for text in progress.texts if "stopped" in text] == [f"stopped after step 3 of 6: {reason}"]
    shown = [text.split()[3:] for text in progress.texts if text.startswith("held-out reward after")]
    assert shown == [
        ["0", "steps:", "0.100"],
        ["1", "step:", "0.900"],
        ["2", "steps:", "0.300"],
        *[["3", "steps:", "0.200"]] * 2,
    ]
    found = summary(folder)
    assert (found["steps"], found["stopped"], found["best_step"]) == (3, reason, 1)
    assert (found["eval_reward_before"], found["eval_reward_after"]) == (0.1, 0.2)
    with Store(folder / "store.db", read_only=True) as store:
        assert {record.step for record in store.rollouts(phase="eval_after")} == {3}
    # Without the optimizer's state, which only the newest checkpoint has.
    assert evaluate(scoring([0.9]), config=own, folder=folder, tasks=HELD_OUT, checkpoint=best).reward == 0.9


def test_a_new_best_replaces_the_old_one_and_a_stopped_run_stays_stopped(model: Path, tmp_path: Path) -> None:
    rule = {"early_stop": {"reward": 0.8}}
    own = config(model, tmp_path, trainer={"keep_best": True}, eval=rule)
    fit(scoring([0.1, 0.2, 0.3, 0.8, 0.7]), config=own, eval_tasks=HELD_OUT)
    folder = tmp_path / "run"
    assert [path.name for path in checkpoints(folder)] == ["step-000003"]
    again = config(model, tmp_path, trainer={"keep_best": True}, eval=rule, run={"resume": True})
    fit(scoring([0.7]), config=again, eval_tasks=HELD_OUT)
    found = summary(folder)
    assert (found["steps"], found["best_step"]) == (3, 3)
    assert found["stopped"] == "the held-out reward 0.800 reached eval.early_stop.reward = 0.8"


def test_a_budget_of_tokens_ends_a_run(model: Path, tmp_path: Path) -> None:
    """A step samples 4 responses of up to 4 tokens. Evaluations do not count."""
    own = config(model, tmp_path, trainer={"token_budget": 18}, eval={"every": 0})
    progress = Messages()
    result = fit(bandit.solve, config=own, eval_tasks=HELD_OUT, progress=progress)
    spent = list(itertools.accumulate(int(m["tokens_sampled"]) for m in result.metrics))
    assert spent[-1] >= 18 > ([0, *spent])[-2]
    assert result.summary.steps == len(spent) < 6
    assert result.summary.stopped == f"{spent[-1]} tokens were sampled (trainer.token_budget = 18)"
    assert any(text == f"stopped after step {len(spent)} of 6: {result.summary.stopped}" for text in progress.texts)
    again = config(model, tmp_path, trainer={"token_budget": 18}, eval={"every": 0}, run={"resume": True})
    assert fit(bandit.solve, config=again, eval_tasks=HELD_OUT).summary.steps == len(spent)
    more = config(model, tmp_path, trainer={"token_budget": spent[-1] + 1}, eval={"every": 0}, run={"resume": True})
    assert fit(bandit.solve, config=more, eval_tasks=HELD_OUT).summary.steps == len(spent) + 1


def test_a_budget_of_minutes_ends_a_run(model: Path, tmp_path: Path) -> None:
    own = config(model, tmp_path, trainer={"minutes": 1e-9}, eval={"every": 0})
    result = fit(bandit.solve, config=own, eval_tasks=HELD_OUT)
    assert result.summary.steps == 1
    assert (result.summary.stopped or "").endswith("minutes (trainer.minutes = 1e-09)")


def found_evaluations(folder: Path) -> dict[tuple[str, int], int]:
    """The number of rollouts of each phase and step, but those of training."""
    with Store(folder / "store.db", read_only=True) as store:
        return Counter((r.phase, r.step) for r in store.rollouts() if r.phase != "train")


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from lightning_core import fit, load_config
from tests.loop.test_early_end import HELD_OUT, found_evaluations, first_only
number, file = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
config, held_out = load_config(file), 0
def solve(task):
    global held_out
    value = first_only(task)
    held_out += task in HELD_OUT
    if held_out == 4:  # the second rollout of the evaluation after step 1
        while sum(found_evaluations(Path(config.run.dir) / "run").values()) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        time.sleep(60)
    return value
fit(solve, config=config, eval_tasks=HELD_OUT)
"""


def first_only(task: dict[str, Any]) -> float:
    """The bandit. The first held-out task has the reward 1, the other one 0."""
    value = bandit.solve(task)
    return float(task == HELD_OUT[0]) if task in HELD_OUT else value


@pytest.mark.long
@pytest.mark.parametrize(("number", "checkpoint_every"), [(signal.SIGKILL, 1), (signal.SIGINT, 0)])
def test_an_interrupted_evaluation_goes_on_after_a_resume(
    model: Path, tmp_path: Path, number: signal.Signals, checkpoint_every: int
) -> None:
    """Its only rollout has the reward 1; the mean of both held-out tasks, 0.5, does not end the run."""
    sections: dict[str, dict[str, Any]] = {
        "rollouts": {"concurrency": 1},
        "trainer": {"steps": 2, "keep_best": True, "checkpoint_every": checkpoint_every},
        "eval": {"early_stop": {"reward": 0.8}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config(model, tmp_path, **sections)))
    done = warm.run(["-c", PROGRAM, str(int(number)), str(file)])
    assert done.returncode != 0
    folder = tmp_path / "run"
    assert [path.name for path in checkpoints(folder)] == ["step-000001"]
    assert found_evaluations(folder) == {("eval_before", 0): 2, ("eval_unfinished", 1): 1}

    fit(first_only, config=config(model, tmp_path, run={"resume": True}, **sections), eval_tasks=HELD_OUT)
    assert (summary(folder)["steps"], summary(folder)["stopped"], summary(folder)["best_step"]) == (2, None, 1)
    assert found_evaluations(folder) == {("eval_before", 0): 2, ("eval", 1): 2, ("eval_after", 2): 2}


def test_the_last_weights_are_saved_before_they_are_evaluated(model: Path, tmp_path: Path) -> None:
    saved: list[list[str]] = []

    def solve(task: dict[str, Any]) -> float:
        if task in HELD_OUT:
            saved.append([path.name for path in checkpoints(tmp_path / "run")])
        return bandit.solve(task)

    fit(solve, config=config(model, tmp_path, trainer={"steps": 1, "checkpoint_every": 0}), eval_tasks=HELD_OUT)
    assert saved[-1] == ["step-000001"]


def test_a_finished_evaluation_is_not_repeated(model: Path, tmp_path: Path) -> None:
    """The run fails in its second step, is resumed, resumed when it is finished, and resumed with more steps."""
    training = itertools.count()

    def solve(task: dict[str, Any]) -> float | None:
        value = bandit.solve(task)
        return value if task in HELD_OUT or next(training) < 4 else None

    with pytest.raises(RewardError):
        fit(solve, config=config(model, tmp_path, trainer={"steps": 2}), eval_tasks=HELD_OUT)
    folder, expected = tmp_path / "run", {("eval_before", 0): 2, ("eval", 1): 2}
    assert found_evaluations(folder) == expected

    def evaluations_of(steps: int) -> int:
        """The number of evaluations in the resumed run."""
        ran = itertools.count()

        def solve(task: dict[str, Any]) -> float:
            if task in HELD_OUT:
                next(ran)
            return bandit.solve(task)

        resumed = config(model, tmp_path, trainer={"steps": steps}, run={"resume": True})
        fit(solve, config=resumed, eval_tasks=HELD_OUT)
        return next(ran) // len(HELD_OUT)

    assert evaluations_of(2) == 1
    assert found_evaluations(folder) == expected | {("eval_after", 2): 2}
    before = summary(folder)
    assert evaluations_of(2) == 0
    assert {**before, "wall_seconds": 0} == {**summary(folder), "wall_seconds": 0}
    assert evaluations_of(4) == 2
    assert found_evaluations(folder) == expected | {("eval", 2): 2, ("eval", 3): 2, ("eval_after", 4): 2}


def test_an_evaluation_of_the_run_by_the_user_changes_nothing_in_it(model: Path, tmp_path: Path) -> None:
    """It has the reward 1 after step 2, where the run's own has 0.1."""
    sections: dict[str, dict[str, Any]] = {
        "trainer": {"steps": 2, "keep_best": True},
        "eval": {"early_stop": {"reward": 0.8}},
    }
    result = fit(scoring([0.1, 0.1, 0.1]), config=config(model, tmp_path, **sections), eval_tasks=HELD_OUT)
    found = evaluate(
        scoring([1.0]),
        config=config(model, tmp_path, **sections),
        folder=result.folder,
        checkpoint=result.checkpoint,
        tasks=HELD_OUT,
    )
    assert found.reward == 1.0
    own = {("eval_before", 0): 2, ("eval", 1): 2, ("eval_after", 2): 2}
    assert found_evaluations(result.folder) == own | {("eval_manual", 2): 2}
    sections["trainer"]["steps"] = 3
    more = config(model, tmp_path, run={"resume": True}, **sections)
    fit(scoring([0.2]), config=more, eval_tasks=HELD_OUT)
    assert (summary(result.folder)["stopped"], summary(result.folder)["best_step"]) == (None, 3)


def test_without_held_out_tasks_both_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="require held-out tasks"):
        fit(bandit.solve, config=config(model, tmp_path, trainer={"keep_best": True}))
