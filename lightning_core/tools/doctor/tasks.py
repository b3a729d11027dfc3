"""Checks of the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core.errors import plural
from lightning_core.rollouts.tasks import sample_held_out, shared_tasks, task_content
from lightning_core.tools.doctor.finding import Checks, Observed
from lightning_core.tools.doctor.units import listed

_ADVICE = "remove the shared tasks from one of the lists"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLists:
    """The configured tasks."""

    train: Sequence[Mapping[str, Any]]
    eval: Sequence[Mapping[str, Any]]
    """All held-out tasks, before ``eval.tasks`` selects some."""
    eval_limit: int | None
    """``eval.tasks``."""
    tasks_per_step: int
    allow_overlap: bool = False
    """``tasks.allow_overlap``."""


checks: Checks[TaskLists] = Checks("Tasks")


@checks.check("number")
def number(t: TaskLists) -> Iterator[Observed]:
    """The number of tasks. With a single task the policy memorizes its answer, and with fewer tasks than
    `rollouts.tasks_per_step` each step repeats some. Add tasks."""
    text = f"{plural(len(t.train), 'training task')}, {len(t.eval):,} held-out"
    if len(t.train) == 1:
        yield Observed("warning", f"{text}: the policy can learn its answer by heart", "add training tasks")
    elif len(t.train) < t.tasks_per_step:
        yield Observed(
            "warning",
            f"{text}: fewer than rollouts.tasks_per_step = {t.tasks_per_step}",
            "add tasks, or lower tasks_per_step",
        )
    else:
        yield Observed("ok", text)


@checks.check("ids")
def ids(t: TaskLists) -> Iterator[Observed]:
    """A training task and a held-out task of other content may have equal ids: `train` accepts them, but a task's page in the
    viewer shows the attempts at both. Give them different ids."""
    trained = {task["id"]: task_content(task) for task in t.train}
    equal = [task["id"] for task in t.eval if trained.get(task["id"], task_content(task)) != task_content(task)]
    if equal:
        yield Observed(
            "warning",
            f"{len(equal)} of {len(t.eval)} held-out tasks have the id of a training task of other content: {listed(equal)}",
            "give them other ids, such as eval-1",
        )


@checks.check("duplicates")
def duplicates(t: TaskLists) -> Iterator[Observed]:
    """Tasks of the same content under several ids. They count several times. Remove the copies."""
    for name, tasks in (("training", t.train), ("held-out", t.eval)):
        first: dict[str, str] = {}
        copies = [task["id"] for task in tasks if first.setdefault(task_content(task), task["id"]) != task["id"]]
        if copies:
            yield Observed(
                "warning",
                f"{len(copies)} of {len(tasks)} {name} tasks repeat the content of another: {listed(copies)}",
                "remove the copies",
            )


@checks.check("overlap")
def overlap(t: TaskLists) -> Iterator[Observed]:
    """Evaluated held-out tasks whose content, apart from the id, equals a training task's. The held-out reward then measures
    memorization. `train` refuses them, unless `tasks.allow_overlap` is set. Keep the two apart."""
    evaluated = sample_held_out(list(t.eval), t.eval_limit)
    shared = list(shared_tasks(t.train, evaluated))
    if not shared:
        return
    text = f"{len(shared)} of {len(evaluated)} evaluated tasks are also training tasks: {listed(shared)}"
    yield Observed("warning" if t.allow_overlap else "problem", text, _ADVICE)


@checks.check("eval.tasks")
def eval_tasks(t: TaskLists) -> Iterator[Observed]:
    """`eval.tasks` is larger than the number of held-out tasks, so fewer are evaluated than configured."""
    if t.eval and t.eval_limit is not None and t.eval_limit > len(t.eval):
        yield Observed(
            "warning",
            f"eval.tasks is {t.eval_limit}, but there are {plural(len(t.eval), 'held-out task')}",
            "add held-out tasks, or lower eval.tasks",
        )


@checks.check("few held-out tasks")
def few(t: TaskLists) -> Iterator[Observed]:
    """With fewer than 30 held-out tasks, the interval of the improvement is wide: a gain of 0.2 is seldom significant."""
    count = len(t.eval) if t.eval_limit is None else min(t.eval_limit, len(t.eval))
    if 0 < count < 30:
        yield Observed(
            "info",
            f"{plural(count, 'held-out task')}: only large improvements are significant",
            "evaluate on 50 or more",
        )
