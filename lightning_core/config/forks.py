"""The configuration's section ``rollouts.forks``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.types import Count, Names, Section


def _live_recorded_or_names(data: object) -> object:
    if isinstance(data, str) and data not in ("live", "recorded"):
        raise PydanticCustomError(INVALID_VALUE, "expected live, recorded or a list of names: [{name}]", {"name": data})
    return data


class Forks(Section):
    """Forks of a task's attempts: rollouts that repeat an attempt up to one of its calls, and sample from there on.
    docs/forks.md describes them."""

    points: Count = 1
    """Number of calls per task that are sampled anew, chosen among those of all its attempts."""
    samples: Count = 2
    """Number of forks at each of these calls."""
    agents: Names | None = None
    """Trained agents whose calls are sampled anew, with `*` as wildcard; null: all."""
    tools: Annotated[Literal["live", "recorded"] | Names, BeforeValidator(_live_recorded_or_names)] = "live"
    """Tools whose results are taken from the record before the forked call. `live`: none; all tools run again.
    `recorded`: the functions that are marked with `@replayable`. A list of names: these tools of LangChain, LangGraph,
    OpenAI Agents SDK and AutoGen, and these marked functions. A tool that has effects must run: leave it out."""
