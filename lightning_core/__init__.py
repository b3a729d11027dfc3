"""Trains the model inside an LLM agent by reinforcement learning.

The flow, one place for each arrow::

    @trainable ──marks──▶ agent            capture/        current rollout, agent, span
         agent ──▶ its requests            propagation/    the same in threads, processes, and each request's headers
         request ──▶ tokens, logprobs      endpoint/       OpenAI-compatible endpoint that records the tokens
         spans ──▶ Trace                   trace.py        one OpenTelemetry trace a rollout
         Trace ──▶ [Transition] ──▶ [Row]  transitions.py  per agent; prefix forest; each sampled token once
         [Transition] ──▶ advantages       credit/         episode → call → token; groups
         rows ──▶ new weights              trainers/       torch on this machine, verl on a cluster
         the whole algorithm               loop.py         tasks → rollouts → the above → policy version + 1

Importing the package loads no framework, no torch and no numpy; the names below are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_core.capture import reward
    from lightning_core.capture.integration import install, uninstall
    from lightning_core.capture.mark import trainable
    from lightning_core.config import Config, load_config
    from lightning_core.credit import CreditRules, Episode, assign_credit
    from lightning_core.errors import LightningError
    from lightning_core.loop import Result, evaluate, fit
    from lightning_core.propagation import launch, rollout
    from lightning_core.signals.forks.replayable import replayable
    from lightning_core.tools.record import record
    from lightning_core.trace import Call, Trace
    from lightning_core.transitions import Row, Transition, trace_to_transitions, transitions_to_rows


_HOMES = {
    "reward": "capture",
    "rollout": "propagation",  # it goes on in other processes, too
    "launch": "propagation",
    "Config": "config",
    "load_config": "config",
    "Episode": "credit",
    "CreditRules": "credit",
    "assign_credit": "credit",
    "LightningError": "errors",
    "install": "capture.integration",
    "uninstall": "capture.integration",
    "Result": "loop",
    "evaluate": "loop",
    "fit": "loop",
    "Call": "trace",
    "Trace": "trace",
    "Row": "transitions",
    "trace_to_transitions": "transitions",
    "transitions_to_rows": "transitions",
    "Transition": "transitions",
    "trainable": "capture.mark",
    "replayable": "signals.forks.replayable",
    "record": "tools.record",
}

__all__ = [
    "Call",
    "Config",
    "CreditRules",
    "Episode",
    "LightningError",
    "Result",
    "Row",
    "Trace",
    "Transition",
    "assign_credit",
    "evaluate",
    "fit",
    "install",
    "launch",
    "load_config",
    "record",
    "replayable",
    "reward",
    "rollout",
    "trace_to_transitions",
    "trainable",
    "transitions_to_rows",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_core' has no attribute {name!r}")
    return getattr(import_module(f"lightning_core.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
