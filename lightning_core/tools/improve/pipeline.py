"""The stages: the provider's score, the policy's, prompts, a warm start, reinforcement learning; each stage starts from the best so far."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lightning_core.config import Config
from lightning_core.config.monitor_registry import MONITORS
from lightning_core.errors import plural
from lightning_core.records.run_folder.checkpoints import best_checkpoint, checkpoints
from lightning_core.records.statistics.intervals import Estimate
from lightning_core.records.statistics.prices import Prices
from lightning_core.records.statistics.usage import format_usd
from lightning_core.tools import exits
from lightning_core.tools.improve.stage import Stage, StageFailed, run_stage
from lightning_core.tools.runs.compare import paired_difference
from lightning_core.tools.runs.improvement import POLICY, PROMPTS, PROVIDER, TEACHER, TRAIN, WARM, CurrentStage, Note

UNMEASURED = (PROMPTS, TEACHER)
"""Stages whose runs have rollouts of training tasks: their rewards are none of the held-out tasks."""

_ROUNDS = 3
"""Parts of the training, each followed by an evaluation and a decision."""
_PROMPT_SHARE = 0.2
"""Of the minutes, for the search of prompts."""
_LEAST_PROMPT_ROLLOUTS = 40
_ROLLOUTS_OF_PROMPTS = 300
"""Without a limit of minutes."""
_EPOCHS = ("--epochs", "4", "--batch", "8")
"""Of the warm start; the epoch with the lowest held-out loss is used."""
_WARM_RATE = "1e-4"
"""Ten times the rate of RL, as measured in docs/sft.md."""


class RunStage(Protocol):
    """See `run_stage`."""

    def __call__(
        self, name: str, words: Sequence[str], runs: Path, prices: Prices, *, say: Callable[[str], None]
    ) -> Stage: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovementLimits:
    """What the stages may spend; None: any amount. A command that has begun is not stopped for `usd`."""

    minutes: float | None = None
    usd: float | None = None
    tokens: int | None = None
    """Tokens that training samples."""


@dataclass(slots=True, kw_only=True)
class ImprovementPipeline:
    """The stages in ``folder``, and the best policy so far."""

    config: Config
    file: str
    """The configuration's file."""
    overrides: Sequence[str]
    folder: Path
    limits: ImprovementLimits
    prices: Prices
    prices_file: str | None = None
    model: str | None = None
    """The provider's model to reach; None: none is measured."""
    teach: int = 0
    """Training tasks that the provider's model solves for the warm start."""
    traces: Sequence[str] = ()
    """Runs and files of traces for the warm start."""
    skip: frozenset[str] = frozenset()
    stages: list[Stage] = field(default_factory=list[Stage])
    notes: list[Note] = field(default_factory=list[Note])
    """Why stages were left out, used or not used, and how training ended."""
    current: CurrentStage | None = None
    finished: bool = False
    problem: str | None = None
    """Why it ended early."""
    provider: Stage | None = None
    best: Stage | None = None
    """The stage with the best policy so far."""
    settings: list[str] = field(default_factory=list[str])
    """The settings of the best policy so far."""
    on_change: Callable[[], None] = lambda: None
    """Called when a stage begins or ends, and after each note."""
    say: Callable[[str], None]
    """Prints a line."""
    run_command: RunStage = run_stage
    """Runs a command."""
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Run all stages. Raises `StageFailed` if one fails."""
        if self.model is not None:
            words = ["baseline", self.file, "--model", self.model, *self._prices(), *self._common()]
            self.provider = self._run(PROVIDER, words)
        self.best = self._run(POLICY, ["eval", self.file, *self._common()])
        for name, run in ((PROMPTS, self._find_prompts), (WARM, self._warm_start), (TRAIN, self._train)):
            if name in self.skip:
                self._note(name, "left out, as requested")
            elif (left := self._minutes_left()) is not None and left <= 0:
                self._note(name, f"left out, the time is spent (--minutes {self.limits.minutes:g})")
            else:
                run()
        self.finished = True

    @property
    def untrained(self) -> Stage | None:
        """The evaluation of the untrained policy."""
        return next((stage for stage in self.stages if stage.name == POLICY), None)

    def difference(self, first: Stage | None, second: Stage | None) -> Estimate | None:
        """``second - first`` on the held-out tasks, paired; None without two evaluations."""
        return None if first is None or second is None else paired_difference(first.rewards, second.rewards)

    def minutes(self) -> float:
        """Minutes so far."""
        return (time.monotonic() - self._began) / 60

    def usd_spent(self) -> float:
        """The known cost of the evaluations so far."""
        return sum(stage.usd or 0.0 for stage in self.stages)

    def _find_prompts(self) -> None:
        budget = self._prompt_rollouts()
        if budget < _LEAST_PROMPT_ROLLOUTS:
            self._note(
                PROMPTS,
                f"left out, there is time for {plural(budget, 'rollout')} only, by the time that the first evaluation took, with its start",
            )
            return
        file = self.folder / "prompts.yaml"
        try:
            self._run(PROMPTS, ["prompts", self.file, "--budget", str(budget), "-o", str(file), *self._common()])
        except StageFailed as error:
            if error.code != exits.USAGE:
                raise
            # The search needs more tasks than an evaluation.
            self.current = None
            self._note(
                PROMPTS, "left out, `lightning-rl prompts` refuses this configuration for the reason that it printed"
            )
            return
        if file.is_file():
            used = f"prompts={file}"
            self._adopt(self._run(f"{PROMPTS}, evaluated", ["eval", self.file, *self._common(), used]), [used])
        else:
            self._note(PROMPTS, "none is better than the agent's own")

    def _warm_start(self) -> None:
        sources = [*self.traces]
        if self.teach and self.provider is not None and (taught := self._teacher()) is not None:
            sources.append(f"{taught.folder}:eval_manual")
        if not sources:
            self._note(WARM, "left out, there are no traces: pass --traces, or --model and --teach")
            return
        rate = [] if self.config.trainer.learning_rate != "auto" else [f"trainer.learning_rate={_WARM_RATE}"]
        name = "run.name=warm"
        words = ["sft", *sources, "-c", self.file, *_EPOCHS, *self._common(), *self.settings, *rate, name]
        learned = self._run(WARM, words)
        assert learned.folder is not None
        tuned = self._policy_of(learned.folder)
        if tuned is not None:
            checked = self._run(f"{WARM}, evaluated", ["eval", self.file, *self._common(), *self.settings, tuned])
            self._adopt(checked, [tuned])

    def _teacher(self) -> Stage | None:
        """The provider's model on training tasks, as many as the money allows."""
        assert self.provider is not None
        tasks, rate = self.teach, self._usd_per_rollout()
        if self.limits.usd is not None:
            if rate is None:
                self._note(
                    WARM,
                    "without the provider's model, because the cost of the provider's model is not known; pass --prices",
                )
                return None
            left = self.limits.usd - self.usd_spent()
            tasks = min(tasks, int(left / rate)) if rate > 0 else tasks
            if tasks < 1:
                self._note(WARM, f"without the provider's model, because {format_usd(self.limits.usd)} are spent")
                return None
        train = self.config.tasks.train
        assert train is not None
        source = json.dumps(train.model_dump(mode="json", exclude_none=True))
        held_out = [f"tasks.eval={source}", f"eval.tasks={tasks}", "eval.samples=1"]
        assert self.model is not None
        words = ["baseline", self.file, "--model", self.model, *self._prices(), *self._common(), *held_out]
        return self._run(TEACHER, words)

    def _policy_of(self, folder: Path) -> str | None:
        """The setting that makes the best checkpoint of the run in ``folder`` the policy; None for an adapter."""
        chosen = (best_checkpoint(folder) or checkpoints(folder)[-1]).resolve()
        if not (chosen / "config.json").is_file():
            self._note(WARM, f"{chosen} is an adapter, which RL cannot start from; merge it with `lightning-rl export`")
            return None
        return f"policy.model={chosen}"

    def _train(self) -> None:
        minutes = self._minutes_left()
        every: list[str] = []
        if minutes is not None:
            # Of each round one checkpoint, until the end: the best round may be any.
            kept = ["trainer.checkpoint_every=0", f"trainer.keep_checkpoints={_ROUNDS}"]
            # Each round is a run without evaluations of its own, so what needs them is off.
            stop = [name for name in self.config.monitors.stop if not _needs_evaluations(name)]
            off = ["eval.early_stop=null", "trainer.keep_best=false", f"monitors.stop={json.dumps(stop)}"]
            every = ["eval.every=0", *off, *kept]
            # Training is evaluated before and after each round, which takes as long as it did for the policy.
            assert self.untrained is not None
            minutes -= (_ROUNDS + 1) * self.untrained.minutes
            if minutes <= 0:
                self._note(TRAIN, "left out, the evaluations would take all of the minutes that are left")
                return
        rounds = 1 if minutes is None else _ROUNDS
        last, start = self.best, self.best
        best: Stage | None = None
        for number in range(1, rounds + 1):
            words = ["train", self.file, *self._common(), *self.settings, *every, "run.name=trained"]
            if minutes is not None:
                words.append(f"trainer.minutes={minutes * number / rounds:.4g}")
            if self.limits.tokens is not None:
                words.append(f"trainer.token_budget={self.limits.tokens}")
            trained = self._run(
                TRAIN if number == 1 else f"{TRAIN}, round {number}", [*words, *["--resume"] * (number > 1)]
            )
            ended = self._ended(start, last, trained, is_last=number == rounds)
            last = trained
            if best is None or ((gain := self.difference(best, trained)) is not None and gain.mean >= 0):
                best = trained
            if ended is not None:
                self._note(trained.name, ended)
                break
        assert best is not None
        self._adopt(best, [])

    def _ended(self, start: Stage | None, before: Stage | None, trained: Stage, *, is_last: bool) -> str | None:
        """The reason that training ends after ``trained``, or None."""
        over = self.difference(self.provider, trained)
        if over is not None and over.interval is not None and over.low > 0:
            return f"ended, the policy is better than {self.model}: {over.text(sign='+')}"
        if is_last:
            gain = self.difference(start, trained)
            end = "ended after trainer.steps" if self.limits.minutes is None else "ended with the budget"
            return end if gain is None else f"{end}; gain {gain.text(sign='+')}"
        gain = self.difference(before, trained)
        if gain is not None and gain.mean <= 0:
            return f"ended, the last round gained nothing: {gain.text(sign='+')}"
        return None

    def _adopt(self, stage: Stage, settings: Sequence[str]) -> None:
        """Go on with the policy of ``stage`` if its held-out reward is higher than the best so far."""
        gain = self.difference(self.best, stage)
        if gain is not None and gain.mean > 0:
            self._note(stage.name, f"used, its reward is higher: {gain.text(sign='+')}")
            self.best = stage
            keys = {text.partition("=")[0] for text in settings}
            self.settings = [*(text for text in self.settings if text.partition("=")[0] not in keys), *settings]
        else:
            shown = "it has no evaluation" if gain is None else f"its reward is not higher: {gain.text(sign='+')}"
            self._note(stage.name, f"not used, {shown}")

    def _run(self, name: str, words: Sequence[str]) -> Stage:
        self.current = CurrentStage(name, shlex.join(["lightning-rl", *words]))
        self.on_change()
        stage = self.run_command(name, words, self.folder, self.prices, say=self.say)
        self.stages.append(stage)
        self.current = None
        self.on_change()
        return stage

    def _common(self) -> list[str]:
        return [*self.overrides, f"run.dir={self.folder}"]

    def _prices(self) -> list[str]:
        return [] if self.prices_file is None else ["--prices", self.prices_file]

    def _note(self, stage: str, text: str) -> None:
        self.notes.append(Note(stage, text))
        self.say(f"\n== {stage}: {text}")
        self.on_change()

    def _minutes_left(self) -> float | None:
        limit = self.limits.minutes
        return None if limit is None else limit - self.minutes()

    def _prompt_rollouts(self) -> int:
        assert self.best is not None
        if self.limits.minutes is None or self.best.result is None:
            return _ROLLOUTS_OF_PROMPTS
        per_minute = self.best.result.rollouts / self.best.minutes
        return min(_ROLLOUTS_OF_PROMPTS, int(per_minute * _PROMPT_SHARE * self.limits.minutes))

    def _usd_per_rollout(self) -> float | None:
        assert self.provider is not None
        result = self.provider.result
        return None if result is None or self.provider.usd is None else self.provider.usd / max(1, result.rollouts)


def _needs_evaluations(monitor: str) -> bool:
    return monitor in MONITORS and MONITORS[monitor].needs_evaluations
