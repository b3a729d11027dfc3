"""The settings that each trainer rejects, which it declares in its `supports.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_core.config.source import KeyPath
from lightning_core.credit.registry import Loss
from lightning_core.credit.rules import CreditRules

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections


def check_support(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    """Yield the settings that the trainer of ``c`` does not support. It loads neither torch nor verl."""
    yield from _trainer(c).supports(c)


def check_rule_support(
    c: Sections, *, rules: Sequence[CreditRules] = (), loss: Loss | None = None
) -> Iterator[tuple[KeyPath, str]]:
    """Yield what the trainer of ``c`` does not support of the ``rules`` and the ``loss`` that ``c`` names, once they are imported."""
    yield from _trainer(c).supports_rules(c, rules, loss)


def _trainer(c: Sections) -> Any:
    return import_module(f"lightning_core.trainers.{c.trainer.name}.supports")


def others_keys(c: Sections, keys: Sequence[str], other: str) -> Iterator[tuple[KeyPath, str]]:
    """Yield the ``keys`` of the section ``trainer`` that are set, but belong to the trainer ``other``."""
    for key in keys:
        if getattr(c.trainer, key) != type(c.trainer).model_fields[key].default:
            yield ("trainer", key), f"goes with trainer.name: {other} only, but it is {c.trainer.name!r}"
