"""The configuration's keys ``tasks.sampling`` and ``tasks.sampling_floor``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from lightning_core.config.signal_sections import SignalSection
from lightning_core.config.source import KeyPath
from lightning_core.config.types import Section

if TYPE_CHECKING:
    from lightning_core.config.sections import Sections


class CurriculumKeys(Section):
    """The keys of the curriculum in the section ``tasks``."""

    sampling: Literal["auto", "uniform", "curriculum"] = "auto"
    """The choice of a step's training tasks. `uniform`: one pass over all tasks after the other, each in a random
    order. `curriculum`: at random, with a probability proportional to p(1 − p), where p is the task's estimated
    success rate (see `eval.solved`) in its last attempts (2408.15099, 2502.12272). `auto`: `curriculum`, but
    `uniform` with `trainer.name: verl`, which has only that."""
    sampling_floor: Annotated[float, Ge(0), Le(1)] = 0.1
    """With a curriculum: the part of the probability that is the same for all tasks, so every task can be drawn."""


def sampling_floor(c: Sections) -> float | None:
    """``tasks.sampling_floor``; None without a curriculum."""
    assert isinstance(c.tasks, CurriculumKeys)
    chosen = c.tasks.sampling
    is_curriculum = chosen == "curriculum" or (chosen == "auto" and c.trainer.name != "verl")
    return c.tasks.sampling_floor if is_curriculum else None


def is_automatic(c: Sections) -> bool:
    """Whether ``tasks.sampling`` is ``auto``."""
    assert isinstance(c.tasks, CurriculumKeys)
    return c.tasks.sampling == "auto"


def _check(c: Sections) -> Iterator[tuple[KeyPath, str]]:
    assert isinstance(c.tasks, CurriculumKeys)
    default: float = CurriculumKeys.model_fields["sampling_floor"].default
    if sampling_floor(c) is None and c.tasks.sampling_floor != default:
        why = "'uniform'" if c.tasks.sampling == "uniform" else "'auto', which is uniform with trainer.name: verl"
        yield ("tasks", "sampling_floor"), f"goes with sampling: curriculum only, but tasks.sampling is {why}"
    if c.tasks.sampling == "curriculum" and c.trainer.name == "verl":
        yield (
            ("tasks", "sampling"),
            "found 'curriculum', expected 'uniform' or 'auto': verl reads the tasks of all steps from a file that is written before "
            "training; or use trainer.name: torch",
        )


SECTION = SignalSection(
    section="tasks",
    keys=CurriculumKeys,
    check=_check,
    hidden=("tasks_sampled",),
    means={"tasks_sampled_success": ("tasks_sampled_success_sum", "tasks_sampled")},
    unrecorded={"sampling": "uniform"},
)
