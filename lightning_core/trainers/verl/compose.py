"""Composes verl's configuration.

Its parts: verl's defaults, ours, ``trainer.verl``, and the keys that our configuration determines.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_core.errors import ConfigError, did_you_mean
from lightning_core.trainers.verl.settings import flatten

_ENGINE = "model_engine"
"""Hydra's config group of the training engine (FSDP, Megatron, …).

It determines which keys exist.
"""


def compose_config(derived: Mapping[str, Any], defaults: Mapping[str, Any], own: Mapping[str, Any]) -> DictConfig:
    """Merge verl's configuration with ``defaults``, ``own`` and ``derived``, in this order.

    ``own``: the section ``trainer.verl``.

    Raises `ConfigError` for a key in ``own`` that verl does not have or that ``derived`` contains.
    """
    wanted = flatten(own)
    _refuse_derived(wanted, derived)
    chosen = {key: value for key, value in defaults.items() if key not in {k.removeprefix("+") for k in wanted}}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"{_ENGINE}={wanted[_ENGINE]}"] if _ENGINE in wanted else [])
    known = flatten(OmegaConf.to_container(config, resolve=False))  # type: ignore[arg-type]
    for key, value in {**chosen, **wanted, **derived}.items():
        name = key.removeprefix("+")
        if name == _ENGINE:
            continue
        if not key.startswith("+") and not _is_known(name, known):
            if key not in wanted:
                raise ConfigError(f"the installed verl {version('verl')} has no key {name!r}; expected verl 0.9.1")
            meant = did_you_mean(name, known)
            raise ConfigError(
                f"trainer.verl: verl has no key {name!r}{f'; {meant}' if meant else '.'} To add one, write '+{name}'"
            )
        with open_dict(config):
            OmegaConf.update(config, name, value, merge=True, force_add=True)
    return config


def _is_known(name: str, known: Mapping[str, Any]) -> bool:
    """Whether verl has the key.

    It may be a value, a section, or below a section that is empty by default.
    """
    parts = name.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts))]
    return (
        name in known
        or any(key.startswith(f"{name}.") for key in known)
        or any(known.get(key, None) == {} for key in above)
    )


def _refuse_derived(wanted: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    names = {key.removeprefix("+") for key in derived}
    for key in wanted:
        name = key.removeprefix("+")
        clash = next((d for d in names if name == d or name.startswith(f"{d}.") or d.startswith(f"{name}.")), None)
        if clash is not None:
            raise ConfigError(
                f"trainer.verl: {name!r} is determined by other keys of this configuration (see the table in docs/trainers.md); remove it"
            )
