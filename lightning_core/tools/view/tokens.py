"""The sampled tokens of a call, with the data of each and the bin of its color."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_core.tools.view.tokenizers import Piece, TokenTexts
from lightning_core.trace import LOGPROBS_AFTER, Call, Floats

PROBABILITIES = (0.01, 0.1, 0.5, 0.9)
"""Between the bins of a probability, from unlikely to likely."""
CHANGES = (0.01, 0.1, 0.5)
"""Between the bins of the size of a change of the logprob."""
ADVANTAGES = (0.01, 0.5, 1.0)
"""Between the bins of the size of an advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """A sampled token. ``None``: not known."""

    id: int
    piece: Piece | None
    logprob: float | None
    after: float | None
    """The logprob after the update."""
    advantage: float | None

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None else math.exp(self.logprob)

    @property
    def change(self) -> float | None:
        return None if self.logprob is None or self.after is None else self.after - self.logprob

    @property
    def marks(self) -> str:
        """CSS classes: the bins of its colors, and ``space`` for white space that a browser would not show."""
        text = self.piece.text if self.piece else ""
        marks = [f"p{bisect_right(PROBABILITIES, self.probability)}"] if self.probability is not None else []
        marks += [f"a{signed_bin(self.advantage, ADVANTAGES)}"] if self.advantage is not None else []
        marks += [f"c{signed_bin(self.change, CHANGES)}"] if self.change is not None else []
        marks += ["line"] if "\n" in text else ["part"] if self.piece and self.piece.part else []
        return " ".join(marks)


def signed_bin(value: float, limits: Sequence[float]) -> str:
    """``0`` for a value near 0, else the sign as ``u`` (up) or ``d`` (down) and the number of ``limits`` that its size reaches."""
    size = bisect_right(limits, abs(value))
    return "0" if size == 0 else f"{'u' if value > 0 else 'd'}{size}"


def sampled_tokens(call: Call, texts: TokenTexts | None, advantage: float | None) -> list[ShownToken]:
    """The sampled tokens of ``call``; empty if their ids are not known."""
    if call.output_ids is None:
        return []
    ids = [int(i) for i in call.output_ids]
    before = [] if call.prompt_ids is None else [int(i) for i in call.prompt_ids[-8:]]
    pieces: Sequence[Piece | None] = [None] * len(ids) if texts is None else texts.pieces(ids, before)
    logprobs, later = _of_length(call.logprobs, len(ids)), _of_length(call.arrays.get(LOGPROBS_AFTER), len(ids))
    return [
        ShownToken(id=i, piece=piece, logprob=logprob, after=new, advantage=advantage)
        for i, piece, logprob, new in zip(ids, pieces, logprobs, later, strict=True)
    ]


def _of_length(values: Floats | None, length: int) -> Sequence[float | None]:
    """``values``, or ``length`` times None if they are missing or of another length; None for NaN."""
    if values is None or len(values) != length:
        return [None] * length
    return [float(value) if math.isfinite(value) else None for value in values]
