"""The settings that verl does not support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_core.config.rule_names import declared
from lightning_core.config.sections import Sections
from lightning_core.config.source import KeyPath
from lightning_core.config.trainer_support import others_keys
from lightning_core.credit import ADVANTAGE_RULES, LOSSES, REWARD_RULES
from lightning_core.credit.registry import Loss
from lightning_core.credit.rules import CreditRules, compares_tasks

_TORCH_KEYS = ("max_batch", "gather_ms", "threads", "measure_change", "deterministic")


def rows_per_rollout(c: Sections) -> int:
    """The average number of rows per rollout that verl's updates have room for."""
    return c.trainer.rows_per_rollout or (
        1 if c.trainer.mode == "separate_async" else max(1, len(c.agents.trained_names))
    )


def supports(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield the settings that verl does not support. Functions are not imported, so of rules only declared ones are checked."""
    t = c.trainer
    yield from others_keys(c, _TORCH_KEYS, "torch")
    if (t.mode == "separate_async") != (t.rollout_nodes > 0):
        yield (
            ("trainer", "rollout_nodes"),
            f"found {t.rollout_nodes} with trainer.mode {t.mode!r}; expected 1 or more with 'separate_async', and 0 otherwise",
        )
    if t.mode == "separate_async" and t.rows_per_rollout not in (None, 1):
        yield (
            ("trainer", "rows_per_rollout"),
            f"found {t.rows_per_rollout}, expected 1: with mode: separate_async verl updates on one row per rollout",
        )
    for key in ("port", "public_url"):
        if getattr(c.endpoint, key):
            yield ("endpoint", key), "with trainer.name: verl every worker has its own endpoint; remove the key"
    if t.schedule == "linear":
        yield ("trainer", "schedule"), "found 'linear', expected 'constant' or 'cosine': verl has no other schedule"
    for key in ("token_budget", "minutes"):
        if getattr(t, key) is not None:
            yield ("trainer", key), "verl trains until trainer.steps; remove the key"
    if t.keep_best:
        yield ("trainer", "keep_best"), "verl keeps the newest checkpoints only; use trainer.keep_checkpoints"
    if c.run.grace_seconds:
        yield ("run", "grace_seconds"), "verl ends at once; remove the key, and set trainer.checkpoint_every"
    if c.eval.early_stop is not None:
        yield ("eval", "early_stop"), "verl trains until trainer.steps; remove the key"
    if c.monitors.stop:
        yield ("monitors", "stop"), "verl trains until trainer.steps; remove the key"
    yield from _check_policy(c)
    yield from _check_credit(c, None)
    yield from _check_algorithm(c)
    yield from _check_loss(c, declared(LOSSES, c.algorithm.loss))


def supports_rules(c: Sections, rules: Sequence[CreditRules], loss: Loss | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield what verl does not support of the ``rules`` and the ``loss`` that ``c`` names."""
    for rule in rules:
        yield from _check_credit(c, rule)
    yield from _check_loss(c, loss)


def _check_policy(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    p = c.policy
    if c.policies:
        yield ("policies",), "verl trains one policy; use trainer.name: torch for several"
    if p.train_layers not in (None, "auto"):
        yield ("policy", "train_layers"), "verl trains all layers, or adapters with tuning: lora; remove the key"
    if p.device == "cpu":
        yield ("policy", "device"), "verl runs on GPUs; remove the key, or use trainer.name: torch"
    if p.backend != "torch":
        yield ("policy", "backend"), "verl's own servers sample from the policy; remove the key"
    for agent, model in c.agents.frozen.items():
        if model == "base":
            yield (
                ("agents", "frozen", agent),
                "'base' is not available with verl, whose servers serve only the policy; serve the frozen model elsewhere, set "
                "policy.upstream to that server, and use the model's name there",
            )


def _check_credit(c: Sections, rules: CreditRules | None) -> Iterator[tuple[KeyPath, str]]:
    rewards = declared(REWARD_RULES, c.credit.rewards) if rules is None else rules.reward_rule
    advantage = declared(ADVANTAGE_RULES, c.credit.advantage) if rules is None else rules.advantage_rule
    if rewards is not None and "critic" in rewards.needs:
        yield (
            ("credit", "rewards"),
            f"{rewards.name!r} needs the critic's values before rows are built, but verl's critic runs afterwards; use 'discounted', or "
            "trainer.name: torch",
        )
    if advantage is None or (c.trainer.mode == "sync" and not c.rollouts.refill):
        return
    one_by_one = "expected trainer.mode: sync and rollouts.refill: 0; in other modes groups finish one by one"
    if advantage.needs_batch:
        yield ("credit", "advantage"), f"{c.credit.advantage!r} compares all rollouts of a step: {one_by_one}"
    keys = (c.credit.group_by or (rewards and rewards.group)) if rules is None else rules.keys
    if keys is not None and compares_tasks(advantage, keys):
        yield (
            ("credit", "group_by"),
            f"without 'task' it compares rollouts of all tasks of a step: add 'task'; otherwise {one_by_one}",
        )


def _check_algorithm(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    a = c.algorithm
    if a.mini_batches > 1 and c.trainer.mode == "separate_async":
        yield (
            ("algorithm", "mini_batches"),
            f"found {a.mini_batches}, expected 1: with mode: separate_async verl makes one update per step",
        )
    elif (rows := c.rollouts.tasks_per_step * rows_per_rollout(c)) % a.mini_batches:
        yield (
            ("algorithm", "mini_batches"),
            f"found {a.mini_batches}; with verl expected a divisor of tasks_per_step · rows_per_rollout = {rows}",
        )
    for key, used in (("kl", a.kl is not None), ("entropy_weight", a.entropy_weight > 0)):
        if used and a.aggregation != "token-mean":
            yield (
                ("algorithm", key),
                f"verl does not support it with algorithm.aggregation: {a.aggregation}; expected token-mean",
            )
    if a.loss_args:
        yield (
            ("algorithm", "loss_args"),
            "verl supports no loss arguments except the clip range; use trainer.name: torch",
        )
    i = a.importance
    if i is not None and (i.level == "rollout" or i.high is None or (i.kind == "tis") != (i.low == 0)):
        yield (
            ("algorithm", "importance"),
            f"found {i!r}; with verl expected level: token or row, a high, and a low that is 0 with kind: tis and above 0 with "
            "kind: mask",
        )


def _check_loss(c: Sections, loss: Loss | None) -> Iterator[tuple[KeyPath, str]]:
    if loss is not None and loss.ratio == "sequence" and c.algorithm.sequence == "rollout":
        yield (
            ("algorithm", "sequence"),
            f"found 'rollout', expected 'row' with {c.algorithm.loss!r}: verl may split a rollout's rows over micro-batches",
        )
