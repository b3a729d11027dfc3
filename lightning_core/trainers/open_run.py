"""A run in this process: weights, endpoint, agents and store, opened together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lightning_core.errors import ConfigError
from lightning_core.records.run_folder.checkpoints import checkpoint_step
from lightning_core.records.store import Store
from lightning_core.rollouts.attempt import Rollout
from lightning_core.rollouts.background import BackgroundLoop, background_loop
from lightning_core.rollouts.collect import Collector
from lightning_core.rollouts.interrupts import interruptible
from lightning_core.rollouts.local_agents import capturing, importing_agents, open_agents
from lightning_core.rollouts.recorded import RecordedAgents
from lightning_core.rollouts.signal import Resources, open_signals
from lightning_core.trainers import Learner, make_trainer
from lightning_core.trainers.initial_weights import InitialWeights
from lightning_core.trainers.own_model import sampling_config, with_own_model
from lightning_core.trainers.plan import Plan
from lightning_core.trainers.stand_in import sampling_trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedRun:
    """The open resources of a run."""

    learner: Learner
    collector: Collector
    background: BackgroundLoop
    """Runs the coroutines of ``collector``."""
    store: Store
    agents: RecordedAgents
    initial: InitialWeights
    steps: int = 0
    """Number of updates of the checkpoint to continue from, or to sample from."""
    notes: Sequence[str] = ()
    """See `Trainer.notes`."""


@contextmanager
def open_run(
    plan: Plan, *, weights_only: bool = False, on_rollout: Callable[[Rollout], None] = lambda _: None
) -> Generator[EmbeddedRun]:
    """Handle signals, install patches and integrations, load the weights, start the endpoint.

    At the end, all is undone in reverse order. ``weights_only``: load the checkpoint of ``plan``, which may be verl's, to
    sample, not to train; otherwise the weights are the initial ones, and the session loads it. ``on_rollout``: called with the
    last attempt at each job.
    """
    config, checkpoint, observers = plan.config, plan.checkpoint, plan.observers
    if checkpoint is not None:
        config, checkpoint = (
            sampling_config(config, checkpoint) if weights_only else (with_own_model(config, checkpoint), checkpoint)
        )

    def advance(rollout: Rollout) -> None:
        on_rollout(rollout)
        observers.advance(rollout.trace)

    with ExitStack() as stack:
        stack.enter_context(interruptible(None if weights_only else config.run.grace_seconds))
        stack.enter_context(capturing(config))
        executor = stack.enter_context(importing_agents(config, plan.inputs.solve, plan.inputs.reward))
        observers.phase("loading the model")
        trainer = sampling_trainer(config, checkpoint) if weights_only else make_trainer(config)
        stack.callback(trainer.learner.close)
        max_context = trainer.backend.max_context
        if config.rollouts.max_tokens >= max_context:
            raise ConfigError(
                f"rollouts.max_tokens is {config.rollouts.max_tokens}, but the model's context has {max_context} tokens for prompt and "
                "response together; lower rollouts.max_tokens"
            )
        for note in trainer.notes:
            observers.message(note)
        steps = 0
        if checkpoint is not None:
            steps = trainer.learner.load(checkpoint, weights_only=True) if weights_only else checkpoint_step(checkpoint)
        observers.phase("starting the agents")
        store = stack.enter_context(Store(plan.folder / "store.db"))
        local = stack.enter_context(
            open_agents(
                *(config, plan.inputs.solve, trainer.backend, trainer.chats),
                reward_function=plan.inputs.reward,
                executor=executor,
            )
        )
        agents = RecordedAgents(local, store)
        resources = Resources(
            config=config,
            store=store,
            agents=agents,
            chats=trainer.chats,
            max_context=max_context,
            scorer=trainer.learner.scorer,
            critic=trainer.critic,
            vocabulary=trainer.vocabulary,
        )
        signals = () if weights_only else open_signals(resources)
        for note in (note for signal in signals for note in signal.notes()):
            observers.message(note)
        yield EmbeddedRun(
            learner=trainer.learner,
            collector=Collector(
                config,
                agents,
                store,
                signals=signals,
                on_rollout=advance,
                on_phase=observers.phase,
                on_batch=trainer.forget_contexts,
            ),
            background=stack.enter_context(background_loop()),
            store=store,
            agents=agents,
            initial=InitialWeights(plan.folder, trainer.digest),
            steps=steps,
            notes=trainer.notes,
        )
