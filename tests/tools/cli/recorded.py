"""A recorded rollout for the views of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightning_core import trace as tr
from lightning_core.capture import ActiveRollout, current_address, reward, rollout, scope
from lightning_core.capture.spans import start_span
from lightning_core.records.store import RolloutRecord, Store


def call(
    agent: str, question: str | list[Any], answer: Mapping[str, Any], *, version: int | None = 3, **more: Any
) -> str:
    """Record one model call as the endpoint does; returns the call's id."""
    address = current_address()
    assert address is not None
    asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
    messages = [{"role": "system", "content": "Be brief."}, *asked]
    attributes: dict[str, Any] = {
        tr.SEQUENCE: 1,
        "gen_ai.response.model": "policy" if version is not None else "gpt-x",
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.output.messages": json.dumps([answer]),
        "gen_ai.response.finish_reasons": ("stop",),
    }
    if version is not None:
        attributes |= {
            tr.PROMPT_IDS: tr.pack(range(12), "<u4"),
            tr.OUTPUT_IDS: tr.pack(range(5), "<u4"),
            tr.LOGPROBS: tr.pack([-0.5] * 5, "<f4"),
            "lightning.policy_version": version,
            "lightning.context": "new",
            tr.TRAINED: True,
        }
    else:
        attributes |= {tr.HOST: "api.openai.com", tr.CREDENTIALS: "your key"}
    span = start_span(address, "policy", "chat", agent=agent, attributes=attributes | more)
    span.end()
    return f"{span.get_span_context().span_id:016x}"


def try_it() -> tuple[ActiveRollout, str]:
    """One rollout of a small agent: a writer with a tool inside a graph's node, then a frozen judge."""
    with rollout(task={"id": "q17", "q": "How many?"}) as run:
        with scope("write_query", kind="node"), scope("writer"):
            query = {"role": "assistant", "content": "SELECT\n  count(*)"}
            written = call("writer", "How many rows are in the table?\nAnswer in SQL.", query)
            with scope("run_sql", kind="tool"):
                pass
        wanted = {"function": {"name": "grade", "arguments": '{"points": 1}'}}
        call("judge", "Right?", {"role": "assistant", "content": None, "tool_calls": [wanted]}, version=None)
        reward(1.0)
        reward(0.25, call=written, name="syntax")
        reward(-0.5, agent="judge")
    return run, written


def keep(store: Store, run: ActiveRollout, **changes: Any) -> None:
    values: dict[str, Any] = {
        "id": run.rollout,
        "step": 2,
        "task_id": "q17",
        "phase": "train",
        "attempt": 0,
        "status": "ok",
        "reward": 1.0,
        "error": None,
        "version": 3,
        "started_ns": 10**9,
        "ended_ns": 3 * 10**9,
    }
    store.add_rollout(RolloutRecord(**{**values, **changes}), run.spans)
