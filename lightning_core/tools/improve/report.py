"""The report of a pipeline: its progress and results, and the same as Markdown."""

from __future__ import annotations

import shlex
import time

from lightning_core.records.run_folder.checkpoints import checkpoints
from lightning_core.records.statistics.intervals import format_mean
from lightning_core.records.statistics.usage import format_usd
from lightning_core.tools.improve.pipeline import UNMEASURED, ImprovementPipeline
from lightning_core.tools.improve.stage import Stage
from lightning_core.tools.runs.improvement import Improvement, StageResult

_NOTHING = "–"


def improvement_of(pipeline: ImprovementPipeline, command: str) -> Improvement:
    """The progress and results of ``pipeline``; ``command``: the command line that began it."""
    minutes = pipeline.minutes()
    return Improvement(
        name=pipeline.folder.name,
        command=command,
        model=pipeline.model,
        started=time.time() - 60 * minutes,
        minutes=minutes,
        minutes_limit=pipeline.limits.minutes,
        usd=pipeline.usd_spent(),
        usd_limit=pipeline.limits.usd,
        tokens_limit=pipeline.limits.tokens,
        stages=[_result_of(pipeline, stage) for stage in pipeline.stages],
        current=pipeline.current,
        notes=pipeline.notes,
        best=None if pipeline.best is None else pipeline.best.name,
        result=_sentences(pipeline),
        use=_use(pipeline),
        finished=pipeline.finished,
        problem=pipeline.problem,
    )


def report_text(found: Improvement) -> str:
    """``found`` as Markdown: the result, a row for each stage, the notes and the commands."""
    word = "Serve" if found.use is not None and found.use.startswith("lightning-rl") else "Use"
    use = [] if found.use is None else ["", f"{word} it: `{found.use}`"]
    lines = [f"# {found.name}", "", *found.result, *use, ""]
    head = ("stage", "held-out reward", "solved", "against the policy", f"against {found.model or 'the provider'}")
    head = (*head, "tokens per rollout", "call p50", "USD of 1,000", "minutes")
    lines += [_row(head), _row(["---"] * len(head)), *(_row(_cells(found, stage)) for stage in found.stages), ""]
    notes = [*found.notes, *([] if found.problem is None else [("ended early", found.problem)])]
    if notes:
        lines += [*(f"- {stage}: {text}" for stage, text in notes), ""]
    lines += [
        "Rewards are means over the held-out tasks with their 95% intervals, differences are paired by task. The best stage was chosen "
        "by the same tasks, which favors it slightly.",
        "",
        "## Commands",
        "",
        "```bash",
        *(stage.command for stage in found.stages),
        "```",
        "",
    ]
    return "\n".join(lines)


def _result_of(pipeline: ImprovementPipeline, stage: Stage) -> StageResult:
    is_measured, first = stage.name not in UNMEASURED, pipeline.untrained
    own = pipeline.difference(first, stage) if is_measured and stage not in (first, pipeline.provider) else None
    other = pipeline.difference(pipeline.provider, stage) if is_measured and stage is not pipeline.provider else None
    return StageResult(
        name=stage.name,
        command=stage.command,
        run=None if stage.folder is None else stage.folder.name,
        minutes=stage.minutes,
        result=stage.result if is_measured else None,
        over_policy=own,
        over_provider=other,
    )


def _sentences(pipeline: ImprovementPipeline) -> list[str]:
    best, first = pipeline.best, pipeline.untrained
    if best is None or best.result is None:
        return ["No policy was measured."]
    over_policy = pipeline.difference(first, best)
    reward = format_mean(best.result.reward, best.result.reward_ci95)
    lines = [f"The best stage is {best.name!r}, with a held-out reward of {reward}."]
    if best is first and not pipeline.finished and pipeline.stages[-1] is first:
        lines = [f"The untrained policy has a held-out reward of {reward}."]
    elif best is first:
        lines = [f"No stage is better than the untrained policy, whose held-out reward is {reward}."]
    elif over_policy is not None:
        lines.append(f"Gain over the untrained policy: {over_policy.text(sign='+')}.")
    over = pipeline.difference(pipeline.provider, best)
    if over is not None:
        is_clear = over.low > 0 or over.high < 0
        word = "better than" if over.mean > 0 else "worse than"
        found = (
            f"It is {word} {pipeline.model}"
            if is_clear
            else f"The interval of its difference to {pipeline.model} includes 0"
        )
        lines.append(f"{found}: {over.text(sign='+')}.")
    return lines


def _use(pipeline: ImprovementPipeline) -> str | None:
    best = pipeline.best
    if best is None or best.result is None:
        return None
    if best.folder is not None and best.checkpoint is not None:
        is_newest = best.checkpoint == checkpoints(best.folder)[-1].name
        chosen = [] if is_newest else ["--checkpoint", best.checkpoint]
        return shlex.join(["lightning-rl", "serve", str(best.folder), *chosen])
    tuned = next((text.partition("=")[2] for text in pipeline.settings if text.startswith("policy.model=")), None)
    if tuned is not None:
        prompts = [text for text in pipeline.settings if text.startswith("prompts=")]
        return shlex.join(["lightning-rl", "serve", tuned, *prompts])
    return shlex.join(pipeline.settings) if pipeline.settings else None


def _cells(found: Improvement, stage: StageResult) -> list[str]:
    result, minutes = stage.result, f"{stage.minutes:.1f}"
    if result is None:
        return [stage.name, *[_NOTHING] * 7, minutes]
    usage = result.usage
    tokens = usage.per_rollout(usage.all.input_tokens + usage.all.output_tokens)
    return [
        stage.name if stage is not found.provider else f"{stage.name} ({found.model})",
        format_mean(result.reward, result.reward_ci95),
        f"{result.solved} of {result.tasks}",
        _NOTHING if stage.over_policy is None else stage.over_policy.text(sign="+"),
        _NOTHING if stage.over_provider is None else stage.over_provider.text(sign="+"),
        f"{tokens:,.0f}" if usage.all.calls else _NOTHING,
        f"{usage.all.seconds_p50:.2f} s" if usage.all.calls else _NOTHING,
        _NOTHING if usage.usd_per_1000 is None else format_usd(usage.usd_per_1000),
        minutes,
    ]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
