"""`lightning-rl sft`: supervised fine-tuning with the trainer of a run.

The loss is the mean cross-entropy of the responses' tokens. It is `reinforce` with an advantage of 1 and ``token-mean``: rows,
packing, optimizer and checkpoints are as in reinforcement learning.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_core.config import Config
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.credit import CreditSection
from lightning_core.config.policies import PolicyCredit
from lightning_core.errors import ConfigError, plural
from lightning_core.observers.open import make_observers
from lightning_core.observers.progress import Progress
from lightning_core.records.observer import Observers
from lightning_core.records.report import Summary
from lightning_core.records.results import Result
from lightning_core.records.run_folder.checkpoints import checkpoints, delete_old, drop_optimizer, mark_best
from lightning_core.records.run_folder.folder import SUPERVISED, open_run_folder
from lightning_core.records.run_folder.remove import started
from lightning_core.records.steps import StepLog
from lightning_core.records.store import Store
from lightning_core.rollouts.interrupts import interruptible, uninterrupted
from lightning_core.tools.runs.sources import list_counts
from lightning_core.tools.sft.agents import learning_agents
from lightning_core.tools.sft.chats import open_chats
from lightning_core.tools.sft.examples import Selection, read_examples
from lightning_core.tools.sft.tokens import TokenCounts, Tokens
from lightning_core.trace import POLICY, Trace
from lightning_core.trainers import Learner, make_trainer
from lightning_core.transitions import Row

_METRICS = {"loss": "ce_loss"} | {
    name: name for name in ("grad_norm", "learning_rate", "rows_trained", "packed_tokens", "micro_batches")
}
"""The trainer's metrics that apply without rollouts, and their names here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """Options of the training besides the configuration."""

    epochs: int = 1
    """Passes over the rollouts."""
    batch: int = 16
    """Rollouts per update."""
    held_out: float = 0.1
    """The share of tasks whose rollouts are held out, to measure the loss on."""


@dataclass(slots=True, kw_only=True)
class SftResult:
    """The result of `sft`."""

    folder: Path
    checkpoint: Path
    losses: list[float]
    """The held-out loss in nats per token: before, and after each epoch; empty without held-out rollouts."""
    counts: TokenCounts
    left_out: Mapping[str, int]
    metrics: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])


def sft(
    sources: Sequence[str | Path], *, config: Config, selection: Selection, options: SftOptions, progress: Progress
) -> SftResult:
    """Train the policies of ``config`` on the recorded rollouts in ``sources``; see `read_examples`.

    Raises `ConfigError` if there is nothing to learn from, and errors of the trainer.
    """
    if config.run.resume:
        raise ConfigError(
            "run.resume: supervised fine-tuning cannot be resumed; start it again, under another run.name"
        )
    observers = make_observers(config, progress)
    began, left_out = time.monotonic(), Counter[str]()
    traces = read_examples(sources, selection, left_out)
    agents = learning_agents(config, traces)
    chats, max_context = open_chats(config)
    tokens = Tokens(agents, chats, max_context=max_context, left_out=left_out)
    rows = {trace.rollout: rendered for trace in traces if (rendered := tokens.rows(trace))}
    for reason, number in left_out.items():
        progress.message(f"left out: {number} {reason}")
    if not rows:
        raise ConfigError(
            f"none of {plural(len(traces), 'rollout')} has a call that can be learned: {list_counts(left_out) or 'they have none'}"
        )
    learned, held = split([trace for trace in traces if trace.rollout in rows], options.held_out, seed=config.run.seed)
    if config.prompts:
        progress.message("prompts: calls are learned with the prompts that they were recorded with; nothing is added")
    progress.message(_overview(learned, held, rows, tokens.counts))
    supervised = _for_supervision(config, steps=options.epochs * math.ceil(len(learned) / options.batch))
    folder, _ = open_run_folder(config)
    with ExitStack() as stack:
        stack.enter_context(started(folder))
        stack.enter_context(observers.watching(config, folder, steps=supervised.trainer.steps))
        stack.enter_context(interruptible())
        learner = make_trainer(supervised, samples=False).learner
        stack.callback(learner.close)
        store = stack.enter_context(Store(folder / "store.db"))
        loop = SftLoop(supervised, options, learner, folder, store, observers, rows)
        loop.learn([trace.rollout for trace in learned], [trace.rollout for trace in held])
        result = SftResult(
            folder=folder,
            checkpoint=checkpoints(folder)[-1],
            losses=loop.losses,
            counts=tokens.counts,
            left_out=left_out,
            metrics=loop.metrics,
        )
        _record(result, sources, selection, options)
        summary = Summary(
            eval=None,
            steps=loop.steps,
            stopped=loop.stopped,
            rollouts=len(rows),
            tokens_sampled=0,
            tokens_trained=sum(int(m["tokens_ce"]) for m in loop.metrics),
            wall_seconds=time.monotonic() - began,
            seed=config.run.seed,
        )
        summary.write(folder / "summary.json")
        observers.finished(Result(folder=folder, checkpoint=result.checkpoint, summary=summary, metrics=loop.metrics))
    return result


def split(traces: Sequence[Trace], share: float, *, seed: int) -> tuple[list[Trace], list[Trace]]:
    """``traces`` to learn from, and held-out traces: of ``share`` of the tasks, at least one if there are two.

    A task's rollouts stay together, so no held-out rollout has a trained task.
    """
    tasks = sorted({trace.task_id for trace in traces})
    number = 0 if share == 0 or len(tasks) < 2 else min(len(tasks) - 1, max(1, round(share * len(tasks))))
    held = set(random.Random(f"{seed}:held out").sample(tasks, number))
    return [t for t in traces if t.task_id not in held], [t for t in traces if t.task_id in held]


class SftLoop:
    """The passes over the rollouts."""

    def __init__(
        self,
        config: Config,
        options: SftOptions,
        learner: Learner,
        folder: Path,
        store: Store,
        observers: Observers,
        rows: Mapping[str, Sequence[Row]],
    ) -> None:
        """``rows``: by rollout."""
        self._config, self._options, self._learner = config, options, learner
        self._folder, self._store, self._observers = folder, store, observers
        self._rows = rows
        self.steps = 0
        """Number of updates so far."""
        self.losses: list[float] = []
        self.metrics: list[Mapping[str, Any]] = []
        self.stopped: str | None = None

    def learn(self, rollouts: Sequence[str], held: Sequence[str]) -> None:
        """Train on ``rollouts``; measure the loss on the rollouts ``held`` before and after each epoch."""
        config, options = self._config, self._options
        batches = math.ceil(len(rollouts) / options.batch)
        log = StepLog(self._folder, self._store, self._observers, after=0)
        (self._folder / SUPERVISED).write_text("{}\n", encoding="utf-8")
        self._measure(held, "before")
        for epoch in range(options.epochs):
            order = random.Random(f"{config.run.seed}:{epoch}").sample(list(rollouts), len(rollouts))
            best = False
            for number in range(batches):
                self._observers.phase(f"epoch {epoch + 1}, update {number + 1} of {batches}")
                chosen = order[number * options.batch : (number + 1) * options.batch]
                is_last = number == batches - 1
                with uninterrupted():
                    metrics = self._step(chosen)
                    if is_last and held:
                        loss = self._measure(held, f"after epoch {epoch + 1} of {options.epochs}")
                        metrics["held_out_ce_loss"], best = loss, loss <= min(self.losses[1:])
                    recorded = log.add(self.steps, metrics)
                    self.metrics.append({"step": self.steps, **recorded})
                self.stopped = self._observers.stop_reason()
                if self.stopped is not None:
                    break
            self._save(best=best)
            if self.stopped is not None:
                self._observers.message(f"stopped after step {self.steps}: {self.stopped}")
                break

    def _step(self, rollouts: Sequence[str]) -> dict[str, float]:
        began = time.monotonic()
        rows = [row for rollout in rollouts for row in self._rows[rollout]]
        update = self._learner.step(rows)
        self.steps += 1
        named = [(key.rpartition("/"), value) for key, value in update.items()]
        return {
            **{f"{policy}{slash}{_METRICS[name]}": v for (policy, slash, name), v in named if name in _METRICS},
            "tokens_ce": sum(int(row.mask.sum()) for row in rows),
            "seconds_update": time.monotonic() - began,
        }

    def _measure(self, held: Sequence[str], when: str) -> float:
        """The loss on the rollouts ``held``, in nats per token; shown."""
        if not held:
            return math.nan
        logprobs = self._learner.scorer(POLICY).logprobs([row for rollout in held for row in self._rows[rollout]])
        tokens = sum(len(logprobs_T) for logprobs_T in logprobs.values())
        loss = -math.fsum(float(logprobs_T.sum(dtype="float64")) for logprobs_T in logprobs.values()) / tokens
        self.losses.append(loss)
        self._observers.message(f"held-out loss {when}: {loss:.4f} nats per token")
        return loss

    def _save(self, *, best: bool) -> None:
        """Write a checkpoint, without the optimizer's state; delete those beyond ``trainer.keep_checkpoints``, except the best.

        ``best``: its loss on the held-out rollouts is the lowest so far.
        """
        target = self._folder / "checkpoints" / f"step-{self.steps:06d}"
        self._learner.save(target)
        drop_optimizer(target)  # nothing resumes from it
        if best:
            mark_best(target)
        delete_old(self._folder, self._config.trainer.keep_checkpoints)


def _for_supervision(config: Config, *, steps: int) -> Config:
    """``config`` with the loss of supervised fine-tuning, in this process, without settings that only rollouts need."""
    trainer = config.trainer
    if trainer.warmup_steps >= steps:
        raise ConfigError(
            f"trainer.warmup_steps is {trainer.warmup_steps}, but must be less than the number of updates ({steps}); lower it"
        )
    policies = {name: p.model_copy(update={"credit": PolicyCredit()}) for name, p in config.policies.items()}
    return config.model_copy(
        update={
            "algorithm": Algorithm(loss="reinforce", aggregation="token-mean"),
            "credit": CreditSection(),
            "policies": policies,
            "agents": config.agents.model_copy(update={"frozen": {}}),
            "policy": config.policy.model_copy(update={"backend": "torch"}),
            "trainer": trainer.model_copy(update={"name": "torch", "steps": steps, "max_logprob_difference": None}),
        }
    )


def _overview(
    learned: Sequence[Trace], held: Sequence[Trace], rows: Mapping[str, Sequence[Row]], counts: TokenCounts
) -> str:
    train_rows = [row for trace in learned for row in rows[trace.rollout]]
    tokens = sum(int(row.mask.sum()) for row in train_rows)
    parts = [
        f"{plural(len(learned), 'rollout')} to learn from ({len(train_rows)} rows, {tokens} tokens of responses), {len(held)} held out",
        f"{plural(counts.recorded, 'call')} with recorded tokens, {counts.rendered} rendered by the chat template",
    ]
    if counts.without_reasoning:
        parts.append(
            f"{plural(counts.without_reasoning, 'response')} without their reasoning, which the template does not write"
        )
    return "; ".join(parts)


def _record(result: SftResult, sources: Sequence[str | Path], selection: Selection, options: SftOptions) -> None:
    document = {
        "sources": [str(Path(source).resolve()) for source in sources],
        "min_reward": selection.min_reward,
        "best": selection.best,
        "phase": selection.phase,
        "epochs": options.epochs,
        "batch": options.batch,
        "held_out": options.held_out,
        "held_out_losses": result.losses,
        "calls_recorded": result.counts.recorded,
        "calls_rendered": result.counts.rendered,
        "left_out": dict(result.left_out),
    }
    (result.folder / SUPERVISED).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
