"""The point at which a run with verl starts or continues, and the records that it keeps."""

from __future__ import annotations

from pathlib import Path

from lightning_core.records.atomic import write_atomically
from lightning_core.records.run_folder.manifest import VERL_TRACKER
from lightning_core.records.statistics.held_out import EVALUATIONS, check_held_out
from lightning_core.records.store import Store
from lightning_core.trainers.plan import Plan
from lightning_core.trainers.verl.group_log import GroupLog
from lightning_core.trainers.verl.records import archive_log, evaluated_steps
from lightning_core.trainers.verl.settings import Start


def prepare_start(plan: Plan) -> Start:
    """Drop the records of the run in ``plan`` that it repeats, and return where it starts.

    These are all rollouts and metrics after the checkpoint, and an evaluation of its weights that did not finish. Groups in progress at
    the checkpoint are dropped by the manager, which knows them.

    Raises `ConfigError` if the held-out tasks have changed.
    """
    config, folder = plan.config, plan.folder
    start = Start(checkpoint=plan.checkpoint)
    archive_log(folder, after=start.step)
    GroupLog(folder).rewind(start.step)
    with Store(folder / "store.db") as store:  # created here, so it exists even if verl fails
        if not config.run.resume:
            return start
        store.rewind(start.step)
        finished = start.step in evaluated_steps(folder)
        unfinished = [
            r.id for phase in EVALUATIONS if not finished for r in store.rollouts(phase=phase, step=start.step)
        ]
        store.remove(unfinished)
        check_held_out(store, [str(task["id"]) for task in plan.inputs.eval_tasks])
    _set_tracker(folder, start)
    every = config.eval.every or config.trainer.steps
    evaluate = not finished and (start.step % every == 0 or start.step >= config.trainer.steps)
    origin = f"after step {start.step}" if start.checkpoint else "from the initial weights: it has no checkpoint yet"
    again = "; the interrupted evaluation is repeated" if unfinished and evaluate else ""
    plan.observers.message(f"continues {origin}{again}")
    return Start(checkpoint=plan.checkpoint, evaluate=evaluate)


def _set_tracker(folder: Path, start: Start) -> None:
    """Undo verl's notes about checkpoints after ``start``, which are written again."""
    tracker = folder / "checkpoints" / VERL_TRACKER
    if start.checkpoint is None:
        tracker.unlink(missing_ok=True)
    else:
        write_atomically(tracker, str(start.step))
