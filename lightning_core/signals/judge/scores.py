"""Scores the rollouts of a group in one prompt, as RULER does (OpenPipe's ART).

The prompt contains the common beginning of the rollouts once, then the rest of each. Only the differences within the group matter for
training, and a model compares better than it scores. The judge's requests go through the policy endpoint as an untrained
agent's; its scores are recorded as rewards of the rollouts.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from lightning_core.capture import ActiveRollout, current_address, rollout, scope
from lightning_core.credit import Episode
from lightning_core.endpoint.agents.routing import Routing
from lightning_core.endpoint.interface import Endpoint
from lightning_core.errors import InfrastructureError, describe
from lightning_core.records.store import RolloutRecord, step_of
from lightning_core.signals.judge.section import JUDGE, Criterion, Judge
from lightning_core.trace import OPERATION, REWARD_AGENT, REWARD_NAME, REWARD_VALUE, Reward, SpanRecord, Trace

_MAX_TOKENS = 512
_TOKENS_PER_SCORE = 4
"""Room for each score of further criteria."""
_CHARACTERS = 4000
"""Maximum length of an attempt's text in the prompt.

Of a longer text, the beginning and the end are kept.
"""
_RUBRIC = "An attempt is good if it does what the task asks, completely and correctly."
_SCORES = "scores"
"""The key of the scores in the answer, if the rubric is a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeResult:
    """The judge's scores of one group, and the judge's own rollout with its spans."""

    scores: Mapping[str, Sequence[Reward]]
    """The rewards of each rollout, by its id: the score from 0 to 1 times ``credit.judge.weight``; or one for each criterion and each of
    its agents, without weights."""
    error: str | None
    """The reason there are no scores, or None."""
    records: Sequence[tuple[RolloutRecord, Sequence[SpanRecord]]]


def judge_group(episodes: Sequence[Episode], judge: Judge, endpoint: Endpoint, step: int) -> JudgeResult:
    """Score the attempts at one task. ``step``: number of updates so far."""
    task = episodes[0].task_id
    key = endpoint.new_key()
    scores: Mapping[str, Sequence[float]] = {}
    failure: str | None = None
    with rollout({"id": f"judge of {task}"}, endpoint=endpoint.url_of(key), api_key=key) as run:
        limit = _max_tokens(judge, len(episodes))
        endpoint.open(key, run.address, Routing(frozen={judge.agent: judge.model}, max_tokens=limit))
        try:
            with scope(judge.agent):
                scores = _request_scores(episodes, judge, endpoint.url_of(key), key)
        except (InfrastructureError, httpx.HTTPError, ValueError, LookupError) as error:
            failure = describe(error)
        finally:
            endpoint.close(key)
    return JudgeResult(
        error=failure,
        scores={e.rollout: _rewards(judge, scores, index) for index, e in enumerate(episodes)} if scores else {},
        records=[(judge_record(task, run, failure, step), run.spans)],
    )


def judge_record(task_id: str, run: ActiveRollout, error: str | None, step: int) -> RolloutRecord:
    """The judge's rollout for one group, as recorded. ``error``: why it returned no scores."""
    root = run.trace.events[0]
    return RolloutRecord(
        id=run.trace.rollout,
        step=step_of("judge", step),
        task_id=task_id,
        phase="judge",
        attempt=0,
        status="ok" if error is None else "infrastructure",
        reward=None,
        error=error,
        version=None,
        started_ns=root.start_ns,
        ended_ns=root.end_ns,
        counters=run.trace.counters,
    )


def _max_tokens(judge: Judge, attempts: int) -> int:
    return _MAX_TOKENS + _TOKENS_PER_SCORE * attempts * max(0, len(judge.criteria) - 1)


def _rewards(judge: Judge, scores: Mapping[str, Sequence[float]], index: int) -> list[Reward]:
    if not judge.criteria:
        return [Reward(value=judge.weight * scores[_SCORES][index], name=JUDGE)]
    return [
        Reward(value=scores[c.name][index], name=c.reward, agent=agent)
        for c in judge.criteria
        for agent in c.agents or (None,)
    ]


def with_scores(episodes: Sequence[Episode], scores: Mapping[str, Sequence[Reward]]) -> list[Episode]:
    """``episodes`` with ``scores`` (by rollout id) added to their rewards."""
    return [replace(e, rewards=(*e.rewards, *scores.get(e.rollout, ()))) for e in episodes]


def reward_spans(scores: Mapping[str, Sequence[Reward]]) -> list[SpanRecord]:
    """A reward span for each reward of ``scores``, in the trace of its rollout."""
    now = time.time_ns()
    return [
        SpanRecord(
            name=reward.name or JUDGE,
            trace_id=rollout,
            span_id=secrets.token_hex(8),
            parent_id=None,
            start_ns=now + index,  # spans are read in order of their start
            end_ns=now + index,
            attributes={
                OPERATION: "reward",
                REWARD_VALUE: reward.value,
                REWARD_NAME: reward.name or JUDGE,
                **({} if reward.agent is None else {REWARD_AGENT: reward.agent}),
            },
        )
        for rollout, rewards in scores.items()
        for index, reward in enumerate(rewards)
    ]


def judge_prompt(traces: Sequence[Trace], rubric: str | Sequence[Criterion] | None) -> str:
    """The text of the judge's prompt."""
    texts = [_transcript(trace) for trace in traces]
    shared = _common_lines(texts)
    score = f"{len(traces)} attempts at the same task follow. Score each from 0 (worst) to 10 (best), by comparing them"
    if rubric is None or isinstance(rubric, str):
        names, lines = [_SCORES], [f"{score}.", rubric or _RUBRIC]
    else:
        names = [c.name for c in rubric]
        lines = [f"{score}, separately by each criterion:", *map(_criterion_line, rubric)]
    lines.append(f"Task: {json.dumps(traces[0].task, ensure_ascii=False)}")
    if shared:
        lines += ["All attempts begin with:", *texts[0][:shared]]
    for number, text in enumerate(texts, 1):
        lines += [f"--- Attempt {number}", _shorten("\n".join(text[shared:]))]
    numbers = f"[{len(traces)} whole numbers, one for each attempt in order]"
    lines.append("Answer as JSON: {" + ", ".join(f'"{name}": {numbers}' for name in names) + "}")
    return "\n".join(lines)


def _criterion_line(criterion: Criterion) -> str:
    agents = f" (only what {' and '.join(criterion.agents)} wrote)" if criterion.agents else ""
    return f"- {criterion.name}{agents}: {criterion.text}"


def read_scores(text: str, count: int, names: Sequence[str] = (_SCORES,)) -> dict[str, list[float]]:
    """The scores under each of ``names`` in the judge's answer, scaled to 0 to 1.

    Raises ValueError unless there are ``count`` of each, from 0 to 10.
    """
    start, end = text.find("{"), text.rfind("}")
    found: Any = json.loads(text[start : end + 1]) if start >= 0 else None
    scaled: dict[str, list[float]] = {}
    for name in names:
        scores = found.get(name) if isinstance(found, dict) else None
        if not isinstance(scores, list) or len(scores) != count:
            under = "" if name == _SCORES else f" under {name!r}"
            raise ValueError(f"the judge answered {text[:200]!r}; expected {count} scores{under}")
        scaled[name] = [score / 10 for score in scores if isinstance(score, int | float) and 0 <= score <= 10]
        if len(scaled[name]) != count:
            raise ValueError(f"the judge answered the scores {scores!r}; expected numbers from 0 to 10")
    return scaled


def _request_scores(group: Sequence[Episode], judge: Judge, url: str, key: str) -> dict[str, list[float]]:
    names = [c.name for c in judge.criteria] or [_SCORES]
    numbers = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 10},
        "minItems": len(group),
        "maxItems": len(group),
    }
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, numbers),
        "required": names,
        "additionalProperties": False,
    }
    body = {
        "model": judge.model,
        "messages": [{"role": "user", "content": judge_prompt([e.trace for e in group], judge.rubric)}],
        "temperature": 0,
        "max_tokens": _max_tokens(judge, len(group)),
        "response_format": {"type": "json_schema", "json_schema": {"name": "scores", "schema": schema, "strict": True}},
    }
    address = current_address()
    assert address is not None, "called inside a rollout"
    headers = {**address.to_headers(), "authorization": f"Bearer {key}"}
    answer = httpx.post(
        f"{url}/chat/completions", json=body, headers=headers, timeout=judge.timeout_seconds, trust_env=False
    )
    if answer.status_code != 200:
        raise InfrastructureError(f"the judge {judge.model!r} returned HTTP {answer.status_code}: {answer.text[:300]}")
    return read_scores(answer.json()["choices"][0]["message"]["content"] or "", len(group), names)


def _transcript(trace: Trace) -> list[str]:
    """The messages of all calls, without the history that later calls repeat.

    The agent's own repetitions are kept."""
    lines: list[str] = []
    shown: Counter[str] = Counter()
    for call in trace.calls:
        history = Counter(line for message in call.messages if (line := _line(call.agent, message)))
        new = history - shown
        for message in call.messages:
            line = _line(call.agent, message)
            if new[line] > 0:
                lines.append(line)
                shown[line] += 1
                new[line] -= 1
        response = _line(call.agent, call.response or {})
        if response:
            lines.append(response)
            shown[response] += 1
    return lines


def _line(agent: str | None, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    for tool_call in message.get("tool_calls") or ():
        function = tool_call.get("function") or {}
        said += f" [calls {function.get('name')} {function.get('arguments')}]"
    who = f"{message.get('role')} ({agent})" if message.get("role") == "assistant" and agent else message.get("role")
    return f"{who}: {said.strip()}" if said.strip() else ""


def _common_lines(texts: Sequence[Sequence[str]]) -> int:
    count = 0
    for lines in zip(*texts, strict=False):
        if len(set(lines)) > 1:
            break
        count += 1
    return count


def _shorten(text: str) -> str:
    if len(text) <= _CHARACTERS:
        return text
    half = _CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
