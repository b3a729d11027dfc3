"""The tasks of a run, and all attempts at one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lightning_core.records.statistics.solved import is_solved
from lightning_core.records.statistics.task_history import (
    TASK_ORDERS,
    attempts_at,
    count_attempts,
    find_tasks,
    rewarded_attempts,
)
from lightning_core.records.store import LEFT_OUT, RolloutRecord, Store
from lightning_core.tools.runs.traces import read_trace
from lightning_core.tools.view.attempts_plot import make_attempts_plot
from lightning_core.tools.view.conversation import final_answer
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.query import PAGE_SIZE, Query, with_changes
from lightning_core.tools.view.render import page

_COLUMNS = (
    ("task_id", "task", ""),
    ("attempts", "attempts", "number"),
    ("first", "first mean", "number"),
    ("last", "last mean", "number"),
    ("gain", "gain", "number"),
    ("best", "best", "number"),
    ("solved", "solved", "number"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredAttempt:
    """One attempt and what its agent answered last."""

    record: RolloutRecord
    answer: str
    solved: bool


def show_all(request: Request) -> Response:
    """``/runs/NAME/tasks``: a page of the tasks."""
    library: Library = request.app.state.library
    name = request.path_params["name"]
    parameters = dict(request.query_params)
    query = Query(parameters)
    query.only(("text", "sort", "direction", "page"))
    order, direction = query.choice("sort", TASK_ORDERS) or "task_id", query.choice("direction", ("up", "down"))
    number, text = query.whole("page", least=1) or 1, query.text("text") or ""
    descending = direction == "down"
    with library.store(name) as store:
        tasks, total = find_tasks(
            store,
            text=text,
            solved=library.run(name).solved,
            order=order,  # type: ignore[arg-type]
            descending=descending,
            limit=PAGE_SIZE,
            offset=(number - 1) * PAGE_SIZE,
        )

    def sorted_by(key: str) -> str:
        turned = order == key and not descending
        return with_changes(parameters, {"sort": key, "direction": "down" if turned else "up", "page": None})

    pages = {"previous": number - 1 or None, "following": number + 1 if number * PAGE_SIZE < total else None}
    return page(
        request,
        "tasks.html",
        status=400 if query.problems else 200,
        name=name,
        tasks=tasks,
        total=total,
        first=(number - 1) * PAGE_SIZE + 1,
        text=text,
        order=order,
        descending=descending,
        columns=[(key, title, kind, sorted_by(key)) for key, title, kind in _COLUMNS],
        links={key: value and with_changes(parameters, {"page": value}) for key, value in pages.items()},
        problems=query.problems,
    )


def show(request: Request) -> Response:
    """``/runs/NAME/task?id=ID``: all attempts at one task, first to last."""
    library: Library = request.app.state.library
    name, parameters = request.path_params["name"], dict(request.query_params)
    # Not in the path: clients change a path that has "..".
    query, task = Query(parameters), parameters.get("id", "")
    query.only(("id", "page"))
    with library.store(name) as store:
        total = count_attempts(store, task)
        if not total:
            raise HTTPException(404, f"The run {name!r} has no attempt at a task {task!r}.")
        number, solved = query.whole("page", least=1) or 1, library.run(name).solved
        first = (number - 1) * PAGE_SIZE
        pages = {"previous": number - 1 or None, "following": number + 1 if number * PAGE_SIZE < total else None}
        base = request.url_for("rollouts", name=name).path
        return page(
            request,
            "task.html",
            status=400 if query.problems else 200,
            name=name,
            task=task,
            total=total,
            attempts=_answered(store, attempts_at(store, task, limit=PAGE_SIZE, offset=first), solved),
            plot=make_attempts_plot(rewarded_attempts(store, task)),
            base=base,
            links={key: value and with_changes(parameters, {"page": value}) for key, value in pages.items()},
            problems=query.problems,
        )


def _answered(store: Store, records: Sequence[RolloutRecord], solved: float) -> list[AnsweredAttempt]:
    attempts: list[AnsweredAttempt] = []
    for record in records:
        trace = read_trace(store, record).trace
        attempts.append(
            AnsweredAttempt(
                record=record,
                answer="" if trace is None else final_answer(trace.calls),
                solved=record.reward is not None and record.status not in LEFT_OUT and is_solved(record.reward, solved),
            )
        )
    return attempts
