"""The declaration of ``credit.air``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_core.config.signal_sections import SignalSection
from lightning_core.config.source import KeyPath
from lightning_core.config.types import Names, Section
from lightning_core.credit import Episode
from lightning_core.signals.air.keys import AirKeys, air_of, import_rules
from lightning_core.signals.air.rewards import with_air_of

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections

logger = logging.getLogger(__name__)

_KEY: KeyPath = ("credit", "air")
_MONITORS = ("intermediate_rewards", "shaping_alone")
"""The monitors that are about these rewards."""


def _check(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    air = air_of(c.credit)
    if air is not None and air.truncated_ramp and not air.truncated:
        yield (*_KEY, "truncated_ramp"), "has no effect without credit.air.truncated; set it, such as to -0.5"


def _check_run(c: Sections, tasks: Sequence[Mapping[str, Any]]) -> None:
    air = air_of(c.credit)
    if air is None:
        for name in filter(_MONITORS.__contains__, c.monitors.stop):
            logger.warning(
                "a setting has no effect: monitors.stop has %r, but there are no intermediate rewards; set credit.air, or remove the "
                "monitor",
                name,
            )
        return
    import_rules(air)
    if not air.has_rewards:
        logger.warning(
            "a setting has no effect: all rewards and costs of credit.air are 0; set one, such as tool_error: -0.1, or remove the section"
        )


def _agents(c: Sections) -> Iterator[tuple[KeyPath, Names | None]]:
    air = air_of(c.credit)
    for index, rule in enumerate(() if air is None else air.formats):
        yield (*_KEY, "formats", index, "agents"), rule.agents


def _derive(c: Sections, episodes: Sequence[Episode]) -> Sequence[Episode]:
    return with_air_of(c.credit, episodes, solved=c.eval.solved)


def _functions(credit: Section) -> Iterator[str]:
    air = air_of(credit)
    yield from () if air is None else (rule.function for rule in air.rules)


SECTION = SignalSection(
    section="credit",
    keys=AirKeys,
    check=_check,
    check_run=_check_run,
    agents=_agents,
    derive=_derive,
    unrecorded={"air.gate": False},
    functions=_functions,
    means={"air_alone": ("air_alone_sum", "air_groups")},
    hidden=("air_groups",),
)
