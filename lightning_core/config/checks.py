"""Combinations of settings that cannot be honoured although each value alone is fine. Each is a key and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_core.config.algorithm import CLIPS, Algorithm
from lightning_core.config.checks_verl import impossible_verl
from lightning_core.config.credit import FLAT, CreditSection
from lightning_core.config.policies import PolicyCredit
from lightning_core.config.resolve import policy_settings
from lightning_core.config.rules import argument_problems, declared, such_as, with_parameter
from lightning_core.config.sections import Sections, TaskSource, Vllm
from lightning_core.config.source import KeyPath
from lightning_core.config.trainer import TrainerSection
from lightning_core.config.types import is_callable_name
from lightning_core.credit import ADVANTAGE_RULES, LOSSES, REWARD_RULES
from lightning_core.credit.registry import AdvantageRule, Loss, RewardRule
from lightning_core.trace import BASE, POLICY


def impossible(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Combinations that cannot be honoured although each value alone is fine."""
    for split in ("train", "eval"):
        source: TaskSource | None = getattr(c.tasks, split)
        if source is not None and source.args and not is_callable_name(source.source):
            yield ("tasks", split, "args"), f"arguments are for 'module:callable'; {source.source!r} is a file"
    for name in c.agents.frozen:
        if name in (c.agents.train or ()):
            yield ("agents", "frozen", name), "the agent is in agents.train too; it can be one or the other"
    if c.agents.train == ():
        yield ("agents", "train"), "an empty list trains nobody; leave the key out to train what the code marks"
    if c.policy.tuning == "lora" and c.policy.train_layers is not None:
        yield ("policy", "train_layers"), "goes with tuning: full only, but policy.tuning is 'lora'"
    if c.policy.tuning == "full" and c.policy.lora is not None:
        yield ("policy", "lora"), "goes with tuning: lora only, but policy.tuning is 'full'"
    yield from _impossible_sampling(c)
    yield from impossible_policies(c)
    yield from impossible_algorithm(c.algorithm)
    yield from impossible_credit(c.credit, group_size=c.rollouts.group_size, refill=c.rollouts.refill)
    if c.rollouts.temperature == 0:
        yield (
            ("rollouts", "temperature"),
            "at 0 all attempts are equal and nothing is learnt; eval.temperature may be 0",
        )
    if c.policy.max_context is not None and c.rollouts.max_tokens >= c.policy.max_context:
        limit = c.policy.max_context
        yield (
            ("rollouts", "max_tokens"),
            f"found {c.rollouts.max_tokens}, which leaves no room for a prompt in policy.max_context = {limit}",
        )
    yield from impossible_verl(c)
    if c.otlp.headers_env is not None and c.otlp.endpoint is None:
        yield ("otlp", "headers_env"), "headers for no endpoint; set otlp.endpoint"
    if c.eval.temperature == 0 and c.eval.samples > 1:
        yield ("eval", "samples"), f"at eval.temperature 0 all {c.eval.samples} attempts are equal; use 1"


def _impossible_sampling(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """The same, for who samples."""
    if c.policy.backend != "vllm":
        if c.policy.vllm != Vllm():
            yield ("policy", "vllm"), f"goes with backend: vllm only, but policy.backend is {c.policy.backend!r}"
        return
    if c.policy.vllm.url is not None and c.policy.vllm.args:
        yield (
            ("policy", "vllm", "args"),
            "arguments are for a server that is started here, but policy.vllm.url names a running one",
        )
    for agent, model in c.agents.frozen.items():
        if model == "base":
            yield (
                ("agents", "frozen", agent),
                "'base' is not served with policy.backend: vllm, whose server has the live policy only; serve the frozen model "
                "with another server, name that under policy.upstream, and give the agent the model's name there",
            )
    for section, temperature in (("rollouts", c.rollouts.temperature), ("eval", c.eval.temperature)):
        if temperature is not None and 0 < temperature < 0.01:
            yield (section, "temperature"), f"found {temperature}; vLLM samples at 0 (greedy), or at 0.01 and above"
    for key in ("max_batch", "gather_ms"):
        if getattr(c.trainer, key) != TrainerSection.model_fields[key].default:
            yield (
                ("trainer", key),
                "is for sampling in process, but policy.backend is 'vllm'; its batches are set by "
                "policy.vllm.args, such as [--max-num-seqs, '64']",
            )


def impossible_policies(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Combinations that cannot be honoured although each value alone is fine."""
    yield from _impossible_agents(c)
    yield from _impossible_frozen(c)
    if c.policies and c.policy.backend != "torch":
        yield (
            ("policy", "backend"),
            f"with several policies they are sampled in this process: expected 'torch', found {c.policy.backend!r}",
        )
    for name, settings in policy_settings(c).items() if c.policies else ():
        own, path = c.policies[name], ("policies", name)
        if settings.tuning == "lora" and own.train_layers is not None:
            yield (*path, "train_layers"), "goes with tuning: full only, but this policy's is 'lora'"
        if settings.tuning == "full" and own.lora is not None:
            yield (*path, "lora"), "goes with tuning: lora only, but this policy's is 'full'"
        if own.credit != PolicyCredit():
            for (section, *rest), text in impossible_credit(
                settings.credit, group_size=c.rollouts.group_size, refill=c.rollouts.refill
            ):
                yield ((*path, section, *rest) if section == "credit" else (section, *rest)), text


def _impossible_agents(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    owners: dict[str, str] = {}
    for name, policy in c.policies.items():
        if not policy.agents:
            yield ("policies", name, "agents"), "an empty list: nobody would be answered by this policy"
        for agent in policy.agents:
            if agent in owners:
                yield (
                    ("policies", name, "agents"),
                    f"agent {agent!r} is in policies.{owners[agent]}.agents too; an agent belongs to one policy, and is named once",
                )
            owners.setdefault(agent, name)
    if c.policies and set(c.agents.train or ()) != owners.keys():
        yield (
            ("agents", "train"),
            f"found {list(c.agents.train or ())!r}, but the agents of the policies are {list(owners)!r}; leave the key out",
        )


def _impossible_frozen(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    if not c.policies:
        return
    judge = c.credit.judge
    wanted: list[tuple[KeyPath, str]] = [(("agents", "frozen", a), model) for a, model in c.agents.frozen.items()]
    wanted += [(("credit", "judge", "model"), judge.model)] if judge else []
    initial = any(settings.model == c.policy.model for settings in policy_settings(c).values())
    for path, model in wanted:
        if model == POLICY:
            yield (
                path,
                f"no policy has the name 'policy'; expected 'base', one of {list(c.policies)!r}, or an upstream's model",
            )
        if model == BASE and not initial:
            yield path, f"'base' is the initial {c.policy.model!r} (policy.model), but no policy is made of that"


def impossible_algorithm(a: Algorithm, loss: Loss | None = None) -> Iterator[tuple[KeyPath, str]]:
    """Combinations that cannot be honoured. ``loss``: that of ``a``, if it is not a declared one."""
    loss = loss or declared(LOSSES, a.loss)
    if loss is not None:
        yield from _impossible_loss(a, loss)
    if a.aggregation == "constant" and a.constant_tokens is None:
        yield ("algorithm", "aggregation"), "'constant' needs algorithm.constant_tokens, such as 1024"
    if a.aggregation != "constant" and a.constant_tokens is not None:
        yield (
            ("algorithm", "constant_tokens"),
            f"goes with aggregation: constant only, but algorithm.aggregation is {a.aggregation!r}",
        )
    if a.importance is not None and a.importance.high is not None and a.importance.low >= a.importance.high:
        yield (
            ("algorithm", "importance", "low"),
            f"found {a.importance.low}, which is not below algorithm.importance.high = {a.importance.high}",
        )
    if a.importance is not None and a.importance.kind == "mask" and a.importance.low == 0 and a.importance.high is None:
        yield ("algorithm", "importance", "kind"), "'mask' without low and high masks nothing; set one of them"


def _impossible_loss(a: Algorithm, loss: Loss) -> Iterator[tuple[KeyPath, str]]:
    by_sequence = [loss.name] * (loss.ratio == "sequence") + [a.aggregation] * (a.aggregation == "sequence-mean")
    if by_sequence and a.sequence is None:
        yield ("algorithm", "sequence"), f"{by_sequence[0]!r} needs a definition of a sequence: row or rollout"
    if not by_sequence and a.sequence is not None:
        names = " | ".join(rule.name for rule in LOSSES.values() if rule.ratio == "sequence")
        yield (
            ("algorithm", "sequence"),
            f"goes with loss: {names} or aggregation: sequence-mean only, but they are {a.loss!r} and {a.aggregation!r}",
        )
    needed = [p for name in CLIPS if (p := loss.parameters.get(name)) and p.required]
    if not {p.name for p in needed} <= a.model_fields_set:
        values = " and ".join(f"{p.name}: {p.example}" for p in needed if p.example is not None)
        yield (
            ("algorithm", "loss"),
            f"{loss.name!r} needs a {' and '.join(p.name for p in needed)} of its own{values and f', such as {values}'}",
        )
    for key in CLIPS:
        if key not in loss.parameters and getattr(a, key) != Algorithm.model_fields[key].default:
            names = with_parameter(LOSSES, key)
            only = " only" if len(names) == 1 else ""
            yield (
                ("algorithm", key),
                f"{loss.name!r} has no ratio to clip"
                if loss.ratio is None
                else f"goes with loss: {' | '.join(names)}{only}, but algorithm.loss is {a.loss!r}",
            )
    if loss.ratio is None and a.updates_per_step > 1:
        yield (
            ("algorithm", "updates_per_step"),
            f"found {a.updates_per_step}; {loss.name!r} has no ratio, so a second update on the same rows would be wrong; use 1, or "
            "another loss",
        )
    yield from argument_problems(loss, a.loss_args, ("algorithm", "loss_args"), flat=CLIPS)


def impossible_credit(
    c: CreditSection,
    *,
    group_size: int,
    refill: int,
    rewards: RewardRule | None = None,
    advantage: AdvantageRule | None = None,
) -> Iterator[tuple[KeyPath, str]]:
    """Combinations that cannot be honoured. ``rewards`` and ``advantage``: the rules of ``c``, if they are not declared ones."""
    rewards, advantage = (
        rewards or declared(REWARD_RULES, c.rewards),
        advantage or declared(ADVANTAGE_RULES, c.advantage),
    )
    if rewards is not None:
        yield from _impossible_rewards(c, rewards)
    if advantage is not None:
        yield from argument_problems(advantage, c.advantage_args, ("credit", "advantage_args"))
    compares = "group" if advantage is None else advantage.compares
    if rewards is not None and rewards.needs_critic and compares == "group":
        others = " or ".join(repr(rule.name) for rule in ADVANTAGE_RULES.values() if rule.compares != "group")
        yield (
            ("credit", "advantage"),
            f"with rewards: {c.rewards} the critic is the baseline; expected {others}, found {c.advantage!r}",
        )
    if c.group_by is not None and (not c.group_by or len(set(c.group_by)) < len(c.group_by)):
        yield ("credit", "group_by"), f"expected one or more different keys, found {list(c.group_by)!r}"
    if group_size == 1 and compares == "group":
        yield ("rollouts", "group_size"), f"{c.advantage!r} compares attempts at one task: 2 or more are needed"
    if group_size == 1 and c.judge is not None:
        yield ("rollouts", "group_size"), "a judge compares attempts at one task: 2 or more are needed"
    if refill and compares != "group":
        yield (
            ("rollouts", "refill"),
            f"goes with advantages that compare the attempts of a group; with {c.advantage!r} equal attempts teach something too",
        )


def _impossible_rewards(c: CreditSection, rule: RewardRule) -> Iterator[tuple[KeyPath, str]]:
    for key in FLAT:
        value, parameter = getattr(c, key), rule.parameters.get(key)
        if parameter is not None and parameter.required and value is None:
            yield ("credit", "rewards"), f"{rule.name!r} needs credit.{key}{such_as(parameter)}"
        if parameter is None and value is not None:
            yield ("credit", key), _goes_with(with_parameter(REWARD_RULES, key), c.rewards)
    if c.critic is not None and not rule.needs_critic:
        names = [other.name for other in REWARD_RULES.values() if other.needs_critic]
        yield ("credit", "critic"), _goes_with(names, c.rewards)
    yield from argument_problems(rule, c.rewards_args, ("credit", "rewards_args"), flat=FLAT)


def _goes_with(names: Sequence[str], found: str) -> str:
    only = " only" if len(names) == 1 else ""
    return f"goes with rewards: {' | '.join(names)}{only}, but credit.rewards is {found!r}"
