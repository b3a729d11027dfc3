"""A set of changes to the shipped defaults, and the configuration of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_core import Config, load_config
from lightning_core.errors import ConfigError
from tests.bench.defaults.suite.agent import HELD_OUT, Agent

MODEL = "smollm2-135m-instruct"
CORES = 2
"""A minute of the budget is a minute of that many cores."""
EVALUATED_AT = 0.7
"""The temperature of all evaluations. At a lower temperature the untrained model earns more too: a variant that samples at another one
would else be compared by its sampling."""
MOST_STEPS = 10_000
"""More steps than any budget holds: a run ends when its time is spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Changes to the defaults, as ``key=value`` of the command line."""

    name: str
    changes: tuple[str, ...] = ()


BASELINE = Variant(name="defaults")


def parse_variant(text: str) -> Variant:
    """The variant ``name: key=value key=value``. Raises ValueError for other texts."""
    name, colon, changes = text.partition(":")
    keys = tuple(changes.split())
    if not colon or not name.strip() or not keys or not all("=" in change for change in keys):
        raise ValueError(f"found {text!r}, expected 'name: key=value key=value'")
    if name.strip() == BASELINE.name:
        raise ValueError(f"the name {BASELINE.name!r} is taken by the shipped defaults; choose another one")
    return Variant(name=name.strip(), changes=keys)


def parse_change(text: str) -> Variant:
    """The variant with the one change ``key=value``, by which it is called. Raises ValueError for other texts."""
    if not text.partition("=")[1]:
        raise ValueError(f"found {text!r}, expected key=value, such as trainer.learning_rate=1e-5")
    return Variant(name=text, changes=(text,))


def check(variant: Variant, agents: Sequence[Agent]) -> None:
    """Raises ValueError if a run of one of ``agents`` could not begin with the changes: an unknown key, a wrong value, no such rule."""
    from lightning_core.config.build_rules import check_rules

    for agent in agents:
        try:
            check_rules(configure(agent, variant.changes, seed=0, steps=MOST_STEPS, folder="runs"))
        except ConfigError as error:
            raise ValueError(f"{variant.name!r} does not fit the agent {agent.name!r}: {error}") from error


def configure(agent: Agent, changes: Sequence[str], *, seed: int, steps: int, folder: str) -> Config:
    """The configuration of a run: what every user must set, the evaluations, and ``changes``."""
    given: dict[str, Any] = {
        "agents": {"train": list(agent.train), "frozen": dict.fromkeys(agent.frozen, "base")},
        "policy": {"model": MODEL},
        "trainer": {"steps": steps},
        "eval": {"tasks": HELD_OUT, "solved": agent.solved, "temperature": EVALUATED_AT},
        "run": {"dir": folder, "seed": seed},
    }
    return load_config(given, list(changes))
