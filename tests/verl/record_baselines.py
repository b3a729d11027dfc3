"""Writes the expected results of the runs of `tests.verl.baselines`, or of those named, and prints what differs from the old ones.

eval "$(python -m tests.verl.cpu)" && python -m tests.verl.record_baselines [NAME…]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.baselines.record import rewrite
from tests.tiny_model import make_tiny_model
from tests.verl.baselines import RUNS, found
from tests.verl.manager_runs import open_cluster


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as model, open_cluster():
        make_tiny_model(model)
        for name in names or RUNS:
            with tempfile.TemporaryDirectory() as folder:
                rewrite(name, found(name, Path(model), Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
