"""The model card: training, tasks and results, from the run's records."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from lightning_core.config.prompts import make_prompts
from lightning_core.config.source import to_yaml
from lightning_core.errors import ConfigError, RecordError, redact_urls
from lightning_core.model.source import hub_name, is_demo_model
from lightning_core.records.report import read_metrics
from lightning_core.records.results import Evaluation, recorded_evaluations
from lightning_core.records.run_folder.checkpoints import best_checkpoint, checkpoint_step
from lightning_core.records.run_folder.commit import recorded_commits
from lightning_core.records.statistics.held_out import EVALUATIONS
from lightning_core.records.statistics.intervals import Comparison, compare
from lightning_core.records.store import Phase, Store
from lightning_core.tools.export.trained_model import Trained

_REASON = re.compile("unknown: .*")
_RELATIONS = {"transformers": "finetune", "peft": "adapter", "gguf": "quantized"}


def make_card(trained: Trained, *, title: str, library: str, usage: str) -> str:
    """The text of ``README.md``, with the YAML header that the Hub reads.

    ``library``: ``transformers``, ``peft`` or ``gguf``. ``usage``: Markdown that shows how to load the model.
    """
    header: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if name := hub_name(trained.policy.model):
        header |= {"base_model": name, "base_model_relation": _RELATIONS[library]}
    header["tags"] = ["reinforcement-learning", "lightning-rl"]
    steps = checkpoint_step(trained.checkpoint)
    rows = "\n".join(f"| {key} | {value} |" for key, value in _facts(trained, steps).items())
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {title}\n\n"
        f"A language model for an agent, trained by reinforcement learning with lightning-rl "
        f"{metadata.version('lightning-rl')}.\n\n| | |\n|---|---|\n{rows}\n\n"
        f"{_settings(trained)}## Held-out reward\n\n{_results(trained, steps)}\n\n## Usage\n\n{usage}\n\n"
        "The licence of the base model applies.\n"
    )


def _base(model: str) -> str:
    """The weights that training started from."""
    if is_demo_model(model):
        return (
            f"`{model}`, the demo model of lightning-rl: SmolLM2-135M-Instruct, quantised to Q4_1 and dequantised. It was trained "
            "on the dequantised weights, which differ from those on the Hub"
        )
    return hub_name(model) or f"{Path(model).expanduser().resolve().name}, a local folder"


def _facts(trained: Trained, steps: int) -> dict[str, str]:
    """The training of the model: agents, policy, tasks and settings."""
    config, policy = trained.config, trained.policy
    tuning = "all weights"
    if policy.lora is not None:
        tuning = f"LoRA, rank {policy.lora.rank}, alpha {policy.lora.alpha:g}"
    elif policy.train_layers == "auto":
        tuning = (
            tuning if trained.by_verl else "half of the layers on a CPU, all weights on a GPU (`train_layers: auto`)"
        )
    elif policy.train_layers is not None:
        tuning = f"the top {policy.train_layers} layers and the final norm"
    facts = {
        "Base model": _base(policy.model),
        "Trained": tuning,
        "Steps": str(steps),
        "Algorithm": f"advantage `{policy.credit.advantage}`, credit `{policy.credit.rewards}`, "
        f"loss `{config.algorithm.loss}`, learning rate {_learning_rate(trained, steps)}",
        "Training data": _data(trained),
        "Seed": str(config.run.seed),
    }
    if agents := ", ".join(f"`{agent}`" for agent in _agents(trained)):
        facts["Agents"] = agents
    if labels := ", ".join(f"`{prompt.label}`" for prompt in make_prompts(config.prompts).by_agent.values()):
        facts["Prompts"] = (
            f"{labels}, which the endpoint added; they are not in the weights, but in the run's `config.yaml`"
        )
    if commits := recorded_commits(trained.run):
        # Without git's message, which may contain local paths.
        facts["Commit of the agent's code"] = "<br>".join(_REASON.sub("unknown", commit) for commit in commits)
    return facts


def _learning_rate(trained: Trained, steps: int) -> str:
    """That of the last update, if the configuration leaves it to the run."""
    if trained.policy.learning_rate != "auto":
        return f"{trained.policy.learning_rate:g}"
    key = f"{trained.name}/learning_rate" if trained.config.policies else "learning_rate"
    try:
        metrics = read_metrics(trained.run / "metrics.jsonl")[:steps]
    except (OSError, RecordError):  # a run without its metrics can still be exported
        metrics = []
    found = [line[key] for line in metrics if line.get(key) is not None]
    return f"{found[-1]:g}" if found else "auto"


def _settings(trained: Trained) -> str:
    """The section with the settings that differ from the defaults.

    Without settings that may contain a path, a key or data: verl's own settings, hosts, prompts, and arguments of rules that are not
    numbers.
    """
    config = trained.config
    sections: dict[str, dict[str, Any]] = {
        "credit": trained.policy.credit.model_dump(mode="json", exclude_defaults=True),
        "algorithm": config.algorithm.model_dump(mode="json", exclude_defaults=True, exclude={"distill": {"prompts"}}),
        "rollouts": config.rollouts.model_dump(mode="json", exclude_defaults=True, exclude={"ignore_hosts"}),
        "trainer": config.trainer.model_dump(mode="json", exclude_defaults=True, exclude={"verl"})
        | {"learning_rate": trained.policy.learning_rate},
    }
    for section in sections.values():
        for key in [key for key in section if key.endswith("_args")]:
            section[key] = {name: value for name, value in section[key].items() if isinstance(value, int | float)}
    text = to_yaml({name: section for name, section in sections.items() if section})
    return f"## Settings\n\nThose that differ from the defaults of lightning-rl.\n\n```yaml\n{redact_urls(text)}```\n\n"


def _agents(trained: Trained) -> tuple[str, ...]:
    policy = trained.config.policies.get(trained.name)
    named = trained.config.agents.train if policy is None else policy.agents
    return () if named is None or isinstance(named, str) else tuple(named)


def _data(trained: Trained) -> str:
    """The number of training tasks, and where they came from."""
    try:
        with Store(trained.run / "store.db", read_only=True) as store:
            rollouts = store.rollouts(phase="train")
    except (ConfigError, RecordError):  # a run without its store can still be exported
        return "not recorded"
    tasks = len({rollout.task_id for rollout in rollouts})
    return f"{len(rollouts):,} rollouts of {tasks:,} tasks"


def _results(trained: Trained, steps: int) -> str:
    """The rewards on held-out tasks before training and with these weights."""
    evaluations = _evaluations(trained)
    c = _compare(evaluations, steps)
    if c is None:
        return "These weights were not evaluated on held-out tasks."
    rows = (
        ("before", c.eval_reward_before, c.eval_ci95_before),
        ("after", c.eval_reward_after, c.eval_ci95_after),
        ("improvement", c.improvement, c.improvement_ci95),
    )
    lines = [f"Mean reward of {c.tasks:,} held-out tasks.", "", "| | mean | 95% interval |", "|---|---|---|"]
    for name, mean, interval in rows:
        ends = "too few tasks" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
        lines.append(f"| {name} | {mean:.3f} | {ends} |")
    if c.improvement_ci95 is not None and c.improvement_ci95[0] <= 0 <= c.improvement_ci95[1]:
        lines += ["", "The improvement is not significant: its 95% interval includes 0."]
    trials = len(evaluations["eval"].keys() | evaluations["eval_after"].keys())
    if trials > 1 and trained.checkpoint == best_checkpoint(trained.run):
        lines += [
            "",
            f"These weights have the highest mean reward of {trials} evaluations on these tasks (`trainer.keep_best`). "
            "The maximum of several evaluations is biased upwards, and so are the reward after training, the improvement "
            "and their intervals. Measure the reward on other tasks to get an unbiased estimate.",
        ]
    return "\n".join(lines)


def _evaluations(trained: Trained) -> dict[Phase, dict[int, Evaluation]]:
    """The run's own evaluations, by phase and number of updates."""
    try:
        with Store(trained.run / "store.db", read_only=True) as store:
            return {phase: recorded_evaluations(store, phase) for phase in EVALUATIONS}
    except (ConfigError, RecordError):  # as in `_data`
        return {phase: {} for phase in EVALUATIONS}


def _compare(evaluations: dict[Phase, dict[int, Evaluation]], steps: int) -> Comparison | None:
    """The evaluations before training and after ``steps`` updates; None if either is missing."""
    before = next(iter(evaluations["eval_before"].values()), None)
    after = next((by_step[steps] for by_step in reversed(evaluations.values()) if steps in by_step), None)
    try:
        return None if before is None or after is None else compare(before.rewards, after.rewards)
    except ValueError:  # no task in common
        return None
