"""An agent whose module starts a program of its own session when it is imported, such as a server of tools."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

if "lightning_core.rollouts.executors.launcher" in sys.modules:  # not in the test that names this module
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def solve(task: Any) -> float:
    return 1.0
