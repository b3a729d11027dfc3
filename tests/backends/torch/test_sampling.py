"""Choosing tokens: correct probabilities and logprobs, independently per row."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_core.backends.torch.sampling import sample_tokens

pytestmark = pytest.mark.numeric


def draw(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    count = len(uniforms)
    rows = logits.expand(count, -1).clone()
    return sample_tokens(rows, [temperature] * count, [top_p] * count, uniforms)


SHORT = {(1.0, 1.0, 3), (1.0, 1.0, 1024), (0.5, 1.0, 256), (1.3, 0.6, 3), (1.3, 0.6, 300)}
CASES = [(*kind, vocabulary) for kind in [(1.0, 1.0), (0.5, 1.0), (1.3, 0.6)] for vocabulary in (3, 256, 300, 1024)]


@pytest.mark.parametrize(
    ("temperature", "top_p", "vocabulary"),
    [pytest.param(*case, marks=() if case in SHORT else pytest.mark.long) for case in CASES],
)
def test_frequencies_and_logprobs(vocabulary: int, temperature: float, top_p: float) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    expected = torch.softmax(logits / temperature, -1)
    if top_p < 1:
        order = expected.argsort(descending=True)
        inside = order[: int((expected[order].cumsum(0) < top_p).sum()) + 1]
        expected = torch.zeros(vocabulary).index_copy(0, inside, expected[inside] / expected[inside].sum())
    # Evenly spread numbers instead of random ones: frequencies are then exact up to one part in their count.
    count = 20000
    tokens, logprobs = draw(logits, (torch.arange(count) + 0.5) / count, temperature, top_p)
    frequencies = torch.bincount(tokens, minlength=vocabulary) / count
    torch.testing.assert_close(frequencies, expected, atol=2e-3 if vocabulary < 300 else 1e-3, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-4, rtol=0)


def test_the_ends_of_the_range_meet_tokens_that_are_possible() -> None:
    logits = torch.full((600,), -torch.inf)
    logits[[5, 300, 555]] = torch.tensor([0.0, 1.0, 2.0])
    ends = torch.tensor([0.0, 1e-30, 0.5, 1 - 2**-24, 1.0])
    tokens, logprobs = draw(logits, ends, 1.0, 1.0)
    assert tokens.tolist() == [5, 5, 555, 555, 555]
    assert torch.isfinite(logprobs).all()


def test_greedy_rows_in_a_batch_with_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    temperatures, uniforms = torch.tensor([0.0, 2.0]), torch.tensor([0.99, 0.99])
    tokens, logprobs = sample_tokens(logits.clone(), temperatures.tolist(), [1.0, 1.0], uniforms)
    assert tokens.tolist() == [1, 2]
    assert logprobs[0].item() == pytest.approx(torch.log_softmax(logits[0], -1)[1].item())
    assert logprobs[1].item() == pytest.approx(torch.log_softmax(logits[1] / 2, -1)[2].item())


@pytest.mark.parametrize("found", [math.nan, math.inf, [-math.inf] * 320], ids=["nan", "inf", "no token"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.0, 0.9), (0.0, 1.0)])
def test_logits_that_are_not_finite_give_logprobs_that_are_not_and_other_rows_stay(
    found: float | list[float], temperature: float, top_p: float
) -> None:
    logits = torch.randn(3, 320, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.3, 0.99, 0.5])
    expected = sample_tokens(logits.clone(), [temperature] * 3, [top_p] * 3, uniforms)
    logits[1] = torch.tensor(found)
    tokens, logprobs = sample_tokens(logits, [temperature] * 3, [top_p] * 3, uniforms)
    assert 0 <= tokens[1] < 320
    assert not math.isfinite(logprobs[1])
    for values, wanted in zip((tokens, logprobs), expected, strict=True):
        assert values[[0, 2]].equal(wanted[[0, 2]])
