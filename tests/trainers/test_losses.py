"""Each loss, importance weight and penalty against a short reference, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_core.config.algorithm import Importance
from lightning_core.credit import LOSSES
from lightning_core.credit.losses import TokenLosses
from lightning_core.trainers.torch.corrections import importance_weights
from lightning_core.trainers.torch.penalties import kl_penalty, place_entropy

pytestmark = pytest.mark.numeric

LOW, HIGH, DUAL = 0.2, 0.3, 2.0
CLIPS = {"clip_low": LOW, "clip_high": HIGH, "clip_dual": DUAL}


def loss(name: str, new: Tensor, log_ratio: Tensor, advantages: Tensor) -> TokenLosses:
    rule = LOSSES[name]
    return rule.function(new, log_ratio, advantages, **rule.arguments(CLIPS, {}))


def ppo(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (new - old).exp()
    return -torch.min(ratio * advantages, ratio.clip(1 - LOW, 1 + HIGH) * advantages)


def dual_clip(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    surrogate = -ppo(new, old, advantages)
    return -torch.where(advantages < 0, torch.max(surrogate, DUAL * advantages), surrogate)


def cispo(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -(new - old).exp().clip(1 - LOW, 1 + HIGH).detach() * advantages * new


def reinforce(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * new


REFERENCES = {"ppo": ppo, "dual-clip": dual_clip, "cispo": cispo, "reinforce": reinforce}


def tokens(count: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """New logprobs, old ones at about the clipping distance, advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(count, generator=generator)
    new = old + 0.8 * torch.randn(count, generator=generator)
    return new, old, torch.randn(count, generator=generator)


@pytest.mark.parametrize("name", REFERENCES)
def test_losses(name: str) -> None:
    new, old, advantages = tokens()
    a, b = new.clone().requires_grad_(), new.clone().requires_grad_()
    found = loss(name, a, a - old, advantages).losses_E
    expected = REFERENCES[name](b, old, advantages)
    torch.testing.assert_close(found, expected)
    weights = torch.rand(len(new))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_gspo_has_the_gradient_of_the_clipped_sequence_ratio() -> None:
    """Three sequences: within the range, above it with a positive advantage, below it with one."""
    new, old, _ = tokens(12)
    sequence = torch.tensor([0] * 3 + [1] * 5 + [2] * 4)
    old = new - torch.tensor([0.1, -0.05, 0.02, 0.4, 0.5, 0.2, 0.3, 0.6, -0.4, -0.2, -0.6, -0.5])
    advantages = torch.tensor([1.5, 0.7, 0.5])
    lengths = torch.bincount(sequence)
    b = new.clone().requires_grad_()
    ratio = (torch.zeros(3).index_add(0, sequence, b - old) / lengths).exp()
    expected = -torch.min(ratio * advantages, ratio.clip(1 - LOW, 1 + HIGH) * advantages).mean()
    expected.backward()

    a = new.clone().requires_grad_()
    found = loss("gspo", a, ratio.detach().log()[sequence], advantages[sequence])
    total = (found.losses_E / lengths[sequence] / 3).sum()  # the mean over sequences of the mean over tokens
    total.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(a.grad, b.grad)
    assert found.marks["clip_high_fraction"].tolist() == [False] * 3 + [True] * 5 + [False] * 4


def test_where_a_loss_lets_go() -> None:
    """Ratios 1.5 and 0.5, advantages of both signs: clipped tokens, and tokens that keep a gradient."""
    new = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    expected = {
        "ppo": [0, 1.5, -0.5, 0],
        "dual-clip": [0, 1.5, -0.5, 0],
        "cispo": [-1.3, 1.3, -0.8, 0.8],
        "reinforce": [-1, 1, -1, 1],
    }
    for name, gradient in expected.items():
        new.grad = None
        loss(name, new, new - 0.0, advantages).losses_E.sum().backward()
        assert new.grad is not None
        assert new.grad.tolist() == pytest.approx(gradient)
    far = torch.tensor([2.5]).log().requires_grad_()
    found = loss("dual-clip", far, far - 0.0, torch.tensor([-1.0]))
    found.losses_E.sum().backward()
    assert found.losses_E.item() == DUAL
    assert far.grad is not None
    assert far.grad.item() == 0
    assert found.marks["clip_dual_fraction"].tolist() == [True]


@pytest.mark.parametrize(
    ("low", "high", "masked"),
    # policy − old is 0.2, 0.02, −0.2 and −0.09, for tokens with A > 0, A < 0, and so on.
    [(0.15, 0.15, [0, 5]), (0.15, 0.25, [5]), (0.05, 0.15, [0, 5, 7])],
)
def test_dppo_masks_by_the_change_of_the_sampled_token(low: float, high: float, masked: list[int]) -> None:
    check_masked(LOSSES["dppo-tv"].function, masked, clip_low=low, clip_high=high)


def check_masked(loss: Callable[..., TokenLosses], masked: list[int], **clips: float) -> None:
    """Each pair of probabilities with A = 2 and A = −1. The ratio 3 of a rare token moves little probability."""
    old = torch.tensor([0.5, 0.01, 0.9, 0.99]).repeat_interleave(2).log()
    new = torch.tensor([0.7, 0.03, 0.7, 0.9]).repeat_interleave(2).log().requires_grad_()
    found = loss(new, new - old, torch.tensor([2.0, -1.0] * 4), **clips)
    # −r A, which is also the gradient, where the token is not masked
    expected = [-2.8, 1.4, -6, 3, -2 * 7 / 9, 7 / 9, -2 * 10 / 11, 10 / 11]
    expected = [0.0 if token in masked else value for token, value in enumerate(expected)]
    found.losses_E.sum().backward()
    assert found.losses_E.tolist() == pytest.approx(expected)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(expected)
    marks = {key: mark.nonzero().flatten().tolist() for key, mark in found.marks.items()}
    assert marks == {
        "clip_high_fraction": [token for token in masked if token % 2 == 0],
        "clip_low_fraction": [token for token in masked if token % 2],
    }


RATIOS = torch.tensor([0.1, 0.5, 1.0, 2.0, 7.0])


@pytest.mark.parametrize(
    ("importance", "expected", "outside"),
    [
        (Importance(), [0.1, 0.5, 1, 2, 2], [4]),
        (Importance(low=0.3, high=5.0), [0.3, 0.5, 1, 2, 5], [0, 4]),
        (Importance(high=None), [0.1, 0.5, 1, 2, 7], []),
        (Importance(kind="mask", low=0.5, high=5.0), [0, 0.5, 1, 2, 0], [0, 4]),
        (Importance(kind="mask"), [0.1, 0.5, 1, 2, 0], [4]),
    ],
)
def test_importance_weights(importance: Importance, expected: list[float], outside: list[int]) -> None:
    log_ratio = RATIOS.double().log().requires_grad_()
    weights, beyond = importance_weights(log_ratio, importance)
    assert weights.tolist() == pytest.approx(expected)
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert beyond.nonzero().flatten().tolist() == outside


def test_products_beyond_float32_are_cut_down_before_they_overflow() -> None:
    far = torch.tensor([300.0, -300.0])
    assert importance_weights(far, Importance())[0].tolist() == [2, 0]
    assert importance_weights(far, Importance(kind="mask", low=0.5))[0].tolist() == [0, 0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators(estimator: str) -> None:
    new, old, _ = tokens()
    a = new.clone().requires_grad_()
    found = kl_penalty(a, old, estimator)  # type: ignore[arg-type]
    found.sum().backward()
    log_ratio = new - old
    if estimator == "k1":
        torch.testing.assert_close(found, log_ratio)
        torch.testing.assert_close(a.grad, log_ratio)  # that of log_ratio ** 2 / 2
    else:
        torch.testing.assert_close(found, (-log_ratio).exp() - 1 + log_ratio)
        torch.testing.assert_close(a.grad, 1 - (-log_ratio).exp())
        assert (found >= 0).all()


def test_the_k1_penalty_has_the_gradient_of_the_divergence_in_expectation() -> None:
    """All tokens of a small vocabulary, each as often as it is sampled; k3's gradient differs."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator).requires_grad_()
    reference = torch.log_softmax(torch.randn(6, generator=generator), 0)

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        logits.grad = None
        function(torch.log_softmax(logits, 0)).backward()
        assert logits.grad is not None
        return logits.grad

    true = gradient(lambda p: (p.exp() * (p - reference)).sum())
    k1 = gradient(lambda p: (p.detach().exp() * kl_penalty(p, reference, "k1")).sum())
    k3 = gradient(lambda p: (p.detach().exp() * kl_penalty(p, reference, "k3")).sum())
    torch.testing.assert_close(k1, true)
    assert not torch.allclose(k3, true, atol=0.05)


def test_entropy_is_that_of_the_tempered_and_constrained_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, generator=generator) * 2
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0])
    forbidden = [(1, torch.arange(9) < 4), (3, torch.arange(9) != 5)]  # at the last position only one token is allowed
    a = logits.clone().requires_grad_()
    found = place_entropy(a * 1.0, temperatures, iter(forbidden))
    expected, gradients = [], torch.zeros(4, 9)
    for place in range(4):
        b = logits[place].clone().requires_grad_()
        allowed = ~dict(forbidden).get(place, torch.zeros(9, dtype=torch.bool))
        distribution = torch.distributions.Categorical(logits=(b / temperatures[place])[allowed])
        value = distribution.entropy()
        value.backward()
        assert b.grad is not None
        gradients[place] = b.grad * (place + 1)
        expected.append(value.item())
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    found.backward(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    torch.testing.assert_close(a.grad, gradients, atol=1e-6, rtol=1e-5)
