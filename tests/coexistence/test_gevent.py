"""gevent's threads are not Python's."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from gevent import monkey; monkey.patch_all()
from lightning_core.testing import playground
with playground(["hi"], train=["a"]):
    pass
"""


def test_monkey_patches_are_refused_before_anything_is_patched() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ConfigError: found gevent's monkey patches, expected Python's own threads" in done.stderr
