"""Combinations of settings that cannot be honoured although each value alone is fine. Each is a key and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config.algorithm import Algorithm
from lightning_core.config.checks_verl import impossible_verl
from lightning_core.config.credit import CreditSection
from lightning_core.config.policies import PolicyCredit
from lightning_core.config.resolve import policy_settings
from lightning_core.config.sections import Sections, TaskSource, Vllm
from lightning_core.config.source import KeyPath
from lightning_core.config.trainer import TrainerSection
from lightning_core.config.types import is_callable_name
from lightning_core.trace import BASE, POLICY

_GAMMA = ("discounted", "gigpo", "gae")
_ALONE = ("reinforce++", "none")


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


def impossible_algorithm(a: Algorithm) -> Iterator[tuple[KeyPath, str]]:
    """Combinations that cannot be honoured although each value alone is fine."""
    needing = [name for name in (a.loss, a.aggregation) if name in ("gspo", "sequence-mean")]
    if needing and a.sequence is None:
        yield ("algorithm", "sequence"), f"{needing[0]!r} needs to be told what a sequence is: row or rollout"
    if not needing and a.sequence is not None:
        yield (
            ("algorithm", "sequence"),
            f"goes with loss: gspo or aggregation: sequence-mean only, but they are {a.loss!r} and {a.aggregation!r}",
        )
    if a.loss == "gspo" and not {"clip_low", "clip_high"} <= a.model_fields_set:
        yield (
            ("algorithm", "loss"),
            "'gspo' needs a clip_low and clip_high of its own, far smaller than those of single tokens, such as 3e-4 and 4e-4",
        )
    if a.loss == "reinforce":
        for key in ("clip_low", "clip_high"):
            if getattr(a, key) != Algorithm.model_fields[key].default:
                yield ("algorithm", key), "'reinforce' has no ratio to clip"
        if a.updates_per_step > 1:
            yield (
                ("algorithm", "updates_per_step"),
                f"found {a.updates_per_step}; 'reinforce' has no ratio, so a second update on the same rows would be wrong; use 1, or "
                "another loss",
            )
    if a.loss != "dual-clip" and a.clip_dual != Algorithm.model_fields["clip_dual"].default:
        yield ("algorithm", "clip_dual"), f"goes with loss: dual-clip only, but algorithm.loss is {a.loss!r}"
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


def impossible_credit(c: CreditSection, *, group_size: int, refill: int) -> Iterator[tuple[KeyPath, str]]:
    """Combinations that cannot be honoured although each value alone is fine."""
    own_rule = is_callable_name(c.rewards)
    if c.rewards in _GAMMA and c.gamma is None:
        yield ("credit", "rewards"), f"{c.rewards!r} needs credit.gamma, such as gamma: 0.95"
    if c.rewards not in _GAMMA and not own_rule and c.gamma is not None:
        yield ("credit", "gamma"), f"goes with rewards: {' | '.join(_GAMMA)}, but credit.rewards is {c.rewards!r}"
    for key, rule in (("lam", "gae"), ("critic", "gae"), ("step_weight", "gigpo"), ("anchor", "gigpo")):
        if getattr(c, key) is not None and c.rewards != rule:
            yield ("credit", key), f"goes with rewards: {rule} only, but credit.rewards is {c.rewards!r}"
    if c.rewards == "gae" and c.advantage not in _ALONE:
        yield (
            ("credit", "advantage"),
            f"with rewards: gae the critic is the baseline; expected 'reinforce++' or 'none', found {c.advantage!r}",
        )
    if not c.group_by or len(set(c.group_by)) < len(c.group_by):
        yield ("credit", "group_by"), f"expected one or more different keys, found {list(c.group_by)!r}"
    if group_size == 1 and c.advantage not in _ALONE:
        yield ("rollouts", "group_size"), f"{c.advantage!r} compares attempts at one task: 2 or more are needed"
    if group_size == 1 and c.judge is not None:
        yield ("rollouts", "group_size"), "a judge compares attempts at one task: 2 or more are needed"
    if refill and c.advantage in _ALONE:
        yield (
            ("rollouts", "refill"),
            f"goes with advantages that compare the attempts of a group; with {c.advantage!r} equal attempts teach something too",
        )
