"""Runs written without training: small ones with chosen contents, and one with many rollouts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_core import trace as tr
from lightning_core.records.report import MetricsLog, Summary
from lightning_core.records.store import RolloutRecord, Store
from lightning_core.trace import SpanRecord

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>{{ 7*7 }}'\"&"
"""Shown as it is, it is harmless."""
SECOND = 1_000_000_000


def make_run(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    metrics: Iterable[Mapping[str, Any]] = (),
    rollouts: Sequence[tuple[RolloutRecord, Sequence[SpanRecord]]] | None = None,
    summary: Summary | None = None,
) -> Path:
    """Write a run's folder; without ``rollouts``, it has no store."""
    folder.mkdir(parents=True)
    given = {"policy": {"model": "tiny"}, "trainer": {"steps": 9}, "run": {"name": folder.name, "tags": ["first"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**given, **(config or {})}), encoding="utf-8")
    log = MetricsLog(folder / "metrics.jsonl")
    for step, line in enumerate(metrics, start=1):
        log.append(step, line)
    if rollouts is not None:
        with Store(folder / "store.db") as store:
            store.add_rollouts(rollouts)
    if summary is not None:
        summary.write(folder / "summary.json")
    return folder


def rollout(number: int, **values: Any) -> tuple[RolloutRecord, list[SpanRecord]]:
    """A rollout with one call of the agent ``talker``; ``values``: fields of its record, and ``text``: what the model said."""
    text = values.pop("text", "hello")
    defaults: dict[str, Any] = {
        "id": f"{number:032x}", "step": 1, "task_id": f"t{number}", "phase": "train", "attempt": 0, "status": "ok", "reward": 0.5,
        "error": None, "version": 0, "started_ns": number * SECOND, "ended_ns": (number + 1) * SECOND,
    }  # fmt: skip
    record = RolloutRecord(**{**defaults, **values})
    times: dict[str, Any] = {"start_ns": record.started_ns, "end_ns": record.ended_ns, "trace_id": record.id}
    task = {tr.TASK_ID: record.task_id, tr.TASK: json.dumps({"id": record.task_id})}
    call = {
        tr.OPERATION: "chat",
        tr.AGENT: "talker",
        tr.INPUT_MESSAGES: json.dumps([{"role": "user", "content": text}]),
        tr.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": text}]),
        tr.RESPONSE_MODEL: "policy",
        tr.CONTEXT: "new",
        tr.FINISH_REASONS: ("stop",),
    }
    spans = [
        SpanRecord(name="rollout", span_id="a" * 16, parent_id=None, attributes=task, **times),
        SpanRecord(name="chat", span_id="b" * 16, parent_id="a" * 16, attributes=call, **times),
    ]
    return record, spans


def make_big_store(path: Path, *, steps: int = 1000, per_step: int = 100, text: str = "hello") -> Path:
    """Write a store of ``steps × per_step`` rollouts with one call each, and the credit of these; 10^5 take seconds."""
    with Store(path) as store:
        store.add_rollouts([rollout(1, text=text)])
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("CREATE TEMP TABLE numbers AS WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
                   "SELECT i, printf('%032x', i) AS id, (i - 1) / ? + 1 AS step FROM n", (steps * per_step, per_step))  # fmt: skip
        copied = "attempt, status, error, version, started_ns, ended_ns, calls, counters"
        db.execute(
            f"INSERT INTO rollouts (id, step, task_id, phase, reward, {copied}) "
            f"SELECT n.id, n.step, 'task-' || (n.i % 200), 'train', (n.i * 7919 % 1000) / 1000.0, {copied} "
            "FROM numbers AS n, rollouts AS r WHERE r.ordinal = 1 ORDER BY n.i"
        )
        shared = "span_id, parent_id, name, start_ns, end_ns, error, operation, agent, attributes"
        first = f"{1:032x}"
        db.execute(
            f"INSERT INTO spans (rollout, {shared}) SELECT n.id, {shared} FROM numbers AS n, spans AS s WHERE s.rollout = ?",
            (first,),
        )
        db.execute(
            "INSERT INTO credit (rollout, call, agent, step, reward, advantage, tokens) "
            "SELECT id, ?, 'talker', step, 0.5, (i % 3) - 1.0, 8 FROM numbers",
            ("b" * 16,),
        )
    db.close()
    return path
