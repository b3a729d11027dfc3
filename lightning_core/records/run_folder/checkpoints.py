"""A run's checkpoints: their paths, which can be used, how long they keep the optimizer's state, and which one is the best."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from lightning_core.errors import ConfigError, plural
from lightning_core.records.atomic import link_atomically
from lightning_core.records.run_folder.manifest import OPTIMIZER, find_problem, has_manifest

logger = logging.getLogger(__name__)

BEST = "best"
"""The link to the checkpoint with the best held-out reward, beside the checkpoints."""
_NAME = re.compile(r"(step-|global_step_)\d+")
_UNUSED = re.compile(_NAME.pattern + r"\.unused\d*")
WITH_OPTIMIZER = 2
"""Number of newest checkpoints that keep the optimizer's state: if one is damaged, a run resumes from the other."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of the run in ``folder``, oldest first; verl's are ``global_step_10``. Other names and empty folders are ignored."""
    parent = folder / "checkpoints"
    found = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)] if parent.is_dir() else []
    return sorted((path for path in found if path.is_dir() and not _is_empty(path)), key=checkpoint_step)


def _is_empty(folder: Path) -> bool:
    try:
        return next(folder.iterdir(), None) is None
    except OSError:  # a run that goes on deletes it, or it cannot be read; `find_problem` says so
        return False


def checkpoint_step(checkpoint: Path) -> int:
    """The number of updates before ``checkpoint``."""
    return int(checkpoint.name.replace("-", "_").rpartition("_")[2])


def drop_optimizer(checkpoint: Path) -> None:
    """Remove the optimizer's state from ``checkpoint``.

    It can still be evaluated, served and exported, but training cannot resume from it.
    """
    for path in checkpoint.rglob(OPTIMIZER):
        path.unlink()


def delete_old(folder: Path, keep: int) -> None:
    """Delete all checkpoints of the run in ``folder`` but the newest ``keep`` and the best.

    Only the two newest keep the optimizer's state.
    """
    folders, best = checkpoints(folder), best_checkpoint(folder)
    for old in folders[:-WITH_OPTIMIZER]:
        drop_optimizer(old)
    for old in folders[:-keep]:
        if old != best:
            shutil.rmtree(old)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `mark_best` marked last; None without one."""
    link = folder / "checkpoints" / BEST
    return link.parent / link.readlink() if link.is_symlink() and link.exists() else None


def mark_best(checkpoint: Path) -> None:
    """Link ``checkpoint`` as the best one of its run."""
    link_atomically(checkpoint.parent / BEST, checkpoint.name)


def newest_sound(folder: Path, *, training: bool) -> Path | None:
    """The newest checkpoint of the run in ``folder`` without a problem; None if the run has no checkpoint.

    Each newer one is named in a warning. ``training``: to resume from. Raises `ConfigError` if all have a problem.
    """
    problems, listed = list[str](), checkpoints(folder)
    for checkpoint in reversed(listed):
        problem = find_problem(checkpoint, step=checkpoint_step(checkpoint), training=training)
        if problem is None:
            if (checkpoint / "trainer.json").exists() and not has_manifest(checkpoint):
                logger.warning(
                    "the checkpoint %r is of a version without manifests: it is not verified", str(checkpoint)
                )
            for text in problems:
                logger.warning("the checkpoint %s. The one before it is used", text)
            return checkpoint
        problems.append(f"{str(checkpoint)!r} cannot be used: {problem}")
    if problems and checkpoints(folder) != listed:  # the run goes on, and has replaced them
        return newest_sound(folder, training=training)
    if problems:
        raise ConfigError(
            f"the run {str(folder)!r} has no checkpoint that can be used; expected one: {'; '.join(problems)}. Restore one of them from "
            "a copy, or start a new run"
        )
    return None


def set_aside_newer(folder: Path, checkpoint: Path | None) -> None:
    """Rename the newest checkpoint of the run in ``folder`` if it is newer than ``checkpoint``, which the run continues from.

    Others that are newer, and what was renamed before, are deleted. ``checkpoint`` None: all are newer.
    """
    step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    newer = [path for path in checkpoints(folder) if checkpoint_step(path) > step]
    if not newer:
        return
    earlier = [path for path in newer[-1].parent.iterdir() if _UNUSED.fullmatch(path.name)]
    for path in (*earlier, *newer[:-1]):
        shutil.rmtree(path)
    kept = newer[-1].rename(newer[-1].with_name(f"{newer[-1].name}.unused"))
    deleted = f"; {plural(len(newer) - 1, 'checkpoint')} before it, newer too, deleted" if newer[:-1] else ""
    logger.warning("the checkpoint that the run does not continue from is kept as %r%s", str(kept), deleted)


def choose_checkpoint(folder: Path, name: str | None = None) -> Path:
    """The checkpoint ``name`` of the run in ``folder``; None: the newest without a problem; ``best``: see `mark_best`.

    Raises `ConfigError` if the run does not have it, or if it is damaged.
    """
    by_name = {path.name: path for path in checkpoints(folder)}
    if not by_name:
        raise ConfigError(f"the run {str(folder)!r} has no checkpoint yet; expected one under checkpoints/")
    if name == BEST:
        best = best_checkpoint(folder)
        if best is None:
            raise ConfigError(
                f"--checkpoint best: the run {str(folder)!r} kept no best checkpoint (trainer.keep_best); it has {list(by_name)!r}"
            )
        name = best.name
    if name is None:
        found = newest_sound(folder, training=False)
        assert found is not None, "there are checkpoints"
        return found
    if name not in by_name:
        raise ConfigError(f"--checkpoint {name!r}: the run {str(folder)!r} has {list(by_name)!r}")
    found = by_name[name]
    if (problem := find_problem(found, step=checkpoint_step(found), training=False)) is not None:
        raise ConfigError(
            f"the checkpoint {str(found)!r} cannot be used: {problem}. Choose another one of {list(by_name)!r}"
        )
    return found
