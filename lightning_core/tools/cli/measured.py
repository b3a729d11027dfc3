"""The result of an evaluation as console output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType

from lightning_core.errors import plural
from lightning_core.records.statistics.intervals import format_mean
from lightning_core.records.statistics.measured import EvaluationSummary
from lightning_core.records.statistics.pass_rates import PassRate
from lightning_core.records.statistics.usage import ModelUsage, Usage, format_usd
from lightning_core.tools.cli.console import Column, make_table

_NOTHING = "–"


def _rate(e: EvaluationSummary, name: str) -> str:
    if not e.pass_rates:
        return _NOTHING
    last = e.pass_rates[-1]
    return f"{getattr(last, name):.3f} (k = {last.k})"


EVALUATION_ROWS: Sequence[tuple[str, Callable[[EvaluationSummary], str]]] = (
    ("reward", lambda e: f"{e.reward:.3f}"),
    ("95% interval", lambda e: _NOTHING if e.reward_ci95 is None else "[{:.3f}, {:.3f}]".format(*e.reward_ci95)),
    ("solved tasks", lambda e: f"{e.solved} of {e.tasks}"),
    ("answered by", lambda e: "recorded responses" if e.recorded_in else _NOTHING),
    ("rollouts left out", lambda e: str(e.left_out) if e.left_out else _NOTHING),
    ("pass@k", lambda e: _rate(e, "at_least_one")),
    ("pass^k", lambda e: _rate(e, "all")),
    ("calls of a rollout", lambda e: _of_calls(e, f"{e.usage.per_rollout(e.usage.all.calls):.1f}")),
    ("tokens in of a rollout", lambda e: _of_calls(e, _tokens(e.usage, e.usage.all.input_tokens))),
    ("tokens out of a rollout", lambda e: _of_calls(e, _tokens(e.usage, e.usage.all.output_tokens))),
    ("seconds of a call, p50", lambda e: _of_calls(e, f"{e.usage.all.seconds_p50:.2f}")),
    ("seconds of a call, p90", lambda e: _of_calls(e, f"{e.usage.all.seconds_p90:.2f}")),
    ("USD of 1,000 rollouts", lambda e: _NOTHING if e.usage.usd_per_1000 is None else format_usd(e.usage.usd_per_1000)),
)
"""The rows of a table that compares evaluations: title, and the cell of one evaluation."""


def _of_calls(e: EvaluationSummary, cell: str) -> str:
    return cell if e.usage.all.calls else _NOTHING


def _tokens(usage: Usage, total: int) -> str:
    """Tokens per rollout; with a ≥ if a server did not report those of all calls."""
    return f"{'≥ ' if usage.all.calls_without_tokens else ''}{usage.per_rollout(total):,.0f}"


def make_evaluation(e: EvaluationSummary) -> Group:
    """Reward, solved tasks, pass@k and pass^k, and the model calls."""
    parts: list[RenderableType] = [
        f"held-out reward {format_mean(e.reward, e.reward_ci95)} (95% interval) on {plural(e.tasks, 'task')}",
        f"solved: {e.solved} of {plural(e.tasks, 'task')} ({e.solved / e.tasks:.0%})",
    ]
    if e.pass_rates:
        parts += ["", make_pass_table(e.pass_rates)]
    if e.usage.models:
        parts += ["", *_calls(e.usage)]
    if e.usd_spent is not None:
        what = "cost of these calls at the providers" if e.recorded_in else "cost of this evaluation"
        parts.append(f"{what}: {format_usd(e.usd_spent)}")
    return Group(*parts)


def make_pass_table(rates: Sequence[PassRate]) -> RenderableType:
    """pass@k and pass^k by k."""
    columns = [Column("k"), *(Column(str(rate.k), "right") for rate in rates)]
    rows = [
        ["pass@k (one of k solved)", *(f"{rate.at_least_one:.3f}" for rate in rates)],
        ["pass^k (all k solved)", *(f"{rate.all:.3f}" for rate in rates)],
    ]
    if len({rate.tasks for rate in rates}) > 1:
        rows.append(["tasks with k rollouts", *(str(rate.tasks) for rate in rates)])
    return make_table(columns, rows)


def _calls(usage: Usage) -> Iterator[RenderableType]:
    is_priced = any(model.usd is not None for model in usage.models)
    titles = ("calls", "tokens in", "cached", "tokens out", "call p50", "call p90", *(["USD"] if is_priced else []))
    columns = [Column("model", cut=True), *(Column(title, "right") for title in titles)]
    yield make_table(columns, (_row(model, is_priced=is_priced) for model in usage.models))
    calls, read, written = (
        usage.per_rollout(total) for total in (usage.all.calls, usage.all.input_tokens, usage.all.output_tokens)
    )
    cost = "" if usage.usd_per_1000 is None else f"; 1,000 rollouts: {format_usd(usage.usd_per_1000)}"
    yield f"a rollout: {calls:.1f} calls, {read:,.0f} tokens in, {written:,.0f} out{cost}"
    if usage.all.calls_without_tokens:
        yield (
            f"{plural(usage.all.calls_without_tokens, 'call')} without token counts, which the provider did not report (streams of chat "
            "completions need stream_options.include_usage): the sums lack them"
        )


def _row(m: ModelUsage, *, is_priced: bool) -> Sequence[str]:
    where = m.model if m.host is None else f"{m.model} ({m.host})"
    cost = [_NOTHING if m.usd is None else format_usd(m.usd)] if is_priced else []
    tokens = (f"{number:,}" for number in (m.calls, m.input_tokens, m.cached_tokens, m.output_tokens))
    return where, *tokens, f"{m.seconds_p50:.2f}s", f"{m.seconds_p90:.2f}s", *cost
