"""``python -m lightning_core.cli``."""

import sys

from lightning_core.cli.main import main

sys.exit(main())
