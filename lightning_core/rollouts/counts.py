"""Counts of a batch and the metrics computed from them. The same for every trainer.

Counts are sums, so the counts of a step's groups can be added. docs/metrics.md describes the metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lightning_core.chat.history.conversations import CHANGES, cause_of
from lightning_core.config import Config
from lightning_core.config.signal_sections import hidden_counts, signal_sections
from lightning_core.credit import Credit, Episode
from lightning_core.records.statistics.solved import is_solved
from lightning_core.records.store import LEFT_OUT
from lightning_core.rollouts.attempt import Group, Rollout
from lightning_core.rollouts.outcome import last_refusals
from lightning_core.transitions import Row, Transition, discarded_calls

_CONTEXTS = ("new", "clean", "realigned", "forked")
_REASONS = {*LEFT_OUT, "masked", "max_calls"} - {"infrastructure", "invalid"}
"""Statuses with a metric that a step has only if it is not 0."""
_SUMS = (
    "reward_sum",
    "reward_squares",
    "rollouts_solved",
    "rollouts_trained",
    "rollouts_credited",
    "caught_refusal_reward_sum",
    "versions_behind",
)
"""Counts that are replaced by means."""
_SUMS_OF_POLICIES = ("response_tokens_sum", "surprisal_sum")
"""The same, with one for each policy if there are several."""


def count_rollouts(rollouts: Sequence[Rollout], *, lost: int = 0, solved: float = 1.0) -> dict[str, float]:
    """Rollouts by status, the sum of their rewards, their calls by context, those that they dropped, and their sampled tokens.

    ``context``: how the prompt continues earlier ones.

    ``lost``: number of jobs without a rollout. They count as left out. ``solved``: see ``eval.solved``.
    """
    finished = [r for r in rollouts if r.status not in LEFT_OUT]
    calls = [c for r in rollouts for c in r.trace.calls]
    statuses = Counter(r.status for r in rollouts)
    causes = Counter((c.context, cause) for c in calls if (cause := cause_of(c.context_reason)))
    del causes["realigned", "template"]  # these continue their tokens
    caught = [r.reward for r in rollouts if r.status == "ok" and last_refusals(r.trace.calls)]
    return {
        "reward_sum": math.fsum(r.reward for r in finished),
        "reward_squares": math.fsum(r.reward**2 for r in finished),
        "rollouts_solved": sum(is_solved(r.reward, solved) for r in finished),
        "rollouts": len(rollouts) + lost,
        "rollouts_failed": statuses["failed"] + statuses["masked"],
        "rollouts_invalid": statuses["invalid"],
        **{f"rollouts_{status}": number for status, number in statuses.items() if status in _REASONS},
        "rollouts_left_out": len(rollouts) + lost - len(finished),
        "rollouts_caught_refusal": len(caught),
        "caught_refusal_reward_sum": math.fsum(caught),
        "rollouts_without_calls": sum(not any(c.trained for c in r.trace.calls) for r in finished),
        **{f"context_{kind}": sum(c.context == kind for c in calls) for kind in _CONTEXTS},
        "context_rewritten": sum(causes[kind, cause] for kind in ("new", "forked") for cause in CHANGES),
        **{f"context_{kind}_{cause}": number for (kind, cause), number in causes.items()},
        "calls_discarded": sum(len(discarded_calls(r.trace)) for r in rollouts),
        "tokens_sampled": sum(len(c.output_ids) for c in calls if c.output_ids is not None),
    }


def count_groups(groups: Sequence[Group], *, solved: float) -> dict[str, float]:
    """`count_rollouts` of ``groups``, and the counts of their further rollouts."""
    counts = count_rollouts([r for g in groups for r in g.rollouts], lost=sum(g.lost for g in groups), solved=solved)
    for group in groups:
        counts = add_counts(counts, group.counts)
    return counts


def count_batch(
    config: Config, episodes: Sequence[Episode], credit: Credit, rows: Sequence[Row], step: int
) -> dict[str, float]:
    """`count_calls`, `count_rewards`, `count_rows` and the metrics of ``credit``."""
    return {
        **count_calls(episodes, credit, list(config.policies)),
        **count_rewards(episodes),
        **count_rows(
            rows,
            step=None if config.policies else step,
            regularized=config.algorithm.kl is not None or config.algorithm.entropy_weight != 0,
        ),
        **credit.metrics,
    }


def count_calls(episodes: Sequence[Episode], credit: Credit, policies: Sequence[str] = ()) -> dict[str, float]:
    """The trained agents' calls: how many were cut and credited, and their tokens.

    ``policies``: the names of several policies, each of which gets its own counts too.
    """
    transitions = [t for e in episodes for t in e.transitions]
    counts = _count_transitions(transitions, credit)
    for name in policies:
        own = _count_transitions([t for t in transitions if t.policy == name], credit)
        counts |= {f"{name}/{key}": value for key, value in own.items()}
    return counts


def _count_transitions(transitions: Sequence[Transition], credit: Credit) -> dict[str, float]:
    return {
        "calls": len(transitions),
        "calls_truncated": sum(t.finish_reason == "length" for t in transitions),
        "calls_credited": sum(credit.advantages[t.call] != 0 for t in transitions),
        "response_tokens_sum": sum(len(t.output_ids) for t in transitions),
        "surprisal_sum": -math.fsum(float(t.logprobs.sum()) for t in transitions),
    }


def count_rewards(episodes: Sequence[Episode]) -> dict[str, float]:
    """The number of rollouts with credit, and the sum of the rewards that signals added to rollouts and agents, by name.

    A reward that several agents have counts once in each rollout.
    """
    counts: dict[str, float] = {"rollouts_credited": len(episodes)}
    derived = [
        {r.name: r.value for r in e.rewards[len(e.trace.rewards) :] if r.name and r.call is None} for e in episodes
    ]
    names = dict.fromkeys(name for rewards in derived for name in rewards)
    return counts | {f"reward_{name}_sum": math.fsum(found.get(name, 0.0) for found in derived) for name in names}


def count_rows(rows: Sequence[Row], *, step: int | None = None, regularized: bool = False) -> dict[str, float]:
    """Rows, the rollouts they come from, and the sampled tokens of those with a gradient.

    ``step``: number of updates so far; then also how many versions of the weights older the rows are. None with
    several policies, which have their own versions. ``regularized``: a term of the loss gives every token a gradient.
    """
    counts: dict[str, float] = {
        "rows": len(rows),
        "rollouts_trained": len({row.rollout for row in rows}),
        "tokens_trained": sum(int(row.mask.sum()) for row in rows if regularized or row.has_gradient),
    }
    if any(row.streams.cross_entropy is not None for row in rows):
        counts["tokens_ce"] = sum(int(row.cross_entropy_mask.sum()) for row in rows)
    if step is not None:
        counts["versions_behind"] = sum(step - max(s.version for s in row.segments) for row in rows)
    return counts


def add_counts(total: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The sums of both."""
    return {key: total.get(key, 0) + more.get(key, 0) for key in {**total, **more}}


def counts_to_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step: the counts, with means and shares in place of the sums.

    Those whose counts are missing, as in the sums of older runs with verl, are left out.
    """
    finished = counts["rollouts"] - counts["rollouts_left_out"]
    reward = counts["reward_sum"] / finished if finished else 0.0
    metrics: dict[str, float] = {"reward": reward}
    if "reward_squares" in counts and finished:
        metrics["reward_std"] = math.sqrt(max(0.0, counts["reward_squares"] / finished - reward**2))
    metrics |= _mean("solved", counts, "rollouts_solved", finished)
    metrics |= _mean(
        "caught_refusal_reward", counts, "caught_refusal_reward_sum", counts.get("rollouts_caught_refusal", 0)
    )
    metrics |= {key: value for key, value in counts.items() if not _is_sum(key)}
    if "rollouts_trained" in counts:
        metrics["rows_per_rollout"] = counts["rows"] / max(1, counts["rollouts_trained"])
    metrics |= _mean("staleness", counts, "versions_behind", counts["rows"])
    for signal in signal_sections().values():
        for name, (total, number) in signal.means.items():
            metrics |= _mean(name, counts, total, counts.get(number, 0))
    for name in filter(_is_derived_reward, counts):
        metrics |= _mean(name.removesuffix("_sum"), counts, name, counts.get("rollouts_credited", 0))
    for prefix in dict.fromkeys(key.rpartition("calls")[0] for key in counts if _is_name(key, "calls")):
        metrics |= _call_metrics(counts, prefix)
    return metrics


def _call_metrics(counts: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The means over calls. ``prefix``: ``NAME/`` of one of several policies, or empty."""
    calls, tokens = counts[f"{prefix}calls"], counts[f"{prefix}response_tokens_sum"]
    return {
        **_mean(f"{prefix}response_tokens", counts, f"{prefix}response_tokens_sum", calls),
        **_mean(f"{prefix}truncated", counts, f"{prefix}calls_truncated", calls),
        **_mean(f"{prefix}sampling_entropy", counts, f"{prefix}surprisal_sum", tokens),
    }


def _mean(name: str, counts: Mapping[str, float], total: str, number: float) -> dict[str, float]:
    """``name`` with the mean; nothing if there is no count or nothing to divide by."""
    return {name: counts[total] / number} if total in counts and number else {}


def _is_derived_reward(key: str) -> bool:
    name = key.rpartition("/")[2]
    return name.startswith("reward_") and name.endswith("_sum") and name not in _SUMS


def _is_sum(key: str) -> bool:
    return (
        key in _SUMS
        or key in hidden_counts()
        or _is_derived_reward(key)
        or any(_is_name(key, name) for name in _SUMS_OF_POLICIES)
    )


def _is_name(key: str, name: str) -> bool:
    return key.rpartition("/")[2] == name


def seconds_to_metrics(counts: Mapping[str, float], *, rollouts: float, update: float) -> dict[str, float]:
    """The metrics of a step whose rollouts and update took this many seconds."""
    return {
        "seconds_rollouts": rollouts,
        "seconds_update": update,
        # A coarse clock may not have moved.
        **_mean("tokens_per_second", counts, "tokens_sampled", rollouts),
    }
