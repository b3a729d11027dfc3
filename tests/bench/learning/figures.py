"""Draws the learning curves of a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from tests.bench.learning.records import Record
from tests.bench.learning.statistics import mean_curve, smoothed

_AXES: Mapping[str, Callable[[Record], Sequence[float]]] = {
    "tokens sampled": lambda record: np.cumsum(record.tokens).tolist(),
    "rollouts and forks": lambda record: np.cumsum(record.rollouts).tolist(),
    "minutes": lambda record: (np.cumsum(record.seconds) / 60).tolist(),
}


def draw(path: Path, title: str, arms: Mapping[str, Sequence[Record]]) -> None:
    """The smoothed training reward of each arm: the mean over seeds, and the range from the least to the largest."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (label, position) in zip(figure.subplots(1, len(_AXES), sharey=True), _AXES.items(), strict=True):
        for arm, records in arms.items():
            x, mean, least, most = mean_curve([(position(record), smoothed(record)) for record in records])
            (line,) = axes.plot(x, mean, label=f"{arm} ({len(records)})")
            axes.fill_between(x, least, most, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="training reward, smoothed")
    figure.axes[0].legend(title="arm (seeds)")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without dates and random ids, so that the file changes only with its data.
    with mpl.rc_context({"svg.hashsalt": "lightning"}):
        figure.savefig(path, metadata={"Date": None})
