"""The configuration sections of an embedded trainer, with overrides."""

from __future__ import annotations

from typing import Any, TypedDict

from lightning_core.config.algorithm import Algorithm
from lightning_core.config.policies import Lora
from lightning_core.config.resolve import PolicySettings, policy_settings
from lightning_core.config.sections import Policy, Sections
from lightning_core.config.trainer import TrainerSection
from lightning_core.trace import POLICY


class Parts(TypedDict):
    policy: PolicySettings
    algorithm: Algorithm
    settings: TrainerSection
    seed: int


def parts(**overrides: Any) -> Parts:
    """The arguments of `TorchTrainer`, on the CPU unless ``device`` is set.

    ``overrides``: fields of the sections ``policy``, ``trainer`` and ``lora`` (``lora_rank`` and so on), and of
    `PolicySettings` (``keep_base``); ``algorithm``, ``critic`` and ``seed``. Raises `TypeError` for any other name.
    """
    own: dict[str, dict[str, Any]] = {
        "policy": {name: overrides.pop(name) for name in Policy.model_fields if name in overrides},
        "trainer": {name: overrides.pop(name) for name in TrainerSection.model_fields if name in overrides},
        "run": {"seed": overrides.pop("seed", 0)},
    }
    lora = {name: overrides.pop(f"lora_{name}") for name in Lora.model_fields if f"lora_{name}" in overrides}
    if lora:
        own["policy"]["lora"] = lora
    if "critic" in overrides:
        own["credit"] = {"rewards": "gae", "gamma": 1.0, "advantage": "none", "critic": overrides.pop("critic")}
    keep_base = overrides.pop("keep_base", False)
    algorithm = overrides.pop("algorithm", Algorithm())
    if overrides:
        raise TypeError(f"unknown settings: {list(overrides)!r}")
    own["policy"] = {"device": "cpu", **own["policy"]}
    # Most tests make up the logprobs of their rows.
    own["trainer"] = {"max_logprob_difference": None, **own["trainer"]}
    # `Sections`, not `Config`: a trainer must reject invalid combinations itself.
    sections = Sections(**own)  # pyright: ignore[reportArgumentType]
    if keep_base:
        sections = sections.model_copy(
            update={"agents": sections.agents.model_copy(update={"frozen": {"frozen": "base"}})}
        )
    return {
        "policy": policy_settings(sections)[POLICY],
        "algorithm": algorithm,
        "settings": sections.trainer,
        "seed": sections.run.seed,
    }
