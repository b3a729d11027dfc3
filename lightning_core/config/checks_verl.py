"""What ``trainer.name: verl`` can honour of the configuration. What it cannot is refused, key by key."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config.rules import declared
from lightning_core.config.sections import Sections
from lightning_core.config.source import KeyPath
from lightning_core.credit import ADVANTAGE_RULES, LOSSES, REWARD_RULES
from lightning_core.credit.registry import AdvantageRule, RewardRule

_OURS_ALONE = ("max_batch", "gather_ms", "threads")
_VERLS_ALONE = (
    "mode", "nodes", "gpus_per_node", "rollout_nodes", "rollout_gpus_per_node", "rollout_workers", "rows_per_rollout", "verl",
)  # fmt: skip


def impossible_verl(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Combinations that cannot be honoured although each value alone is fine."""
    t = c.trainer
    for key in _OURS_ALONE if t.name == "verl" else _VERLS_ALONE:
        if getattr(t, key) != type(t).model_fields[key].default:
            yield ("trainer", key), f"is for another trainer, but trainer.name is {t.name!r}"
    if t.name != "verl":
        if c.ray.address is not None:
            yield ("ray", "address"), f"goes with trainer.name: verl only, but it is {t.name!r}"
        return
    if (t.mode == "separate_async") != (t.rollout_nodes > 0):
        yield (
            ("trainer", "rollout_nodes"),
            f"found {t.rollout_nodes} with trainer.mode {t.mode!r}; 'separate_async' needs nodes that sample, and nothing else has any",
        )
    if t.mode == "separate_async" and t.rows_per_rollout not in (None, 1):
        yield (
            ("trainer", "rows_per_rollout"),
            "with mode: separate_async verl fixes an update at one row for each rollout; use 1",
        )
    yield from _impossible_policy(c)
    yield from impossible_verl_credit(c)
    yield from _impossible_algorithm(c)


def _impossible_policy(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    p = c.policy
    if c.policies:
        yield ("policies",), "verl trains one model; use trainer.name: torch for several policies"
    if p.train_layers is not None:
        yield ("policy", "train_layers"), "verl trains all layers, or adapters with tuning: lora"
    if p.device == "cpu":
        yield ("policy", "device"), "verl runs on GPUs; leave it out, or use trainer.name: torch"
    if p.backend != "torch":
        yield ("policy", "backend"), "verl's own servers sample from the policy; leave it out"
    for agent, model in c.agents.frozen.items():
        if model == "base":
            yield (
                ("agents", "frozen", agent),
                "'base' is not served with verl, whose servers have the live policy only; serve the frozen model elsewhere, name that "
                "server under policy.upstream, and give the agent the model's name there",
            )
    if c.credit.judge is not None and c.credit.judge.model in ("base", "policy"):
        yield (
            ("credit", "judge", "model"),
            f"found {c.credit.judge.model!r}; with verl the judge is a model of policy.upstream",
        )


def impossible_verl_credit(
    c: Sections, *, rewards: RewardRule | None = None, advantage: AdvantageRule | None = None
) -> Iterator[tuple[KeyPath, str]]:
    """The same for credit. ``rewards`` and ``advantage``: the rules of ``c``, if they are not declared ones."""
    rewards = rewards or declared(REWARD_RULES, c.credit.rewards)
    advantage = advantage or declared(ADVANTAGE_RULES, c.credit.advantage)
    if rewards is not None and rewards.needs_critic:
        yield (
            ("credit", "rewards"),
            f"{rewards.name!r} needs the critic's values before rows are written, and verl's critic sees them after; use 'discounted', or "
            "trainer.name: torch",
        )
    if advantage is not None and advantage.needs_batch and (c.trainer.mode != "sync" or c.rollouts.refill):
        yield (
            ("credit", "advantage"),
            f"{c.credit.advantage!r} compares with all rollouts of a step: expected trainer.mode: sync and rollouts.refill: 0; in other "
            "modes groups are complete one by one",
        )


def _impossible_algorithm(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    a = c.algorithm
    for key, wanted in (("kl", a.kl is not None), ("entropy_weight", a.entropy_weight > 0)):
        if wanted and a.aggregation != "token-mean":
            yield (
                ("algorithm", key),
                f"verl means it over rows or tokens, not as {a.aggregation!r} has it; expected algorithm.aggregation: token-mean",
            )
    loss = declared(LOSSES, a.loss)
    if loss is None:
        yield (
            ("algorithm", "loss"),
            f"found {a.loss!r}; verl's workers know declared losses only: expected {', '.join(LOSSES)}; or use trainer.name: torch",
        )
    elif a.loss_args:
        yield ("algorithm", "loss_args"), "verl's workers get no arguments but the clip range; use trainer.name: torch"
    elif loss.ratio == "sequence" and a.sequence == "rollout":
        yield (
            ("algorithm", "sequence"),
            f"verl's micro-batches cut a rollout's rows apart: with {a.loss!r} expected 'row'",
        )
    i = a.importance
    if i is not None and (i.level == "rollout" or i.high is None or (i.kind == "tis") != (i.low == 0)):
        yield (
            ("algorithm", "importance"),
            "verl corrects by token or row; it truncates from above only, and masks between two bounds: expected level: token | row, "
            f"a high, and low: 0 with kind: tis or a low above 0 with kind: mask; found {i!r}",
        )
