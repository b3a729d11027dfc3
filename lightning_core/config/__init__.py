"""The configuration of a run: sections, checks, and the settings of each policy."""

from lightning_core.config.config import Config, dump_config, load_config

__all__ = ["Config", "dump_config", "load_config"]
