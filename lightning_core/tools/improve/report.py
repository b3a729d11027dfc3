"""The report of a pipeline, as Markdown."""

from __future__ import annotations

import shlex

from lightning_core.records.intervals import format_mean
from lightning_core.records.usage import format_usd
from lightning_core.tools.improve.pipeline import UNMEASURED, ImprovementPipeline
from lightning_core.tools.improve.stage import Stage

_NOTHING = "–"


def report_text(pipeline: ImprovementPipeline) -> str:
    """What each stage led to, which policy is the best, and what to do with it."""
    lines = [f"# {pipeline.folder.name}", "", *_result(pipeline), ""]
    head = ("stage", "held-out reward", "solved", "against the policy", f"against {pipeline.model or 'the provider'}")
    head = (*head, "tokens per rollout", "call p50", "USD of 1,000", "minutes")
    lines += [_row(head), _row(["---"] * len(head)), *(_row(_cells(pipeline, stage)) for stage in pipeline.stages), ""]
    if pipeline.notes:
        lines += [*(f"- {note}" for note in pipeline.notes), ""]
    lines += [
        "Rewards are means over the held-out tasks with their 95% intervals, differences are paired by task. The best stage was chosen "
        "by the same tasks, which favors it slightly.",
        "",
        "## Commands",
        "",
        "```bash",
        *(stage.command for stage in pipeline.stages),
        "```",
        "",
    ]
    return "\n".join(lines)


def _result(pipeline: ImprovementPipeline) -> list[str]:
    best = pipeline.best
    if best is None or best.result is None:
        return ["No policy was measured."]
    over_policy = pipeline.difference(_first(pipeline), best)
    lines = [f"Best: **{best.name}**, held-out reward {_mean(best)}."]
    if best is _first(pipeline):
        lines = [f"No stage is better than the untrained policy, whose held-out reward is {_mean(best)}."]
    if best is not _first(pipeline) and over_policy is not None:
        lines.append(f"Gain over the untrained policy: {over_policy.text(sign='+')}.")
    over = pipeline.difference(pipeline.provider, best)
    if over is not None:
        word = "better than" if over.low > 0 else "worse than" if over.high < 0 else "not significantly different from"
        lines.append(f"It is {word} {pipeline.model}: {over.text(sign='+')}.")
    trained = best.folder if best.folder is not None and (best.folder / "checkpoints").is_dir() else None
    tuned = next((text.partition("=")[2] for text in pipeline.settings if text.startswith("policy.model=")), None)
    if (served := trained or tuned) is not None:
        prompts = [text for text in pipeline.settings if text.startswith("prompts=") and trained is None]
        lines += ["", f"Serve it: `{shlex.join(['lightning-rl', 'serve', str(served), *prompts])}`"]
    elif pipeline.settings:
        lines += ["", f"Use it: `{shlex.join(pipeline.settings)}`"]
    return lines


def _first(pipeline: ImprovementPipeline) -> Stage | None:
    return next((stage for stage in pipeline.stages if stage.name == "policy"), None)


def _cells(pipeline: ImprovementPipeline, stage: Stage) -> list[str]:
    result = stage.result
    minutes = f"{stage.minutes:.1f}"
    if result is None or stage.name in UNMEASURED:
        return [stage.name, *[_NOTHING] * 7, minutes]
    usage, first = result.usage, _first(pipeline)
    tokens = usage.per_rollout(usage.all.input_tokens + usage.all.output_tokens)
    own = None if stage in (first, pipeline.provider) else pipeline.difference(first, stage)
    other = None if stage is pipeline.provider else pipeline.difference(pipeline.provider, stage)
    return [
        stage.name if stage is not pipeline.provider else f"{stage.name} ({pipeline.model})",
        _mean(stage),
        f"{result.solved} of {result.tasks}",
        _NOTHING if own is None else own.text(sign="+"),
        _NOTHING if other is None else other.text(sign="+"),
        f"{tokens:,.0f}" if usage.all.calls else _NOTHING,
        f"{usage.all.seconds_p50:.2f} s" if usage.all.calls else _NOTHING,
        _NOTHING if usage.usd_per_1000 is None else format_usd(usage.usd_per_1000),
        minutes,
    ]


def _mean(stage: Stage) -> str:
    assert stage.result is not None
    return format_mean(stage.result.reward, stage.result.reward_ci95)


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
