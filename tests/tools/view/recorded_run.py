"""A recorded run for the pages of rollouts: real calls through the endpoint, real credit, no training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from openai import BadRequestError, OpenAI

from lightning_core import Config, Episode, load_config, reward, trace_to_transitions
from lightning_core import trace as tr
from lightning_core.capture import scope
from lightning_core.config import dump_config
from lightning_core.config.build_rules import policy_rules
from lightning_core.credit import assign_by_policy
from lightning_core.records.store import RolloutRecord, Store
from lightning_core.rollouts.jobs import call_credits
from lightning_core.signals.air.rewards import with_air_of
from lightning_core.testing import Playground, open_playground, tool_call
from lightning_core.trace import LOGPROBS_AFTER, SpanRecord, spans_to_trace

AGENT, TOOL, ERROR, REASON = "<i>solver</i>", "<i>search</i>", "<i>no such page</i>", "<i>another host</i>"
QUESTION, TASK, PART = "<img src=x onerror=alert(1)> & 'why'?", "<script>task</script>/1", "reward <i>part</i>"
TOOLS = [{"type": "function", "function": {"name": "search", "description": "d", "parameters": {"type": "object"}}}]
CREDIT: Mapping[str, Any] = {
    "rewards": "discounted",
    "gamma": 0.5,
    "advantage": "dr-grpo",
    "air": {"tool_error": -0.25},
}


def answer(prompt: str) -> str:
    """A tool call, then a response that has white space, characters of several bytes and HTML."""
    if "found nothing" not in prompt:
        return tool_call("search", query="<i>naïve</i>")
    return f"It is  {len(prompt) % 3}.\n\n🚀 <script>alert(2)</script>"


def solve(task: Mapping[str, Any]) -> None:
    """Two calls with a failing tool between them; one request that is refused."""
    client = OpenAI(api_key="any", max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "Be <i>brief</i>."}, {"role": "user", "content": task["q"]}]
    with scope(AGENT):
        first = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message  # type: ignore[arg-type]
        (called,) = first.tool_calls or ()
        arguments = {tr.TOOL_ARGUMENTS: '{"query": "<i>naïve</i>"}', tr.TOOL_CALL_ID: called.id}
        try:
            with scope(TOOL, kind="tool", attributes=arguments):
                raise LookupError(ERROR)
        except LookupError:
            pass
        messages += [
            first.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": called.id, "content": "found nothing"},
        ]
        last = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
        with contextlib.suppress(BadRequestError):
            client.chat.completions.create(model="m", messages=[])
    reward(task["earns"], name=PART)
    reward(0.125, call=last.id.rpartition("-")[2], name="syntax")


def record(number: int, identity: str, **values: Any) -> RolloutRecord:
    defaults: dict[str, Any] = {
        "step": 1, "task_id": TASK, "phase": "train", "attempt": 0, "status": "ok", "reward": None, "error": None, "version": 3,
        "started_ns": number * 10**9, "ended_ns": number * 10**9 + 250_000_000,
    }  # fmt: skip
    return RolloutRecord(id=identity, **{**defaults, **values})


def span(rollout: str, number: int, parent: int | None, attributes: Mapping[str, Any], **values: Any) -> SpanRecord:
    """A span called ``number`` under ``parent``, one millisecond long."""
    return SpanRecord(
        name=values.pop("name", "span"),
        trace_id=rollout,
        span_id=f"{number:016x}",
        parent_id=None if parent is None else f"{parent:016x}",
        start_ns=values.pop("start_ns", number * 1_000_000),
        end_ns=values.pop("end_ns", (number + 1) * 1_000_000),
        attributes=attributes,
        **values,
    )


def root(rollout: str, *, task: str = TASK) -> SpanRecord:
    return span(rollout, 0, None, {tr.TASK_ID: task, tr.TASK: json.dumps({"id": task})})


def make_run(folder: Path, *, credit: Mapping[str, Any] = CREDIT, name: str = "sample") -> Path:
    """Write a run of two steps with four attempts each, of which it is certain that some earn and some do not.

    Rollouts 1 to 8 are these attempts, 9 has no spans, 10 is the judge's, 11 and 12 are held-out evaluations.
    """
    run = folder / name
    run.mkdir(parents=True)
    config = load_config({"agents": {"train": [AGENT]}, "credit": credit, "policy": {"model": str(folder / "model")}})
    (run / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    if find_spec("tokenizers") is not None:
        make_tokenizer(folder / "model")
    with Store(run / "store.db") as store, open_playground(answer, integrations=()) as opened:
        for step in (1, 2):
            attempts = [_attempt(opened, earns=earns) for earns in (0.0, 1.0, 1.0, 0.5)]
            traces = [spans_to_trace(spans) for spans in attempts]
            for number, (spans, trace) in enumerate(zip(attempts, traces, strict=True), 4 * step - 3):
                store.add_rollout(record(number, trace.rollout, step=step, reward=trace.reward), spans)
            assign(store, step, credit)
        store.add_rollout(record(9, "9" * 32, step=2, status="infrastructure", error=f"TimeoutError: {ERROR}"), [])
        store.add_rollout(record(10, "a" * 32, step=2, phase="judge", version=None), [root("a" * 32)])
        for number, phase in ((11, "eval_before"), (12, "eval_after")):
            spans = _attempt(opened, earns=number - 11.0)
            values = {"phase": phase, "task_id": "held-out", "reward": number - 11.0, "step": 2 * (number - 11)}
            store.add_rollout(record(number, spans[0].trace_id, **values), spans)
    return run


def assign(store: Store, step: int, credit: Mapping[str, Any]) -> None:
    """Store the credit of a step as training does."""
    assign_with(store, step, load_config({"agents": {"train": [AGENT]}, "policy": {"model": "any"}, "credit": credit}))


def assign_with(store: Store, step: int, config: Config) -> None:
    """Store the credit of a step as training with ``config`` does."""
    traces = [store.trace(r.id) for r in store.rollouts(step=step, phase="train", status="ok")]
    episodes = [
        Episode(trace=t, transitions=trace_to_transitions(t, agents=config.agents.trained_names), rewards=t.rewards)
        for t in traces
    ]
    credit = assign_by_policy(with_air_of(config.credit, episodes, solved=config.eval.solved), policy_rules(config))
    store.add_credit(call_credits(episodes, credit, step - 1))


def trainable(number: int, *, agent: str = AGENT, model: str = "policy", tokens: int = 3) -> dict[str, Any]:
    """The attributes of the ``number``-th call of a rollout, which can be trained on."""
    return {
        tr.OPERATION: "chat",
        tr.AGENT: agent,
        tr.SEQUENCE: number,
        tr.RESPONSE_MODEL: model,
        tr.VERSION: 0,
        tr.DIGEST: "0",
        tr.TRAINED: True,
        tr.INPUT_MESSAGES: json.dumps([{"role": "user", "content": "question " * tokens}]),
        tr.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": "answer " * tokens}]),
        tr.PROMPT_IDS: tr.pack([97] * tokens, "<u4"),
        tr.OUTPUT_IDS: tr.pack([98] * tokens, "<u4"),
        tr.LOGPROBS: tr.pack([-0.5] * tokens, "<f4"),
    }


def _attempt(opened: Playground, *, earns: float) -> list[SpanRecord]:
    task = {"id": TASK, "q": QUESTION, "earns": earns}
    with opened.rollout(task, train=[AGENT], strict=False) as run:
        solve(task)
    spans = [_with_logprobs(found) for found in run.spans]
    elsewhere = {
        tr.OPERATION: tr.ELSEWHERE,
        tr.HOST: "api.example.com",
        tr.REASON: REASON,
        tr.REQUESTS: 3,
        tr.AGENT: AGENT,
    }
    return [*spans, replace(spans[-1], span_id="e" * 16, attributes=elsewhere, error=None)]


def _with_logprobs(found: SpanRecord) -> SpanRecord:
    """``found`` with different logprobs, and those after an update, which raises every other one."""
    ids = found.attributes.get(tr.OUTPUT_IDS)
    if not isinstance(ids, bytes):
        return found
    count = len(ids) // 4
    logprobs = np.log(np.linspace(0.005, 0.99, count)).astype("<f4")
    after = (logprobs + np.where(np.arange(count) % 2, -0.2, 0.05)).astype("<f4")
    changed = {tr.LOGPROBS: logprobs.tobytes(), LOGPROBS_AFTER: after.tobytes()}
    return replace(found, attributes={**found.attributes, **changed})


def make_tokenizer(folder: Path) -> Path:
    """Write the tokenizer of scripted models: a token for each byte, and two special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    from lightning_core.chat.token_bytes import BYTE_OF

    vocabulary = dict(BYTE_OF)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
