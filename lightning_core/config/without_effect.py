"""Settings that a run does not use. They are warnings at its start, not errors: a run that is short on purpose, one recorded earlier,
and a question about its credit may have them."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_core.config.config import Config
from lightning_core.config.monitor_registry import MONITORS
from lightning_core.config.resolve import policy_settings
from lightning_core.config.rule_names import declared
from lightning_core.credit import ADVANTAGE_RULES


def settings_without_effect(config: Config) -> Iterator[str]:
    """What is set without effect in ``config``, each with what to do."""
    yield from _group_keys(config)
    yield from _monitors(config)
    yield from _warmup(config)


def _group_keys(c: Config) -> Iterator[str]:
    for name, settings in policy_settings(c).items():
        credit = settings.credit
        rule = declared(ADVANTAGE_RULES, credit.advantage)
        if credit.group_by is not None and rule is not None and not rule.uses_groups:
            of = f" of policy {name}" if c.policies else ""
            yield (
                f"credit.group_by{of} is {[*credit.group_by]!r}, but credit.advantage: {rule.name} does not compare within groups; remove "
                "the key, or use another advantage"
            )


def _monitors(c: Config) -> Iterator[str]:
    for name in c.monitors.stop:
        rule = MONITORS.get(name)
        if rule is not None and rule.needs_evaluations and not 0 < c.eval.every < c.trainer.steps:
            yield (
                f"monitors.stop has {name!r}, which is evaluated on held-out tasks during training, but eval.every is {c.eval.every} and "
                f"trainer.steps {c.trainer.steps}; set eval.every below trainer.steps, or remove the monitor"
            )


def _warmup(c: Config) -> Iterator[str]:
    warmup, steps = c.trainer.warmup_steps, c.trainer.steps
    if warmup > steps:
        yield (
            f"trainer.warmup_steps is {warmup}, but trainer.steps is {steps}: the learning rate rises to {steps / warmup:.0%} of "
            "trainer.learning_rate only; lower trainer.warmup_steps, unless the run is short on purpose or will be resumed with more steps"
        )
