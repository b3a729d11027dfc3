"""Checks of settings that are valid alone but not together. Each yields key and error."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config.algorithm import CLIPS, Algorithm
from lightning_core.config.checks_agents import check_chosen_agents, check_named_calls
from lightning_core.config.checks_monitors import check_monitors
from lightning_core.config.checks_trainer import check_trainer
from lightning_core.config.command import CommandSection
from lightning_core.config.credit import RULE_ARGUMENT_KEYS, CreditSection
from lightning_core.config.policies import PolicyCredit
from lightning_core.config.resolve import policy_settings
from lightning_core.config.rule_names import argument_problems, declared, example_of, goes_with, with_parameter
from lightning_core.config.sections import Sections, TaskSource, Vllm
from lightning_core.config.signal_sections import requested_models, signal_sections
from lightning_core.config.source import KeyPath
from lightning_core.config.trainer import TrainerSection
from lightning_core.config.trainer_support import check_support
from lightning_core.config.types import is_callable_name
from lightning_core.credit import ADVANTAGE_RULES, LOSSES, REWARD_RULES
from lightning_core.credit.registry import AdvantageRule, Loss, RewardRule
from lightning_core.trace import BASE, POLICY


def check_sections(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield the unsupported combinations of settings."""
    for split in ("train", "eval"):
        source: TaskSource | None = getattr(c.tasks, split)
        if source is not None and source.args and not is_callable_name(source.source):
            yield (
                ("tasks", split, "args"),
                f"goes with a source 'module:callable' only, but {source.source!r} is a file",
            )
    for name in c.agents.frozen:
        if name in c.agents.trained_names:
            yield ("agents", "frozen", name), "the agent is in agents.train too; remove it from one of them"
    if c.agents.train == ():
        yield ("agents", "train"), "the list is empty; remove the key to train the marked agents"
    if c.policy.tuning == "lora" and c.policy.train_layers not in (None, "auto"):
        yield ("policy", "train_layers"), "goes with tuning: full only, but policy.tuning is 'lora'"
    if c.policy.tuning == "full" and c.policy.lora is not None:
        yield ("policy", "lora"), "goes with tuning: lora only, but policy.tuning is 'full'"
    yield from _check_sampling(c)
    yield from _check_workers(c)
    yield from check_policies(c)
    yield from check_algorithm(c.algorithm)
    if c.algorithm.reward_weight == 0 and c.rollouts.refill:
        yield (
            ("rollouts", "refill"),
            f"found {c.rollouts.refill}, expected 0 with algorithm.reward_weight: 0: it replaces groups of equal rewards, which train "
            "like all others",
        )
    yield from check_chosen_agents(c)
    yield from check_named_calls(c)
    yield from check_credit(c.credit, group_size=c.rollouts.group_size, refill=c.rollouts.refill)
    rules = _reward_rules(c)
    for signal in signal_sections().values():
        yield from signal.check(c)
        yield from signal.check_rules(c, rules)
    if c.rollouts.temperature == 0:
        yield (
            ("rollouts", "temperature"),
            "at 0 all attempts are equal, so there is no training signal; use a value above 0 (eval.temperature may be 0)",
        )
    if c.policy.max_context is not None and c.rollouts.max_tokens >= c.policy.max_context:
        limit = c.policy.max_context
        yield (
            ("rollouts", "max_tokens"),
            f"found {c.rollouts.max_tokens}, expected less than policy.max_context = {limit}, which includes the prompt",
        )
    if c.rollouts.fresh and c.rollouts.executor in ("task", "thread"):
        yield ("rollouts", "fresh"), f"needs worker processes, but rollouts.executor is {c.rollouts.executor!r}"
    if c.rollouts.executor == "command" and not isinstance(c.agent, CommandSection):
        yield ("rollouts", "executor"), "found 'command', which is for agents that are programs (agent.command)"
    if c.rollouts.executor in ("task", "thread") and isinstance(c.agent, CommandSection):
        yield (
            ("rollouts", "executor"),
            f"found {c.rollouts.executor!r}, but the agent is a program, which needs a process; use auto or command",
        )
    if isinstance(c.agent, CommandSection) and c.agent.reward_file is not None and c.reward is not None:
        yield ("agent", "reward_file"), "has no effect with a reward function; remove it, or reward"
    yield from check_monitors(c)
    yield from check_trainer(c)
    yield from check_support(c)
    if c.otlp.headers_env is not None and c.otlp.endpoint is None:
        yield ("otlp", "headers_env"), "requires otlp.endpoint"
    if c.otlp.timeout_seconds is not None and c.otlp.endpoint is None:
        yield ("otlp", "timeout_seconds"), "requires otlp.endpoint"
    if c.run.report_seconds is not None and not c.run.report_to:
        yield ("run", "report_seconds"), "goes with run.report_to, which names no tracker"
    if c.run.report_checkpoint and not c.run.report_to:
        yield ("run", "report_checkpoint"), "goes with run.report_to, which names no tracker"
    if c.eval.temperature == 0 and c.eval.samples > 1:
        yield ("eval", "samples"), f"found {c.eval.samples}, expected 1: at eval.temperature 0 all attempts are equal"


def _check_sampling(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield problems of ``policy.backend`` and its settings."""
    if c.policy.backend != "vllm":
        if c.policy.vllm != Vllm():
            yield ("policy", "vllm"), f"goes with backend: vllm only, but policy.backend is {c.policy.backend!r}"
        return
    if c.policy.vllm.url is not None and c.policy.vllm.args:
        yield (
            ("policy", "vllm", "args"),
            "goes with a server that Lightning starts, but policy.vllm.url is a running server; remove one of them",
        )
    for agent, model in c.agents.frozen.items():
        if model == "base":
            yield (
                ("agents", "frozen", agent),
                "'base' is not available with policy.backend: vllm, which serves only the policy; serve the frozen model elsewhere, "
                "set policy.upstream to that server, and use the model's name there",
            )
    for section, temperature in (("rollouts", c.rollouts.temperature), ("eval", c.eval.temperature)):
        if temperature is not None and 0 < temperature < 0.01:
            yield (section, "temperature"), f"found {temperature}; vLLM supports 0 (greedy), or 0.01 and above"
    if c.trainer.deterministic:
        yield ("trainer", "deterministic"), "goes with policy.backend: torch only, but it is 'vllm'; remove the key"
    for key in ("max_batch", "gather_ms"):
        if getattr(c.trainer, key) != TrainerSection.model_fields[key].default:
            yield (
                ("trainer", key),
                "goes with policy.backend: torch only, but it is 'vllm'; use policy.vllm.args, such as "
                "[--max-num-seqs, '64']",
            )


def _check_workers(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield what does not go with several processes of the endpoint."""
    workers = c.endpoint.workers
    if workers == 1:
        return
    path = ("endpoint", "workers")
    if c.trainer.name == "verl":
        yield (
            path,
            f"found {workers}, expected 1 with trainer.name: verl; use trainer.rollout_workers, each has its own endpoint",
        )
    elif c.policy.backend != "vllm":
        yield (
            path,
            f"found {workers}, expected 1 with policy.backend: {c.policy.backend}, which samples in the run's own process; use "
            "policy.backend: vllm, or remove the key",
        )
    for key in ("port", "public_url"):
        if getattr(c.endpoint, key):
            yield (
                ("endpoint", key),
                f"each of the {workers} endpoint.workers has a port of its own; remove one of the two keys",
            )


def check_policies(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield problems of ``policies`` and the agents that they name."""
    yield from _check_agents(c)
    yield from _check_frozen(c)
    if c.policies and c.policy.backend != "torch":
        yield (
            ("policy", "backend"),
            f"found {c.policy.backend!r}, expected 'torch': several policies are sampled in this process",
        )
    for name, settings in policy_settings(c).items() if c.policies else ():
        own, path = c.policies[name], ("policies", name)
        if settings.tuning == "lora" and own.train_layers not in (None, "auto"):
            yield (*path, "train_layers"), "goes with tuning: full only, but this policy's is 'lora'"
        if settings.tuning == "full" and own.lora is not None:
            yield (*path, "lora"), "goes with tuning: lora only, but this policy's is 'full'"
        if own.credit != PolicyCredit():
            for (section, *rest), text in check_credit(
                settings.credit, group_size=c.rollouts.group_size, refill=c.rollouts.refill
            ):
                yield ((*path, section, *rest) if section == "credit" else (section, *rest)), text


def _check_agents(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    owners: dict[str, str] = {}
    for name, policy in c.policies.items():
        if not policy.agents:
            yield ("policies", name, "agents"), "the list is empty; expected one or more agents"
        for agent in policy.agents:
            if agent in owners:
                yield (
                    ("policies", name, "agents"),
                    f"agent {agent!r} is in policies.{owners[agent]}.agents too; list it once, under one policy",
                )
            owners.setdefault(agent, name)
    if c.policies and set(c.agents.trained_names) != owners.keys():
        yield (
            ("agents", "train"),
            f"found {list(c.agents.trained_names) or c.agents.train!r}, but the agents of the policies are {list(owners)!r}; "
            "remove the key",
        )


def _check_frozen(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    if not c.policies:
        return
    used: list[tuple[KeyPath, str]] = [(("agents", "frozen", a), model) for a, model in c.agents.frozen.items()]
    used += requested_models(c)
    initial = any(settings.model == c.policy.model for settings in policy_settings(c).values())
    for path, model in used:
        if model == POLICY:
            yield (
                path,
                f"no policy has the name 'policy'; expected 'base', one of {list(c.policies)!r}, or an upstream's model",
            )
        if model == BASE and not initial:
            yield path, f"'base' is the initial {c.policy.model!r} (policy.model), but no policy uses that model"


def check_algorithm(a: Algorithm, loss: Loss | None = None) -> Iterator[tuple[KeyPath, str]]:
    """Yield problems of ``algorithm``. ``loss``: the loss of ``a``, if it is not declared."""
    loss = loss or declared(LOSSES, a.loss)
    if loss is not None:
        yield from _check_loss(a, loss)
    if a.aggregation == "constant" and a.constant_tokens is None:
        yield ("algorithm", "aggregation"), "'constant' needs algorithm.constant_tokens, such as 1024"
    if a.aggregation != "constant" and a.constant_tokens is not None:
        yield (
            ("algorithm", "constant_tokens"),
            f"goes with aggregation: constant only, but algorithm.aggregation is {a.aggregation!r}",
        )
    streams = [signal.stream for signal in signal_sections().values() if signal.stream is not None]
    if a.reward_weight == 0 and all(getattr(a, key) is None for key in streams):
        keys = " or ".join(f"algorithm.{key}" for key in streams)
        yield (
            ("algorithm", "reward_weight"),
            f"at 0 nothing is trained on without {keys}; set one, or raise the weight",
        )
    if a.importance is not None and a.importance.high is not None and a.importance.low >= a.importance.high:
        yield (
            ("algorithm", "importance", "low"),
            f"found {a.importance.low}, which is not below algorithm.importance.high = {a.importance.high}",
        )
    if a.importance is not None and a.importance.kind == "mask" and a.importance.low == 0 and a.importance.high is None:
        yield ("algorithm", "importance", "kind"), "'mask' has no effect without low and high; set one of them"


def _check_loss(a: Algorithm, loss: Loss) -> Iterator[tuple[KeyPath, str]]:
    by_sequence = [loss.name] * (loss.ratio == "sequence") + [a.aggregation] * (a.aggregation == "sequence-mean")
    if by_sequence and a.sequence is None:
        yield ("algorithm", "sequence"), f"{by_sequence[0]!r} needs algorithm.sequence: row, rollout or call"
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
            f"{loss.name!r} has no default for {' and '.join(p.name for p in needed)}; set {'it' if len(needed) == 1 else 'both'}"
            f"{values and f', such as {values}'}",
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
    for key in ("updates_per_step", "mini_batches"):
        if loss.ratio is None and getattr(a, key) > 1:
            yield (
                ("algorithm", key),
                f"found {getattr(a, key)}; {loss.name!r} has no ratio, which a second update on the rollouts of a step "
                "needs; use 1, or another loss",
            )
    yield from argument_problems(loss, a.loss_args, ("algorithm", "loss_args"), flat=CLIPS)


def check_credit(
    c: CreditSection,
    *,
    group_size: int,
    refill: int,
    rewards: RewardRule | None = None,
    advantage: AdvantageRule | None = None,
) -> Iterator[tuple[KeyPath, str]]:
    """Yield problems of ``credit``.

    ``rewards`` and ``advantage``: the rules of ``c``, if they are not declared.
    """
    rewards, advantage = (
        rewards or declared(REWARD_RULES, c.rewards),
        advantage or declared(ADVANTAGE_RULES, c.advantage),
    )
    if rewards is not None:
        yield from _check_rewards(c, rewards)
    if advantage is not None:
        yield from argument_problems(advantage, c.advantage_args, ("credit", "advantage_args"))
    compares = "group" if advantage is None else advantage.compares
    if rewards is not None and rewards.baseline and compares == "group":
        others = " or ".join(repr(rule.name) for rule in ADVANTAGE_RULES.values() if rule.compares != "group")
        yield (
            ("credit", "advantage"),
            f"found {c.advantage!r}, expected {others}: with rewards: {c.rewards} {rewards.baseline} is the baseline",
        )
    if c.group_by is not None and (not c.group_by or len(set(c.group_by)) < len(c.group_by)):
        yield ("credit", "group_by"), f"expected one or more different keys, found {list(c.group_by)!r}"
    if group_size == 1 and compares == "group":
        yield ("rollouts", "group_size"), f"found 1, expected 2 or more: {c.advantage!r} compares attempts at one task"
    if refill and compares != "group":
        yield (
            ("rollouts", "refill"),
            f"goes with advantages that compare within groups, but credit.advantage is {c.advantage!r}, which does not",
        )


def _check_rewards(c: CreditSection, rule: RewardRule) -> Iterator[tuple[KeyPath, str]]:
    for key in RULE_ARGUMENT_KEYS:
        value, parameter = getattr(c, key), rule.parameters.get(key)
        if parameter is not None and parameter.required and value is None:
            yield ("credit", "rewards"), f"{rule.name!r} needs credit.{key}{example_of(parameter)}"
        if parameter is None and value is not None:
            yield ("credit", key), goes_with(with_parameter(REWARD_RULES, key), c.rewards)
    yield from argument_problems(rule, c.rewards_args, ("credit", "rewards_args"), flat=RULE_ARGUMENT_KEYS)


def _reward_rules(c: Sections) -> dict[str, RewardRule | None]:
    """The reward rule of each policy; None for ``module:callable``."""
    return {name: declared(REWARD_RULES, settings.credit.rewards) for name, settings in policy_settings(c).items()}
