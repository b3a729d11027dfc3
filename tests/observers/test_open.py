"""The observers of a run together: what is shown in which order, and which reason to stop counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_core.config import Config, load_config
from lightning_core.observers import open as listed
from lightning_core.observers.open import make_display, make_observers
from lightning_core.observers.progress import SilentProgress
from lightning_core.records.observer import Observer, Observers
from lightning_core.records.results import Evaluation
from lightning_core.records.steps import StepLog
from lightning_core.records.store import Phase, Store
from tests.records.test_store import record

EQUAL = {"calls": 8, "calls_credited": 0, "groups": 2, "reward": 0.5, "tokens_sampled": 6}
STOPS: Mapping[str, Any] = {
    "trainer": {"steps": 6, "token_budget": 10},
    "eval": {"every": 1, "early_stop": {"reward": 0.5}},
    "monitors": {"stop": ["no_gradient"], "args": {"no_gradient": {"steps": 2}}},
}


class Lines(SilentProgress):
    """The lines that a user sees, shortened."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        self.shown.append(
            f"step {step} of {total_steps}, monitors {sum(key.startswith('monitor/') for key in metrics)}"
        )

    def message(self, text: str) -> None:
        self.shown.append(text.partition(": ")[0])

    def close(self) -> None:
        self.shown.append("closed")


def config(**sections: Any) -> Config:
    return load_config({"policy": {"model": "m"}, **STOPS, **sections})


def evaluate(observers: Observers, store: Store, step: int, reward: float, *, phase: Phase = "eval") -> None:
    store.add_rollout(record(f"{step:032x}", step=step, phase=phase, reward=reward), [])
    observers.on_evaluation(step, phase, Evaluation(rewards={"t1": [reward]}, left_out=0))


def test_lines_are_shown_in_order_and_held_out_rewards_end_a_run_before_monitors_and_these_before_tokens(
    tmp_path: Path,
) -> None:
    progress, reasons = Lines(), list[str]()
    observers = make_observers(config(), progress)
    with Store(tmp_path / "store.db") as store, observers.watching(config(), tmp_path):
        log = StepLog(tmp_path, store, observers, after=0)
        evaluate(observers, store, 0, 0.0, phase="eval_before")
        log.add(1, EQUAL)
        assert observers.stop_reason() is None
        log.add(2, {**EQUAL, "calls_credited": 4})
        reasons.append(str(observers.stop_reason()))
        log.add(3, EQUAL)
        log.add(4, EQUAL)
        reasons.append(str(observers.stop_reason()))
        evaluate(observers, store, 4, 0.75)
        reasons.append(str(observers.stop_reason()))
        evaluate(observers, store, 5, 0.25, phase="eval_manual")
    assert progress.shown == [
        "held-out reward after 0 steps",
        "step 1 of 2, monitors 0",
        "step 2 of 2, monitors 0",
        "step 3 of 3, monitors 0",
        "step 4 of 4, monitors 1",
        "monitor no_gradient",
        "held-out reward after 4 steps",
    ], "a progress that is passed is not closed"
    assert [reason.partition(":")[0] for reason in reasons] == [
        "12 tokens were sampled (trainer.token_budget = 10)",
        "monitor no_gradient",
        "the held-out reward 0.750 reached eval.early_stop.reward = 0.5",
    ]


def test_an_observer_is_a_class_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sleepy(Observer):
        def __init__(self, config: Config) -> None:
            self.after = config.trainer.steps - 4

        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            self.after -= 1

        def stop_reason(self) -> str | None:
            return None if self.after else "it is late"

    monkeypatch.setattr(listed, "OBSERVERS", (*listed.OBSERVERS, Sleepy))
    observers, display = make_observers(config(), False), make_display(config(), False)
    with (
        Store(tmp_path / "store.db") as store,
        observers.watching(config(), tmp_path),
        display.watching(config(), tmp_path),
    ):
        log = StepLog(tmp_path, store, observers, after=0)
        log.add(1, {"reward": 0.5})
        assert observers.stop_reason() is None
        log.add(2, {"reward": 0.5})
        assert observers.stop_reason() == "it is late"
        assert display.stop_reason() is None
