"""The settings that the embedded trainer does not support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_core.config.sections import Sections
from lightning_core.config.source import KeyPath
from lightning_core.config.trainer_support import others_keys
from lightning_core.credit.registry import Loss
from lightning_core.credit.rules import CreditRules

_VERL_KEYS = (
    "mode", "nodes", "gpus_per_node", "rollout_nodes", "rollout_gpus_per_node", "rollout_workers", "rows_per_rollout", "verl",
)  # fmt: skip


def supports(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield the settings that the embedded trainer does not support."""
    yield from others_keys(c, _VERL_KEYS, "verl")
    if c.ray.address is not None:
        yield ("ray", "address"), f"goes with trainer.name: verl only, but it is {c.trainer.name!r}"


def supports_rules(c: Sections, rules: Sequence[CreditRules], loss: Loss | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield nothing: the embedded trainer supports all rules and losses."""
    yield from ()
