"""What a signal returns for tokens fits the calls of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from lightning_core import Episode
from lightning_core.errors import CreditError
from lightning_core.rollouts.signal import Signal, checked_streams
from lightning_core.transitions import Streams, WeightedSpan
from tests.credit.episodes import episode


@dataclass(frozen=True, kw_only=True)
class Fixed(Signal):
    """Returns the same streams for all episodes."""

    result: Streams

    def streams(self, episodes: Sequence[Episode]) -> Streams:
        return self.result


def test_streams_that_fit_are_kept() -> None:
    (transition,) = episode("r", 1.0).transitions
    whole = len(transition.prompt_ids) + len(transition.output_ids)
    streams = Streams(
        advantages={"r0": np.ones(len(transition.output_ids), dtype=np.float32)},
        cross_entropy={"r0": [WeightedSpan(0, whole, 0.5)]},
    )
    assert checked_streams(Fixed(result=streams), [episode("r", 1.0)]) is streams


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        (Streams(advantages={"r0": np.ones(7, dtype=np.float32)}), r"7 advantages of call 'r0'; expected \d+ finite"),
        (Streams(advantages={"c9": np.ones(1, dtype=np.float32)}), "'c9', which is no call of the step's"),
        (Streams(cross_entropy={"r0": [WeightedSpan(0, 99, 1.0)]}), "tokens 0 to 99 of call 'r0', which has"),
    ],
)
def test_others_are_errors_that_name_the_signal(streams: Streams, message: str) -> None:
    with pytest.raises(CreditError, match=rf"^Fixed\.streams returned {message}"):
        checked_streams(Fixed(result=streams), [episode("r", 1.0)])


def test_an_advantage_that_is_not_finite_is_an_error() -> None:
    (transition,) = episode("r", 1.0).transitions
    values = np.full(len(transition.output_ids), np.nan, dtype=np.float32)
    with pytest.raises(CreditError, match="finite numbers, one for each token"):
        checked_streams(Fixed(result=Streams(advantages={"r0": values})), [episode("r", 1.0)])
