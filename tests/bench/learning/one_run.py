"""Trains one arm with one seed and evaluates it on the held-out tasks, in a process of its own.

    python -m tests.bench.learning.one_run STUDY ARM SEED --data FOLDER --work FOLDER --results FILE

A run that was interrupted continues from its last checkpoint in ``--work``. The arms `untrained`, the configuration's model, and
`warm start`, the weights that all runs begin with, are only evaluated.
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from lightning_core import Config, evaluate, fit, load_config
from lightning_core.loop import Evaluation
from lightning_core.records.run_folder.checkpoints import checkpoints
from tests.bench.commit import current_commit
from tests.bench.cpu import cpu
from tests.bench.learning import trl_arm
from tests.bench.learning.records import EVALUATED, UNTRAINED, Record, append
from tests.bench.learning.studies import STUDIES, configured, located, settings_digest
from tests.bench.learning.warm import warm_start


def run(name: str, arm: str, seed: int, *, data: Path, work: Path) -> Record:
    """Train and evaluate; returns the record."""
    study = STUDIES[name]
    trained = study.baseline if arm in EVALUATED else arm
    initial = None if study.model is None else study.model()
    if study.warm is not None and arm != UNTRAINED:
        initial = warm_start(name, study, study.warm, data=data, work=work)
    config = configured(study, trained, seed, data=data, work=work / name, model=initial)
    if arm == UNTRAINED:
        config = load_config(config.model_dump(mode="json"), located(study.untrained, data))
    folder = Path(config.run.dir) / str(config.run.name)
    record = Record(
        study=name,
        arm=arm,
        seed=seed,
        settings=settings_digest(study, arm),
        commit=current_commit(".", ":!tests/bench/learning/results.jsonl"),
        cpu=cpu(),
        date=time.strftime("%Y-%m-%d"),
        held_out={},
    )
    if arm in EVALUATED:
        found = evaluate(config=config, folder=_empty(folder.parent / arm), progress=True)
        return replace(record, held_out=_rewards(found))
    if arm == trl_arm.ARM:
        return _run_trl(record, config, folder)
    resume = bool(folder.is_dir() and checkpoints(folder))
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    training = config.model_copy(
        update={
            "tasks": config.tasks.model_copy(update={"eval": None}),
            "run": config.run.model_copy(update={"resume": resume}),
        }
    )
    result = fit(config=training, progress=True)
    steps = result.metrics
    return replace(
        record,
        tokens=[int(m["tokens_sampled"]) + int(m.get("tokens_forked", 0)) for m in steps],
        rewards=[round(float(m["reward"]), 4) for m in steps],
        attempts=[int(m["rollouts"]) - int(m["rollouts_left_out"]) for m in steps],
        rollouts=[int(m["rollouts"]) + int(m.get("forks", 0)) for m in steps],
        seconds=[round(float(m["seconds_rollouts"]) + float(m["seconds_update"]), 1) for m in steps],
        held_out=_rewards(evaluate(config=config, folder=folder, checkpoint=result.checkpoint, progress=True)),
    )


def _run_trl(record: Record, config: Config, folder: Path) -> Record:
    found = trl_arm.train(config, _empty(folder))
    rollouts = [config.rollouts.tasks_per_step * config.rollouts.group_size] * len(found.tokens)
    trained = config.model_copy(
        update={"policy": config.policy.model_copy(update={"model": str(found.weights), "train_layers": None})}
    )
    return replace(
        record,
        tokens=found.tokens,
        rewards=[round(reward, 4) for reward in found.rewards],
        attempts=rollouts,
        rollouts=rollouts,
        seconds=[round(seconds, 1) for seconds in found.seconds],
        held_out=_rewards(
            evaluate(config=trained, folder=_empty(folder.parent / f"{folder.name}-eval"), progress=True)
        ),
    )


def _rewards(evaluation: Evaluation) -> dict[str, float]:
    return {task: round(fmean(rewards), 4) for task, rewards in evaluation.rewards.items()}


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("arm")
    parser.add_argument("seed", type=int)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    record = run(options.study, options.arm, options.seed, data=options.data, work=options.work)
    append(options.results, record)


if __name__ == "__main__":
    main()
