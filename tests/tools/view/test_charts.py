"""Charts as data: which metrics are lines of which chart."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_core.tools.view.charts import Chart, Curves, compared_charts, run_charts


def curves(*lines: dict[str, Any], **given: Any) -> Curves:
    return Curves(
        metrics=[{"step": step, **line} for step, line in enumerate(lines, start=1)],
        **{"errors": {}, "held_out": {}, **given},
    )


def by_id(charts: list[Chart]) -> dict[str, dict[str, list[Any]]]:
    """The points by chart and line."""
    return {chart.id: {line.name: list(line.points) for line in chart.lines} for chart in charts}


def test_a_chart_without_points_is_left_out() -> None:
    assert run_charts(curves()) == []
    assert by_id(run_charts(curves({"loss": 1.0}))) == {"loss": {"Loss": [(1, 1.0)]}}


def test_both_divergences_are_one_chart() -> None:
    (chart,) = run_charts(curves({"kl": 1.0, "approx_kl": 2.0}))
    assert by_id([chart]) == {"kl": {"to the reference": [(1, 1.0)], "of the update": [(1, 2.0)]}}
    (alone,) = run_charts(curves({"approx_kl": 2.0}))
    assert (alone.note, [line.name for line in alone.lines]) == ("of the update", ["KL divergence"])


def test_missing_shares_and_means_are_computed_from_counts() -> None:
    counts = {"context_new": 2, "context_clean": 2, "calls_truncated": 1, "tokens_trained": 12, "seconds_rollouts": 2.0}
    found = by_id(run_charts(curves({**counts, "groups": 4, "groups_equal": 3})))
    assert found["truncated"] == {"Truncated responses": [(1, 0.25)]}
    assert found["length"] == {"Response length": [(1, 3.0)]}
    assert found["speed"] == {"Tokens per second": [(1, 6.0)]}
    assert found["equal"] == {"Wasted groups": [(1, 0.75)]}


def test_recorded_shares_and_means_are_not_computed() -> None:
    recorded = {"truncated": 0.5, "response_tokens": 7.0, "tokens_per_second": 9.0}
    counts = {"calls": 4, "calls_truncated": 1, "tokens_trained": 12, "tokens_sampled": 24, "seconds_rollouts": 2.0}
    found = by_id(run_charts(curves({**counts, **recorded})))
    assert [found[chart] for chart in ("truncated", "length", "speed")] == [
        {"Truncated responses": [(1, 0.5)]},
        {"Response length": [(1, 7.0)]},
        {"Tokens per second": [(1, 9.0)]},
    ]
    del recorded["tokens_per_second"]
    assert by_id(run_charts(curves({**counts, **recorded})))["speed"] == {"Tokens per second": [(1, 12.0)]}


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), 10**400, [1], {}])
def test_what_is_no_number_is_no_point(value: Any) -> None:
    found = by_id(
        run_charts(curves({"reward": value, "loss": value, "new": value}, {"reward": 0.5, "loss": 1, "new": 2}))
    )
    assert found == {"reward": {"training": [(2, 0.5)]}, "loss": {"Loss": [(2, 1)]}, "other-new": {"new": [(2, 2)]}}


def test_compared_runs_are_lines_with_a_line_for_each_policy() -> None:
    one = curves({"reward": 0.1, "loss": 1.0})
    two = curves({"reward": 0.2, "a/loss": 2.0, "b/loss": 3.0}, policies=["a", "b"], errors={1: 0.125})
    found = by_id(compared_charts({"one": one, "two": two}))
    assert found["reward"] == {"one": [(1, 0.1)], "two": [(1, 0.2, 0.2 - 0.125, 0.2 + 0.125)]}
    assert found["loss"] == {"one": [(1, 1.0)], "two · a": [(1, 2.0)], "two · b": [(1, 3.0)]}


def test_monitors_are_no_charts() -> None:
    assert run_charts(curves({"monitor/no_gradient": 1.0})) == []
