"""An agent that replaces its history by a summary: its rows, its credit and the weight of its tokens, against computed numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from openai import OpenAI

from lightning_core import CreditRules, Episode, assign_credit, reward, trace_to_transitions, transitions_to_rows
from lightning_core.capture import scope
from lightning_core.config.algorithm import Algorithm
from lightning_core.testing import Playground, open_playground
from lightning_core.trainers.torch.aggregation import token_weights

pytestmark = pytest.mark.numeric


def work(turns: int, window: int, summarizer: str) -> None:
    """``turns`` questions. After each ``window`` of them, the history becomes a summary."""
    client = OpenAI(api_key="any", max_retries=0)
    messages: list[Mapping[str, str]] = []

    def say(agent: str, text: str) -> str:
        with scope(agent):
            prompt = [*messages, {"role": "user", "content": text}]
            reply = client.chat.completions.create(model="gpt", messages=prompt)  # pyright: ignore[reportArgumentType]
        return reply.choices[0].message.content or ""

    for turn in range(turns):
        if turn and turn % window == 0:
            messages[:] = [{"role": "system", "content": say(summarizer, "Summarise.")}]
        answer = say("worker", f"Question {turn}?")
        messages += [
            {"role": "user", "content": f"Question {turn}?"},
            {"role": "assistant", "content": answer},
        ]


def episode_of(opened: Playground, turns: int, value: float, *, summarizer: str = "worker") -> Episode:
    names = {"worker", summarizer}
    with opened.rollout({"id": "t"}, train=names) as run:
        work(turns, 2, summarizer)
        reward(value)
    transitions = trace_to_transitions(run.trace, agents=names)
    return Episode(trace=run.trace, transitions=transitions, rewards=run.trace.rewards)


def respond(prompt: str) -> str:
    return "the sum" if prompt.rstrip().endswith("Summarise.<|im_end|>\n<|im_start|>assistant") else "yes"


@pytest.mark.parametrize(
    ("summarizer", "expected"),
    [
        # The agent itself: its summary continues the window's row. Five questions in windows of two: three windows, two summaries.
        ("worker", [[3, 3, 7], [3, 3, 7], [3]]),
        # Another agent: a row for each of its summaries.
        ("summarizer", [[3, 3], [7], [3, 3], [7], [3]]),
    ],
)
def test_a_window_is_a_row_and_each_summary_is_trained_once(summarizer: str, expected: list[list[int]]) -> None:
    """A response of n bytes has n tokens and the end of the turn. The summary in the next prompt is not trained on."""
    with open_playground(respond) as opened:
        episode = episode_of(opened, 5, 1.0, summarizer=summarizer)
    rows = transitions_to_rows(episode.transitions)
    assert [[s.stop - s.start - 1 for s in row.segments] for row in rows] == expected
    assert sum(int(row.mask.sum()) for row in rows) == sum(len(t.output_ids) for t in episode.transitions)
    assert [call.context for call in episode.trace.calls] == ["new", "clean", "clean"] * 2 + ["new"]


def test_a_rollout_that_is_cut_counts_as_one_that_is_not() -> None:
    """SUPO (2510.06727): the advantage of a rollout, R − mean of the group, for all calls of all of its windows.

    The failed attempt has three windows (five answers, two summaries), the two that succeed have one. In the mean over rows the failed one
    would count three of five times, and the baseline would be 2/5. Here it is 2/3.
    """
    with open_playground(respond) as opened:
        episodes = [episode_of(opened, 5, 0.0), episode_of(opened, 2, 1.0), episode_of(opened, 1, 1.0)]
    credit = assign_credit(episodes, CreditRules(advantage="dr-grpo"))
    for episode, advantage in zip(episodes, (-2 / 3, 1 / 3, 1 / 3), strict=True):
        assert [credit.advantages[t.call] for t in episode.transitions] == pytest.approx(
            [advantage] * len(episode.transitions)
        )
    rows = transitions_to_rows([t for e in episodes for t in e.transitions], credit.advantages)
    assert [row.rollout for row in rows] == [
        e.rollout for e, n in zip(episodes, (3, 1, 1), strict=True) for _ in range(n)
    ]
    # Sampled tokens, with the ends of turns: 5 · 4 + 2 · 8 = 36, then 8, then 4.
    by_aggregation = {"rollout-mean": [1 / 3, 1 / 3, 1 / 3], "token-mean": [36 / 48, 8 / 48, 4 / 48]}
    for aggregation, shares in by_aggregation.items():
        weights = token_weights(rows, Algorithm(aggregation=aggregation))  # type: ignore[arg-type]
        total = {e.rollout: 0.0 for e in episodes}
        for row, weight in zip(rows, weights, strict=True):
            total[row.rollout] += float(np.sum(weight))
        assert list(total.values()) == pytest.approx(shares)


def test_gae_continues_over_a_compaction() -> None:
    """Three calls in two windows: answer, summary | answer, with V = 0.5, 0.4, 0.8 and R = 1.

    δ = (0.9 · 0.4 − 0.5, 0.9 · 0.8 − 0.4, 1 − 0.8) = (−0.14, 0.32, 0.2), A = δ + 0.45 A of the next call. The second δ has the value of the
    prompt after the compaction. GAE within the window would end in R there: δ = 1 − 0.4.
    """
    with open_playground(respond) as opened, opened.rollout({"id": "t"}, train=["worker"]) as run:
        work(2, 1, "worker")
        reward(1.0)
    transitions = trace_to_transitions(run.trace, agents={"worker"})
    assert len(transitions) == 3
    assert len(transitions_to_rows(transitions)) == 2
    episode = Episode(trace=run.trace, transitions=transitions, rewards=run.trace.rewards)
    rules = CreditRules(rewards="gae", gamma=0.9, lam=0.5, advantage="none")
    values = dict(zip([t.call for t in transitions], [0.5, 0.4, 0.8], strict=True))
    credit = assign_credit([episode], rules, values=values)
    assert [credit.advantages[t.call] for t in transitions] == pytest.approx(
        [-0.14 + 0.45 * (0.32 + 0.45 * 0.2), 0.32 + 0.45 * 0.2, 0.2]
    )
