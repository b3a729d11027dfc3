"""The configuration of a run: sections, checks, and what each policy gets of them."""

from lightning_core.config.config import Config, dump_config, load_config

__all__ = ["Config", "dump_config", "load_config"]
