"""The proof that a run starts from the same weights whenever it is resumed: their digest, recorded before the first rollout.

The weights themselves are not copied: the model and ``run.seed`` determine them. A resumed run is given them first, and loads its
checkpoint afterwards, so an evaluation before training never measures trained weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from lightning_core.errors import TrainingError
from lightning_core.records.atomic import write_atomically
from lightning_core.records.json_file import read_json
from lightning_core.records.report import installed_versions

logger = logging.getLogger(__name__)

INITIAL = "initial.json"


class InitialWeights:
    """The initial weights of the run in ``folder``."""

    def __init__(self, folder: Path, digest: Callable[[], str] | None) -> None:
        """``digest``: of the weights that the learner has now; None: the trainer computes none, and nothing is compared."""
        self._file = folder / INITIAL
        self._digest = digest

    def confirm(self, steps: int) -> bool:
        """Whether the learner has the weights that the run began with; recorded for a run without updates that has no record.

        ``steps``: number of the run's updates. Raises `TrainingError` if they are others and there are no updates; otherwise that is
        a warning.
        """
        if self._digest is None:
            return True
        try:
            expected = read_json(self._file)["weights"] if self._file.exists() else None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TrainingError(
                f"{str(self._file)!r} is damaged: {type(error).__name__}: {error}. It has the digest of the weights that the run began "
                "with; restore it from a copy, or start a new run"
            ) from error
        found = self._digest()
        if expected is None and not steps:
            facts = {"weights": found, "versions": installed_versions()}
            write_atomically(self._file, json.dumps(facts, indent=2) + "\n")
        elif expected is None:
            logger.warning(
                "the evaluation before training is not recorded, and is made with the weights that policy.model has now: the run is of a "
                "version that did not record the digest of its initial weights"
            )
        elif found != expected:
            problem = (
                f"the model has other weights than when the run began: found the digest {found[:16]}…, expected {expected[:16]}… "
                f"({INITIAL}). Restore the model of policy.model, with the same run.seed and policy.dtype"
            )
            if not steps:
                raise TrainingError(f"{problem}, or start a new run")
            logger.warning("the evaluation before training is not recorded, and cannot be made: %s", problem)
            return False
        return True
