"""The model calls of rollouts: number, tokens, time and cost, by the model that answered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lightning_core import trace as tr
from lightning_core.records.statistics.prices import Prices
from lightning_core.records.store import LEFT_OUT, Phase, Store

_ATTRIBUTES = (tr.REQUEST_MODEL, tr.RESPONSE_MODEL, tr.HOST, tr.INPUT_TOKENS, tr.CACHED_TOKENS, tr.OUTPUT_TOKENS)


class AnsweredCall(NamedTuple):
    """One answered model call."""

    requested: str
    """The model that was requested."""
    model: str
    """The model that answered, by the server's name for it."""
    host: str | None
    """The host that the call was forwarded to; None if it was answered here."""
    input_tokens: int | None
    """None if the server did not report it."""
    cached_tokens: int
    """Of the input tokens, those from the server's prompt cache."""
    output_tokens: int | None
    seconds: float
    """From the request's arrival at the endpoint to the end of the response."""
    of_reward: bool = False
    """Whether the reward function made the call."""
    failed: bool = False
    """Whether an error answered it; only `requests_of_spans` has such calls."""
    counted: bool = True
    """Whether its rollout counts; False: it was left out, and may have been repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """The answered calls to one model."""

    model: str
    host: str | None
    """The host that answered; None: calls answered here."""
    calls: int
    calls_without_tokens: int
    """Calls whose server reported no token counts, such as streams that did not request them."""
    input_tokens: int
    cached_tokens: int
    """Of the input tokens, those from the server's prompt cache."""
    output_tokens: int
    seconds_p50: float
    """Median seconds of a call."""
    seconds_p90: float
    usd: float | None
    """The cost of the calls; None without a price, or if token counts are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The calls of some rollouts."""

    rollouts: int
    """Number of rollouts, each an attempt at a task."""
    models: Sequence[ModelUsage]
    """By model, the one with the most calls first, then by name."""
    all: ModelUsage
    """All calls together. The cost is None unless that of each model is known."""

    def per_rollout(self, total: float) -> float:
        """``total`` per rollout; 0 without rollouts."""
        return total / self.rollouts if self.rollouts else 0.0

    @property
    def usd_per_1000(self) -> float | None:
        """The cost of 1,000 rollouts in USD; None if it is not known."""
        return None if self.all.usd is None else 1000 * self.per_rollout(self.all.usd)


def calls_of_spans(spans: Iterable[tr.SpanRecord]) -> Iterator[AnsweredCall]:
    """The answered calls among ``spans``."""
    for span in spans:
        if span.attributes.get(tr.OPERATION) == "chat" and span.error is None and tr.REPLAYS not in span.attributes:
            values = [span.attributes.get(name) for name in _ATTRIBUTES]
            agent = span.attributes.get(tr.AGENT)
            yield _call(values, span.start_ns, span.end_ns, of_reward=agent == tr.REWARD_FUNCTION)


def requests_of_spans(spans: Iterable[tr.SpanRecord]) -> Iterator[AnsweredCall]:
    """The forwarded calls among ``spans``, also failed ones, which their clients may have repeated."""
    spans = [s for s in spans if tr.HOST in s.attributes]
    yield from calls_of_spans(spans)
    failed = [replace(span, error=None) for span in spans if span.error is not None]
    yield from (call._replace(failed=True) for call in calls_of_spans(failed))


def calls_of_store(store: Store, phase: Phase, step: int, *, after: int = 0) -> list[AnsweredCall]:
    """The answered calls of the rollouts of ``phase`` at ``step`` in ``store`` that were stored ``after`` this ordinal."""
    names = ", ".join(f"'$.\"{name}\"'" for name in _ATTRIBUTES)
    rows = store.select(
        f"SELECT json_extract(attributes, {names}) AS found, agent, start_ns, end_ns, status FROM spans "
        "JOIN rollouts ON rollouts.id = spans.rollout WHERE phase = ? AND step = ? AND ordinal > ? AND operation = 'chat' "
        "AND spans.error IS NULL",
        *(phase, step, after),
    )
    return [
        _call(json.loads(row["found"]), row["start_ns"], row["end_ns"], of_reward=row["agent"] == tr.REWARD_FUNCTION)
        ._replace(counted=row["status"] not in LEFT_OUT)
        for row in rows
    ]  # fmt: skip


def _call(values: Sequence[Any], start_ns: int, end_ns: int, *, of_reward: bool) -> AnsweredCall:
    requested, model, host, *tokens = values
    # Spans of other programs may have any value here.
    read, cached, written = (value if isinstance(value, int) else None for value in tokens)
    return AnsweredCall(
        requested=str(requested or ""),
        model=str(model or requested or ""),
        host=None if host is None else str(host),
        input_tokens=read,
        cached_tokens=cached or 0,
        output_tokens=written,
        seconds=(end_ns - start_ns) / 1e9,
        of_reward=of_reward,
    )


def usage_of(calls: Iterable[AnsweredCall], *, rollouts: int, prices: Prices) -> Usage:
    """The usage of ``calls``, which ``rollouts`` rollouts made."""
    calls = list(calls)
    by_model: dict[tuple[str, str | None], list[AnsweredCall]] = {}
    for call in calls:
        by_model.setdefault((call.model, call.host), []).append(call)
    models = [_model_usage(model, host, own, prices) for (model, host), own in by_model.items()]
    known = [one.usd for one in models if one.usd is not None]
    total = _model_usage("all", None, calls, Prices())
    total = replace(total, usd=sum(known) if calls and len(known) == len(models) else None)
    return Usage(rollouts=rollouts, models=sorted(models, key=lambda one: (-one.calls, one.model)), all=total)


def _model_usage(model: str, host: str | None, calls: Sequence[AnsweredCall], prices: Prices) -> ModelUsage:
    counted = [(c.input_tokens, c.output_tokens) for c in calls]
    read, written = (sum(tokens or 0 for tokens in own) for own in zip(*counted, strict=True)) if counted else (0, 0)
    cached = sum(call.cached_tokens for call in calls)
    missing = sum(None in pair for pair in counted)
    # A model here answers requests that name the provider's.
    requested = () if host is None else dict.fromkeys(call.requested for call in calls)
    price = prices.of(model, *requested)
    p50, p90 = np.percentile([call.seconds for call in calls], (50, 90)) if calls else (0.0, 0.0)
    return ModelUsage(
        model=model,
        host=host,
        calls=len(calls),
        calls_without_tokens=missing,
        input_tokens=read,
        cached_tokens=cached,
        output_tokens=written,
        seconds_p50=float(p50),
        seconds_p90=float(p90),
        usd=None if price is None or missing else price.cost(read, written, cached),
    )


def format_usd(usd: float) -> str:
    """``$1.23``, with more digits for smaller sums."""
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.3g}"
