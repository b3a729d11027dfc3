"""The figures of docs/evidence.md: their arithmetic, and that the page is up to date."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_core import load_config
from lightning_core.rollouts.tasks import held_out_tasks, training_tasks
from tests.bench.learning import records
from tests.bench.learning.__main__ import RESULTS, is_current, wanted
from tests.bench.learning.records import UNTRAINED, WARM, Record
from tests.bench.learning.report import PAGE, block, update
from tests.bench.learning.statistics import (
    held_out_matrix,
    mean_curve,
    mean_over_tokens,
    over_seeds_and_tasks,
    smoothed,
    tokens_to_reach,
)
from tests.bench.learning.studies import (
    DEMONSTRATED_MATH,
    DEMONSTRATED_SPIDER,
    ROOT,
    STUDIES,
    configured,
    located,
    settings_digest,
    warm_digest,
)
from tests.examples.data_sets import data_set

DOCS = Path(__file__).parents[2] / "docs"
NAME, STUDY = next(iter(STUDIES.items()))


def record(arm: str = STUDY.baseline, seed: int = 0, *, gain: float = 0.0) -> Record:
    return Record(
        study=NAME,
        arm=arm,
        seed=seed,
        settings=settings_digest(STUDY, arm),
        commit="c",
        cpu="a CPU",
        date="2026-11-24",
        tokens=[100, 300, 100],
        rewards=[0.25, 0.5 + gain, 1.0],
        attempts=[64, 128, 64],
        rollouts=[64, 128, 64],
        seconds=[1.0, 2.0, 3.0],
        held_out={"a": 0.0, "b": 1.0, "c": gain},
    )


def test_a_curve_is_smoothed_over_two_steps() -> None:
    found = smoothed(record())
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx([(0.25 * 64 + 0.5 * 128) / 192, (0.5 * 128 + 1.0 * 64) / 192])
    assert smoothed(replace(record(), attempts=[32, 64, 32])) == pytest.approx(found, nan_ok=True)
    assert smoothed(replace(record(), rewards=[], attempts=[])) == []


def test_tokens_to_reach_a_reward() -> None:
    assert tokens_to_reach(record(), 0.4) == 400
    assert tokens_to_reach(record(), 0.6) == 500
    assert tokens_to_reach(record(), 0.7) is None
    assert mean_over_tokens(record()) == pytest.approx((0.25 * 100 + 0.5 * 300 + 1.0 * 100) / 500)


def test_the_interval_covers_seeds_and_tasks() -> None:
    """Rewards that differ between seeds only, and between tasks only, have the spread of that factor."""
    by_seed = np.repeat([[0.0], [0.5], [1.0]] * 4, 50, axis=1)
    by_task = np.repeat([[0.0, 0.5, 1.0] * 20], 12, axis=0)
    t975_of_11 = 2.201
    for values, rewards in ((by_seed[:, 0], by_seed), (by_task[0], by_task)):
        found = over_seeds_and_tasks(rewards)
        assert found.mean == pytest.approx(0.5)
        expected = t975_of_11 * values.std(ddof=1) / len(values) ** 0.5
        assert found.high - found.low == pytest.approx(2 * expected, rel=0.1)
    assert over_seeds_and_tasks(by_task[:5]).interval is None


def test_only_tasks_that_all_runs_have_are_compared() -> None:
    short = replace(record(), held_out={"a": 1.0, "c": 0.5})
    assert held_out_matrix([record(), short]).tolist() == [[0.0, 0.0], [1.0, 0.5]]


def test_curves_are_averaged_where_all_are_defined() -> None:
    x, mean, least, most = mean_curve([([1, 2, 3], [math.nan, 0.0, 1.0]), ([1, 2, 4], [1.0, 1.0, 1.0])], points=3)
    assert x.tolist() == [2.0, 2.5, 3.0]
    assert mean.tolist() == [0.5, 0.75, 1.0]
    assert (least.tolist(), most.tolist()) == ([0.0, 0.5, 1.0], [1.0, 1.0, 1.0])


def test_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert records.read(path) == []
    for seed in range(2):
        records.append(path, record(seed=seed))
    assert [found.seed for found in records.read(path)] == [0, 1]
    assert is_current(records.read(path)[0])
    with path.open("a") as file:
        file.write(json.dumps({"study": "x"}) + "\n")
    with pytest.raises(ValueError, match=r"results.jsonl:3: expected a record of a run, found '{\"study\""):
        records.read(path)


def test_a_record_of_other_settings_is_not_used() -> None:
    assert not is_current(replace(record(), settings="other"))
    assert not is_current(replace(record(), study="other"))
    changed = replace(STUDY, budget=STUDY.budget + 1)
    assert settings_digest(changed, STUDY.baseline) != settings_digest(STUDY, STUDY.baseline)


def test_seeds_are_the_outer_loop() -> None:
    arms = list(STUDY.arms)[:2]
    assert list(wanted([NAME], [*arms, UNTRAINED], 2)) == [
        (NAME, UNTRAINED, 0),
        *((NAME, arm, seed) for seed in range(2) for arm in arms),
    ]


def test_a_warm_start_is_evaluated_before_the_runs_that_begin_with_it() -> None:
    warm = [name for name, study in STUDIES.items() if study.warm]
    assert warm
    for name, study in STUDIES.items():
        expected = [UNTRAINED, WARM] if name in warm else [UNTRAINED]
        assert [run[1] for run in wanted([name], None, 1)] == [*expected, *study.arms]
    study = STUDIES[warm[0]]
    longer = replace(study, warm=replace(study.warm, epochs=2))
    assert warm_digest(longer) != warm_digest(study)
    assert settings_digest(longer, study.baseline) != settings_digest(study, study.baseline)
    cheaper = replace(study, budget=1)
    assert warm_digest(cheaper) == warm_digest(study), "the same weights serve another budget"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.warm])
def test_demonstrated_tasks_are_in_no_run(name: str, tmp_path: Path) -> None:
    """By the tasks that the runs load, and by the gold answers: no run trains on a demonstrated query in other words."""
    study = STUDIES[name]
    assert study.warm
    data = data_set({"spider": "spider", "math": "svamp", "multihop": "multihop"}[name]).parent
    run = training_tasks(configured(study, study.baseline, 0, data=data, work=tmp_path))
    shown = training_tasks(load_config(ROOT / study.config, located(study.warm.tasks, data)))
    assert len(run) > 100
    assert len(shown) == {"spider": DEMONSTRATED_SPIDER, "math": DEMONSTRATED_MATH}.get(name, len(shown)) > 0
    assert not {task["id"] for task in run} & {task["id"] for task in shown}
    for task in run[:2]:
        assert task["examples"] in ([], "none", False), "prompts without examples, as in the demonstrations"
    if name == "spider":
        pairs = [{(task["schema"], "".join(task["sql"].lower().split())) for task in part} for part in (run, shown)]
        assert not pairs[0] & pairs[1]
    # The initial model has examples in its prompt, and the configuration's temperature.
    own = load_config(ROOT / study.config)
    config = configured(study, study.baseline, 0, data=data, work=tmp_path)
    untrained = load_config(config.model_dump(mode="json"), located(study.untrained, data))
    assert untrained.rollouts.temperature == own.rollouts.temperature
    assert held_out_tasks(untrained)[0]["examples"] not in ([], "none", False)


def test_a_table_has_each_arm_against_the_baseline() -> None:
    other = list(STUDY.arms)[1]
    runs = [record(arm, seed, gain=0.5 * (arm == other)) for arm in (STUDY.baseline, other) for seed in range(6)]
    table = block(NAME, STUDY, [record(UNTRAINED), *runs]).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == [UNTRAINED, STUDY.baseline, other]
    base, better = rows[3:]
    assert base[1] == better[1] == "6"
    assert base[2].startswith("0.33 [")
    assert better[3].startswith("+0.17 [")
    assert (base[6].startswith("≥"), "of 6 seeds" in base[6]) == (False, True)


def test_a_seed_that_never_reaches_the_reward_counts_with_all_its_tokens() -> None:
    other = list(STUDY.arms)[1]
    runs = [record(seed=seed) for seed in range(6)]
    runs += [replace(record(other, seed), rewards=[0.0, 0.0, 0.0 if seed < 5 else 2.0]) for seed in range(6)]
    runs[6:] = [replace(run, tokens=[STUDY.budget, 100, STUDY.budget]) for run in runs[6:]]
    row = next(line for line in block(NAME, STUDY, runs).splitlines() if line.startswith(f"| {other} "))
    assert f"| ≥ {2 + 100 / STUDY.budget:.2f} of the budget, 1 of 6 seeds | {2 * STUDY.budget + 100:,} |" in row


def test_evaluations_are_shown_before_the_first_run() -> None:
    text = block(NAME, STUDY, [record(UNTRAINED)])
    assert "Not run yet" in text
    assert "Held-out reward: untrained 0.33 [" in text


def test_the_page_is_up_to_date() -> None:
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    current = [found for found in records.read(RESULTS) if is_current(found)]
    assert update(page, current) == page, "run python -m tests.bench.learning --report"


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_a_valid_configuration_and_its_held_out_set_is_not_that_of_tuning(name: str) -> None:
    study = STUDIES[name]
    for arm in study.arms:
        config = configured(study, arm, 3, data=Path("/data"), work=Path("/work"))
        assert config.trainer.token_budget == study.budget
        assert config.run.seed == 3
        assert config.tasks.train is not None
        assert config.tasks.eval is not None
        assert "/data/" in str(config.tasks.train.args)
        assert config.tasks.eval.args == {
            key: value for key, value in config.tasks.train.args.items() if key != "demonstrations"
        }
        assert config.tasks.eval.source.endswith(":test")
