"""Finds prompts on training tasks, and measures them on held-out tasks."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.config.prompts import PromptSection
from lightning_core.errors import plural
from lightning_core.observers.open import Progress, make_display
from lightning_core.prompts.file import PromptFile, PromptVersion
from lightning_core.records.statistics.intervals import Comparison, compare
from lightning_core.rollouts.attempt import Task
from lightning_core.rollouts.entry_points import check_tasks
from lightning_core.rollouts.prepare import Inputs, RewardFunction, Solve, prepare_evaluation
from lightning_core.rollouts.tasks import check_overlap, given_tasks, training_tasks
from lightning_core.tools.prompts import BUDGET, DEMONSTRATIONS, SETS
from lightning_core.tools.prompts.bootstrap import DemonstrationResult, find_demonstrations
from lightning_core.tools.prompts.reflection import ReflectionModel
from lightning_core.tools.prompts.search import AgentSections, PromptSearch, rewards_of, split_tasks
from lightning_core.tools.prompts.with_gepa import check_gepa, find_with_gepa
from lightning_core.trainers.open_run import open_run
from lightning_core.trainers.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrompts:
    """The result of a search."""

    sections: AgentSections
    """The best prompts; the configured ones if no others have a higher mean reward on the validation tasks."""
    methods: Sequence[str]
    """How they were found, a line for each method."""
    validation: Comparison
    """Before and after on the validation tasks, which chose the prompts: too favorable."""
    held_out: Comparison | None
    """Before and after on the held-out tasks; None if nothing better was found."""
    rollouts: int
    """Number of rollouts of training tasks."""
    left_out: int
    """Number of rollouts of training tasks that were left out of the means."""
    refused: int = 0
    """Number of rollouts of training tasks with a refused request, which count as 0; with a long prompt, the context may be full."""
    held_out_left_out: int = 0
    """As `left_out`, of held-out tasks."""
    held_out_refused: int = 0
    """As `refused`, of held-out tasks."""
    reflections: int = 0
    """Number of responses of the reflection model."""

    @property
    def is_better(self) -> bool:
        """Whether other prompts than the configured ones have a higher mean reward on the validation tasks."""
        return self.held_out is not None


def find_prompts(
    solve: Solve | None = None,
    *,
    config: Config,
    folder: Path,
    tasks: Iterable[Task] | None = None,
    eval_tasks: Iterable[Task] | None = None,
    reward: RewardFunction | None = None,
    demonstrations: int = DEMONSTRATIONS,
    sets: int = SETS,
    reflection: ReflectionModel | None = None,
    budget: int = BUDGET,
    progress: Progress | bool | None = None,
) -> FoundPrompts:
    """Search for prompts of the trained agents with at most ``budget`` rollouts of training tasks, recorded in ``folder``.

    ``reflection``: the model that proposes system prompts with GEPA; None: no system prompts are searched.
    ``demonstrations``: the number for each agent, in ``sets`` different sets; 0: none are searched. The other arguments are as for
    `lightning_core.fit`. Raises `ConfigError` for too few tasks, and the errors of `lightning_core.evaluate`.
    """
    if reflection is not None:
        check_gepa()
    inputs = prepare_evaluation(config, solve=solve, reward=reward, tasks=eval_tasks)
    trained = training_tasks(config) if tasks is None else given_tasks(tasks, "tasks.train")
    check_tasks(config, trained)
    check_overlap(config, trained, inputs.eval_tasks)
    each = budget // ((reflection is not None) + (demonstrations > 0) or 1)
    split = split_tasks(trained, seed=config.run.seed, validation=each // (2 * (sets + 1)))
    display = make_display(config, progress)
    plan = Plan(
        config=config,
        folder=folder,
        checkpoint=None,
        inputs=Inputs(solve=inputs.solve, reward=inputs.reward, tasks=trained, eval_tasks=inputs.eval_tasks),
        observers=display,
    )
    with display.watching(config, folder), open_run(plan, weights_only=True) as run:
        search = PromptSearch(
            config=config,
            run=run,
            budget=budget,
            on_phase=display.phase,
            on_rollout=lambda rollout: display.advance(rollout.trace),
        )
        sections: AgentSections = config.prompts
        before = search.evaluate(sections, split.validation)
        methods: list[str] = []
        if reflection is not None:
            proposed = find_with_gepa(search, sections, split, reflection=reflection, budget=each)
            sections = proposed.sections
            methods.append(f"gepa with {reflection.model}: {plural(proposed.candidates, 'candidate')}")
        if demonstrations:
            shown = find_demonstrations(search, sections, split, number=demonstrations, sets=sets)
            sections = shown.sections
            methods.append(_of_demonstrations(shown, demonstrations))
        after = search.evaluate(sections, split.validation)
        left_out, refused = search.left_out, search.refused
        held_out = None
        if sections != config.prompts:
            samples = config.eval.samples
            first, last = (
                rewards_of(search.roll_out(one, inputs.eval_tasks, samples=samples))
                for one in (config.prompts, sections)
            )
            held_out = compare(first, last)
    return FoundPrompts(
        sections=sections,
        methods=methods,
        validation=compare(rewards_of(before), rewards_of(after)),
        held_out=held_out,
        rollouts=search.spent,
        left_out=left_out,
        refused=refused,
        held_out_left_out=search.left_out - left_out,
        held_out_refused=search.refused - refused,
        reflections=0 if reflection is None else reflection.calls,
    )


def _of_demonstrations(shown: DemonstrationResult, number: int) -> str:
    if not shown.solved:
        return (
            "demonstrations: no training task was solved with a conversation that can be shown; raise --budget, add easier tasks, or "
            "search system prompts first (--gepa)"
        )
    return f"demonstrations: {plural(shown.solved, 'solved training task')}, {plural(shown.sets, 'set')} of {number} compared"


def add_version(file: PromptFile, found: FoundPrompts, *, model: str, run: Path) -> PromptFile:
    """``file`` with ``found`` as its newest and current version. ``model``: that answered. ``run``: the folder of its rollouts."""
    agents = {agent: _written(section) for agent, section in found.sections.items()}
    content = json.dumps(agents, sort_keys=True, ensure_ascii=False)
    assert found.held_out is not None
    version = PromptVersion(
        digest=hashlib.sha256(content.encode()).hexdigest()[:12],
        agents=agents,
        facts={
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "found_by": list(found.methods),
            "model": model,
            "run": str(run),
            "rollouts": found.rollouts,
            "validation": _scores(found.validation),
            "held_out": _scores(found.held_out),
        },
    )
    return PromptFile(current=version.digest, versions=[*file.versions, version])


def _written(section: PromptSection) -> Mapping[str, Any]:
    return {key: value for key, value in section.model_dump(mode="json").items() if value}


def _scores(comparison: Comparison) -> Mapping[str, Any]:
    """``comparison`` as YAML has it: rounded, intervals as lists."""

    def plain(value: Any) -> Any:
        return [round(end, 4) for end in value] if isinstance(value, tuple) else value

    fields = {key.removeprefix("eval_"): value for key, value in asdict(comparison).items()}
    return {key: round(value, 4) if isinstance(value, float) else plain(value) for key, value in fields.items()}
