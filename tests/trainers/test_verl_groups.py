"""The log of verl's groups: what is removed from the store if some run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_core.records.store import Phase, RolloutRecord, Store
from lightning_core.trainers.verl.group_log import GroupLog


def add(store: Store, task: str, rollout: str, *, step: int = 1, phase: Phase = "train") -> None:
    """A rollout without calls."""
    record = RolloutRecord(
        id=rollout * 32,
        step=step,
        task_id=task,
        phase=phase,
        attempt=0,
        status="ok",
        reward=1.0,
        error=None,
        version=0,
        started_ns=1,
        ended_ns=2,
    )
    store.add_rollout(record, [])


def left(store: Store) -> set[str]:
    return {record.id[0] for record in store.rollouts()}


def test_a_group_that_runs_again_is_removed_and_another_of_its_task_stays(tmp_path: Path) -> None:
    log = GroupLog(tmp_path)
    with Store(tmp_path / "store.db") as store:
        for uid, task, rollout, step in [
            ("u", "t", "a", 1),
            ("v", "t", "b", 1),
            ("w", "s", "c", 1),
            ("x", "s", "d", 2),
        ]:
            log.begin(uid, task, step)
            add(store, task, rollout, step=step)
            if uid != "w":
                store.add_step(step, log.publish(step, {uid: task}, {uid: [rollout * 32]}, {"rows": 1}))
        add(store, "t", "e", phase="eval")
        GroupLog(tmp_path).drop(["v", "w", "x"], store)
        assert left(store) == {"a", "e"}
        assert store.steps() == {1: {"rows": 1}, 2: {"rows": 0}}
        # In their next step; the log is read again as after a kill.
        assert GroupLog(tmp_path).publish(3, {"v": "t"}, {"v": ["f" * 32]}, {"rows": 1}) == {"rows": 1}
        GroupLog(tmp_path).drop(["v"], store)
        assert left(store) == {"a", "e"}


@pytest.mark.parametrize("again", [["u"], ["u", "v"]])
def test_groups_that_were_published_together_keep_the_counts_while_one_stays(tmp_path: Path, again: list[str]) -> None:
    log = GroupLog(tmp_path)
    with Store(tmp_path / "store.db") as store:
        add(store, "t", "a")
        add(store, "s", "b")
        rollouts = {"u": ["a" * 32], "v": ["b" * 32]}
        store.add_step(1, log.publish(1, {"u": "t", "v": "s"}, rollouts, {"rows": 2}))
        log.drop(again, store)
        assert left(store) == ({"b"} if again == ["u"] else set())
        assert store.steps() == {1: {"rows": 2 if again == ["u"] else 0}}


def test_steps_after_the_checkpoint_and_an_incomplete_line_are_not_read(tmp_path: Path) -> None:
    log = GroupLog(tmp_path)
    for step in (1, 2):
        log.publish(step, {"u": "t"}, {"u": ["a" * 32]}, {"rows": step})
    with (tmp_path / "verl.groups.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1, "ta')
    GroupLog(tmp_path).rewind(1)
    again = GroupLog(tmp_path)
    assert again.publish(2, {}, {}, {"rows": 5}) == {"rows": 5}
    assert again.publish(1, {}, {}, {"rows": 5}) == {"rows": 6}
