"""The pages of a rollout and of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.records.store import RolloutRecord, Store
from lightning_core.tools.runs.browse import neighbours
from lightning_core.tools.runs.traces import read_call, read_trace
from lightning_core.tools.view.cards import CallCard, EventCard, make_call_card, make_cards
from lightning_core.tools.view.conversation import final_answer, indented, show_message
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.outline import SCALE, OutlineRow, make_outline
from lightning_core.tools.view.query import Query
from lightning_core.tools.view.render import page
from lightning_core.tools.view.tokenizers import find_tokenizer
from lightning_core.tools.view.tokens import ADVANTAGES, CHANGES, PROBABILITIES, sampled_tokens
from lightning_core.tools.view.why import Why, explain_rollout
from lightning_core.trace import Trace

_ATTEMPTS = 64
"""Largest number of attempts that are shown side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAttempt:
    """A rollout of the same group."""

    record: RolloutRecord
    answer: str
    advantages: Sequence[float]
    """The different advantages of its calls, ascending."""


def show(request: Request) -> Response:
    """``/runs/NAME/rollouts/N``: the header, the tree and all calls of one rollout."""
    library: Library = request.app.state.library
    name = request.path_params["name"]
    query = Query(dict(request.query_params))
    query.only(("import",))
    may_import = query.choice("import", ("yes",)) is not None
    with library.store(name) as store:
        record = _record(store, request)
        trace, spans, problem = read_trace(store, record)
        credit = store.credit(rollout=record.id)
        group = _of_group(store, record, *(("train", "fork") if record.phase in ("train", "fork") else (record.phase,)))
        read = {r.id: read_trace(store, r).trace for r in group if r.id != record.id} | {record.id: trace}
        traces = {identity: shown for identity, shown in read.items() if shown is not None}
        folder = library.run(name).folder
        why = explain_rollout(store, folder, record, credit, may_import=may_import, traces=traces)
        previous, following = neighbours(store, record.ordinal)
        outline = [] if trace is None else make_outline(trace)
        cards = [] if trace is None else make_cards(trace, spans, credit, why)
        return page(
            request,
            "rollout.html",
            status=400 if query.problems else 200,
            name=name,
            record=record,
            trace=trace,
            task=indented(trace.task) if trace else "",
            problem=problem,
            problems=query.problems,
            outline=outline,
            anchors=_anchors(outline, cards),
            numbers={card.id: card.number for card in cards if isinstance(card, CallCard)},
            scale=SCALE,
            cards=cards,
            credit=credit,
            why=why,
            attempts=_attempts(store, group, traces),
            ordinals=_ordinals(store, why),
            judged=_of_group(store, record, "judge"),
            previous=previous,
            following=following,
            limits={"p": PROBABILITIES, "a": ADVANTAGES, "c": CHANGES},
        )


def show_call(request: Request) -> Response:
    """``/runs/NAME/rollouts/N/calls/ID``: one call in full. ``?part=``: a fragment for the rollout's page."""
    library: Library = request.app.state.library
    name, identity = request.path_params["name"], request.path_params["call"]
    query = Query(dict(request.query_params))
    query.only(("part", "count"))
    part, count = query.choice("part", ("tokens", "history")), query.whole("count")
    if query.problems:
        raise HTTPException(400, "; ".join(query.problems))
    with library.store(name) as store:
        record = _record(store, request)
        call = read_call(store, record, identity)
        if call is None:
            raise HTTPException(404, f"Rollout {record.ordinal} has no call {identity!r} that can be read.")
        if part == "history":
            history = [show_message(message) for message in call.messages[:count]]
            return page(request, "call_history.html", messages=history)
        credit = next((row for row in store.credit(rollout=record.id) if row.call == call.id), None)
        texts = find_tokenizer(library.run(name), call.model)
        values: dict[str, Any] = {
            "call": call,
            "tokens": sampled_tokens(call, texts.texts, credit and credit.advantage),
            "credit": credit,
            "problem": texts.problem,
            "measured_rollouts": _measured_rollouts(library.run(name)),
        }
        if part == "tokens":
            return page(request, "call_tokens.html", **values)
        trace, spans, problem = read_trace(store, record)
        if trace is None:
            raise HTTPException(404, problem)
        number = next(n for n, c in enumerate(trace.calls, 1) if c.id == call.id)
        attributes = next(span.attributes for span in spans if span.span_id == call.id)
        card = make_call_card(
            call,
            number=number,
            repeated=0,
            attributes=attributes,
            rewards=[r for r in trace.rewards if r.call == call.id],
            credit=credit,
            why=Why(),
            full=True,
        )
        limits = {"p": PROBABILITIES, "a": ADVANTAGES, "c": CHANGES}
        return page(request, "call.html", name=name, record=record, card=card, limits=limits, **values)


def _record(store: Store, request: Request) -> RolloutRecord:
    number: int = request.path_params["ordinal"]
    try:
        return store.rollout(number)
    except (LookupError, OverflowError):
        raise HTTPException(
            404, f"There is no rollout {number}; the run has {store.count()}, numbered from 1."
        ) from None


def _measured_rollouts(run: RunInfo) -> Any:
    """``trainer.measure_change``; None in runs that do not record it."""
    section: Any = run.config.get("trainer")
    return section.get("measure_change") if isinstance(section, dict) else None


def _of_group(store: Store, record: RolloutRecord, *phases: str) -> list[RolloutRecord]:
    chosen = ", ".join("?" for _ in phases)
    query = f"SELECT * FROM rollouts WHERE task_id = ? AND step = ? AND phase IN ({chosen}) ORDER BY ordinal LIMIT ?"
    return store.records(query, record.task_id, record.step, *phases, _ATTEMPTS)


def _attempts(store: Store, group: Sequence[RolloutRecord], traces: Mapping[str, Trace]) -> list[GroupAttempt]:
    """The attempts at the same task in the same step, with their forks, the rollout itself among them."""
    return [
        GroupAttempt(
            record=other,
            answer=final_answer(traces[other.id].calls) if other.id in traces else "",
            advantages=sorted({row.advantage for row in store.credit(rollout=other.id)}),
        )
        for other in group
    ]


def _anchors(outline: Sequence[OutlineRow], cards: Sequence[CallCard | EventCard]) -> dict[str, str]:
    """The anchor of each item of the outline: its card, else the first card inside it, else its row."""
    anchors = {card.id: card.anchor for card in cards}
    below = None
    for row in reversed(outline):
        if row.item.id not in anchors:
            inside = below is not None and below.depth > row.depth
            anchors[row.item.id] = anchors[below.item.id] if below and inside else f"row-{row.item.id}"
        below = row
    return anchors


def _ordinals(store: Store, why: Why) -> dict[str, int]:
    """The numbers of the rollouts that the explanations name."""
    named = {member.rollout for e in why.explanations.values() for group in e.groups for member in group.members}
    marks = ", ".join("?" * len(named))
    return {
        row["id"]: row["ordinal"]
        for row in store.select(f"SELECT id, ordinal FROM rollouts WHERE id IN ({marks})", *named)
    }
