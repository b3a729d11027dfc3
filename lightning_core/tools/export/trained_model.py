"""The model to export: a run's checkpoint and policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_core.config import Config, load_config
from lightning_core.config.resolve import PolicySettings, policy_settings
from lightning_core.errors import ConfigError
from lightning_core.records.run_folder.checkpoints import checkpoint_step, choose_checkpoint
from lightning_core.records.run_folder.configs import config_of_step
from lightning_core.records.run_folder.runs import missing_run
from lightning_core.trainers.own_model import own_model
from lightning_core.trainers.verl.export import exported_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained policy."""

    run: Path
    config: Config
    checkpoint: Path
    name: str
    """The policy's name."""
    policy: PolicySettings
    folder: Path
    """The policy's folder in the checkpoint; for a run with verl, the model that verl exported."""

    @property
    def by_verl(self) -> bool:
        """Whether verl trained it."""
        return self.config.trainer.name == "verl"


def find_trained(
    run: Path, *, checkpoint: str | None = None, policy: str | None = None, overrides: Sequence[str] = ()
) -> Trained:
    """The policy ``policy`` of ``run`` in its checkpoint ``checkpoint``.

    None: the only policy, and the newest checkpoint. ``checkpoint`` may be ``best``. ``overrides``: ``key=value`` settings
    that replace the run's, such as ``policy.model`` for a model that was moved. Raises `ConfigError` if there is no such
    run, checkpoint or policy.
    """
    if (missing := missing_run(run)) is not None:
        raise ConfigError(f"{missing}. Expected a run's folder")
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{str(run)!r} is not a run's folder: expected config.yaml and checkpoints/ in it")
    chosen = choose_checkpoint(run, checkpoint)
    config = load_config(config_of_step(run, checkpoint_step(chosen)), overrides)
    policies = policy_settings(config)
    name = policy or next(iter(policies))
    if name not in policies:
        raise ConfigError(f"--policy {name!r}: the run {str(run)!r} trained {list(policies)!r}")
    if policy is None and len(policies) > 1:
        raise ConfigError(
            f"the run {str(run)!r} trained several policies: choose one of {list(policies)!r} with --policy"
        )
    if config.trainer.name == "verl":
        folder = exported_model(chosen)
    else:
        folder = chosen / name if config.policies else chosen
    trained = policies[name]
    if config.trainer.name != "verl":
        trained = replace(trained, model=own_model(trained, folder))
    return Trained(run=run, config=config, checkpoint=chosen, name=name, policy=trained, folder=folder)
